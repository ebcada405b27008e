"""The lookups of a batch sorted by row, on a GPU: what summing, updating and caching begin with.

`describe` writes, for each lookup, its arena row (the key), where the gradient of its bag lies, and what to multiply it with.
The keys are sorted, stably, so equal rows become runs that keep the order of the lookups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import formats as F
from .gather.gpu import out_align
from .gpu_bags import bag_bounds, check_features, locate
from .gpu_errors import mailbox
from .gpu_launch import ceil_div, launch, power_of_two
from .layout import Layout, per_feature

_FIELDS, _ROW, _ROWS = tl.constexpr(F.LAYOUT_FIELDS), tl.constexpr(F.ROW), tl.constexpr(F.ROWS)
_COLUMN, _MEAN, _MAX = (tl.constexpr(k) for k in (F.COLUMN, F.MEAN, F.MAX))
_STEP, _BETA1, _BETA2 = (tl.constexpr(k) for k in (F.STEP, F.BETA1, F.BETA2))
_POWER1, _POWER2 = (tl.constexpr(k) for k in (F.BETA1_POWER, F.BETA2_POWER))


class Lookups(NamedTuple):
    """The lookups of a batch, sorted by row. `places`, `factors` and `marks` are by lookup, not by sorted place."""

    keys: Tensor  # arena rows, ascending; bad ids are at the end, as the number of rows
    order: Tensor  # the lookup of each sorted place
    places: Tensor  # element of the gradient where the lookup's bag begins; empty where unpooled
    sorted_places: Tensor  # the same in sorted order, written by `sum_gradients`
    factors: Tensor  # what the gradient is multiplied with; empty if nothing
    marks: Tensor  # the lookup's number in its bag, for max pooling; else empty
    winners: Tensor
    align: int  # divides every place


@triton.jit
def advance(clock, hyper):
    """One more step: the clock ticks and the powers of Adam's betas follow it."""
    tl.store(clock + _STEP, tl.load(clock + _STEP) + 1)
    tl.store(hyper + _POWER1, tl.load(hyper + _POWER1) * tl.load(hyper + _BETA1))
    tl.store(hyper + _POWER2, tl.load(hyper + _POWER2) * tl.load(hyper + _BETA2))


@triton.jit
def _describe(
    fields, ids, offsets, weights, keys, places, factors, marks, flag, record, clock, hyper,
    ids_count, batch, width, rows_total,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, UNPOOLED: tl.constexpr, ADVANCE: tl.constexpr,
    FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, BAGS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    if ADVANCE and tl.program_id(0) == 0:
        advance(clock, hyper)
    if UNPOOLED and tl.program_id(0) == 0:
        check_features(offsets, ids_count, flag, record, FEATURES, BLOCK_F)
    feature, first = locate(offsets, tl.program_id(0), ids_count, batch, FEATURES, BLOCK_F, UNPOOLED, BAGS)
    if feature >= FEATURES:
        return
    field = fields + feature * _FIELDS
    row, rows = tl.load(field + _ROW), tl.load(field + _ROWS)
    bag_B = first + tl.arange(0, BAGS)
    first_B, last_B = bag_bounds(offsets, ids_count, feature, bag_B, batch, flag, record, FEATURES, UNPOOLED)
    longest = 1 if UNPOOLED else tl.max(last_B - first_B, 0).to(tl.int32)
    for k0 in range(0, longest, STRIDE):
        k = k0 + tl.arange(0, STRIDE)
        lookup = first_B[:, None] + k[None, :]
        mask = lookup < last_B[:, None]
        id = tl.load(ids + lookup, mask=mask, other=0).to(tl.int64)
        good = (id >= 0) & (id < rows)
        tl.store(keys + lookup, tl.where(good, row + id, rows_total).to(keys.dtype.element_ty), mask=mask)
        if not UNPOOLED:
            place_B = bag_B * width + tl.load(field + _COLUMN)
            place = place_B[:, None] + k[None, :] * 0
            tl.store(places + lookup, place.to(places.dtype.element_ty), mask=mask)
        if MODE == _MEAN:
            factor_B = tl.div_rn(1.0, tl.maximum(last_B - first_B, 1).to(tl.float32))
            tl.store(factors + lookup, factor_B[:, None] + 0.0 * k[None, :], mask=mask)
        if WEIGHTED:
            tl.store(factors + lookup, tl.load(weights + lookup, mask=mask, other=0.0).to(tl.float32), mask=mask)
        if MODE == _MAX:
            tl.store(marks + lookup, k[None, :] + 0 * first_B[:, None].to(tl.int32), mask=mask)


def sort_lookups(
    layout: Layout,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    mode: int,
    winners: Tensor,
    clock: Tensor | None = None,
    hyper: Tensor | None = None,
) -> Lookups:
    """Describe every lookup and sort by row. With a clock, advances it in the same launch."""
    tables, count, batch = layout.tables, ids_N.numel(), per_feature(layout, offsets)
    device, unpooled = ids_N.device, mode == F.NONE
    ids_N, offsets = ids_N.contiguous(), offsets.contiguous()
    weights_N = None if weights_N is None else weights_N.contiguous()
    box = mailbox(ids_N)
    kind = torch.int32 if tables.rows < 2**31 - 1 else torch.int64
    keys = torch.full((count,), tables.rows, dtype=kind, device=device)  # lookups that bad offsets leave out stay so
    small = batch * tables.width < 2**31
    places = torch.empty(0 if unpooled else count, dtype=torch.int32 if small else torch.int64, device=device)
    scaled = mode == F.MEAN or weights_N is not None
    factors = torch.empty(count if scaled else 0, device=device)
    marks = torch.empty(count if mode == F.MAX else 0, dtype=torch.int32, device=device)
    features = len(tables.features)
    bags, stride = (128, 1) if count < 4 * features * batch or unpooled else (32, 8)
    programs = ceil_div(count, bags) + features - 1 if unpooled else features * ceil_div(batch, bags)
    launch(
        _describe, programs,
        (layout.fields_F8, ids_N, offsets, keys if weights_N is None else weights_N, keys, places, factors, marks, box.flag,
         box.record, keys if clock is None else clock, keys if hyper is None else hyper),
        (count, batch, tables.width, tables.rows),
        (mode, weights_N is not None, unpooled, clock is not None, features, power_of_two(features), bags, stride),
        exact=True, warps=2,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    return Lookups(keys, order, places, torch.empty_like(places), factors, marks, winners, out_align(tables))
