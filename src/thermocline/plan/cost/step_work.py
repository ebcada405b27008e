"""The work of one step on all tables, as arrays for the solver: steps of the heat curves, padded to one width.

T tables, K steps of the longest curve, three tiers. Steps beyond the end of a shorter curve hold no rows and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.heat.curve import Curve
from thermocline.plan.model import Exchange

from .memory import RowPrecision, row_bytes, slot_bytes
from .step_cost import (
    INDEPENDENT,
    BagLengths,
    Cluster,
    EffectiveShare,
    Floats,
    RequestProbability,
    request_probability,
    wire_bytes,
)

STEPS = 256  # least steps of a curve with few tables: fine enough to fill memory to 1%
FINE_TABLES = 64

Seconds = TypeVar("Seconds", float, Floats)  # of one solution, or of several


@dataclass(frozen=True)
class TableWork:
    """One table, and the work of one rank on it in one step."""

    name: str
    dim: int
    pooled: bool  # sums may travel in place of rows
    lookups: float  # per rank and step
    bags: float
    curve: Curve  # of all rows; rows never seen are a step without lookups
    precision: RowPrecision
    state: int  # bytes of optimizer state per row
    effective: EffectiveShare = INDEPENDENT
    host: bool = False  # codes in host memory, row-wise
    id_map_bytes: float = 0.0  # on every rank
    lengths: BagLengths = ()  # of bags, in any unit; empty: all bags are equal

    @property
    def codes(self) -> int:
        """Bytes of the codes of a row, which may lie in host memory."""
        return F.row_bytes(F.NAMES.index(self.precision.base), self.dim)

    @property
    def rows(self) -> int:
        return round(self.curve.rows)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.dim, self.precision.base)


@dataclass(frozen=True)
class Workload:
    """All tables, the cluster, and the limits of a plan. `gradient` is the wire precision, None for serving.

    `dense` is the compute between lookup and gradient, `below` the rest of the dense part.
    """

    cluster: Cluster
    tables: tuple[TableWork, ...]
    budget: int
    dense: float
    gradient: str | None
    below: float = 0.0
    sums: str = "fp32"  # precision of pooled sums on the wire
    spare_R: Floats = field(default_factory=lambda: np.zeros(1))  # room of each rank beyond `budget`, that of the smallest

    def step(self, exposed: Seconds, hidden: Seconds, prefetch_wait: Seconds) -> Seconds:
        """Seconds of a step or request: the shorter of a step with prefetch and a step without.

        `prefetch_wait` are the seconds that only a step with prefetch waits (`phases.py`); a short dense part cannot hide them.
        """
        alone = exposed + hidden - prefetch_wait + self.dense + self.below
        found: Seconds = np.minimum(alone, self.overlapped(exposed, hidden)) if self.overlaps else alone
        return found

    @property
    def overlaps(self) -> bool:
        """Whether exchanges run behind the dense part: in training, under a backend that can."""
        return self.gradient is not None and self.cluster.overlaps

    def overlapped(self, exposed: Seconds, hidden: Seconds) -> Seconds:
        """Seconds of a step that prefetches the next batch."""
        found: Seconds = np.maximum(exposed, self.below) + np.maximum(hidden, self.dense)
        return found


@dataclass(frozen=True)
class Grid:
    """All curve steps of all tables, [T, K], and the numbers of each table, [T]."""

    rows: Floats
    share: Floats  # of the lookups, for one row of the step
    wire: Floats  # bytes of a row on the wire
    fp32: Floats  # share of the step's rows with an fp32 slot
    int8: Floats  # share of the step's rows with an int8 slot
    requested: RequestProbability
    steps: NDArray[np.int64]
    dim: Floats
    row: Floats  # bytes of a stored row
    fp32_slot: Floats  # bytes
    int8_slot: Floats  # bytes
    state: Floats
    gradient: Floats  # bytes of a gradient on the wire
    sum: Floats  # bytes of a pooled sum on the wire
    lookups: Floats
    bags: Floats
    host: Floats  # bytes of a row in host memory, 0 where it is on the GPUs
    maps: Floats  # [T, K + 1] bytes of the map that separates the rows before a step from those after it
    id_maps: Floats  # bytes of the id maps, on every rank

    @cached_property
    def read(self) -> Floats:
        """Bytes [T, K] that the lookups of a rank read in a step, local or received."""
        return np.asarray(self.lookups[:, None] * self.share * self.rows * self.wire, np.float64)

    @cached_property
    def slots(self) -> Floats:
        """Bytes of slots [T, K] per row of a step."""
        return self.fp32 * self.fp32_slot[:, None] + self.int8 * self.int8_slot[:, None]

    def over_host(self, cluster: Cluster, exchange: Exchange) -> tuple[Floats, Floats]:
        """Bytes [T, K] per rank and row over the host link: read for each rank or node that requests a row, and updated."""
        uncached = (1 - self.fp32 - self.int8) * self.host[:, None]
        asked = self.requested.node / cluster.gpus_per_node if exchange == "node" else self.requested.rank
        return asked * uncached, 2 * self.requested.any / cluster.world_size * uncached

    @classmethod
    def of(cls, workload: Workload) -> Grid:
        works = workload.tables
        curves = [subdivide(work.curve, STEPS) if len(works) <= FINE_TABLES else work.curve for work in works]
        tables, width = len(curves), max(len(curve.rows_K) for curve in curves)
        rows, share, wire, fp32, int8 = (np.zeros((tables, width)) for _ in range(5))
        for t, (work, curve) in enumerate(zip(works, curves, strict=True)):
            k = len(curve.rows_K)
            first_K = np.cumsum(curve.rows_K) - curve.rows_K
            rows[t, :k], share[t, :k] = curve.rows_K, curve.share_K
            wire[t, :k], fp32[t, :k], int8[t, :k] = wire_bytes(work.dim, work.precision, first_K, curve.rows_K)

        def column(value: Callable[[TableWork], float]) -> Floats:
            return np.array([float(value(work)) for work in works])

        lookups = column(lambda work: work.lookups)
        effective = EffectiveShare(*(np.array([[work.effective[n]] for work in works]) for n in range(3)))
        return cls(
            rows, share, wire, fp32, int8, request_probability(share, lookups[:, None], workload.cluster, effective),
            steps=np.array([len(curve.rows_K) for curve in curves]),
            dim=column(lambda work: work.dim),
            row=column(lambda work: work.row_bytes),
            fp32_slot=column(lambda work: slot_bytes(work.dim)),
            int8_slot=column(lambda work: slot_bytes(work.dim, near=True)),
            state=column(lambda work: work.state),
            gradient=column(lambda work: row_bytes(work.dim, workload.gradient) if workload.gradient else 0),
            sum=column(lambda work: row_bytes(work.dim, workload.sums)),
            lookups=lookups,
            bags=column(lambda work: work.bags),
            host=column(lambda work: work.codes if work.host else 0),
            maps=map_bytes(column(lambda work: work.rows)[:, None], np.cumsum(np.pad(rows, ((0, 0), (1, 0))), axis=1)),
            id_maps=column(lambda work: work.id_map_bytes),
        )  # fmt: skip


def rotation_bytes(ranks: int) -> int:
    """Bytes per row of the block rotations (`balance.py`): one or two for each row that a rank owns."""
    return (1 if ranks <= 256 else 2) if ranks > 1 else 0


def map_bytes(rows: Floats, hot: Floats) -> Floats:
    """Bytes of the bitmap of the `hot` rows of a table: one bit per row, four bytes per 512 rows
    (`distributed/placement/bitmap.py`); nothing where no row is hot."""
    return np.where(hot > 0, rows / 8 + rows / 128, 0.0)


def subdivide(curve: Curve, steps: int) -> Curve:
    """The same curve with its widest steps cut into equal parts, to about `steps` steps."""
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
