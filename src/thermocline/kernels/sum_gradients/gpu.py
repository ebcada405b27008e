"""Sum the gradients of repeated rows on a GPU: deterministic, without atomics and without a synchronization.

Lookups are sorted by row; a first launch lists the runs of equal rows and sums chunks inside long runs; a second adds the rest
(docs/decisions/kernel_notes.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import Array, as_tensor, ceil_div, launch, scratch
from thermocline.kernels.gpu.row_tiles import columns, first_words, over_columns, over_rows, tile_shape, zeros_of
from thermocline.kernels.gpu.sort import SortedLookups, advance, outside, sort_lookups
from thermocline.kernels.gpu.staged import is_staged
from thermocline.kernels.layout import Layout, TableRun

TILE = 4  # runs processed at once
SHORT_RUN = 8  # positions of a run that are added in step with the other runs of its tile
REST_TILE = 4  # further positions of a long run that are added at once
CHUNK = 128  # positions
PARTS = 4  # programs that share the runs of a chunk


@triton.jit
def load_gradients(
    grad, order, places, factors, in_bag, winners, at_T, mask_T, stride,
    DISTINCT: tl.constexpr, SORTED: tl.constexpr, UNPOOLED: tl.constexpr, FACTORS: tl.constexpr, IN_BAG: tl.constexpr,
    ALIGN: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gradients of a wide tile of sorted positions."""
    column_D, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column = over_columns(column_D)
    lookup_T = at_T
    if not DISTINCT and (UNPOOLED or FACTORS or IN_BAG or not SORTED):
        lookup_T = tl.load(order + at_T, mask=mask_T, other=0)
    if UNPOOLED:
        place_T = lookup_T * stride
    elif SORTED:
        place_T = tl.multiple_of(tl.load(places + at_T, mask=mask_T, other=0).to(tl.int64), ALIGN)
    else:
        place_T = tl.multiple_of(tl.load(places + lookup_T, mask=mask_T, other=0).to(tl.int64), ALIGN)
    at = over_rows(place_T, column) + column
    mask = over_rows(mask_T, column) & over_columns(inside_D)
    value = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    if FACTORS:
        value = value * over_rows(tl.load(factors + lookup_T, mask=mask_T, other=0.0), value)
    if IN_BAG:
        in_bag_T = tl.load(in_bag + lookup_T, mask=mask_T, other=0)
        won = tl.load(winners + at, mask=mask, other=-1) == over_rows(in_bag_T, value)
        value = tl.where(won, value, 0.0)
    return value


