"""Ids that come and go, on the CPU (definition: `reference.py`).

A lookup compares the 64 tags of a bucket at once. Threads share ids in `find`, and buckets in `look_up`, which also counts; the
few ids without a row take theirs in one thread, in the order of `placing_order`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import addresses, helper, kernel
from thermocline.kernels.cpu.rows import CACHED, CACHED_INT8, PAD, meta_bytes, row_bytes
from thermocline.kernels.cpu.vectors import (
    equal_bytes,
    get_f32,
    get_i64,
    get_u8,
    get_u32,
    lowest_bit,
    prefetch,
    put_f32,
    put_i64,
    put_u8,
    put_u32,
)
from thermocline.kernels.cpu.write_row import measure_row, write_row
from thermocline.kernels.ids import fields as M
from thermocline.kernels.ids.cpu import hash_id, mix, reduce_to
from thermocline.kernels.ids.reference import hash_ids

from . import fields as K
from .fields import BUCKET, CELLS, CHANCE_KEY, DEPTH, MOST, Admitted, KeyArrays, KeyRules, TableRows, slot_shifts
from .reference import placing_order

CHUNK = 8192
BLOCK = 128  # ids whose tags are fetched together
BEGIN_CHUNK, AHEAD = 512, 4  # rows of a task, and how far ahead they are fetched
_SCALE, _ONE = np.float32(2.0**-23), np.float32(1.0)
_GOLDEN = np.uint64(M.GOLDEN)
_32, _40, _255 = np.uint64(32), np.uint64(40), np.uint64(255)
_PINNED = 0xFFFFFFFF
_NO_ROW = 1 << 50


@helper
def _tag(hash):
    return np.int64(max(np.uint64(1), hash & _255))


@helper
def _row(keys, tags, rows, id, hash):
    """Row of an id, or -1."""
    first = reduce_to(hash, rows) // BUCKET * BUCKET
    same = equal_bytes(tags + first, _tag(hash))
    while same != 0:
        row = first + lowest_bit(same)
        if get_i64(keys, row) == id:
            return row
        same &= same - 1
    return np.int64(-1)


@helper
def _score(used, lookups, half_life, edge):
    """Heat at a step of which `edge` is the last multiple of `half_life`. Comparisons instead of a division."""
    age, halvings = edge - used, 0
    for n in range(8):
        halvings += age > n * half_life
    return lookups >> halvings


@helper
def _count_lookup(last, heat, row, half_life, edge, step):
    used = get_u32(last, row)
    if used != _PINNED:
        put_u8(heat, row, min(_score(used, get_u8(heat, row), half_life, edge) + 1, MOST))
        put_u32(last, row, step)


@kernel("int64(" + ", ".join(["int64"] * 17) + ")")
def _look_up(
    keys, last, tags, heat, rows, shared, key, half_life, step, ids, found, missed, scratch, begin, end, low, high
):  # fmt: skip
    """Rows of ids `begin` to `end` - 1 whose buckets are `low` to `high` - 1; with a step, counts their lookups.

    Ids go through in blocks. Tags of all of a block are fetched, then what belongs to their rows. Returns how many have none.
    """
    hashes, guesses = scratch + 8 * BLOCK, scratch + 16 * BLOCK
    count, edge = np.int64(0), step // half_life * half_life
    for first in range(begin, end, BLOCK):
        size = np.int64(0)
        for i in range(first, min(first + BLOCK, end)):
            hash = hash_id(get_i64(ids, i), key)
            bucket = reduce_to(hash, rows) // BUCKET
            mine = bucket >= low and bucket < high
            put_i64(scratch, size, i)
            put_i64(hashes, size, hash)
            prefetch(tags + BUCKET * (bucket if mine else low))
            size += mine
        for k in range(size):
            hash = np.uint64(get_i64(hashes, k))
            home = reduce_to(hash, rows) // BUCKET * BUCKET
            same = equal_bytes(tags + home, _tag(hash))
            guess = np.int64(-1) if same == 0 else home + lowest_bit(same)
            put_i64(guesses, k, guess)
            prefetch(keys + 8 * guess)
            if step > 0:
                prefetch(last + 4 * guess)
                prefetch(heat + guess)
        for k in range(size):
            i, row = get_i64(scratch, k), get_i64(guesses, k)
            id = get_i64(ids, i)
            if row >= 0 and get_i64(keys, row) != id:
                row = _row(keys, tags, rows, id, np.uint64(get_i64(hashes, k)))
            if row < 0:
                row = rows + reduce_to(np.uint64(get_i64(hashes, k)), shared)
                put_i64(missed, count, i)
                count += 1
            elif step > 0:
                _count_lookup(last, heat, row, half_life, edge, step)
            put_i64(found, i, row)
    return count


@helper
def _coldest(last, tags, heat, first, end, half_life, lru, edge, barrier):
    """(the row of a bucket that an id takes, or -1, and its heat); the first free one, else the coldest. Without branches."""
    best = _NO_ROW
    for row in range(first, end):
        used, held = get_u32(last, row), get_u8(tags, row) != 0
        score = 0 if lru else _score(used, get_u8(heat, row), half_life, edge)
        key = (1 << 46) | (((score << 32) | used) << 6) if held else np.int64(0)
        key = _NO_ROW if held and used >= barrier else key  # or pinned
        best = min(best, key | (row - first))
    return np.int64(-1) if best >= _NO_ROW else first + (best & (BUCKET - 1)), (best >> 38) & MOST


@helper
def _prefetch_bucket(last, tags, heat, bucket):
    prefetch(tags + BUCKET * bucket)
    prefetch(heat + BUCKET * bucket)
    for line in range(4):
        prefetch(last + 4 * BUCKET * bucket + 64 * line)


@helper
def _take_row(keys, last, tags, heat, rows, open, half_life, lru, step, barrier, id, hash, lookups):
    """Give an id a row: (the row or -1, whether another id had it, that id)."""
    first = reduce_to(hash, rows) // BUCKET * BUCKET
    edge = step // half_life * half_life
    row, score = _coldest(last, tags, heat, first, min(first + open, rows), half_life, lru, edge, barrier)
    if row < 0 or score > lookups:
        return np.int64(-1), False, np.int64(0)
    left, before = get_u8(tags, row) != 0, get_i64(keys, row)
    put_i64(keys, row, id)
    put_u32(last, row, step)
    put_u8(tags, row, _tag(hash))
    put_u8(heat, row, lookups)
    return row, left, before


@kernel("void(" + ", ".join(["int64"] * 18) + ")")
def _place(
    keys, last, tags, heat, rows, open, half_life, lru, step, barrier, key, ids, lookups, order, found, before, left, size
):  # fmt: skip
    for i in range(size):
        at = get_i64(order, i)
        id = get_i64(ids, at)
        row, had, other = _take_row(
            keys, last, tags, heat, rows, open, half_life, lru, step, barrier, id, hash_id(id, key), get_i64(lookups, at)
        )  # fmt: skip
        put_i64(found, at, row)
        put_u8(left, at, had)
        put_i64(before, at, other if had else 0)


@helper
def _sort(keys, values, spare, size):
    """Sort a list by unsigned keys, equal ones in their order; `spare` has room for both arrays."""
    other_keys, other_values, width = spare, spare + 8 * size, 1
    while width < size:
        for begin in range(0, size, 2 * width):
            i, j = begin, min(begin + width, size)
            middle, end = j, min(begin + 2 * width, size)
            for k in range(begin, end):
                first = j >= end or (i < middle and np.uint64(get_i64(keys, i)) <= np.uint64(get_i64(keys, j)))
                at = i if first else j
                put_i64(other_keys, k, get_i64(keys, at))
                put_i64(other_values, k, get_i64(values, at))
                i, j = i + first, j + (not first)
        keys, values, other_keys, other_values = other_keys, other_values, keys, values
        width *= 2
    return keys, values


@helper
def _estimate(sketch, rows, hashes, starts, estimates, size):
    """Count the lookups of ids in the sketch: `starts` has their places in a list, by id."""
    for pass_ in range(2):  # every id reads before any writes
        for r in range(size):
            hash = np.uint64(get_i64(hashes, get_i64(starts, r)))
            lines = reduce_to(hash, rows) // BUCKET * DEPTH
            lowest = np.int64(MOST)
            for line in range(DEPTH):
                cell = (lines + line) * CELLS + reduce_to(mix(hash + np.uint64(line + 1) * _GOLDEN), CELLS)
                if pass_ == 0:
                    lowest = min(lowest, get_u8(sketch, cell))
                elif get_i64(estimates, r) > get_u8(sketch, cell):
                    put_u8(sketch, cell, get_i64(estimates, r))
            if pass_ == 0:
                put_i64(estimates, r, min(lowest + get_i64(starts, r + 1) - get_i64(starts, r), MOST))


@kernel("void(" + ", ".join(["int64"] * 22) + ")")
def _admit(
    keys, last, tags, heat, sketch, rows, open, half_life, lru, step, barrier, key, after, least, ids, found, missed, size,
    scratch, came, gone, numbers,
):  # fmt: skip
    """`reference.admit`. Ids come before their rows in lists; `numbers`: came, gone, distinct, ready, lookups that share."""
    room = 8 * (size + 1)
    hashes, lookups, spare = scratch, scratch + room, scratch + 2 * room
    starts, estimates, order, ranks = scratch + 4 * room, scratch + 5 * room, scratch + 6 * room, scratch + 7 * room
    for k in range(size):
        put_i64(lookups, k, get_i64(missed, k))
        put_i64(hashes, k, np.int64(hash_id(get_i64(ids, get_i64(missed, k)), key)))
    hashes, lookups = _sort(hashes, lookups, spare, size)
    distinct, ready, placed, left, shared = np.int64(0), np.int64(0), np.int64(0), np.int64(0), size
    for k in range(size):
        if k == 0 or get_i64(hashes, k) != get_i64(hashes, k - 1):
            put_i64(starts, distinct, k)
            distinct += 1
    put_i64(starts, distinct, size)
    _estimate(sketch, rows, hashes, starts, estimates, distinct)
    chance_key = step ^ CHANCE_KEY
    for r in range(distinct):
        begin, estimate = get_i64(starts, r), get_i64(estimates, r)
        hash, times = get_i64(hashes, begin), min(get_i64(starts, r + 1) - begin, MOST)
        put_i64(order, ready, r)
        put_i64(ranks, ready, reduce_to(np.uint64(hash), rows) // BUCKET * 256 + MOST - estimate)
        ready += estimate >= after and np.int64(hash_id(hash, chance_key) >> _32) >= get_i64(least, times)
    ranks, order = _sort(ranks, order, spare if hashes == scratch else scratch, ready)
    for n in range(ready):
        if n + 4 < ready:
            _prefetch_bucket(last, tags, heat, get_i64(ranks, n + 4) // 256)
        r = get_i64(order, n)
        begin, end = get_i64(starts, r), get_i64(starts, r + 1)
        id, hash = get_i64(ids, get_i64(lookups, begin)), np.uint64(get_i64(hashes, begin))
        row, had, other = _take_row(
            keys, last, tags, heat, rows, open, half_life, lru, step, barrier, id, hash, get_i64(estimates, r)
        )  # fmt: skip
        if row < 0:
            continue
        put_i64(came, placed, id)
        put_i64(came, size + placed, row)
        placed += 1
        if had:
            put_i64(gone, left, other)
            put_i64(gone, size + left, row)
            left += 1
        for k in range(begin, end):
            put_i64(found, get_i64(lookups, k), row)
        shared -= end - begin
    for n, number in enumerate((placed, left, distinct, ready, shared)):
        put_i64(numbers, n, number)


def _bases(arrays: KeyArrays, rules: KeyRules) -> list[int]:
    """Addresses of keys, last steps, tags, heat and sketch, as those of a table whose row 0 is there too."""
    bytes_per_row = (8, 4, 1, 1, DEPTH * CELLS // BUCKET)
    return [at - rules.first * each for at, each in zip(addresses("qiiii", *arrays), bytes_per_row, strict=True)]


def find(arrays: KeyArrays, rules: KeyRules, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    count, every = ids_N.numel(), (0, -(-rules.rows // BUCKET))
    size = max(CHUNK, -(-count // (4 * torch.get_num_threads())))
    return _look_up_parts(arrays, rules, ids_N, 0, [((at, min(at + size, count)), every) for at in range(0, count, size)])


def look_up(arrays: KeyArrays, rules: KeyRules, ids_N: Tensor, step: int) -> tuple[Tensor, Tensor]:
    first = rules.first // BUCKET
    here, count = len(arrays.tags) * 4 // BUCKET, ids_N.numel()
    size = max(1, here if count < CHUNK else -(-here // torch.get_num_threads()))
    ranges = [(first + at, first + min(at + size, here)) for at in range(0, here, size)]
    return _look_up_parts(arrays, rules, ids_N, step, [((0, count), buckets) for buckets in ranges])


def _look_up_parts(
    arrays: KeyArrays, rules: KeyRules, ids_N: Tensor, step: int, parts: list[tuple[tuple[int, int], tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    """Look up parts of a batch in threads: ranges of ids, of which those with a bucket in a range."""
    rows_N, state = torch.empty_like(ids_N), _bases(arrays, rules)[:4]
    what = (*state, rules.rows, rules.shared, rules.key, rules.half_life, step, *addresses("qq", ids_N, rows_N))
    found: dict[int, Tensor] = {}

    def task(first: int, last: int) -> None:
        for n in range(first, last):
            (begin, end), buckets = parts[n]
            missed_N, scratch = torch.empty(end - begin, dtype=torch.int64), torch.empty(3 * BLOCK, dtype=torch.int64)
            count = _look_up(*what, *addresses("qq", missed_N, scratch), begin, end, *buckets)
            found[n] = missed_N[:count]

    threads.run_chunks(task, len(parts), 1)
    missed_M = found[0] if len(parts) == 1 else torch.cat([ids_N[:0], *(found[n] for n in range(len(parts)))])
    return rows_N, missed_M if step == 0 or len(parts) == 1 else missed_M.sort().values


def admit(
    arrays: KeyArrays, rules: KeyRules, ids_N: Tensor, rows_N: Tensor, missed_M: Tensor, after: int, chance: float, step: int,
    barrier: int,
) -> Admitted:  # fmt: skip
    size = missed_M.numel()
    scratch, lists = torch.empty(8 * (size + 1), dtype=torch.int64), torch.empty(5 + 4 * size, dtype=torch.int64)
    numbers, came, gone = lists.split([5, 2 * size, 2 * size])
    rule = (rules.rows, rules.open, rules.half_life, int(rules.lru), step, barrier, rules.key, after)
    _admit(
        *_bases(arrays, rules), *rule, *addresses("qqqq", K.chances(chance), ids_N, rows_N, missed_M), size,
        *addresses("qqqq", scratch, came, gone, numbers),
    )  # fmt: skip
    placed, left, *rest = numbers.tolist()
    return Admitted(came[:placed], came[size : size + placed], gone[:left], gone[size : size + left], *rest)


def place(
    arrays: KeyArrays, rules: KeyRules, ids_C: Tensor, heat_C: Tensor, step: int, barrier: int
) -> tuple[Tensor, Tensor, Tensor]:
    order_C = placing_order(hash_ids(ids_C, rules.key), heat_C, rules.rows)
    rows_C, before_C, left_C = torch.empty_like(ids_C), torch.empty_like(ids_C), torch.empty(ids_C.numel(), dtype=torch.uint8)
    *state, _ = _bases(arrays, rules)
    rule = (rules.rows, rules.open, rules.half_life, int(rules.lru), step, barrier, rules.key)
    lists = addresses("qqqqqB", ids_C, heat_C, order_C, rows_C, before_C, left_C)
    _place(*state, *rule, *lists, ids_C.numel())
    return rows_C, before_C, left_C.bool()


@helper
def _first_row(id, key, dim, bound, values):
    """First values of the row of an id."""
    hash = hash_id(id, key)
    for column in range(dim):
        bits = mix(hash + np.uint64(column + 1) * _GOLDEN) >> _40
        put_f32(values, column, (np.float32(np.int64(bits)) * _SCALE - _ONE) * bound)


@kernel("int64(" + ", ".join(["int64"] * 19) + ")")
def _begin_rows(
    ids, rows, key, bound, codes, meta, format, dim, owners, scores, fp32, int8, state0, size0, state1, size1, scratch,
    first, last,
):  # fmt: skip
    """Begin rows `first` to `last` - 1 of a list; returns how many were cached."""
    width, words = row_bytes(format, dim), meta_bytes(format)
    released = np.int64(0)
    for i in range(first, last):
        later = get_i64(rows, min(i + AHEAD, last - 1))
        for line in range(0, width, 64):
            prefetch(codes + later * width + line)
        prefetch(meta + later * words)
        prefetch(state0 + 4 * later * size0)
        prefetch(state1 + 4 * later * size1)
        row = get_i64(rows, i)
        word = get_u32(meta + row * words, 0) if owners != 0 else 0
        if word >= CACHED:
            slot = (word & F.SLOT_BITS) + (int8 if word >= CACHED_INT8 else fp32)
            put_i64(owners, slot, F.EMPTY)
            put_u32(scores, slot, 0)
            released += 1
        _first_row(get_i64(ids, i), key, dim, get_f32(bound, 0), scratch)
        low, high, top = measure_row(scratch, dim)
        write_row(format, scratch, dim, low, high, top, codes + row * width, meta + row * words, 0, 0)
        for column in range(size0):
            put_f32(state0, row * size0 + column, np.float32(0))
        for column in range(size1):
            put_f32(state1, row * size1 + column, np.float32(0))
    return released


def begin_rows(table: TableRows, ids_K: Tensor, rows_K: Tensor, key: int, bound: float) -> None:
    codes_RB, meta_RW, format, dim, _, cache, pool, states = table
    lists = (*addresses("qq", ids_K, rows_K), key, *addresses("f", bound_1 := torch.tensor([bound], dtype=torch.float32)))
    slots: tuple[int, ...] = (0, 0, 0, 0)
    if cache is not None and pool is not None:
        slots = (*addresses("qi", cache.rows, cache.scores), *slot_shifts(pool[1]))
    sizes = [each.numel() // each.shape[0] for each in states]
    state = [n for each, size in zip(addresses("f" * len(states), *states), sizes, strict=True) for n in (each, size)]
    where = (*addresses("Bi", codes_RB, meta_RW), format, dim, *slots, *(*state, 0, 0, 0, 0)[:4])
    released = []

    def task(first: int, last: int) -> None:
        scratch = np.empty(F.MAX_DIM + PAD, dtype=np.float32)
        released.append(_begin_rows(*lists, *where, *addresses("f", scratch), first, last))

    threads.run_chunks(task, ids_K.numel(), BEGIN_CHUNK)
    del bound_1
    if cache is not None and pool is not None and (count := sum(released)):
        cache.ledger[pool[0], F.EVICTIONS] += count
