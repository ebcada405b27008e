"""Simulation of a plan without its ranks: one process counts every byte that thousands of ranks would send.

Nothing is looked up, summed or sent. The simulator finds requests as the runtime does, by the same maps (`make_maps`,
`RowIndex`) and rules (`exchange/routes.py`), for all ranks at once as arrays of (rank, row). Its counts therefore equal the
traffic meters of all ranks, messages included; tests compare both. Cached rows are those that `shard_` puts into slots, where
they stay if the policy is "fixed".

Ranks are processed a few nodes at a time. Only the distinct rows of each rank and node, and of the whole step, are kept. Memory
grows with the distinct rows of a step and with ranks x parts, not with lookups.

**Time** is predicted from the counts. An exchange takes as long as its busiest rank, which sends and receives at the same time,
at the rates of the plan's topology. The exchanges, their latencies, and which of them the dense part can hide are those of the
planner (`plan/cost/phases.py`). Lookups and updates use device memory as in `plan/cost/step_cost.py`, with counted rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline.distributed.exchange import routes as R
from thermocline.distributed.exchange.routes import PHASES, Kind, Phase, Routes, links_of, receiver
from thermocline.distributed.placement.init_rows import initial_cache
from thermocline.distributed.placement.local_shard import STORED
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.placement.table_map import Counts, make_maps, rows_of_ids
from thermocline.distributed.planned_tables import check_table, id_maps
from thermocline.errors import BadInput
from thermocline.heat.log_columns import LogIds
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.plan.cost.phases import CommScope
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, Plan

from .result import Simulation
from .step_time import RowRequests, StepTimer

_NOTHING = np.zeros(0, np.int64)
_CARD, _NODE, _CLUSTER = (LINK_CLASSES.index(link) for link in ("card", "node", "cluster"))


class RankBatches(NamedTuple):
    """The batches of some ranks in a step: ranks of whole nodes in order, their samples concatenated."""

    bags: Mapping[str, LogIds]  # by feature
    samples_C: Counts  # of each rank


def simulate(
    plan: Plan, heat: HeatProfile | None, steps: Iterable[Iterable[RankBatches]], ids: Mapping[str, IdMap] | None = None
) -> Simulation:
    """Count the bytes that the ranks of a plan send in some training steps, and predict the time of a step.

    All tables of the plan form one collection, in the plan's order.

    Args:
        plan: a plan with goal "train".
        heat: the heat profile of the plan.
        steps: the batches of all ranks, for each step in chunks of whole nodes.
        ids: maps from raw ids to rows, by feature; by default those of the plan.

    Returns:
        The bytes and times.

    Raises:
        BadInput: the plan is not for training, or a step lacks the batches of some ranks.

    Example::

        log = SimulationLog(["clicks.parquet"], plan)
        found = simulate(plan, heat, log.steps(plan, 4))
        found.bytes_over("cluster")
    """
    if plan.goal != "train":
        raise BadInput(f'the plan has goal "{plan.goal}"; simulation needs goal "train"', parameter="goal", value=plan.goal)
    for table in plan.tables:
        check_table(table)
    simulator = _Simulator(plan, heat, _id_maps(plan, heat) if ids is None else ids)
    for step in steps:
        simulator.step(step)
    return simulator.result()


def _id_maps(plan: Plan, heat: HeatProfile | None) -> dict[str, IdMap]:
    return {feature: map for table in plan.tables for feature, map in id_maps(table, heat).items()}


class _Simulator:
    def __init__(self, plan: Plan, heat: HeatProfile | None, ids: Mapping[str, IdMap]) -> None:
        self.plan, self.ids = plan, ids
        self.nodes, self.local_size = plan.topology.nodes, plan.topology.gpus_per_node
        self.ranks = self.nodes * self.local_size
        device = torch.device("cpu")
        maps = make_maps(plan.tables, heat, ids, self.nodes, self.local_size, device)
        self.row_index = RowIndex(plan.tables, maps, self.nodes, self.local_size, device)
        self.routes = Routes(self.row_index.parts, self.nodes, self.local_size, self.row_index.id_bytes)
        self.cached = initial_cache(self.row_index, [table.features for table in plan.tables], heat, ids, self.local_size)
        parts = len(self.row_index.parts)
        self.sent = np.zeros((self.ranks, len(DIRECTIONS), len(LINK_CLASSES), parts + 1), np.int64)
        self.messages = np.zeros((self.ranks, len(DIRECTIONS), len(LINK_CLASSES)), np.int64)
        self.time = StepTimer(plan, self.row_index, self.routes)
        self.steps = 0

    def step(self, chunks: Iterable[RankBatches]) -> None:
        """One step of all ranks."""
        for reach, direction, numbers in self._count_exchanges():
            self._send_counts(reach, direction, numbers)
        first, touched = 0, _NOTHING
        for chunk in chunks:
            assert len(chunk.samples_C) % self.local_size == 0
            requests, pooled = self._requests(first, chunk)
            self._request_rows(requests)
            self._request_sums(pooled)
            touched = np.unique(np.concatenate([touched, requests.row_N, pooled.row_N]))
            first += len(chunk.samples_C)
        if first != self.ranks:
            raise BadInput(
                f"a step has the batches of {first} ranks, but the plan is for {self.ranks}; give one batch per rank",
                parameter="steps", needed=self.ranks, available=first,
            )  # fmt: skip
        self._broadcast_sums(touched)
        self.steps += 1
        self.time.end_step()

    def _count_exchanges(self) -> Iterator[tuple[CommScope, Direction, int]]:
        """Exchanges of message sizes: reach, direction, and numbers per peer."""
        routes = self.routes
        yield "everyone", "ids", routes.header_numbers
        if routes.relayed or routes.syncs_nodes:
            yield "across", "ids" if routes.relayed else "sync", R.COUNTS
        if routes.syncs_nodes:
            yield "across", "sync", R.COUNTS
        if routes.tier1:
            yield "node", "sync", R.COUNTS

    def _send_counts(self, reach: CommScope, direction: Direction, numbers: int) -> None:
        """Every rank sends numbers to each other member of its group."""
        d = DIRECTIONS.index(direction)
        others = R.members(reach, self.nodes, self.local_size) - 1
        near = 0 if reach == "across" else self.local_size - 1
        for link, count in ((_NODE, near), (_CLUSTER, others - near)):
            self.sent[:, d, link, -1] += numbers * R.COUNT_BYTES * count
            self.messages[:, d, link] += count
        self.time.counts(direction, numbers * near, numbers * (others - near))

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def _requests(self, first: int, chunk: RankBatches) -> tuple[RowRequests, RowRequests]:
        """Distinct rows of each rank from `first` on, and all lookups that owners pool."""
        keys, pooled = [_NOTHING], [RowRequests(*[_NOTHING] * 5)]
        summed = {part.table for part in self.row_index.parts if part.owner_pooled}
        ends_C = np.concatenate([[0], np.cumsum(chunk.samples_C)])
        for table, plan in enumerate(self.plan.tables):
            for feature in plan.features:
                bags = chunk.bags[feature]
                at_C = ends_C if bags.offsets is None else bags.offsets[ends_C]
                lookups_C = np.diff(at_C)
                rank_N = np.repeat(np.arange(first, first + len(lookups_C)), lookups_C)
                row_N = rows_of_ids(self.ids, feature, bags.ids_N) + self.row_index.first[table]
                if table in summed:
                    rank_N, row_N, others = self._split_owner_pooled(rank_N, bags.offsets, row_N)
                    pooled.append(others)
                keys.append(rank_N * self.row_index.rows + row_N)
                self.time.results(table, first, lookups_C, chunk.samples_C)
        key_N, lookups_N = np.unique(np.concatenate(keys), return_counts=True)
        rank_N, row_N = np.divmod(key_N, self.row_index.rows)
        return RowRequests(rank_N, row_N, *self._located(row_N), lookups_N), _joined(pooled)

    def _split_owner_pooled(
        self, rank_N: Counts, offsets: Counts | None, row_N: Counts
    ) -> tuple[Counts, Counts, RowRequests]:  # fmt: skip
        """Split the lookups of one feature: ranks and rows that the requester pools, and the others. No offsets: one per bag.

        The lookup counts of the others are 1 for the first of a partial sum (one bag and owner) and else 0.
        """
        bag_N = np.arange(len(row_N)) if offsets is None else np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        part_N, home_N = self._located(row_N)
        pooled_N = self.routes.owner_pooled_K[part_N]
        first_N = np.zeros_like(row_N)
        _, first_S = np.unique((bag_N * self.ranks + home_N)[pooled_N], return_index=True)
        first_N[np.flatnonzero(pooled_N)[first_S]] = 1
        return rank_N[~pooled_N], row_N[~pooled_N], _some(RowRequests(rank_N, row_N, part_N, home_N, first_N), pooled_N)

    def _located(self, row_N: Counts) -> tuple[Counts, Counts]:
        """Parts and homes of rows. Many ranks request the same rows, and locating rows takes longest."""
        row_U = np.unique(row_N)
        at_N, where = np.searchsorted(row_U, row_N), self.row_index.locate(torch.from_numpy(row_U))
        return where.part_N.numpy()[at_N], where.home_N.numpy()[at_N]

    def _request_rows(self, requests: RowRequests) -> None:
        """Requests of the ranks of some nodes, relayed requests, and gradients of replicated rows."""
        self.time.lookups(requests.rank_N, requests.part_N, requests.lookups_N)
        routes = self.routes
        route_N = routes.route_K[requests.part_N]
        in_node, first = _some(requests, route_N == R.NODE), _some(requests, route_N == R.LOCAL)
        asks = (
            self._all_to_all("everyone", "request", _some(requests, route_N == R.FLAT)),
            self._all_to_all("node", "request", in_node),
        )
        self._message(np.concatenate(asks), self._all_to_all("node", "sync", first))
        self._flags([("everyone", _some(requests, route_N == R.FLAT)), ("node", in_node)])
        relayed = self._once_a_node(_some(in_node, routes.relayed_K[in_node.part_N]))
        relays = self._all_to_all("across", "relay", relayed)
        self._flags([("across", relayed)])
        second = _some(in_node, routes.tier_K[in_node.part_N] == 2)
        copied = self._once_a_node(_joined([first, second]) if routes.syncs_nodes else _some(first, _NOTHING))
        self._message(relays, self._all_to_all("across", "sync", copied))

    def _once_a_node(self, requests: RowRequests) -> RowRequests:
        """Distinct rows of each node, at the rank that receives the requests or gradients of the node."""
        node_N = requests.rank_N // self.local_size
        _, at = np.unique(node_N * self.row_index.rows + requests.row_N, return_index=True)
        found = _some(requests, at)
        return found._replace(rank_N=receiver("node", found.rank_N, found.home_N, self.local_size))

    def _broadcast_sums(self, row_N: Counts) -> None:
        """Sums of replicated rows that any rank requested, from their homes to all holders."""
        part_N, home_N = self._located(row_N)
        self.time.updates(part_N, home_N)
        copied_N = self.routes.tier_K[part_N] < 3
        if self.routes.syncs_nodes:
            self._to_all("across", home_N[copied_N], part_N[copied_N])
        first_N = self.routes.tier_K[part_N] == 1
        self._to_all("node", home_N[first_N] % self.local_size, part_N[first_N])

    # -- counting -----------------------------------------------------------------------------------------------------------

    def _all_to_all(
        self, reach: CommScope, kind: Kind, requests: RowRequests, phases: Sequence[Phase] = (), pooled: bool = False
    ) -> Counts:
        """Count the requests of ranks to the members of their groups that the homes determine, and the answers.

        `phases` are all phases of the kind by default. `pooled`: sums travel, not rows. Returns the pairs of ranks with
        messages: sender * ranks + receiver.
        """
        bytes_K = self.routes.sum_bytes_K if pooled else self.routes.bytes_K
        from_N, parts = requests.rank_N, len(self.row_index.parts)
        to_N = receiver(reach, from_N, requests.home_N, self.local_size)
        link_N = links_of(from_N, to_N, self.local_size)
        kept_N = np.flatnonzero((link_N != _CARD) | (kind == "request"))
        keys = [((end_N * len(LINK_CLASSES) + link_N) * parts + requests.part_N)[kept_N] for end_N in (from_N, to_N)]
        rows = [_counted(key_N, (self.ranks, len(LINK_CLASSES), parts)) for key_N in keys]
        for phase in phases or PHASES[kind]:
            back = phase == "rows"
            d = DIRECTIONS.index(R.direction_of(kind, phase))
            sizes = [counts_CLK * bytes_K[phase] for counts_CLK in rows]  # by sender of the request, and by receiver
            if back and not pooled and len(self.cached[0]):
                more_N = self._slot_bytes(requests)[kept_N]
                sizes = [each + _counted(key_N, each.shape, more_N) for key_N, each in zip(keys, sizes, strict=True)]
            out_CLK, in_CLK = reversed(sizes) if back else sizes
            self.sent[:, d, :, :-1] += out_CLK
            self.time.all_to_all(reach, kind, phase, out_CLK, in_CLK)
        return np.unique((from_N * self.ranks + to_N)[link_N != _CARD])

    def _request_sums(self, pooled: RowRequests) -> None:
        """Ids of lookups go to owners; every partial sum comes back, and the gradient of its bag goes to the owner."""
        self.time.lookups(pooled.home_N, pooled.part_N, 1)
        self._all_to_all("everyone", "request", pooled, ("ids",), pooled=True)
        sums = _some(pooled, pooled.lookups_N > 0)
        self._message(self._all_to_all("everyone", "request", sums, ("rows", "gradients"), pooled=True), _NOTHING)

    def _slot_bytes(self, requests: RowRequests) -> Counts:
        """Additional bytes of cached rows in messages."""
        rows_S, kind_S = self.cached
        at_N = np.minimum(np.searchsorted(rows_S, requests.row_N), len(rows_S) - 1)
        kind_N = np.where(rows_S[at_N] == requests.row_N, kind_S[at_N], STORED)
        sizes = (
            np.array([[p.row_bytes, 4 * p.dim, p.dim + 4] for p in self.row_index.parts]) - self.routes.bytes_K["rows"][:, None]
        )
        return np.asarray(sizes[requests.part_N, kind_N])

    def _flags(self, hops: Sequence[tuple[CommScope, RowRequests]]) -> None:
        """Flags of rows that may be cached, which precede the answers of one exchange."""
        parts = self.row_index.parts
        slotted_K = np.array([part.slots > 0 for part in parts])
        bits = 2 if any(part.int8_slots for part in parts) else 1
        pairs = []
        for reach, requests in hops:
            some = _some(requests, slotted_K[requests.part_N])
            to_N = receiver(reach, some.rank_N, some.home_N, self.local_size)
            pairs.append(to_N * self.ranks + some.rank_N)
        pair_P, count_P = np.unique(np.concatenate(pairs), return_counts=True)
        ends = pair_P // self.ranks, pair_P % self.ranks
        link_P, d = links_of(*ends, self.local_size), DIRECTIONS.index("rows")
        other = link_P != _CARD
        np.add.at(self.sent, (ends[0][other], d, link_P[other], -1), -(-bits * count_P[other] // 8))
        np.add.at(self.messages, (ends[0][other], d, link_P[other]), 1)

    def _message(self, asks_P: Counts, syncs_P: Counts) -> None:
        """Count one message per pair of ranks for ids, answers and gradients; it is sync if it carries nothing else."""
        asks_P = np.unique(asks_P)
        for direction, pair_P, back in (
            ("ids", asks_P, False), ("rows", asks_P, True), ("gradients", asks_P, False),
            *[("sync", np.setdiff1d(syncs_P, asks_P), False)] * 2,
        ):  # fmt: skip
            ends = pair_P // self.ranks, pair_P % self.ranks
            link_P = links_of(*ends, self.local_size)
            sends = _counted(ends[back] * len(LINK_CLASSES) + link_P, (self.ranks, len(LINK_CLASSES)))
            self.messages[:, DIRECTIONS.index(direction)] += sends

    def _to_all(self, reach: CommScope, from_N: Counts, part_N: Counts) -> None:
        """Ranks send rows to all other members of their groups. Inside nodes, `from_N` are local ranks of every node."""
        others, link = R.members(reach, self.nodes, self.local_size) - 1, _NODE if reach == "node" else _CLUSTER
        senders, parts = self.local_size if reach == "node" else self.ranks, len(self.row_index.parts)
        rows_CK = np.tile(_counted(from_N * parts + part_N, (senders, parts)), (self.ranks // senders, 1))
        self.messages[:, DIRECTIONS.index("sync"), link] += others * rows_CK.any(axis=1)
        for phase in PHASES["broadcast"]:
            d = DIRECTIONS.index(R.direction_of("broadcast", phase))
            self.sent[:, d, link, :-1] += others * rows_CK * self.routes.bytes_K[phase]
            self.time.to_all(reach, phase, others, (rows_CK * self.routes.bytes_K[phase]).sum(axis=1))

    def result(self) -> Simulation:
        if not self.steps:
            raise BadInput("there is no step to simulate; give a log with samples", parameter="steps")
        parts = (*((part.name, part.tier) for part in self.row_index.parts), ("", 0))
        return Simulation(
            self.plan, self.steps, parts, self.sent, self.messages, self.time.result(self.steps), self.time.latency
        )


def _some(requests: RowRequests, which: Counts | NDArray[np.bool_]) -> RowRequests:
    return RowRequests(*(each[which] for each in requests))


def _joined(some: Sequence[RowRequests]) -> RowRequests:
    return RowRequests(*(np.concatenate(each) for each in zip(*some, strict=True)))


def _counted(key_N: Counts, shape: tuple[int, ...], weight_N: Counts | None = None) -> Counts:
    return np.bincount(key_N, weight_N, minlength=int(np.prod(shape))).astype(np.int64).reshape(shape)
