"""Which rows a batch needs and where they are, on a GPU: checks of ids, distinct rows, locations and routes.

No function waits for the GPU. Results whose size the ids determine have room for the largest size, and their size stays on the
device: rows beyond it have the row `limit`, and their part is -1. The host reads all sizes of a step at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline.kernels.gpu.bags import NO_POSITION, check_ids, ids_of_program
from thermocline.kernels.gpu.errors import OFFSETS, error_buffer, report
from thermocline.kernels.gpu.launch import as_tensor, ceil_div, launch, power_of_two
from thermocline.kernels.gpu.sort import KeySort, key_type
from thermocline.kernels.ids.gpu import ones_of

from . import fields as E

TILE = 256

_MAP_FIELDS, _FIRST, _END, _OWNER = (tl.constexpr(k) for k in (E.MAP_FIELDS, E.FIRST, E.END, E.OWNER))
_COLD, _COPIED, _EVERYWHERE = tl.constexpr(E.COLD), tl.constexpr(E.COPIED), tl.constexpr(E.EVERYWHERE)
_WORDS2, _BELOW2, _WORDS1, _BELOW1 = (tl.constexpr(k) for k in (E.WORDS2, E.BELOW2, E.WORDS1, E.BELOW1))
_TURNS, _TURN, _BITS, _PART = (tl.constexpr(k) for k in (E.TURNS, E.TURN, E.BITS, E.PART))
_SOME, _ALL = tl.constexpr(E.SOME), tl.constexpr(E.ALL)
_NOWHERE, _SAME_NODE, _OTHER_NODES = (tl.constexpr(k) for k in (E.NOWHERE, E.SAME_NODE, E.OTHER_NODES))


# -- ids of a batch ---------------------------------------------------------------------------------------------------


@triton.jit
def _check_offsets(offsets, flag, record, last, ids_count, TILE: tl.constexpr):
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < last
    first_T = tl.load(offsets + at_T, mask=mask_T, other=0).to(tl.int64)
    last_T = tl.load(offsets + at_T + 1, mask=mask_T, other=0).to(tl.int64)
    bad_T = (last_T < first_T) | ((at_T == 0) & (first_T != 0)) | ((at_T == last - 1) & (last_T != ids_count))
    first_bad = tl.min(tl.where(mask_T & bad_T, at_T, NO_POSITION), 0)
    if first_bad < NO_POSITION:
        begin, end = tl.load(offsets + first_bad), tl.load(offsets + first_bad + 1)
        report(flag, record, offsets, OFFSETS, first_bad, first_bad, begin, end)


@triton.jit
def _global_rows(
    fields, ids, offsets, rows, flag, record, ids_count, batch,
    FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    feature, first, last = ids_of_program(offsets, tl.program_id(0), ids_count, batch, FEATURES, BLOCK_F, TILE)
    if feature >= FEATURES:
        return
    limit, begin = tl.load(fields + 2 * feature), tl.load(fields + 2 * feature + 1)
    at_T = first + tl.arange(0, TILE)
    id_T = tl.load(ids + at_T, mask=at_T < last, other=0).to(tl.int64)
    good_T = (id_T >= 0) & (id_T < limit)
    tl.store(rows + at_T, begin + id_T, mask=(at_T < last) & good_T)
    check_ids(ids, fields, feature, limit, tl.where((at_T < last) & ~good_T, at_T, NO_POSITION), flag, record)


def global_rows(fields_F2: Tensor, ids_N: Tensor, offsets: Tensor, limit: int) -> Tensor:
    """Global rows of rows of tables; `limit` for a row that is not in its table, which is reported, as are wrong offsets."""
    features, count, last = fields_F2.shape[0], ids_N.numel(), offsets.numel() - 1
    rows_N, errors = torch.full_like(ids_N, limit, dtype=torch.int64), error_buffer(fields_F2)
    if last > 0:
        batch, inputs = last // features, (ids_N.contiguous(), offsets.contiguous())
        launch(
            _check_offsets, ceil_div(last, TILE), (inputs[1], errors.flag, errors.record), (last, count), (TILE,), exact=True
        )
        launch(
            _global_rows, ceil_div(count, TILE) + features, (fields_F2, *inputs, rows_N, errors.flag, errors.record),
            (count, batch), (features, power_of_two(features), TILE), exact=True,
        )  # fmt: skip
    return rows_N


# -- distinct rows ----------------------------------------------------------------------------------------------------


@triton.jit
def _mark_heads(keys, heads, count, limit, ONCE: tl.constexpr, TILE: tl.constexpr):
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    key_T = tl.load(keys + at_T, mask=at_T < count, other=0).to(tl.int64)
    head_T = key_T < limit
    if ONCE:
        before_T = tl.load(keys + at_T - 1, mask=(at_T > 0) & (at_T < count), other=-1).to(tl.int64)
        head_T = head_T & (key_T != before_T)
    tl.store(heads + at_T, head_T.to(tl.int32), mask=at_T < count)


@triton.jit
def _place_rows(keys, order, heads, ends, rows, inverse, count, TILE: tl.constexpr):
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < count
    place_T = tl.maximum(tl.load(ends + at_T, mask=mask_T, other=1) - 1, 0).to(tl.int64)
    head_T = mask_T & (tl.load(heads + at_T, mask=mask_T, other=0) != 0)
    tl.store(rows + place_T, tl.load(keys + at_T, mask=mask_T, other=0).to(tl.int64), mask=head_T)
    tl.store(inverse + tl.load(order + at_T, mask=mask_T, other=0), place_T, mask=mask_T)


def distinct_padded(rows_N: Tensor, limit: int, once: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """`distinct_rows` with room for one row of each input: (rows, then `limit`; indices; [number of rows] on the device)."""
    count, device = rows_N.numel(), rows_N.device
    found_N, inverse_N = torch.full_like(rows_N, limit), torch.empty_like(rows_N)
    if not count:
        return found_N, inverse_N, torch.zeros(1, dtype=torch.int32, device=device)
    sorting = KeySort(count, key_type(limit), device)
    as_tensor(sorting.keys)[:count].copy_(rows_N)
    keys, order = sorting.sort()
    heads_N = torch.empty(count, dtype=torch.int32, device=device)
    programs = ceil_div(count, TILE)
    launch(_mark_heads, programs, (keys, heads_N), (count, limit), (once, TILE), exact=True)
    ends_N = heads_N.cumsum(0, dtype=torch.int32)
    launch(_place_rows, programs, (keys, order, heads_N, ends_N, found_N, inverse_N), (count,), (TILE,), exact=True)
    return found_N, inverse_N, ends_N[-1:]


# -- locations --------------------------------------------------------------------------------------------------------


@triton.jit
def _field(table_T, FIELD: tl.constexpr, mask_T):
    return tl.load(table_T + FIELD, mask=mask_T, other=0)


@triton.jit
def _below(words_T, below_T, row_T, mask_T):
    """(whether each row is in the bitmap of its table, its rank)."""
    words_T = words_T.to(tl.pointer_type(tl.int64))
    word_T, bit_T = row_T >> 6, row_T & 63
    rank_T = tl.load(below_T.to(tl.pointer_type(tl.int32)) + (row_T >> 9), mask=mask_T, other=0).to(tl.int64)
    own_T = tl.load(words_T + word_T, mask=mask_T, other=0)
    rank_T += ones_of(own_T & (((row_T * 0 + 1) << bit_T) - 1))
    for step in tl.static_range(7):
        before_T = (row_T >> 9 << 3) + step
        rank_T += ones_of(tl.load(words_T + before_T, mask=mask_T & (before_T < word_T), other=0))
    return mask_T & ((own_T >> bit_T) & 1 == 1), rank_T


@triton.jit
def _scattered(index_T, cold_T, bits_T, mask_T, M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr):
    """The fixed bijection of `plan/balance.py`."""
    fold_T, one_T = tl.maximum(bits_T >> 1, 1), index_T * 0 + 1
    low_T = (one_T << bits_T) - 1
    at_T, turning_T = tl.where(mask_T, index_T, 0), mask_T
    while tl.max(turning_T.to(tl.int32), 0) > 0:
        next_T = ((at_T ^ (at_T >> fold_T)) * M0) & low_T
        next_T = ((next_T ^ (next_T >> fold_T)) * M1) & low_T
        next_T = ((next_T ^ (next_T >> fold_T)) * M2) & low_T
        at_T = tl.where(turning_T, next_T ^ (next_T >> fold_T), at_T)
        turning_T = mask_T & (at_T >= cold_T)
    return at_T


@triton.jit
def _turn(table_T, block_T, mask_T):
    """The rotations of blocks, one or two bytes each."""
    turns_T = _field(table_T, _TURNS, mask_T).to(tl.pointer_type(tl.uint8))
    wide_T = _field(table_T, _TURN, mask_T) == 2
    at_T = tl.where(wide_T, 2 * block_T, block_T)
    high_T = tl.load(turns_T + at_T + 1, mask=mask_T & wide_T, other=0).to(tl.int64)
    return tl.load(turns_T + at_T, mask=mask_T, other=0).to(tl.int64) + 256 * high_T


@triton.jit
def _locate(
    maps, rows, parts, homes, places, count, tables, nodes, local_size,
    STEPS: tl.constexpr, M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row_T = tl.load(rows + at_T, mask=at_T < count, other=-1)
    number_T = row_T * 0
    for step in tl.static_range(STEPS):
        next_T = number_T + (1 << (STEPS - 1 - step))
        first_T = tl.load(maps + next_T * _MAP_FIELDS + _FIRST, mask=next_T < tables, other=0)
        number_T = tl.where((next_T < tables) & (first_T <= row_T), next_T, number_T)
    table_T, ranks = maps + number_T * _MAP_FIELDS, nodes * local_size
    inside_T = (at_T < count) & (row_T >= 0)
    inside_T = inside_T & (row_T < _field(table_T, _END, inside_T))
    row_T = tl.where(inside_T, row_T - _field(table_T, _FIRST, inside_T), 0)
    copied_T, every_T = _field(table_T, _COPIED, inside_T), _field(table_T, _EVERYWHERE, inside_T)
    some_T = inside_T & (copied_T == _SOME)
    replicated_T, below_T = _below(_field(table_T, _WORDS2, some_T), _field(table_T, _BELOW2, some_T), row_T, some_T)
    replicated_T = replicated_T | (inside_T & (copied_T == _ALL))
    below_T = tl.where(some_T, below_T, tl.where(copied_T == _ALL, row_T, 0))
    some_T = inside_T & (every_T == _SOME)
    first_T, first_below_T = _below(_field(table_T, _WORDS1, some_T), _field(table_T, _BELOW1, some_T), row_T, some_T)
    first_T = first_T | ((every_T == _ALL) & replicated_T)
    first_below_T = tl.where(some_T, first_below_T, tl.where(every_T == _ALL, below_T, 0))
    owner_T = _field(table_T, _OWNER, inside_T)
    whole_T, second_T = inside_T & (owner_T >= 0), below_T - first_below_T
    cold_T = inside_T & ~whole_T & ~replicated_T & ~first_T
    scattered_T = _scattered(
        row_T - below_T, _field(table_T, _COLD, cold_T), _field(table_T, _BITS, cold_T), cold_T, M0, M1, M2
    )  # fmt: skip
    block_T = scattered_T // ranks
    cold_home_T = (scattered_T + _turn(table_T, block_T, cold_T & (ranks > 1))) % ranks
    second_home_T = second_T // local_size % nodes * local_size + second_T % local_size
    home_T = tl.where(cold_T, cold_home_T, tl.where(first_T, first_below_T % ranks, second_home_T))
    place_T = tl.where(cold_T, block_T, tl.where(first_T, first_below_T, second_T // local_size))
    tier_T = tl.where(cold_T | whole_T, 2, tl.where(first_T, 0, 1))
    part_T = tl.load(table_T + _PART + tier_T, mask=inside_T, other=-1)
    tl.store(parts + at_T, part_T, mask=at_T < count)
    tl.store(homes + at_T, tl.where(whole_T, owner_T, tl.where(inside_T, home_T, 0)), mask=at_T < count)
    tl.store(places + at_T, tl.where(whole_T, row_T, tl.where(inside_T, place_T, 0)), mask=at_T < count)


def locate(
    maps_TM: Tensor, multipliers: tuple[int, ...], nodes: int, local_size: int, rows_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Part, owner and place of global rows, part -1 for others; `maps_TM` has the fields of each table, by first row."""
    rows_N, count, tables = rows_N.contiguous(), rows_N.numel(), maps_TM.shape[0]
    part_N, home_N, place_N = (torch.empty_like(rows_N) for _ in range(3))
    if count:
        launch(
            _locate, ceil_div(count, TILE), (maps_TM, rows_N, part_N, home_N, place_N), (count, tables, nodes, local_size),
            ((tables - 1).bit_length(), *multipliers, TILE), exact=True,
        )  # fmt: skip
    return part_N, home_N, place_N


