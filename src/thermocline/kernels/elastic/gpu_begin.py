"""Begin the rows of new ids on a GPU (definition: `reference.py`). How many there are may be known on the GPU alone."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.launch import ceil_div, launch
from thermocline.kernels.gpu.row_tiles import columns, extent, first_words, over_columns, over_rows, store_rows, tile_shape
from thermocline.kernels.gpu.slots import SLOT_BITS, is_int8_slot
from thermocline.kernels.gpu.staged import cancel_leaving, is_staged, locate_staged
from thermocline.kernels.ids.gpu import hash_id
from thermocline.kernels.stage import area_of

from .fields import TableRows, slot_shifts

_EMPTY, _EVICTIONS = tl.constexpr(F.EMPTY), tl.constexpr(F.EVICTIONS)
_PROGRAMS = 1024


@triton.jit
def _first_values(id_T, key, column, bound):
    """First values of rows, as a tile."""
    z = over_rows(hash_id(id_T, key), column) + (column + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    bits = ((z ^ (z >> 31)) >> 40).to(tl.int32)
    return (bits.to(tl.float32) * 1.1920928955078125e-07 - 1.0) * bound


@triton.jit
def _release(owners, scores, ledger, word_T, mask_T, fp32, int8, INT8_SLOTS: tl.constexpr):
    """Empty the slots that pointers name."""
    slot_T = (word_T & SLOT_BITS).to(tl.int64)
    if INT8_SLOTS:
        slot_T += tl.where(is_int8_slot(word_T), int8, fp32)
    else:
        slot_T += fp32
    tl.store(owners + slot_T, tl.zeros_like(slot_T) + _EMPTY, mask=mask_T)
    tl.store(scores + slot_T, tl.zeros_like(word_T), mask=mask_T)
    tl.atomic_add(ledger, tl.sum(mask_T.to(tl.int64), 0))


@triton.jit
def _begin_rows(
    ids, rows, count, key, codes, meta, owners, scores, ledger, area, state0, state1, bound, first, fp32, int8, low,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, WORDS: tl.constexpr,
    CACHED: tl.constexpr, INT8_SLOTS: tl.constexpr, POOL: tl.constexpr, SIZE0: tl.constexpr, SIZE1: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column, inside = over_columns(column), over_columns(inside_D)
    end = tl.load(count)
    for begin in range(tl.program_id(0) * TILE, end, tl.num_programs(0) * TILE):
        at_T = begin + tl.arange(0, TILE)
        mask_T = at_T < end
        row_T = tl.load(rows + at_T, mask=mask_T, other=0) + first
        mask = over_rows(mask_T, column) & inside
        stored_T, stored_meta, word_T = row_T, meta, (row_T * 0).to(tl.int32)
        if CACHED:
            word_T = first_words(meta, row_T, mask_T, FORMAT)
            held_T = mask_T & (word_T < 0)
            if POOL >= 0:
                held_T = held_T & (is_staged(word_T) == 0)
                stored_T, stored_meta, _first_T = locate_staged(area, POOL, meta, word_T, row_T, mask_T, low, FORMAT)
            _release(owners, scores, ledger, word_T, held_T, fp32, int8, INT8_SLOTS)
        id_T = tl.load(ids + at_T, mask=mask_T, other=0)
        limit = tl.full((), bound, tl.int32).to(tl.float32, bitcast=True)
        value = tl.where(mask, _first_values(id_T, tl.load(key), column, limit), 0.0)
        low_T, high_T, _good_T = extent(value, inside_D, FORMAT)
        tl.debug_barrier()  # words are read before they are written
        store_rows(codes, stored_meta, stored_T, mask_T, value, low_T, high_T, row_T, ids, DIM, FORMAT, BLOCK, BLOCK_H, False)
        if POOL >= 0:
            cancel_leaving(meta + WORDS * row_T, word_T, mask_T)
        if SIZE0 == 1:
            tl.store(state0 + row_T, row_T.to(tl.float32) * 0, mask=mask_T)
        elif SIZE0 > 1:
            tl.store(state0 + over_rows(row_T, column) * DIM + column, tl.zeros_like(value), mask=mask)
        if SIZE1 == 1:
            tl.store(state1 + row_T, row_T.to(tl.float32) * 0, mask=mask_T)
        elif SIZE1 > 1:
            tl.store(state1 + over_rows(row_T, column) * DIM + column, tl.zeros_like(value), mask=mask)


def begin_some(
    table: TableRows, ids_C: Tensor, rows_C: Tensor, count: Tensor, key: Tensor, bound: float, first: int = 0
) -> None:  # fmt: skip
    """Begin the first `count` (int32, on the GPU) rows of a list; `first` is added to them."""
    codes_RB, meta_RW, format, dim, row, cache, pool, states = table
    owners, scores, ledger, area, shifts, number = meta_RW, meta_RW, meta_RW, meta_RW, (0, 0), -1
    if cache is not None and pool is not None:
        owners, scores, ledger, shifts = cache.rows, cache.scores, cache.ledger[pool[0], F.EVICTIONS :], slot_shifts(pool[1])
        staging = area_of(cache)
        if staging is not None:
            staging.wait_for_copies()  # else one of a row that left could overwrite the new row
            area, number = staging.tensor, pool[0]
    block, block_h = tile_shape(format, dim)
    tile = max(1, min(16, 2048 // block))
    programs = min(_PROGRAMS, max(1, ceil_div(ids_C.numel(), tile)))
    sizes = [each.numel() // each.shape[0] for each in states]
    bits = struct.unpack("i", struct.pack("f", bound))[0]
    int8_slots = pool is not None and pool[1].int8_slots > 0
    launch(
        _begin_rows, programs,
        (ids_C, rows_C, count, key, codes_RB, meta_RW, owners, scores, ledger, area, *(*states, meta_RW, meta_RW)[:2]),
        (bits, first, *shifts, row),
        (dim, format, block, block_h, F.META_WORDS[format], pool is not None, int8_slots, number, *(*sizes, 0, 0)[:2], tile),
        exact=True,
    )  # fmt: skip


def begin_rows(table: TableRows, ids_K: Tensor, rows_K: Tensor, key: int, bound: float) -> None:
    """`reference.begin_rows`."""
    count = torch.tensor([ids_K.numel()], dtype=torch.int32).to(ids_K.device)
    begin_some(table, ids_K, rows_K, count, torch.tensor([key], dtype=torch.int64).to(ids_K.device), bound)
