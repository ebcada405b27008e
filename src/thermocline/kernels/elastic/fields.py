"""The arrays of a key table, and the rules by which ids come and go.

Row r of a table belongs to the id `keys[r]`: a key lies at the place of its row, so that no row numbers are stored. The rows
are divided into buckets of 64. An id may only have a row of its own bucket, which its hash chooses:

    home = (hash * rows) >> 64,  bucket = home >> 6,  tag = max(1, hash & 255)

so a lookup reads one line of 64 tags and, with 1.3 keys on average, the key. The bound holds at every load and for ids that
were chosen to collide: those compete for 64 rows and slow nothing down. Everything about an id, the counters of the sketch
included, lies with its bucket, so that ranks can share the buckets of a table: arrays may hold a range of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thermocline.kernels.layout import Cache, Pool

BUCKET = 64  # rows of a bucket: their tags are one cache line
DEPTH = 4  # counters of an id in the sketch
CELLS = 32  # counters of a bucket in each of DEPTH lines: its part of the sketch is two cache lines
MOST = 255  # counts are bytes that stop here
PINNED = -1  # in place of the last step
CHANCE_KEY = 0x5EED_C4A9CE  # with the number of a step, of its draws
BYTES_PER_ROW = 16  # keys 8, last 4, tags 1, heat 1, sketch 2
MOST_LOAD = 3, 4  # share of the open rows that ids may have before a table grows
# Counts of a key table. BARRIER is the step since which rows are in use, WINDOW counts towards the next halving of the sketch.
(
    ADMITTED, EVICTED, EXPIRED, REFUSED, DROPPED, LOOKUPS, SHARED, EVAL_LOOKUPS, EVAL_SHARED, WAITING, STEPS,
    BARRIER, WINDOW,
) = range(13)  # fmt: skip


class KeyArrays(NamedTuple):
    """The state of a key table. The last three are bytes in int32 tensors, which checkpoints compare word by word."""

    keys: Tensor  # int64 a row: the id
    last: Tensor  # int32 a row: the last training step that looked it up, or PINNED
    tags: Tensor  # uint8 a row, in whole buckets: 0 if no id has the row
    heat: Tensor  # uint8 a row: lookups, halved every `half_life` steps
    sketch: Tensor  # uint8, DEPTH * CELLS a bucket: counters of ids without a row


class KeyRules(NamedTuple):
    """What decides about rows; `key` is that of the hash, as int64."""

    rows: int  # that ids may have to themselves
    shared: int  # rows after them, for all other ids
    key: int
    half_life: int
    lru: bool  # else LFU with decay
    first: int = 0  # row at which the arrays begin, that of a bucket; row numbers count from the first row of all
    open: int = BUCKET  # rows of each bucket that ids may have now

    @property
    def width(self) -> int:
        """Counted lookups of ids without a row, after which the counters of the sketch halve."""
        return CELLS * -(-self.rows // BUCKET)


FIND, READ, READ_TO_TRAIN, STEP, PROTECTED_STEP = range(5)  # kinds of lookups on a GPU


class Admitted(NamedTuple):
    """What became of the ids without a row in a step."""

    came_K: Tensor  # ids that got rows, in any order
    rows_K: Tensor
    went_E: Tensor  # ids that had some of these rows
    left_E: Tensor  # the rows that these had
    distinct: int
    ready: int  # looked up often enough, and drawn
    shared: int  # lookups of ids that got no row


class StepRule(NamedTuple):
    """What decides about a training step on a GPU, beside `KeyRules`."""

    admit_after: int = 1
    admit_chance: float = 1.0
    ttl: int | None = None
    sweep: int = 1  # steps after which expired rows are freed
    grows: bool = False


@cache
def chances(admit_chance: float) -> NDArray[np.int64]:
    """The least draw, of 2^32, that admits an id with so many lookups in a step: each has a chance of its own."""
    return np.array([int((1.0 - admit_chance) ** lookups * (1 << 32)) for lookups in range(MOST + 1)], dtype=np.int64)


class GpuBatch(NamedTuple):
    """Ids of all features, feature-major, of which those of some features belong to a key table."""

    ids_N: Tensor
    offsets: Tensor
    users_F: Tensor  # int32: whether the ids of a feature belong; one feature always does
    rows_N: Tensor  # their rows are written here
    first: int = 0  # added to them


class GpuMoves(NamedTuple):
    """The ids that got rows in a step on a GPU: the first `numbers[0]` entries, in any order."""

    ids_C: Tensor
    rows_C: Tensor
    before_C: Tensor  # the ids that had the rows
    left_C: Tensor  # int32: whether there was one
    numbers: Tensor
    key: Tensor  # of the hash


class TableRows(NamedTuple):
    """The rows of one table, as far as a new id changes them."""

    codes_RB: Tensor
    meta_RW: Tensor
    format: int
    dim: int
    row: int  # arena row of the first
    cache: Cache | None
    pool: tuple[int, Pool] | None  # that caches rows of the table, with its number
    states: Sequence[Tensor]  # of the optimizer: a line of numbers for each row


def slot_shifts(pool: Pool) -> tuple[int, int]:
    """What is added to the numbers in pointers to fp32 slots and to int8 slots, for the places of these slots in the cache."""
    return pool.slot - pool.base, pool.slot + pool.fp32_slots - pool.int8_base
