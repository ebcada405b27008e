"""Ids that come and go, on a GPU (definition: `reference.py`). Nothing waits for the GPU, and a CUDA graph may record a step.

    expire   with a time to live: frees rows, at the steps that do so
    find     a tile of ids: rows. In training each lookup also claims its row, or, without one, a place in a hash table
    tally    counts the lookups of each row and of each id without one; lists the buckets of these ids
    touch    heat and last step of rows; where the ids of each bucket begin in a list
    list     the ids without a row, by bucket
    place    `gpu_place.py`, a program a bucket
    finish   rows of ids that were given one; halves the sketch when it is due

A claim is the number of a lookup: of all lookups of a row the last one counts for it (`last` holds its number until `touch`),
and of all lookups of an id without a row any one. Which one it is, and the order of lists, depend on the GPU; results do not.
The hash table is keyed by a secret, so that no ids can be chosen that collide in it.

Rejected: sorting the ids without a row. It needs no table and no lists, but sorts all ids of the batch for the sake of a few.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline.kernels.gpu.bags import ids_of_program
from thermocline.kernels.gpu.launch import ceil_div, launch, power_of_two
from thermocline.kernels.ids.gpu import hash_id, ones_of

from . import fields as K
from .fields import GpuBatch, GpuMoves, KeyArrays, KeyRules, StepRule, TableRows
from .gpu_begin import begin_rows, begin_some

TILE, FIND_TILE = 512, 128
MOST_PROGRAMS = 4096

# Fields of the rule of a table on the device.
ROWS, SHARED, KEY, HALF_LIFE, LRU, ADMIT_AFTER, TTL, SWEEP, SECRET, GROWS, CHANCES = (tl.constexpr(n) for n in range(11))
# Numbers of a step.
CAME, MISSED, TOUCHED, LISTED, HALVINGS = (tl.constexpr(n) for n in range(5))
_NUMBERS = 8
READ, READ_TO_TRAIN, STEP = (tl.constexpr(n) for n in (K.READ, K.READ_TO_TRAIN, K.STEP))
PINNED, MOST, BUCKET = tl.constexpr(K.PINNED), tl.constexpr(K.MOST), tl.constexpr(K.BUCKET)
ADMITTED, EVICTED, EXPIRED, REFUSED = (tl.constexpr(n) for n in (K.ADMITTED, K.EVICTED, K.EXPIRED, K.REFUSED))
WAITING, STEPS, BARRIER, WINDOW = (tl.constexpr(n) for n in (K.WAITING, K.STEPS, K.BARRIER, K.WINDOW))
_DROPPED, _MOST_LOAD, _LOAD_OF = tl.constexpr(K.DROPPED), *(tl.constexpr(n) for n in K.MOST_LOAD)
_LOOKUPS, _SHARED_LOOKUPS = tl.constexpr(K.LOOKUPS), tl.constexpr(K.SHARED)
_EVAL_LOOKUPS, _EVAL_SHARED = tl.constexpr(K.EVAL_LOOKUPS), tl.constexpr(K.EVAL_SHARED)
_CELLS_OF_BUCKET = tl.constexpr(K.DEPTH * K.CELLS)
_SECRET = secrets.randbits(62)
__all__ = ["begin_moves", "begin_rows", "find", "find_rows", "step"]


@lru_cache(maxsize=256)
def _rule_on(device: torch.device, rules: KeyRules, step: StepRule) -> Tensor:
    assert rules.first == 0
    rule = (rules.rows, rules.shared, rules.key, rules.half_life, rules.lru, step.admit_after, step.ttl or 0, step.sweep)
    numbers = [*map(int, rule), _SECRET, int(step.grows), *K.chances(step.admit_chance).tolist()]
    return torch.tensor(numbers, dtype=torch.int64).to(device)


@triton.jit
def first_of_bucket(hash_T, rows):
    """First row of the bucket of each hash."""
    home_T = tl.umulhi(hash_T, tl.zeros_like(hash_T) + rows.to(tl.uint64)).to(tl.int64)
    return home_T // BUCKET * BUCKET


@triton.jit
def tag_of(hash_T):
    return tl.maximum((hash_T & 255).to(tl.int32), 1)


@triton.jit
def _same_tags(tags, first_T, tag_T, mask_T):
    """A bit for each row of each bucket whose tag is that of the id."""
    word = tl.arange(0, 16)
    x = tl.load(tags + (first_T >> 2)[:, None] + word[None, :], mask=mask_T[:, None], other=0).to(tl.uint32, bitcast=True)
    x = x ^ (tag_T.to(tl.uint32) * 0x01010101)[:, None]
    ones = ((((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x | 0x7F7F7F7F) ^ 0xFFFFFFFF) >> 7  # 1 in each zero byte
    nibble = (ones | (ones >> 7) | (ones >> 14) | (ones >> 21)) & 15
    return tl.sum(nibble.to(tl.uint64) << (4 * word)[None, :].to(tl.uint64), 1).to(tl.uint64)


@triton.jit
def _rows_of(keys, tags, id_T, hash_T, rows, mask_T):
    """Row of each id, or -1."""
    first_T = first_of_bucket(hash_T, rows)
    left_T = _same_tags(tags, first_T, tag_of(hash_T), mask_T)
    row_T = tl.zeros_like(id_T) - 1
    while tl.max((left_T != 0).to(tl.int32), 0) > 0:
        at_T = first_T + ones_of(left_T ^ (left_T - 1)) - 1
        hit_T = (left_T != 0) & (tl.load(keys + at_T, mask=left_T != 0, other=0) == id_T)
        row_T = tl.where(hit_T, at_T, row_T)
        left_T = tl.where(hit_T, 0, left_T & (left_T - 1))
    return row_T


@triton.jit
def _claim_places(slots, slot_mask, ids, id_T, hash_T, at_T, missed_T, secret):
    """A lookup for each id without a row, the same one for all of its lookups."""
    mixed_T = (hash_T ^ secret.to(tl.uint64)) * 0x9E3779B97F4A7C15
    slot_T = ((mixed_T >> 32).to(tl.int64)) & slot_mask
    slot_T = tl.where(missed_T, slot_T, at_T & slot_mask)  # others compare with what no slot holds, each in its own
    mine_T = (at_T + 1).to(tl.int32)
    found_T = mine_T
    open_T = missed_T
    while tl.max(open_T.to(tl.int32), 0) > 0:
        was_T = tl.atomic_cas(slots + slot_T, tl.where(open_T, 0, -1).to(tl.int32), mine_T)
        other_T = open_T & (was_T != 0)
        same_T = tl.load(ids + was_T.to(tl.int64) - 1, mask=other_T, other=0) == id_T
        found_T = tl.where(other_T & same_T, was_T, found_T)
        open_T = other_T & (same_T == 0)
        slot_T = tl.where(open_T, (slot_T + 1) & slot_mask, slot_T)
    return found_T


@triton.jit
def _begin_step(counts, PROTECT: tl.constexpr):
    step = tl.load(counts + STEPS) + 1
    tl.store(counts + STEPS, step)
    if not PROTECT:
        tl.store(counts + BARRIER, step)


@triton.jit
def _find(
    keys, last, tags, rule, ids, offsets, users, rows, claims, seen, slots, counts, numbers, ids_count, batch, first, slot_mask,
    KIND: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if KIND >= STEP and program == 0:
        _begin_step(counts, KIND > STEP)
    if KIND == READ_TO_TRAIN and program == 0:
        tl.store(counts + BARRIER, 0)
    begin, end = program.to(tl.int64) * TILE, ids_count.to(tl.int64)
    if FEATURES > 1:
        feature, begin, end = ids_of_program(offsets, program, ids_count, batch, FEATURES, BLOCK_F, TILE)
        if feature >= FEATURES:
            return
        if tl.load(users + feature) == 0:
            return
    at_T = begin + tl.arange(0, TILE)
    mask_T = at_T < end
    id_T = tl.load(ids + at_T, mask=mask_T, other=0)
    hash_T = hash_id(id_T, tl.load(rule + KEY))
    own = tl.load(rule + ROWS)
    row_T = _rows_of(keys, tags, id_T, hash_T, own, mask_T)
    missed_T = mask_T & (row_T < 0)
    shared_T = tl.umulhi(hash_T, tl.zeros_like(hash_T) + tl.load(rule + SHARED).to(tl.uint64)).to(tl.int64)
    tl.store(rows + at_T, tl.where(row_T < 0, own + shared_T, row_T) + first, mask=mask_T)
    if KIND == READ or KIND == READ_TO_TRAIN:
        tl.atomic_add(counts + _EVAL_LOOKUPS, tl.sum(mask_T.to(tl.int64), 0))
        tl.atomic_add(counts + _EVAL_SHARED, tl.sum(missed_T.to(tl.int64), 0))
    if KIND >= STEP:
        tl.atomic_add(counts + _LOOKUPS, tl.sum(mask_T.to(tl.int64), 0))
        tl.atomic_add(numbers + MISSED, tl.sum(missed_T.to(tl.int32), 0))
        owned_T = mask_T & (row_T >= 0)
        owned_T = owned_T & (tl.load(last + row_T, mask=owned_T, other=PINNED) != PINNED)
        before_T = tl.atomic_min(last + row_T, (-2 - at_T).to(tl.int32), mask=owned_T)
        tl.store(seen + at_T, before_T, mask=owned_T)
        claim_T = _claim_places(slots, slot_mask, ids, id_T, hash_T, at_T, missed_T, tl.load(rule + SECRET))
        tl.store(claims + at_T, claim_T, mask=missed_T | owned_T)


@triton.jit
def _tile(claims, rows, rule, first, ids_count, TILE: tl.constexpr):
    """Lookups of this program: (position, row, those that count for a row, those of ids without a row, claim)."""
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    claim_T = tl.load(claims + at_T, mask=at_T < ids_count, other=0).to(tl.int64) - 1
    row_T = tl.load(rows + at_T, mask=claim_T >= 0, other=0) - first
    owned_T = row_T < tl.load(rule + ROWS)
    return at_T, row_T, (claim_T >= 0) & owned_T, (claim_T >= 0) & (owned_T == 0), claim_T


@triton.jit
def _tally(
    last, rule, ids, rows, claims, seen, before, times, places, in_bucket, buckets, numbers, ids_count, first,
    TILE: tl.constexpr,
):  # fmt: skip
    at_T, row_T, owned_T, missed_T, claim_T = _tile(claims, rows, rule, first, ids_count, TILE)
    holder_T = -2 - tl.load(last + row_T, mask=owned_T, other=-2).to(tl.int64)
    seen_T = tl.load(seen + at_T, mask=owned_T, other=-1)
    tl.store(before + holder_T, seen_T, mask=owned_T & (seen_T >= 0))  # the one lookup that saw the last step
    tl.atomic_add(times + tl.where(owned_T, holder_T, claim_T), 1, mask=owned_T | missed_T)
    tl.store(claims + at_T, (holder_T + 1).to(tl.int32), mask=owned_T)
    chief_T = missed_T & (claim_T == at_T)
    id_T = tl.load(ids + at_T, mask=chief_T, other=0)
    bucket_T = first_of_bucket(hash_id(id_T, tl.load(rule + KEY)), tl.load(rule + ROWS)) // BUCKET
    place_T = tl.atomic_add(in_bucket + bucket_T, 1, mask=chief_T)
    tl.store(places + at_T, place_T, mask=chief_T)
    opens_T = chief_T & (place_T == 0)
    number = tl.sum(opens_T.to(tl.int32), 0)
    if number > 0:
        begin = tl.atomic_add(numbers + TOUCHED, number)
        tl.store(buckets + begin + tl.cumsum(opens_T.to(tl.int32), 0) - 1, bucket_T.to(tl.int32), mask=opens_T)


@triton.jit
def _touch(
    last, heat, rule, rows, claims, before, times, in_bucket, buckets, starts, counts, numbers, ids_count, first,
    TILE: tl.constexpr,
):  # fmt: skip
    at_T, row_T, owned_T, _, claim_T = _tile(claims, rows, rule, first, ids_count, TILE)
    owned_T = owned_T & (claim_T == at_T)
    step, half_life = tl.load(counts + STEPS), tl.load(rule + HALF_LIFE)
    before_T = tl.load(before + at_T, mask=owned_T, other=0).to(tl.int64)
    shift_T = ((row_T & 3) * 8).to(tl.int32)
    old_T = (tl.load(heat + (row_T >> 2), mask=owned_T, other=0) >> shift_T) & 255
    halvings_T = tl.minimum(step // half_life - before_T // half_life, 8).to(tl.int32)
    new_T = tl.minimum((old_T >> halvings_T) + tl.load(times + at_T, mask=owned_T, other=0), MOST)
    tl.atomic_add(heat + (row_T >> 2), (new_T - old_T) << shift_T, mask=owned_T)  # bytes never carry: each is set once
    tl.store(last + row_T, tl.zeros_like(new_T) + step.to(tl.int32), mask=owned_T)
    touched_T = at_T < tl.load(numbers + TOUCHED)
    bucket_T = tl.load(buckets + at_T, mask=touched_T, other=0)
    size_T = tl.load(in_bucket + bucket_T, mask=touched_T, other=0)
    begin = tl.atomic_add(numbers + LISTED, tl.sum(size_T, 0))
    tl.store(starts + bucket_T, begin + tl.cumsum(size_T, 0) - size_T, mask=touched_T)


@triton.jit
def _list(rule, ids, rows, claims, places, starts, listed, counts, numbers, ids_count, first, width, TILE: tl.constexpr):
    at_T, _, _, missed_T, claim_T = _tile(claims, rows, rule, first, ids_count, TILE)
    chief_T = missed_T & (claim_T == at_T)
    id_T = tl.load(ids + at_T, mask=chief_T, other=0)
    bucket_T = first_of_bucket(hash_id(id_T, tl.load(rule + KEY)), tl.load(rule + ROWS)) // BUCKET
    place_T = tl.load(starts + bucket_T, mask=chief_T, other=0) + tl.load(places + at_T, mask=chief_T, other=0)
    tl.store(listed + place_T, at_T.to(tl.int32), mask=chief_T)
    if tl.program_id(0) == 0:
        window = tl.load(counts + WINDOW) + tl.load(numbers + MISSED)
        tl.store(counts + WINDOW, window % width)
        tl.store(numbers + HALVINGS, tl.minimum(window // width, 8).to(tl.int32))
        tl.store(counts + WAITING, tl.load(numbers + LISTED).to(tl.int64))


@triton.jit
def _grow(rule, counts, open):
    """Open more places of each bucket once ids have three quarters of the open ones."""
    used = tl.load(counts + ADMITTED) - tl.load(counts + EVICTED) - tl.load(counts + _DROPPED)
    most = _MOST_LOAD * tl.load(rule + ROWS)
    needed = tl.minimum((BUCKET * _LOAD_OF * used + most - 1) // most, BUCKET)
    tl.store(open, tl.maximum(tl.load(open), needed))


@triton.jit
def _finish(rule, rows, claims, placed, sketch, counts, open, numbers, ids_count, first, words, TILE: tl.constexpr):
    at_T, _, _, missed_T, claim_T = _tile(claims, rows, rule, first, ids_count, TILE)
    row_T = tl.load(placed + claim_T, mask=missed_T, other=0)
    tl.store(rows + at_T, row_T.to(tl.int64) - 1 + first, mask=missed_T & (row_T > 0))
    tl.atomic_add(counts + _SHARED_LOOKUPS, tl.sum((missed_T & (row_T == 0)).to(tl.int64), 0))
    if tl.program_id(0) == 0 and tl.load(rule + GROWS) != 0:
        _grow(rule, counts, open)
    halvings = tl.load(numbers + HALVINGS)
    if halvings > 0:
        kept = (255 >> halvings) * 0x01010101
        for begin in range(tl.program_id(0) * TILE, words, tl.num_programs(0) * TILE):
            word_T = begin + tl.arange(0, TILE)
            cells_T = tl.load(sketch + word_T, mask=word_T < words, other=0).to(tl.uint32, bitcast=True)
            cells_T = (cells_T >> halvings.to(tl.uint32)) & kept.to(tl.uint32)
            tl.store(sketch + word_T, cells_T.to(tl.int32, bitcast=True), mask=word_T < words)


@triton.jit
def _expire(last, tags, rule, counts, rows, PROTECT: tl.constexpr, TILE: tl.constexpr):
    step = tl.load(counts + STEPS) + 1
    if step % tl.load(rule + SWEEP) == 0:
        end = step - tl.load(rule + TTL)
        if PROTECT:
            end = tl.minimum(end, tl.load(counts + BARRIER))
        for begin in range(tl.program_id(0) * TILE, rows, tl.num_programs(0) * TILE):
            row_T = begin + tl.arange(0, TILE)
            last_T = tl.load(last + row_T, mask=row_T < rows, other=PINNED)
            old_T = (last_T != PINNED) & (last_T < end) & (tl.load(tags + row_T, mask=row_T < rows, other=0) != 0)
            tl.store(tags + row_T, tl.zeros_like(last_T).to(tl.uint8), mask=old_T)
            count = tl.sum(old_T.to(tl.int64), 0)
            tl.atomic_add(counts + EVICTED, count)
            tl.atomic_add(counts + EXPIRED, count)


def find_rows(arrays: KeyArrays, rules: KeyRules, counts: Tensor, batch: GpuBatch, kind: int = K.FIND) -> None:
    """Write the row of each id, its own or a shared one; `kind` says what to count."""
    if batch.ids_N.numel():
        none = arrays.tags
        _launch_find(arrays, _rule_on(counts.device, rules, StepRule()), batch, (none, none, none, counts, none), 0, kind)


def begin_moves(table: TableRows, moves: GpuMoves, bound: float, first: int) -> None:
    """Begin the rows of ids that came."""
    begin_some(table, moves.ids_C, moves.rows_C, moves.numbers, moves.key, bound, first)


def _launch_find(
    arrays: KeyArrays, rule: Tensor, batch: GpuBatch, state: tuple[Tensor, ...], slot_mask: int, kind: int
) -> None:  # fmt: skip
    count, features = batch.ids_N.numel(), batch.users_F.numel()
    per_feature = (batch.offsets.numel() - 1) // features
    launch(
        _find, max(1, ceil_div(count, FIND_TILE) + features - 1),
        (arrays.keys, arrays.last, arrays.tags, rule, batch.ids_N, batch.offsets, batch.users_F, batch.rows_N, *state),
        (count, per_feature, batch.first, slot_mask), (kind, features, power_of_two(features), FIND_TILE), exact=True,
    )  # fmt: skip


def find(arrays: KeyArrays, rules: KeyRules, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.find`; waits for the GPU."""
    rows_N, none = torch.empty_like(ids_N), torch.zeros(2, dtype=torch.int64, device=ids_N.device)
    find_rows(arrays, rules, none, GpuBatch(ids_N.contiguous(), none, none[:1], rows_N))
    return rows_N, (rows_N >= rules.rows).nonzero()[:, 0]


