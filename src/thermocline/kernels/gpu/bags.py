"""Triton functions that locate the bags of a program and check their offsets."""

from __future__ import annotations

import triton
import triton.language as tl

from .errors import ID, OFFSETS, report

NO_POSITION = tl.constexpr(1 << 62)


@triton.jit
def ids_of_program(offsets, program, ids_count, batch, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, TILE: tl.constexpr):
    """(feature, first id of this program, end of the feature); feature = FEATURES if none is left."""
    f = tl.arange(0, BLOCK_F)
    at = f.to(tl.int64) * batch
    first = tl.load(offsets + at, mask=f < FEATURES, other=0).to(tl.int64)
    last = tl.load(offsets + at + batch, mask=f < FEATURES, other=0).to(tl.int64)
    first = tl.minimum(tl.maximum(first, 0), ids_count)  # the lookup reports wrong offsets
    last = tl.minimum(tl.maximum(last, first), ids_count)
    tiles = tl.cdiv(last - first, TILE)
    ends = tl.cumsum(tiles, 0)
    feature = tl.sum(((ends <= program) & (f < FEATURES)).to(tl.int32), 0)
    mine = f == feature
    begun = tl.sum(tl.where(mine, ends - tiles, 0), 0)
    begin = tl.sum(tl.where(mine, first, 0), 0) + (program - begun) * TILE
    return feature, begin, tl.sum(tl.where(mine, last, 0), 0)


@triton.jit
def locate_bags(
    offsets, program, ids_count, batch,
    FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, UNPOOLED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(feature, first bag of this program) or, unpooled, (feature, first id); feature = FEATURES if none is left."""
    if not UNPOOLED:
        tiles = tl.cdiv(batch, TILE)
        return program // tiles, (program % tiles).to(tl.int64) * TILE
    elif FEATURES == 1:
        return program * 0, program.to(tl.int64) * TILE
    else:
        feature, first, _ = ids_of_program(offsets, program, ids_count, 1, FEATURES, BLOCK_F, TILE)
        return feature, first


@triton.jit
def check_feature_offsets(offsets, ids_count, flag, record, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr):
    """Report offsets of unpooled lookups that do not begin at 0, rise and end at the number of ids."""
    f = tl.arange(0, BLOCK_F)
    first = tl.load(offsets + f, mask=f < FEATURES, other=0).to(tl.int64)
    last = tl.load(offsets + f + 1, mask=f < FEATURES, other=0).to(tl.int64)
    bad = (last < first) | ((f == 0) & (first != 0)) | ((f == FEATURES - 1) & (last != ids_count))
    if tl.max((bad & (f < FEATURES)).to(tl.int32), 0) > 0:
        first_bad = tl.min(tl.where(bad & (f < FEATURES), f, BLOCK_F), 0)
        begin, end = tl.load(offsets + first_bad), tl.load(offsets + first_bad + 1)
        report(flag, record, offsets, OFFSETS, first_bad, first_bad, begin, end)


@triton.jit
def check_ids(ids, fields, feature, rows, first_bad_T, flag, record):
    """Report the first bad id, given the first bad position of each lane (NO_POSITION for none)."""
    first_bad = tl.min(first_bad_T, 0)
    if first_bad < NO_POSITION:
        report(flag, record, fields, ID, feature, first_bad, tl.load(ids + first_bad), rows)


@triton.jit
def bag_bounds(
    offsets, ids_count, feature, bag_T, batch, flag, record, features, UNPOOLED: tl.constexpr, until=None
):  # fmt: skip
    """First and last id of each bag before `until`; a bag with invalid offsets is reported and treated as empty."""
    if UNPOOLED:
        end = tl.minimum(tl.load(offsets + feature + 1).to(tl.int64), ids_count)
        return bag_T, tl.minimum(bag_T + 1, end)
    else:
        mask_T = bag_T < (batch if until is None else until)
        place_T = feature.to(tl.int64) * batch + bag_T
        first_T = tl.load(offsets + place_T, mask=mask_T, other=0).to(tl.int64)
        last_T = tl.load(offsets + place_T + 1, mask=mask_T, other=0).to(tl.int64)
        bad_T = (first_T < 0) | (last_T < first_T) | (last_T > ids_count)
        bad_T = bad_T | ((place_T == 0) & (first_T != 0))
        bad_T = mask_T & (bad_T | ((place_T == features * batch - 1) & (last_T != ids_count)))
        if tl.max(bad_T.to(tl.int32), 0) > 0:
            first_bad = tl.min(tl.where(bad_T, place_T, NO_POSITION), 0)
            begin, end = tl.load(offsets + first_bad), tl.load(offsets + first_bad + 1)
            report(flag, record, offsets, OFFSETS, feature, first_bad, begin, end)
        return tl.where(bad_T, 0, first_T), tl.where(bad_T, 0, last_T)
