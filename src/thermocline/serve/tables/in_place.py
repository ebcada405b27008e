"""Rows written to the shards, and read from them, by row number: for publishes that are applied in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.checkpoint.publishes.row_delta import RowDelta, are_rows
from thermocline.errors import BadInput, BadPublish
from thermocline.ids.moved_ids import MovedIds

from . import gpu_shards
from .memory_limits import check_fits
from .row_split import Rows
from .segments import ShardedTableLayout, put_rows
from .version import TableVersion

if TYPE_CHECKING:
    from thermocline.serve.remote.remote_hosts import RemoteHosts


_NO_IDS = MovedIds(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))


def check_deltas(version: TableVersion, deltas: Mapping[str, RowDelta]) -> None:
    """Raise `BadInput` unless the rows are rows of the tables, and fit into memory."""
    tables = {each.table.name: each.table for each in version.layout.tables}
    size = sum(each.codes_KB.nbytes + each.meta_KW.nbytes for each in deltas.values())
    already = 0 if version.overlay is None else version.overlay.segment.numel()
    if version.device.type == "cpu":
        check_fits(size + already, f"a delta of {size:,} bytes over {already:,} changed before")
    for name, each in deltas.items():
        if name not in tables:
            raise BadInput(f"the delta changes table {name!r}; there are {', '.join(tables)}", table=name)
        table, rows_K = tables[name], each.rows_K
        shape = (len(rows_K), F.row_bytes(table.format, table.dim))
        if each.codes_KB.shape != shape:
            raise BadInput(f"the delta of table {name!r} has codes of {each.codes_KB.shape}, not {shape}", table=name)
        if not are_rows(rows_K, table.rows):
            words = f"the delta of table {name!r} must name rows 0 to {table.rows - 1}, ascending and each once"
            raise BadInput(words, table=name, rows=table.rows)


def write_in_place(version: TableVersion, hosts: RemoteHosts | None, number: int) -> TableVersion:
    """Write changed rows and ids of a version to shards and key tables. Returns the version that reads them there."""
    put_deltas(version, version.overlay_rows, hosts, number)
    put_moved(version)
    return version.in_place()


def put_deltas(
    version: TableVersion, deltas: Mapping[str, RowDelta], hosts: RemoteHosts | None = None, number: int = 0
) -> None:  # fmt: skip
    """Write rows to the shards of a version. No lookup may read these rows there. `number`: of the version on other hosts."""
    local: list[Any] = [segment for segment in version.segments if isinstance(segment, Tensor)]
    for index, layout in enumerate(version.layout.tables):
        if (delta := deltas.get(layout.table.name)) is None or not len(delta.rows_K):
            continue
        rows = delta.rows_K, delta.codes_KB, delta.meta_KW
        if version.device.type == "cpu":
            put_rows(layout, [segment.numpy() for segment in local], *rows)
        else:
            gpu_shards.put_rows(layout, local, *rows)
        if hosts is not None:
            hosts.put(number, index, *rows)


def put_moved(version: TableVersion) -> None:
    """Write moved ids to the key tables of a version. No lookup may find these ids there."""
    for map in version.key_maps.values():
        if map.moved is not None and map.keys is not None:
            map.keys.put(map.moved)


def visible_ids(version: TableVersion, table: str, rows_K: Tensor) -> MovedIds:
    """The ids of rows as lookups of a version see them."""
    found = [_NO_IDS]
    for (name, first), map in version.key_maps.items():
        if name == table and map.keys is not None:
            ends = torch.tensor([first, first + map.keys.rules.rows], dtype=torch.int64)
            low, high = torch.searchsorted(rows_K, ends).tolist()
            found.append(map.read_rows(rows_K[low:high]))
    return reduce(MovedIds.merged, found)


def check_moved(version: TableVersion, moved: Mapping[str, MovedIds]) -> None:
    """Raise `BadPublish` unless ids move to rows that they may have."""
    for table, each in moved.items():
        fitting = 0
        for (name, first), map in version.key_maps.items():
            if name == table and map.keys is not None:
                here_K = (each.rows_K >= first) & (each.rows_K < first + map.keys.rules.rows)
                part = MovedIds(each.rows_K[here_K] - first, each.ids_K[here_K], each.used_K[here_K])
                fitting += len(part.rows_K) if map.keys.fits(part) else 0
        if fitting != len(each.rows_K) or bool((each.rows_K.diff() <= 0).any()):
            raise BadPublish(f"ids of table {table[:100]!r} move to rows that they cannot have", "damaged", table=table)


def visible_rows(version: TableVersion, table: str, rows_K: Rows) -> RowDelta | None:
    """Rows as lookups of a version see them; None if the front end cannot read them (other hosts, GPUs)."""
    if version.device.type != "cpu" or not all(isinstance(segment, Tensor) for segment in version.segments):
        return None
    layout = next(each for each in version.layout.tables if each.table.name == table)
    found = _shard_rows(version, layout, rows_K)
    if version.overlay is not None and (over := version.overlay.changed.get(table)) is not None:
        place_K = np.searchsorted(over.rows_K, rows_K).clip(max=max(len(over.rows_K) - 1, 0))
        here_K = np.flatnonzero(over.rows_K[place_K] == rows_K) if len(over.rows_K) else rows_K[:0]
        found.codes_KB[here_K], found.meta_KW[here_K] = over.codes_KB[place_K[here_K]], over.meta_KW[place_K[here_K]]
    return found


def _shard_rows(version: TableVersion, layout: ShardedTableLayout, rows_K: Rows) -> RowDelta:
    format, dim = layout.table.format, layout.table.dim
    codes_KB = np.empty((len(rows_K), F.row_bytes(format, dim)), np.uint8)
    meta_KW = np.empty((len(rows_K), F.META_WORDS[format]), np.int32)
    for shard, which_K, at_K in layout.split.placed(range(version.layout.shards), rows_K):
        segment = version.segments[shard]
        assert isinstance(segment, Tensor)
        codes_PB, meta_PW = layout.views(segment.numpy(), shard)
        codes_KB[which_K], meta_KW[which_K] = codes_PB[at_K], meta_PW[at_K]
    return RowDelta(rows_K, codes_KB, meta_KW)
