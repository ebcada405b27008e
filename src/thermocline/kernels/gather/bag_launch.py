"""Tilings of the kernel of `gpu_bags.py`, and its launch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.gpu import slots as S
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import ceil_div, launch
from thermocline.kernels.gpu.row_tiles import tile_shape
from thermocline.kernels.gpu.staged import cache_tensors
from thermocline.kernels.layout import TableLayout, per_feature

from .gpu_bags import MOST_BAGS, gather_bags

_COLUMNS = 4  # a lane


class BagTiling(NamedTuple):
    """How bags are tiled. Lanes side by side hold `width` columns of a row; `rows` are loaded at once."""

    width: int
    rows: int
    bags: int  # of a program
    fetch: bool = False  # ask for rows while ids are checked
    convert: bool = True  # codes to fp32 by byte permutation
    split: bool = False  # a launch for each dimension and format


@lru_cache(maxsize=1024)
def out_align(tables: TableLayout) -> int:
    """Alignment of features in a pooled output, in elements: a power of two."""
    return math.gcd(tables.width, 16, *(f[F.COLUMN] for f in tables.features))


@lru_cache(maxsize=1024)
def _groups(tables: TableLayout, width: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """(dimension, format, BLOCK_H, PLANES, WIDTH, ROWS, row alignment, CACHED) of each kind of table."""
    found = []
    for dim, format in tables.groups:
        block, block_h = tile_shape(format, dim)
        lanes = max(1, min(width, block_h) // _COLUMNS)
        align = math.gcd(F.row_bytes(format, dim), _COLUMNS * max(1, F.BITS[format] // 8))
        cached = S.slot_kinds(*(pool for pool in tables.pools if (pool.dim, pool.format) == (dim, format)))
        most = max(rows, min(16, 32 // lanes))  # at least the rows of one load
        found.append((dim, format, block_h, block // block_h, min(width, block_h), most, align, cached))
    return tuple(found)


def bag_constants(tables: TableLayout, call: LookupCall, tiling: BagTiling) -> list[tuple[Any, ...]]:
    """The compile-time constants of each launch."""
    groups = _groups(tables, tiling.width, tiling.rows)
    align = math.gcd(_COLUMNS, out_align(tables))
    fixed = (call.mode, call.weights_N is not None, call.checked, tiling.fetch, tiling.convert)
    if tiling.split and len(groups) > 1:
        return [(*fixed, True, (group,), align) for group in groups]
    return [(*fixed, False, groups, align)]


@lru_cache(maxsize=1024)
def _features_of(tables: TableLayout, device: torch.device) -> tuple[Tensor, ...]:
    """The features of each dimension and format."""
    return tuple(
        torch.tensor([f for f, of in enumerate(tables.group_of) if of == group], dtype=torch.int32, device=device)
        for group in range(len(tables.groups))
    )


def launch_bags(rows: RowArrays, call: LookupCall, out: Tensor, tiling: BagTiling) -> None:
    """Write the sums or means of a lookup to `out`."""
    codes, meta, layout, cache = rows
    tables, batch, errors = layout.tables, per_feature(layout, call.offsets), error_buffer(meta)
    bags, features = min(tiling.bags, MOST_BAGS), len(tables.features)
    launches = bag_constants(tables, call, tiling)
    chosen = _features_of(tables, meta.device)  # also for one launch: a later one may be captured
    for turn, constants in enumerate(launches):
        served = chosen[turn].numel() if len(launches) > 1 else features
        launch(
            gather_bags, served * ceil_div(batch, bags),
            (meta, codes, *cache_tensors(cache, codes, meta), layout.fields_F8, chosen[turn], call.ids_N, call.offsets,
             meta if call.weights_N is None else call.weights_N, out, errors.flag, errors.record),
            (call.ids_N.numel(), batch, tables.width, bags, features), constants, exact=False, warps=1,
        )  # fmt: skip
