"""A checkpoint as serving sees it: its tables, how features are pooled, and the work of bringing its rows to the cards.

Rows are served in the precision they were saved in. A table whose rows are in several precisions is served in fp32, which holds
every row exactly. Rows that were in the cache when the checkpoint was written are rounded to their table's
precision, as `flush` rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from thermocline import formats as F
from thermocline.checkpoint.format.manifest import Section
from thermocline.checkpoint.format.tensor_files import damaged, sha256_of
from thermocline.checkpoint.reader import Checkpoint, Delta
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.ids.idmap import IdMap
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.plan.model import Plan
from thermocline.rows.precision import format_of

from .load_job import Job, Piece
from .partition import RowHeat, TableShape, split_tables
from .row_split import Rows, TableSplit
from .segments import Arrangement, Bytes, Shelf, TableInfo, Words
from .version import Changed, merged

_BLOCK = 1 << 16
Put = Callable[[Shelf, Rows, Bytes, Words], None]


class Source:
    """An open checkpoint."""

    def __init__(self, folder: Path | str) -> None:
        self.checkpoint = Checkpoint.open(folder)
        manifest = self.checkpoint.manifest
        self.tables = [TableInfo(t.name, t.rows, t.dim, _served_in(t.precisions), t.features) for t in manifest.tables]
        kinds = {module.name: module.settings.get("mode", "none") for module in manifest.modules}
        modes = {feature: kinds[table.module] for table in manifest.tables for feature in table.features}
        self.modes = {feature: F.SUM if mode == "none" else F.MODES.index(mode) for feature, mode in modes.items()}
        # A folder that is named by a number is a version of its own, and saves to it are versions of that: 3.7.
        number, folder = str(manifest.saves[-1].number), self.checkpoint.folder.name
        self.name = f"{folder}.{number}" if folder.isdecimal() else number

    @property
    def id_maps(self) -> Mapping[str, IdMap]:
        return self.checkpoint.id_maps

    @property
    def dense(self) -> Mapping[str, torch.Tensor]:
        """Parameters of the model around the tables, by name."""
        return self.checkpoint.dense()

    def splits(self, cards: int, split: str, plan: Plan | None, heat: HeatProfile | None) -> list[TableSplit]:
        shapes = [TableShape(t.name, t.rows, t.row_bytes) for t in self.tables]
        known = {} if heat is None else {t.name: self._heat(t, heat) for t in self.tables}
        return split_tables(shapes, cards, split, plan, known)

    def _heat(self, table: TableInfo, heat: HeatProfile) -> RowHeat:
        """Rows of a table that were seen, hottest first, ties by row: the heat of their ids, of all features together."""
        none = np.zeros(0, np.int64)
        seen = [(name, heat.tables[name]) for name in table.features if name in heat.tables]
        rows = [self.id_maps[name](torch.from_numpy(np.ascontiguousarray(each.ids_H))).numpy() for name, each in seen]
        return RowHeat(*add_up(np.concatenate([none, *rows]), np.concatenate([none, *(each.counts_H for _, each in seen)])))

    def job(self, arrangement: Arrangement) -> Job:
        """What card processes bring: rows whose precision is the one they are served in."""
        manifest = self.checkpoint.manifest
        names = [file.name for file in manifest.files]
        phases = [
            tuple(self._piece(section, names) for section in save.sections if section.count and self._as_stored(section))
            for save in manifest.saves
        ]
        files = tuple(str(self.checkpoint.folder / name) for name in names)
        checksums = tuple((n, file.sha256) for n, file in enumerate(manifest.files))
        return Job(arrangement, files, tuple(phases), checksums)

    def _as_stored(self, section: Section) -> bool:
        return len(self.checkpoint.manifest.table(section.table).precisions) == 1

    def _piece(self, section: Section, names: Sequence[str]) -> Piece:
        file, format = self.checkpoint.file(section.file), format_of(section.precision)
        numbers = [table.name for table in self.tables]
        meta = file.offset(f"{section.key}/meta") if F.META_WORDS[format] else 0
        rows, wide = -1, False
        if section.scattered:
            rows, wide = file.offset(f"{section.key}/rows"), self.checkpoint.manifest.table(section.table).rows > 1 << 31
        place = (numbers.index(section.table), names.index(section.file), section.first, section.count)
        return Piece(*place, file.offset(f"{section.key}/codes"), meta, rows, wide)

    def changes(self, after: int) -> dict[str, Changed] | None:
        """Rows that incremental saves after the save with this number have changed, checksums verified; None if rows must be
        read anew, as after a full save."""
        deltas = self.checkpoint.deltas(after)
        if deltas is None or not all(map(self._one_precision, self.tables)):
            return None
        for save in self.checkpoint.manifest.saves:
            for file in save.files if save.number > after else ():
                if (found := sha256_of(self.checkpoint.folder / file.name)) != file.sha256:
                    raise damaged(
                        self.checkpoint.folder / file.name, f"its sha256 is {found[:12]}..., not {file.sha256[:12]}..."
                    )
        changed = {table.name: list(_parts(deltas, table.name)) for table in self.tables}
        return {name: merged(parts) for name, parts in changed.items() if parts}

    def _one_precision(self, table: TableInfo) -> bool:
        return len(self.checkpoint.manifest.table(table.name).precisions) == 1

    def put_rest(self, shelves: Sequence[Shelf], put: Put) -> None:
        """Put in place what `job` leaves: tables of several precisions, and rows that were cached."""
        for shelf in shelves:
            table = shelf.table
            if len(self.checkpoint.manifest.table(table.name).precisions) > 1:
                for part in self.checkpoint.section_rows(table.name):
                    values_RD = dequantize_rows(part.codes_RB, part.meta_RW, format_of(part.precision), table.dim)
                    _put_values(put, shelf, part.rows_R, values_RD)
            rows_K, values_KD = self.checkpoint.cached(table.name)
            for first in range(0, len(rows_K), _BLOCK):
                _put_values(put, shelf, rows_K[first : first + _BLOCK], values_KD[first : first + _BLOCK])


def _parts(deltas: Sequence[Delta], table: str) -> Iterator[Changed]:
    for delta in deltas:
        for rows_K, codes_KB, meta_KW in delta.rows(table):
            yield Changed(rows_K.numpy(), codes_KB.numpy(), meta_KW.numpy())


def _put_values(put: Put, shelf: Shelf, rows_K: torch.Tensor, values_KD: torch.Tensor) -> None:
    codes_KB, meta_KW = quantize_rows(values_KD, shelf.table.format, None, None)
    put(shelf, rows_K.numpy(), codes_KB.numpy(), meta_KW.numpy())


def _served_in(precisions: Sequence[str]) -> int:
    return format_of(precisions[0]) if len(precisions) == 1 else F.FP32