@triton.jit
def _sum_rest(
    keys, grad, order, places, factors, in_bag, winners, partial, count, stride, key, at,
    UNPOOLED: tl.constexpr, FACTORS: tl.constexpr, IN_BAG: tl.constexpr, ALIGN: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum of the run of `key` from position `at` on: whole chunks at once, other positions in tiles."""
    column_D, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column, inside = over_columns(column_D), over_columns(inside_D)
    total = zeros_of(TILE, BLOCK, BLOCK_H)
    lane_T = tl.arange(0, TILE)
    going = tl.load(keys + at, mask=at < count, other=-1) == key
    while going:
        limit = (at // CHUNK + 1) * CHUNK
        whole = (at % CHUNK == 0) & (limit <= count)
        if whole & (tl.load(keys + limit - 1, mask=whole, other=-1) == key):
            end_T = at + (lane_T + 1) * CHUNK
            whole_T = end_T <= count
            whole_T = whole_T & (tl.load(keys + end_T - 1, mask=whole_T, other=-1) == key)
            chunk = partial + over_rows(at // CHUNK + lane_T, column) * DIM + column
            total += tl.load(chunk, mask=over_rows(whole_T, column) & inside, other=0.0)
            at += tl.sum(whole_T.to(tl.int64), 0) * CHUNK
        else:
            at_T = at + lane_T
            mask_T = at_T < tl.minimum(limit, count)
            mask_T = mask_T & (tl.load(keys + at_T, mask=mask_T, other=-1) == key)
            total += load_gradients(
                grad, order, places, factors, in_bag, winners, at_T, mask_T, stride,
                False, True, UNPOOLED, FACTORS, IN_BAG, ALIGN, DIM, BLOCK, BLOCK_H,
            )  # fmt: skip
            at = tl.minimum(at + TILE, limit)
        going = tl.load(keys + at, mask=at < count, other=-1) == key
    return tl.sum(total, 0)


@triton.jit
def sum_runs(
    keys, grad, order, places, factors, in_bag, winners, partial, count, stride, at_T, key_T, length_T, owned_T,
    DISTINCT: tl.constexpr, UNPOOLED: tl.constexpr, FACTORS: tl.constexpr, IN_BAG: tl.constexpr, ALIGN: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, SHORT_RUN: tl.constexpr,
    REST_TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums of a tile of runs that begin at positions `at_T` and have `length_T` positions in their chunk."""
    if DISTINCT:
        return load_gradients(
            grad, order, places, factors, in_bag, winners, at_T, owned_T, stride,
            True, True, UNPOOLED, FACTORS, IN_BAG, ALIGN, DIM, BLOCK, BLOCK_H,
        )  # fmt: skip
    else:
        short_T = tl.minimum(length_T, SHORT_RUN)
        sums = zeros_of(TILE, BLOCK, BLOCK_H)
        for k in range(0, tl.max(tl.where(owned_T, short_T, 0), 0)):
            sums += load_gradients(
                grad, order, places, factors, in_bag, winners, at_T + k, owned_T & (k < short_T), stride,
                False, True, UNPOOLED, FACTORS, IN_BAG, ALIGN, DIM, BLOCK, BLOCK_H,
            )  # fmt: skip
        more_T = owned_T & ((length_T > SHORT_RUN) | ((at_T + length_T) % CHUNK == 0))
        if tl.max(more_T.to(tl.int32), 0) > 0:
            lane_T = tl.arange(0, TILE)
            for lane in range(0, TILE):
                mine_T = more_T & (lane_T == lane)
                if tl.max(mine_T.to(tl.int32), 0) > 0:
                    rest_D = _sum_rest(
                        keys, grad, order, places, factors, in_bag, winners, partial, count, stride,
                        tl.sum(tl.where(mine_T, key_T, 0), 0), tl.sum(tl.where(mine_T, at_T + short_T, 0), 0),
                        UNPOOLED, FACTORS, IN_BAG, ALIGN, DIM, BLOCK, BLOCK_H, REST_TILE, CHUNK,
                    )  # fmt: skip
                    sums += tl.where(over_rows(mine_T, sums), over_columns(rest_D), 0.0)
        return sums


@triton.jit
def _earlier(a, b):
    return tl.minimum(a, b)


@triton.jit
def _list_runs(
    keys, meta, heads, words, run_counts, begin, count, low, high,
    DISTINCT: tl.constexpr, CACHED: tl.constexpr, STAGED: tl.constexpr, FORMAT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the runs of rows in [low, high) that begin in a chunk: uncached rows from the front, cached rows from the back."""
    lane_C = tl.arange(0, CHUNK)
    at_C = begin + lane_C
    key_C = tl.load(keys + at_C, mask=at_C < count, other=-1).to(tl.int64)
    head_C = (key_C >= low) & (key_C < high)
    length_C = lane_C * 0 + 1
    if not DISTINCT:
        before_C = tl.load(keys + at_C - 1, mask=(at_C > 0) & (at_C < count), other=-1).to(tl.int64)
        after_C = tl.load(keys + at_C + 1, mask=at_C + 1 < count, other=-1).to(tl.int64)
        end_C = tl.where((key_C != after_C) | (lane_C == CHUNK - 1), lane_C + 1, CHUNK)
        length_C = tl.associative_scan(end_C, 0, _earlier, reverse=True) - lane_C
        head_C = head_C & (key_C != before_C)
    entry_C = lane_C | (length_C << 8)
    plain_C = head_C
    cached = 0
    if CACHED:
        word_C = first_words(meta, tl.where(head_C, key_C - low, 0), head_C, FORMAT)
        cached_C = head_C & (word_C < 0)
        if STAGED:
            cached_C = cached_C & (is_staged(word_C) == 0)
        plain_C = head_C & (cached_C == 0)
        cached = tl.sum(cached_C.to(tl.int32), 0)
        back_C = begin + CHUNK - tl.cumsum(cached_C.to(tl.int32), 0)
        tl.store(heads + back_C, entry_C, mask=cached_C)
        tl.store(words + back_C, word_C, mask=cached_C)
    front_C = begin + tl.cumsum(plain_C.to(tl.int32), 0) - 1
    tl.store(heads + front_C, entry_C, mask=plain_C)
    tl.store(run_counts + begin // CHUNK, tl.sum(plain_C.to(tl.int32), 0) | (cached << 16))


@triton.jit
def load_heads(
    keys, heads, words, begin, first, number, CACHED: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(position, key, length in the chunk, mask, first meta word if CACHED) of a tile of a chunk's listed runs."""
    rank_T = first + tl.arange(0, TILE)
    owned_T = rank_T < number
    if CACHED:
        listed_T = begin + CHUNK - 1 - rank_T
        word_T = tl.load(words + listed_T, mask=owned_T, other=0)
    else:
        listed_T = begin + rank_T
        word_T = rank_T
    entry_T = tl.load(heads + listed_T, mask=owned_T, other=0)
    at_T = begin + (entry_T & 255)
    return at_T, tl.load(keys + at_T, mask=owned_T, other=0).to(tl.int64), entry_T >> 8, owned_T, word_T


@triton.jit
def _prepare(
    keys, grad, order, places, sorted_places, factors, in_bag, winners, partial, meta, heads, words, run_counts, clock, hyper,
    count, stride, low, high, meta_at,
    ADVANCE: tl.constexpr, DISTINCT: tl.constexpr, CACHED: tl.constexpr, STAGED: tl.constexpr, FORMAT: tl.constexpr,
    UNPOOLED: tl.constexpr, FACTORS: tl.constexpr, IN_BAG: tl.constexpr, ALIGN: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    if ADVANCE and tl.program_id(0) == 0:
        advance(clock, hyper)
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    if not DISTINCT and outside(keys, begin, count, low, high, CHUNK):
        tl.store(run_counts + tl.program_id(0), 0)
        return
    _list_runs(keys, meta + meta_at, heads, words, run_counts, begin, count, low, high, DISTINCT, CACHED, STAGED, FORMAT, CHUNK)
    if DISTINCT:
        return
    at_C = begin + tl.arange(0, CHUNK)
    if not UNPOOLED:
        lookup_C = tl.load(order + at_C, mask=at_C < count, other=0)
        place_C = tl.load(places + lookup_C, mask=at_C < count, other=0)
        tl.store(sorted_places + at_C, place_C, mask=at_C < count)
    if begin + CHUNK > count:
        return
    first, last = tl.load(keys + begin).to(tl.int64), tl.load(keys + begin + CHUNK - 1).to(tl.int64)
    if (first != last) | (first < low) | (first >= high):
        return
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    total = zeros_of(TILE, BLOCK, BLOCK_H)
    for k in range(0, CHUNK, TILE):
        at_T = begin + k + tl.arange(0, TILE)
        total += load_gradients(
            grad, order, places, factors, in_bag, winners, at_T, at_T >= 0, stride,
            False, False, UNPOOLED, FACTORS, IN_BAG, ALIGN, DIM, BLOCK, BLOCK_H,
        )  # fmt: skip
    total_D = tl.sum(total, 0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * DIM + column, total_D, mask=inside_D)


def warps_for(block: int) -> int:
    """Four columns a thread."""
    return max(1, min(16, block // 128))


class Runs(NamedTuple):
    """Runs of a batch, chunk by chunk."""

    partial: Array  # sums of chunks inside one run; others are unwritten
    heads: Array  # int32: position in the chunk and length of the runs that begin there
    words: Array  # int32, beside `heads`: the first meta word of cached rows
    run_counts: Array  # int32 a chunk: runs of uncached rows and, from bit 16 on, of cached rows


def prepare(
    lookups: SortedLookups, grad_out: Tensor, run: TableRun, meta: Tensor, cached: bool = False, staged: bool = False,
    clock: Tensor | None = None, hyper: Tensor | None = None,
) -> Runs:  # fmt: skip
    """List the runs of rows of one run of tables, and sum whole chunks. With a clock, advances it in the same launch."""
    count, device = lookups.keys.numel(), grad_out.device
    chunks, distinct = ceil_div(count, CHUNK), lookups.order.numel() == 0
    partial = 0 if distinct else count // CHUNK * run.dim
    lengths = (chunks * CHUNK, chunks * CHUNK if cached else 0, chunks)
    runs = Runs(*scratch(device, (partial, torch.float32), *((length, torch.int32) for length in lengths)))
    block, block_h = tile_shape(run.format, run.dim)
    launch(
        _prepare, chunks,
        (lookups.keys, grad_out, *lookups[1:7], runs.partial, meta, *runs[1:], meta if clock is None else clock,
         meta if hyper is None else hyper),
        (count, grad_out.shape[1], run.row, run.row + run.rows, run.meta),
        (clock is not None, distinct, cached, staged, run.format, *lookups.flags, run.dim, block, block_h, REST_TILE, CHUNK),
        exact=True, warps=warps_for(block),
    )  # fmt: skip
    return runs


@triton.jit
def _store_sums(
    keys, grad, order, places, sorted_places, factors, in_bag, winners, partial, heads, words, run_counts, rank, rows, out,
    count, stride, width,
    UNPOOLED: tl.constexpr, FACTORS: tl.constexpr, IN_BAG: tl.constexpr, ALIGN: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    TILE: tl.constexpr, SHORT_RUN: tl.constexpr, REST_TILE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    chunk, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    begin, number = chunk.to(tl.int64) * CHUNK, tl.load(run_counts + chunk)
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    for first in range(part * TILE, number, PARTS * TILE):
        at_T, key_T, length_T, owned_T, _word_T = load_heads(keys, heads, words, begin, first, number, False, TILE, CHUNK)
        sums = sum_runs(
            keys, grad, order, sorted_places, factors, in_bag, winners, partial, count, stride, at_T, key_T, length_T, owned_T,
            False, UNPOOLED, FACTORS, IN_BAG, ALIGN, DIM, BLOCK, BLOCK_H, TILE, SHORT_RUN, REST_TILE, CHUNK,
        )  # fmt: skip
        rank_T = tl.load(rank + at_T, mask=owned_T, other=0)
        tl.store(rows + rank_T, key_T, mask=owned_T)
        mask = over_rows(owned_T, sums) & over_columns(inside_D)
        tl.store(out + over_rows(rank_T, sums) * width + over_columns(column), sums, mask=mask)


def sum_row_gradients(
    layout: Layout, call: LookupCall, winners: Tensor, grad_out: Tensor, distinct: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(distinct arena rows in ascending order, their summed gradients [rows, max_dim], zeros after a row's dimension).

    Synchronizes unless it is given the number of distinct rows, the size of the result.
    """
    tables, count, device = layout.tables, call.ids_N.numel(), grad_out.device
    grad_out = grad_out.contiguous()
    if count == 0:
        no_grads = torch.empty((0, tables.max_dim), dtype=torch.float32, device=device)
        return torch.empty(0, dtype=torch.int64, device=device), no_grads
    lookups = sort_lookups(layout, *call[:4], winners)
    keys_N, head_N = as_tensor(lookups.keys), torch.ones(count, dtype=torch.bool, device=device)
    torch.ne(keys_N[1:], keys_N[:-1], out=head_N[1:])
    rank = torch.cumsum(head_N, 0) - 1
    distinct = int((head_N & (keys_N < tables.rows)).sum()) if distinct is None else distinct
    rows_U = torch.empty(distinct, dtype=torch.int64, device=device)
    grads_UW = torch.zeros((distinct, tables.max_dim), dtype=torch.float32, device=device)
    for run in tables.runs:
        runs = prepare(lookups, grad_out, run, keys_N)
        block, block_h = tile_shape(run.format, run.dim)
        launch(
            _store_sums, PARTS * runs.run_counts.numel(),
            (lookups.keys, grad_out, *lookups[1:7], *runs, rank, rows_U, grads_UW),
            (count, grad_out.shape[1], tables.max_dim),
            (*lookups.flags, run.dim, block, block_h, TILE, SHORT_RUN, REST_TILE, CHUNK, PARTS), exact=True,
            warps=warps_for(block),
        )  # fmt: skip
    error_buffer(grad_out).raise_pending()
    return rows_U, grads_UW
