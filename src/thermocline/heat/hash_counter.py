"""Counting of ids in one pass: an open-addressing hash table in an array, compiled by Numba.

A cell is three adjacent int64, so that a lookup touches one cache line:

    ID      the id, any 64 bits
    COUNT   lookups so far; 0 marks an empty cell
    MARK    batch of the last lookup (32 bits), hot in the last slice (3 bits), lookups in this slice (29 bits)

One visit counts the id, and finds whether its batch (and the batch of its node) had it before and whether it was hot in the
slice before. Three passes would cost three times as much; value counters of libraries (pyarrow's `value_counts`) ignore the
order.

The first bits of a mixed id choose a cell, followed by linear probing. `count` stops at an id without room; its caller grows
the table, or makes it a sketch and purges it, and continues.

**A purged table is a sketch of heavy hitters.** `drop` removes the colder half, and its highest dropped count becomes `SLACK`:
an id outside the table had at most that many lookups. An id that comes (again) may have lost that many, stored in `late`. Its
true count lies between COUNT and COUNT + late, and COUNT + late decides which ids are dropped next. Each lookup raises the sum
of (COUNT + late - SLACK) by one, and a purge that raises SLACK by d lowers it by d for at least half the cells: SLACK stays
below twice the lookups divided by the capacity. This is SpaceSaving with bulk evictions, which suit arrays.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from .cardinality import REST

ID, COUNT, MARK = 0, 1, 2
# What `tally` holds: cells in use, how many may be, SLACK, repeats in batches and in node-sized batches, and from SEEN on the
# lookups of this slice by how hot their id was in the slice before.
USED, MOST, SLACK, REPEATS, NODE_REPEATS, SEEN = range(6)
TALLY = SEEN + 8
# How hot: in none of the hot sets, tied for the larger, in it, in it and tied for the smaller, in both, tied for both.
COLD, TIED_5, IN_5, TIED_1, IN_1, TIED_BOTH = range(6)

_RECENT = (1 << 29) - 1
_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "boundscheck": False, "error_model": "numpy"}


@numba.njit(inline="always", **_OPTIONS)
def _mix(id):
    """64 well-mixed bits of an id: the finalizer of splitmix64."""
    x = np.uint64(id) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(**_OPTIONS)
def _shift(cells):
    """The shift of mixed bits that gives a cell; the number of cells is a power of two."""
    bits = 0
    while (1 << bits) < cells.shape[0]:
        bits += 1
    return np.uint64(64 - bits)


@numba.njit(**_OPTIONS)
def _note(registers, x):
    """Adds one id to the cardinality sketch."""
    rest = x & np.uint64((1 << REST) - 1)
    rank = REST + 1
    while rest != 0:
        rest >>= np.uint64(1)
        rank -= 1
    at = np.int64(x >> np.uint64(REST))
    if registers[at] < rank:
        registers[at] = rank


@numba.njit(**_OPTIONS)
def count(ids_N, start, ends_K, batch, per_node, cells, late, registers, tally):
    """Counts ids from position `start` on; `ends_K` are the ends of batches, the first of which has the number `batch`.

    Returns the position of an id without room, or the number of ids. A table without `late` is exact.
    """
    mask, shift, sketched = cells.shape[0] - 1, _shift(cells), late.shape[0] > 0
    used, most, repeats, node_repeats = tally[USED], tally[MOST], 0, 0
    stopped = ids_N.shape[0]
    at = start
    for k in range(ends_K.shape[0]):
        stamp = np.int64(batch + k) << 32
        node_stamp = np.int64(batch + k - (batch + k) % per_node) << 32
        while at < ends_K[k]:
            id = ids_N[at]
            x = _mix(id)
            cell = np.int64(x >> shift)
            while cells[cell, COUNT] != 0 and cells[cell, ID] != id:
                cell = (cell + 1) & mask
            if cells[cell, COUNT] != 0:
                mark = cells[cell, MARK]
                if mark >= node_stamp:
                    node_repeats += 1
                    if mark >= stamp:
                        repeats += 1
                low = mark & 0xFFFFFFFF
                tally[SEEN + (low >> 29)] += 1
                if low & _RECENT != _RECENT:
                    low += 1
                cells[cell, MARK] = stamp | low
                cells[cell, COUNT] += 1
            else:
                if used == most:
                    stopped = at
                    break
                used += 1
                tally[SEEN] += 1
                cells[cell, ID] = id
                cells[cell, COUNT] = 1
                cells[cell, MARK] = stamp | 1
                if sketched:
                    late[cell] = tally[SLACK]
                    _note(registers, x)
            at += 1
        if stopped < ids_N.shape[0]:
            break
    tally[USED] = used
    tally[REPEATS] += repeats
    tally[NODE_REPEATS] += node_repeats
    return stopped


@numba.njit(**_OPTIONS)
def move(old, old_late, cells, late):
    """Moves all cells of one table into another, empty one. Both are exact (without `late`), or both are sketches."""
    mask, shift = cells.shape[0] - 1, _shift(cells)
    for i in range(old.shape[0]):
        if old[i, COUNT] != 0:
            cell = np.int64(_mix(old[i, ID]) >> shift)
            while cells[cell, COUNT] != 0:
                cell = (cell + 1) & mask
            cells[cell] = old[i]
            if late.shape[0] > 0:
                late[cell] = old_late[i]


@numba.njit(**_OPTIONS)
def totals(cells, late, out):
    """COUNT + late of all ids."""
    found = 0
    for i in range(cells.shape[0]):
        if cells[i, COUNT] != 0:
            out[found] = cells[i, COUNT] + late[i]
            found += 1


@numba.njit(**_OPTIONS)
def drop(cells, late, threshold):
    """Drops ids with COUNT + late up to a threshold, in place; returns the number of ids left.

    Ids that stay may have to move back into freed cells. Starting after a cell that was empty, all ids are taken out in turn
    and put back at the first free cell of their probe sequence, so that no later id can displace one already in place.
    """
    mask, shift, left = cells.shape[0] - 1, _shift(cells), 0
    begin = 0
    while cells[begin, COUNT] != 0:
        begin += 1
    for step in range(cells.shape[0]):
        i = (begin + step) & mask
        if cells[i, COUNT] == 0:
            continue
        id, count, mark, before = cells[i, ID], cells[i, COUNT], cells[i, MARK], late[i]
        cells[i, ID] = cells[i, COUNT] = cells[i, MARK] = late[i] = 0
        if count + before <= threshold:
            continue
        cell = np.int64(_mix(id) >> shift)
        while cells[cell, COUNT] != 0:
            cell = (cell + 1) & mask
        cells[cell, ID], cells[cell, COUNT], cells[cell, MARK], late[cell] = id, count, mark, before
        left += 1
    return left


@numba.njit(**_OPTIONS)
def gather(cells, late, slack):
    """Moves ids with more lookups than `slack` to the first cells; returns their number, and the most lookups of any other
    id."""
    found, most = 0, slack
    for i in range(cells.shape[0]):
        if cells[i, COUNT] > slack:
            cells[found] = cells[i]
            if late.shape[0] > 0:
                late[found] = late[i]
            found += 1
        elif cells[i, COUNT] != 0:
            most = max(most, cells[i, COUNT] + late[i])
    return found, most


@numba.njit(**_OPTIONS)
def note_all(ids_N, counts_N, registers):
    """Adds all ids that were counted to the cardinality sketch."""
    for i in range(ids_N.shape[0]):
        if counts_N[i] != 0:
            _note(registers, _mix(ids_N[i]))


@numba.njit(**_OPTIONS)
def recent(cells, out):
    """Lookups in this slice of the ids that had any; returns their number."""
    found = 0
    for i in range(cells.shape[0]):
        lookups = cells[i, MARK] & _RECENT
        if lookups > 0:
            out[found] = lookups
            found += 1
    return found


@numba.njit(**_OPTIONS)
def turn(cells, least_1, least_5):
    """Begins a new slice. Its hot sets are the ids with more lookups than the limits in the old one; ids at a limit tie."""
    for i in range(cells.shape[0]):
        mark = cells[i, MARK]
        lookups = mark & _RECENT
        hot = COLD
        if lookups > least_1:
            hot = IN_1
        elif lookups == least_1:
            hot = TIED_BOTH if least_1 == least_5 else TIED_1
        elif lookups > least_5:
            hot = IN_5
        elif lookups == least_5:
            hot = TIED_5
        cells[i, MARK] = (mark >> 32 << 32) | (hot << 29)
