"""A checkpoint as a source of served tables: shapes, pooling modes, id maps, load jobs and deltas.

Rows are served in the precision in which they were saved; a table with rows in several precisions in fp32, which holds every
row exactly. Rows that were cached when the checkpoint was written are rounded to their table's precision, as `flush` rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from thermocline import formats as F
from thermocline.checkpoint.format.manifest import Section
from thermocline.checkpoint.format.tensor_files import damaged, sha256_of
from thermocline.checkpoint.publishes.row_delta import RowDelta, merge_deltas
from thermocline.checkpoint.reader import Checkpoint, Delta
from thermocline.checkpoint.saved_ids import read_id_maps
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.plan.model import Plan
from thermocline.rows.precision import format_of

from .load_job import FileSlice, LoadJob
from .partition import RowHeat, split_tables
from .row_split import Rows, TableSplit
from .segments import Bytes, ServedTable, ShardedTableLayout, ShardLayout, Words

_BLOCK = 1 << 16
Put = Callable[[ShardedTableLayout, Rows, Bytes, Words], None]


class CheckpointSource:
    """An open checkpoint."""

    def __init__(self, folder: Path | str) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.checkpoint.check_rows()
        manifest = self.checkpoint.manifest
        self.id_maps = read_id_maps(self.checkpoint)
        formats = [format_of(t.precisions[0]) if len(t.precisions) == 1 else F.FP32 for t in manifest.tables]
        served = zip(manifest.tables, formats, strict=True)
        self.tables = [ServedTable(t.name, t.rows, t.dim, format, t.features) for t, format in served]
        kinds = {module.name: module.settings.get("mode", "none") for module in manifest.modules}
        modes = {feature: kinds[table.module] for table in manifest.tables for feature in table.features}
        self.modes = {feature: F.SUM if mode == "none" else F.MODES.index(mode) for feature, mode in modes.items()}
        # A numbered folder is a version, and its saves are minor versions: 3.7.
        number, folder = str(manifest.saves[-1].number), self.checkpoint.folder.name
        self.name = f"{folder}.{number}" if folder.isdecimal() else number

    @property
    def state_bytes(self) -> int:
        """Bytes of everything but rows: id maps, dense parameters, cached rows."""
        state = {name for save in self.checkpoint.manifest.saves for name in (save.state, *save.slots)}
        return sum(file.bytes for file in self.checkpoint.manifest.files if file.name in state)

    def splits(self, shards: int, split: str, plan: Plan | None, heat: HeatProfile | None) -> list[TableSplit]:
        """The split of every table."""
        known = {} if heat is None else {t.name: self._row_heat(t, heat) for t in self.tables}
        return split_tables(self.tables, shards, split, plan, known)

    def _row_heat(self, table: ServedTable, heat: HeatProfile) -> RowHeat:
        """Heat of a table's rows, from the ids of all its features."""
        none = np.zeros(0, np.int64)
        seen = [(name, heat.tables[name]) for name in table.features if name in heat.tables]
        rows = [self.id_maps[name](torch.from_numpy(np.ascontiguousarray(each.ids_H))).numpy() for name, each in seen]
        return RowHeat(*add_up(np.concatenate([none, *rows]), np.concatenate([none, *(each.counts_H for _, each in seen)])))

    def load_job(self, layout: ShardLayout) -> LoadJob:
        """The job of shard processes: all rows that are served in the precision in which they are stored."""
        manifest = self.checkpoint.manifest
        names = [file.name for file in manifest.files]
        sections = [[s for s in save.sections if s.count and self._has_one_precision(s.table)] for save in manifest.saves]
        phases = tuple(tuple(self._file_slice(section, names) for section in each) for each in sections)
        files = tuple(str(self.checkpoint.folder / name) for name in names)
        return LoadJob(layout, files, phases, tuple((n, file.sha256) for n, file in enumerate(manifest.files)))

    def _has_one_precision(self, table: str) -> bool:
        return len(self.checkpoint.manifest.table(table).precisions) == 1

    def _file_slice(self, section: Section, names: Sequence[str]) -> FileSlice:
        file, format = self.checkpoint.file(section.file), format_of(section.precision)
        numbers = [table.name for table in self.tables]
        meta = file.offset(f"{section.key}/meta") if F.META_WORDS[format] else 0
        rows, wide = -1, False
        if section.scattered:
            rows, wide = file.offset(f"{section.key}/rows"), self.checkpoint.manifest.table(section.table).rows > 1 << 31
        place = (numbers.index(section.table), names.index(section.file), section.first, section.count)
        return FileSlice(*place, file.offset(f"{section.key}/codes"), meta, rows, wide)

    def deltas(self, after: int) -> dict[str, RowDelta] | None:
        """Rows that incremental saves after save number `after` changed, by table, checksums verified.

        None if all rows must be loaded again, as after a full save.
        """
        deltas = self.checkpoint.deltas(after)
        if deltas is None or not all(self._has_one_precision(table.name) for table in self.tables):
            return None
        for save in self.checkpoint.manifest.saves:
            for file in save.files if save.number > after else ():
                path = self.checkpoint.folder / file.name
                if (found := sha256_of(path)) != file.sha256:
                    raise damaged(path, f"its sha256 is {found[:12]}..., not {file.sha256[:12]}...")
        changed = {table.name: list(_row_deltas(deltas, table.name)) for table in self.tables}
        return {name: merge_deltas(parts) for name, parts in changed.items() if parts}

    def put_rest(self, layouts: Sequence[ShardedTableLayout], put: Put) -> None:
        """Write what `load_job` leaves: tables of several precisions, and rows of the cache."""
        for layout in layouts:
            table = layout.table
            if not self._has_one_precision(table.name):
                for part in self.checkpoint.section_rows(table.name):
                    values_RD = dequantize_rows(part.codes_RB, part.meta_RW, format_of(part.precision), table.dim)
                    _put_values(put, layout, part.rows_R, values_RD)
            rows_K, values_KD = self.checkpoint.cached(table.name)
            for first in range(0, len(rows_K), _BLOCK):
                _put_values(put, layout, rows_K[first : first + _BLOCK], values_KD[first : first + _BLOCK])


def _row_deltas(deltas: Sequence[Delta], table: str) -> Iterator[RowDelta]:
    for delta in deltas:
        for rows_K, codes_KB, meta_KW in delta.rows(table):
            yield RowDelta(rows_K.numpy(), codes_KB.numpy(), meta_KW.numpy())


def _put_values(put: Put, layout: ShardedTableLayout, rows_K: torch.Tensor, values_KD: torch.Tensor) -> None:
    codes_KB, meta_KW = quantize_rows(values_KD, layout.table.format, None, None)
    put(layout, rows_K.numpy(), codes_KB.numpy(), meta_KW.numpy())
