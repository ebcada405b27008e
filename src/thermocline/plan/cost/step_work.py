"""The work of one step on every table, as arrays that the solver can price: steps of the heat curves, padded to one width.

T tables, K steps of the longest curve, three tiers. A step that a shorter curve does not have holds no rows and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.heat.curve import Curve

from .memory import Store, row_bytes, slot_bytes
from .step_cost import INDEPENDENT, Askers, Floats, Fresh, Machine, askers, wire_bytes

STEPS = 256  # a curve gets about so many steps at least, where there are few tables: fine enough to fill memory to a per cent
FINE_TABLES = 64

Seconds = TypeVar("Seconds", float, Floats)  # of one set of choices, or of several


@dataclass(frozen=True)
class Work:
    """One table and what a card asks of it in a step."""

    name: str
    dim: int
    pooled: bool  # sums may travel instead of rows
    lookups: float  # of a card and step
    bags: float
    curve: Curve  # of all rows; those never seen in a step without lookups
    store: Store
    state: int  # bytes of optimizer state a row
    fresh: Fresh = INDEPENDENT
    host: bool = False  # codes in host memory, row-wise
    ids: float = 0.0  # bytes of its id maps, which are on every card

    @property
    def codes(self) -> int:
        """Bytes of codes of a row, which may lie in host memory."""
        return F.row_bytes(F.NAMES.index(self.store.base), self.dim)

    @property
    def rows(self) -> int:
        return round(self.curve.rows)

    @property
    def row(self) -> int:
        return row_bytes(self.dim, self.store.base)


@dataclass(frozen=True)
class Job:
    """All tables, the cluster, and what bounds the plan. `gradient`: precision on the wire, None where nothing trains.

    `dense` is what is computed between the lookup and its gradient, `below` the rest of the dense part.
    """

    machine: Machine
    works: tuple[Work, ...]
    budget: int
    dense: float
    gradient: str | None
    below: float = 0.0

    def step(self, exposed: Seconds, hidden: Seconds, more: Seconds) -> Seconds:
        """Seconds of a step, or of a request. Where the next batch comes ahead, `more` of these seconds are waits that a step
        without it has not (`phases.py`): a dense part too short to hide them is better off without."""
        apart = exposed + hidden - more + self.dense + self.below
        found: Seconds = np.minimum(apart, self.overlapped(exposed, hidden)) if self.gradient else apart
        return found

    def overlapped(self, exposed: Seconds, hidden: Seconds) -> Seconds:
        """Seconds of a step while which the next batch comes."""
        found: Seconds = np.maximum(exposed, self.below) + np.maximum(hidden, self.dense)
        return found


@dataclass(frozen=True)
class Grid:
    """The steps of all tables: [T, K], and [T] what holds for a whole table."""

    rows: Floats
    share: Floats  # of one row of the step
    wire: Floats  # bytes of a row on the wire
    full: Floats  # share of the step's rows that have an fp32 slot, an int8 slot
    near: Floats
    asked: Askers
    steps: NDArray[np.int64]
    dim: Floats
    row: Floats  # bytes of a row as stored
    slot: Floats  # bytes of an fp32 slot, of an int8 slot
    near_slot: Floats
    state: Floats
    gradient: Floats  # bytes of a gradient on the wire
    lookups: Floats
    bags: Floats
    host: Floats  # bytes of a row in host memory, 0 where it is on the cards
    maps: Floats  # [T, K + 1] bytes of the map that tells the rows before a step from those after it
    ids: Floats  # bytes of its id maps, on every card wherever its rows are

    @cached_property
    def read(self) -> Floats:
        """Bytes [T, K] that the lookups of a card read in a step, wherever the rows came from."""
        return np.asarray(self.lookups[:, None] * self.share * self.rows * self.wire, np.float64)

    def over_host(self, machine: Machine) -> tuple[Floats, Floats]:
        """Bytes [T, K] a card and row over the link to host memory: in the lookup, and in the update."""
        bare = (1 - self.full - self.near) * self.host[:, None]
        return self.asked.card * bare, 2 * self.asked.any / machine.all * bare

    @classmethod
    def of(cls, job: Job) -> Grid:
        curves = [finer(work.curve, STEPS) if len(job.works) <= FINE_TABLES else work.curve for work in job.works]
        tables, width = len(curves), max(len(curve.rows_K) for curve in curves)
        rows, share, wire, full, near = (np.zeros((tables, width)) for _ in range(5))
        for t, (work, curve) in enumerate(zip(job.works, curves, strict=True)):
            k = len(curve.rows_K)
            first_K = np.cumsum(curve.rows_K) - curve.rows_K
            rows[t, :k], share[t, :k] = curve.rows_K, curve.share_K
            wire[t, :k], full[t, :k], near[t, :k] = wire_bytes(work.dim, work.store, first_K, curve.rows_K)

        def column(value: Callable[[Work], float]) -> Floats:
            return np.array([float(value(work)) for work in job.works])

        lookups = column(lambda work: work.lookups)
        fresh = Fresh(*(np.array([[work.fresh[n]] for work in job.works]) for n in range(3)))
        return cls(
            rows, share, wire, full, near, askers(share, lookups[:, None], job.machine, fresh),
            steps=np.array([len(curve.rows_K) for curve in curves]),
            dim=column(lambda work: work.dim),
            row=column(lambda work: work.row),
            slot=column(lambda work: slot_bytes(work.dim)),
            near_slot=column(lambda work: slot_bytes(work.dim, near=True)),
            state=column(lambda work: work.state),
            gradient=column(lambda work: row_bytes(work.dim, job.gradient) if job.gradient else 0),
            lookups=lookups,
            bags=column(lambda work: work.bags),
            host=column(lambda work: work.codes if work.host else 0),
            maps=map_bytes(column(lambda work: work.rows)[:, None], np.cumsum(np.pad(rows, ((0, 0), (1, 0))), axis=1)),
            ids=column(lambda work: work.ids),
        )  # fmt: skip


def turn_bytes(cards: int) -> int:
    """Bytes of the turn of a block of rows, one on each card (`balance.py`): a byte a row of those that a card owns, or two."""
    return (1 if cards <= 256 else 2) if cards > 1 else 0


def map_bytes(rows: Floats, hot: Floats) -> Floats:
    """What it takes to know the `hot` rows of a table and their ranks: one bit for every row and four bytes for every 512 of
    them (`distributed/placement/bitmap.py`); nothing where no row is hot."""
    return np.where(hot > 0, rows / 8 + rows / 128, 0.0)


def finer(curve: Curve, steps: int) -> Curve:
    """The same curve with its widest steps cut into equal parts, until it has about so many."""
    if len(curve.rows_K) >= steps:
        return curve
    parts_K = np.minimum(np.ceil(curve.rows_K), np.ceil(steps / len(curve.rows_K))).astype(np.int64)
    rows, lookups = [], []
    for count, taken, parts in zip(curve.rows_K, curve.lookups_K, parts_K, strict=True):
        edges = np.round(np.linspace(0, count, parts + 1))
        pieces = np.diff(edges)
        pieces = pieces[pieces > 0] if float(count).is_integer() else np.full(parts, count / parts)
        rows.append(pieces)
        lookups.append(taken * pieces / pieces.sum())
    return Curve(np.concatenate(rows), np.concatenate(lookups))