def step(
    arrays: KeyArrays, rules: KeyRules, counts: Tensor, open: Tensor, batch: GpuBatch, step_rule: StepRule, protect: bool
) -> GpuMoves:  # fmt: skip
    """A training step: writes places for ids, and returns the ids that came."""
    from .gpu_place import place

    device, count, first = counts.device, batch.ids_N.numel(), batch.first
    rule, buckets = _rule_on(device, rules, step_rule), ceil_div(rules.rows, K.BUCKET)
    slots, most = power_of_two(max(4, 2 * count)), -(-min(count, rules.rows) // 2) * 2  # parts of 16 bytes
    lookups, listed = ceil_div(count, 4) * 4, ceil_div(min(count, buckets), 4) * 4
    sizes = [lookups, lookups, lookups, slots, ceil_div(buckets, 4) * 4, _NUMBERS]
    claims, times, placed, table, in_bucket, numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    sizes = [lookups] * 4 + [sizes[4], listed]
    seen, before, places, order, starts, touched = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    ids_C, rows_C, before_C = torch.empty(3, most, dtype=torch.int64, device=device)
    left_C = torch.empty(most, dtype=torch.int32, device=device)
    moves = GpuMoves(ids_C, rows_C, before_C, left_C, numbers, rule[KEY.value :])
    rows, tile = arrays.keys.numel(), (TILE,)
    if step_rule.ttl is not None:
        programs = min(MOST_PROGRAMS, ceil_div(rows, TILE))
        tags = arrays.tags.view(torch.uint8)
        launch(_expire, programs, (arrays.last, tags, rule, counts), (rows,), (protect, TILE), exact=True)
    kind = K.PROTECTED_STEP if protect else K.STEP
    _launch_find(arrays, rule, batch, (claims, seen, table, counts, numbers), slots - 1, kind)
    programs = max(1, ceil_div(count, TILE))
    known = (batch.rows_N, claims)
    launch(
        _tally, programs, (arrays.last, rule, batch.ids_N, *known, seen, before, times, places, in_bucket, touched, numbers),
        (count, first), tile, exact=True,
    )  # fmt: skip
    launch(
        _touch, programs, (arrays.last, arrays.heat, rule, *known, before, times, in_bucket, touched, starts, counts, numbers),
        (count, first), tile, exact=True,
    )  # fmt: skip
    launch(
        _list, programs, (rule, batch.ids_N, *known, places, starts, order, counts, numbers),
        (count, first, rules.width), tile, exact=True,
    )  # fmt: skip
    place(arrays, rule, batch.ids_N, (order, times, touched, in_bucket, starts, placed, counts, open), moves)
    launch(
        _finish, programs, (rule, *known, placed, arrays.sketch, counts, open, numbers),
        (count, first, arrays.sketch.numel()), tile, exact=True,
    )  # fmt: skip
    return moves