# -- routes -----------------------------------------------------------------------------------------------------------


@triton.jit
def _route_keys(part, home, ways, keys, count, node, local_size, group, parts, TILE: tl.constexpr):
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < count
    part_T, home_T = tl.load(part + at_T, mask=mask_T, other=-1), tl.load(home + at_T, mask=mask_T, other=0)
    mine_T = mask_T & (part_T >= 0)
    way_T = tl.load(ways + part_T, mask=mine_T, other=_NOWHERE)
    to_T = tl.where(way_T == _SAME_NODE, node * local_size + home_T % local_size, home_T)
    to_T = tl.where(way_T == _OTHER_NODES, home_T // local_size, to_T)
    to_T = tl.where(way_T == _NOWHERE, group, to_T)
    key_T = tl.where(mine_T, to_T * parts + part_T, (group + 1) * parts)
    tl.store(keys + at_T, key_T.to(keys.dtype.element_ty), mask=mask_T)


def route(part_N: Tensor, home_N: Tensor, ways_K: Tensor, node: int, local_size: int, group: int) -> tuple[Tensor, Tensor]:
    """(rows of each part for each rank of a group, and last for none [group + 1, parts]; row indices in that order).

    Rows of part -1 come last and do not count.
    """
    parts, count, device = ways_K.numel(), part_N.numel(), part_N.device
    if not count:
        return torch.zeros((group + 1, parts), dtype=torch.int64, device=device), torch.empty_like(part_N)
    sorting = KeySort(count, torch.int32, device)
    launch(
        _route_keys, ceil_div(count, TILE), (part_N, home_N, ways_K, sorting.keys),
        (count, node, local_size, group, parts), (TILE,), exact=True,
    )  # fmt: skip
    keys_N, order_N = map(as_tensor, sorting.sort())  # the next sort may use their memory
    begins_PK = torch.searchsorted(keys_N, torch.arange((group + 1) * parts + 1, dtype=torch.int32, device=device))
    return begins_PK.diff().view(group + 1, parts), order_N.clone()
