"""The predicted time of a simulated step, from counted bytes (see `simulator.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thermocline.distributed.exchange.routes import COUNT_BYTES, Kind, Phase, Routes, direction_of
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.placement.table_map import Counts
from thermocline.plan.cost.memory import state_bytes
from thermocline.plan.cost.phases import CommScope, exchange_latency, exchange_phases, phase_latency
from thermocline.plan.cost.step_cost import CLUSTER, NODE, TOUCHES, Cluster, Floats
from thermocline.plan.model import LINK_CLASSES, STEP_PARTS, Direction, Plan

_NODE, _CLUSTER = (LINK_CLASSES.index(link) for link in ("node", "cluster"))


class RowRequests(NamedTuple):
    """Distinct (rank, row) pairs, ordered by rank and row, with locations and lookup counts."""

    rank_N: Counts
    row_N: Counts
    part_N: Counts
    home_N: Counts
    lookups_N: Counts


class StepTimer:
    """Sums the work of every rank in a step, and takes the busiest rank."""

    def __init__(self, plan: Plan, row_index: RowIndex, routes: Routes) -> None:
        self.machine, self.plan, self.routes = Cluster.of(plan.topology), plan, routes
        parts, state = row_index.parts, [state_bytes(part.dim, plan.optimizer) for part in row_index.parts]
        self.update_K = np.array([2 * (part.row_bytes + s) + 4 * part.dim for part, s in zip(parts, state, strict=True)])
        self.total = dict.fromkeys(STEP_PARTS, 0.0)
        self.turns = list(exchange_phases(routes.uses, routes.nodes, routes.local_size, prefetch=bool(plan.step.overlaps)))
        self.latency = sum(phase_latency(self.machine, self.turns))  # of a step
        self._begin()

    def _begin(self) -> None:
        ranks = self.machine.world_size
        self.memory: dict[str, Floats] = {"lookup": np.zeros(ranks), "update": np.zeros(ranks)}  # bytes
        self.busy: dict[tuple[CommScope, Kind, Phase], Floats] = {}  # [link, sent and received, rank] bytes

    def results(self, table: int, first: int, lookups_C: Counts, samples_C: Counts) -> None:
        """Output vectors of a feature are written, and their gradients read."""
        plan = self.plan.tables[table]
        vectors_C = samples_C if plan.pooling in ("sum", "mean") else lookups_C
        for part in ("lookup", "update"):
            self.memory[part][first : first + len(vectors_C)] += 4 * plan.dim * vectors_C

    def lookups(self, rank_N: Counts, part_N: Counts, lookups_N: Counts | int) -> None:
        """Ranks read the rows that they pool."""
        read_N = lookups_N * self.routes.bytes_K["rows"][part_N]
        self.memory["lookup"] += np.bincount(rank_N, read_N, minlength=self.machine.world_size)

    def updates(self, part_N: Counts, home_N: Counts) -> None:
        """Distinct rows that any rank requested are updated by all holders."""
        nodes, local_size = self.machine.nodes, self.machine.gpus_per_node
        tier_N, bytes_N = self.routes.tier_K[part_N], self.update_K[part_N].astype(np.float64)
        first_N, second_N, third_N = (tier_N == tier for tier in (1, 2, 3))
        self.memory["update"] += bytes_N[first_N].sum()
        self.memory["update"] += np.tile(
            np.bincount(home_N[second_N] % local_size, bytes_N[second_N], minlength=local_size), nodes
        )
        self.memory["update"] += np.bincount(home_N[third_N], bytes_N[third_N], minlength=self.machine.world_size)

    def counts(self, direction: Direction, near: int, far: int) -> None:
        """Numbers per rank to peers of its node and of other nodes, the same on all ranks."""
        self.total[direction] += COUNT_BYTES * float(self.machine.seconds_L @ [near, far])

    def all_to_all(self, reach: CommScope, kind: Kind, phase: Phase, out_CLK: Counts, in_CLK: Counts) -> None:
        busy = self.busy.setdefault((reach, kind, phase), np.zeros((2, 2, self.machine.world_size)))
        busy += np.stack([sent_CLK[:, [_NODE, _CLUSTER]].sum(axis=2).T for sent_CLK in (out_CLK, in_CLK)], axis=1)
        if kind in ("request", "relay") and phase != "ids":  # messages are written to a buffer and read from it
            passed_CLK = in_CLK if phase == "rows" else out_CLK
            self.memory["lookup" if phase == "rows" else "update"] += TOUCHES * passed_CLK[:, [_NODE, _CLUSTER]].sum(
                axis=(1, 2)
            )

    def to_all(self, reach: CommScope, phase: Phase, others: int, bytes_C: Counts) -> None:
        bytes_NG = bytes_C.reshape(self.machine.nodes, self.machine.gpus_per_node)
        got_NG = bytes_NG.sum(axis=int(reach == "node"), keepdims=True) - bytes_NG
        busy = self.busy.setdefault((reach, "broadcast", phase), np.zeros((2, 2, self.machine.world_size)))
        busy[NODE if reach == "node" else CLUSTER] += np.stack([others * bytes_C, got_NG.reshape(-1)])

    def end_step(self) -> None:
        """Add the busiest rank of each exchange and of memory work."""
        for (_, kind, phase), busy in self.busy.items():
            self.total[direction_of(kind, phase)] += float(self.machine.uneven_seconds(busy).max())
        for turn in self.turns:
            self.total[turn.part] += exchange_latency(self.machine, turn.scope)
        for part, bytes_C in self.memory.items():
            self.total[part] += float(bytes_C.max()) / self.machine.memory_rate
        self._begin()

    def result(self, steps: int) -> dict[str, float]:
        """Mean seconds of a step, by part."""
        return {part: seconds / steps for part, seconds in self.total.items()} | {"dense": self.plan.dense}
