"""Tilings of the bag kernel, and its launch on the arrays of an arena."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.tilings.bag_kernel import MOST_BAGS, gather_bags
from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.gather.gpu import out_align
from thermocline.kernels.gpu import slots as S
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import ceil_div, launch
from thermocline.kernels.gpu.row_tiles import tile_shape
from thermocline.kernels.gpu.staged import cache_tensors
from thermocline.kernels.layout import TableLayout, output_shape, per_feature


class Tiling(NamedTuple):
    """How bags are tiled. `width`: columns that 4 columns a lane make a row of lanes of; `rows`: rows loaded at once."""

    width: int
    rows: int
    bags: int  # of a program
    fetch: bool = False  # ask for rows while ids are checked
    convert: bool = True  # codes to fp32 by byte permutation
    split: bool = False  # a launch for each dimension and format

    @property
    def label(self) -> str:
        return (
            f"w{self.width} r{self.rows} b{self.bags}"
            + (" fetch" if self.fetch else "")
            + ("" if self.convert else " i2f")
            + (" split" if self.split else "")
        )


@lru_cache(maxsize=1024)
def groups_of(tables: TableLayout, width: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """(dimension, format, BLOCK_H, PLANES, WIDTH, ROWS, row alignment, CACHED) of each kind of table."""
    found = []
    for dim, format in tables.groups:
        block, block_h = tile_shape(format, dim)
        lanes = max(1, min(width, block_h) // 4)
        columns = 4 if F.BITS[format] <= 8 else 128 // F.BITS[format]
        align = math.gcd(F.row_bytes(format, dim), columns * max(1, F.BITS[format] // 8))
        least = 32 // lanes  # rows that one load instruction reads
        cached = S.slot_kinds(*(pool for pool in tables.pools if (pool.dim, pool.format) == (dim, format)))
        found.append((dim, format, block_h, block // block_h, min(width, block_h), max(rows, min(16, least)), align, cached))
    return tuple(found)


def constants(tables: TableLayout, call: LookupCall, tiling: Tiling) -> list[tuple[Any, ...]]:
    """The compile-time constants of each launch."""
    groups = groups_of(tables, tiling.width, tiling.rows)
    align = math.gcd(4, out_align(tables))
    fixed = (call.mode, call.weights_N is not None, call.checked, tiling.fetch, tiling.convert)
    if tiling.split and len(groups) > 1:
        return [(*fixed, True, (group,), align) for group in groups]
    return [(*fixed, False, groups, align)]


@lru_cache(maxsize=64)
def _features_of(tables: TableLayout, device: torch.device) -> tuple[Tensor, ...]:
    """The features of each dimension and format."""
    return tuple(
        torch.tensor([f for f, of in enumerate(tables.group_of) if of == group], dtype=torch.int32, device=device)
        for group in range(len(tables.groups))
    )


def gather_pool(rows: RowArrays, call: LookupCall, tiling: Tiling, out: Tensor | None = None) -> Tensor:
    """Sum or mean of bags by the bag kernel."""
    codes, meta, layout, cache = rows
    tables, batch = layout.tables, per_feature(layout, call.offsets)
    errors = error_buffer(meta)
    errors.open(layout.fields_F8, tables)
    shape = output_shape(tables, call.ids_N, call.offsets, call.mode)
    out = torch.empty(shape, dtype=call.dtype, device=meta.device) if out is None else out
    bags, features = min(tiling.bags, MOST_BAGS), len(tables.features)
    launches = constants(tables, call, tiling)
    chosen = _features_of(tables, meta.device)
    for turn, fixed in enumerate(launches if batch else []):
        served = chosen[turn].numel() if len(launches) > 1 else features
        launch(
            gather_bags, served * ceil_div(batch, bags),
            (meta, codes, *cache_tensors(cache, codes, meta), layout.fields_F8, chosen[turn], call.ids_N, call.offsets,
             meta if call.weights_N is None else call.weights_N, out, errors.flag, errors.record),
            (call.ids_N.numel(), batch, shape[1], bags, features), fixed, exact=False, warps=1,
        )  # fmt: skip
    return out
