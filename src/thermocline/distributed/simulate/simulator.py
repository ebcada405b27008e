"""A run of a plan without its cards: every byte that they would send is counted, in one process, for thousands of them.

Nothing is looked up, summed or sent. But which card asks which for a row is found as the runtime finds it: by the same maps
(`make_maps`, `Atlas`) and the same rules (`routes.py`), for all cards at once, as arrays of (card, row). So the numbers are not
an estimate: they are those of the meters of all cards, table by table, messages included, and tests hold them against real
processes. Of rows in slots of caches it counts those that `shard_` puts there: where the policy is "fixed" they stay.

Cards come a few nodes at a time. Of each card only distinct rows are kept, of each node likewise, and of the whole step those
that any card asked for, which is what copies are made equal for. Memory so grows with the distinct rows of a step and with
cards x parts, not with lookups.

**Time** is predicted from what was counted. An exchange takes as long as its busiest card, which sends and receives at the same
time, at the rates of the plan's topology. Which exchanges there are, each with a latency, and which of them the dense part may
hide, is the planner's own list (`phases.py`): it follows from the plan, not from the bytes. Lookups and updates read and
write card memory as in `plan/cost/step_cost.py`, but with counted rows. As much hides as the plan expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline.distributed.exchange.routes import (
    FLAT,
    HERE,
    NODE,
    PHASES,
    SIZE_BYTES,
    TELLING,
    Counts,
    Kind,
    Routes,
    direction_of,
    links_of,
    member,
    members,
    own_counts,
    rank_of,
)
from thermocline.distributed.exchange.traffic_meter import Sent
from thermocline.distributed.id_maps import id_maps
from thermocline.distributed.placement.initial_cache import seated
from thermocline.distributed.placement.local_shard import STORED
from thermocline.distributed.placement.row_index import Atlas
from thermocline.distributed.placement.table_map import make_maps
from thermocline.distributed.validate import check_table
from thermocline.errors import BadInput
from thermocline.heat.log_reader import LogIds
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.plan.cost.phases import CommScope
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, LinkClass, Plan
from thermocline.plan.run_file import fingerprint

from .owner_pooling import PooledByOwners, joined, sums_sent, take_apart
from .step_time import Asked, StepTime

_CARD, _NODE, _CLUSTER = (LINK_CLASSES.index(link) for link in ("card", "node", "cluster"))


class Cards(NamedTuple):
    """What some cards look up in a step: cards of whole nodes, one after the other, and the ids of their samples end to end."""

    bags: Mapping[str, LogIds]  # by feature
    samples_C: Counts  # of each card


@dataclass(frozen=True)
class Simulated:
    """What all cards sent in some steps, and how long a step should take."""

    plan: Plan
    steps: int
    parts: tuple[tuple[str, int], ...]  # table and tier; the last are the sizes, which have none
    bytes_CDLK: Counts  # card, direction, link class, part
    messages_CDL: Counts
    seconds: dict[str, float]  # of a step, by STEP_PARTS, nothing hidden
    latency: float  # seconds of these

    @property
    def cards(self) -> int:
        return len(self.bytes_CDLK)

    @property
    def step(self) -> float:
        """Seconds of a step; as much of it hides behind the dense part as the plan expects."""
        exchange = sum(self.seconds[part] for part in ("ids", "rows", "gradients", "sync"))
        return sum(self.seconds.values()) - min(self.plan.step.hidden, exchange)

    def sent(self, card: int) -> list[Sent]:
        """The lines that the meter of a card would have."""
        return _lines(self.parts, self.bytes_CDLK[card])

    def all_sent(self) -> list[Sent]:
        """Those of all cards, added up."""
        return _lines(self.parts, self.bytes_CDLK.sum(axis=0))

    def bytes_over(self, link: LinkClass, direction: Direction | None = None) -> float:
        """Bytes that a card sends over a class of links in a step, the mean over cards; in one direction or in all."""
        way = slice(None) if direction is None else slice(DIRECTIONS.index(direction), DIRECTIONS.index(direction) + 1)
        return float(self.bytes_CDLK[:, way, LINK_CLASSES.index(link)].sum()) / self.cards / self.steps

    def messages_over(self, link: LinkClass) -> float:
        return float(self.messages_CDL[:, :, LINK_CLASSES.index(link)].sum()) / self.cards / self.steps

    def to_json(self) -> dict[str, Any]:
        """Lines are bytes of all cards and steps; the rest is of one card and step."""
        cluster, links = self.plan.topology, [link for link in LINK_CLASSES if link != "host"]
        return {
            "plan": fingerprint(self.plan),
            "nodes": cluster.nodes,
            "cards_per_node": cluster.gpus_per_node,
            "batch": self.plan.batch,
            "steps": self.steps,
            "lines": [line._asdict() for line in self.all_sent()],
            "bytes": {link: {way: self.bytes_over(link, way) for way in DIRECTIONS} for link in links},
            "messages": {link: self.messages_over(link) for link in links},
            "uneven": self.uneven,
            "seconds": self.seconds,
            "latency": self.latency,
            "step": self.step,
            "planned": {"step": self.plan.step.total, "seconds": self.plan.step.parts},
        }

    @property
    def uneven(self) -> float:
        """Bytes that a card sends to others: the maximum over the mean."""
        sent_C = self.bytes_CDLK[:, :, _CARD + 1 :].sum(axis=(1, 2, 3))
        return float(sent_C.max() / max(sent_C.mean(), 1e-9))


def _lines(parts: tuple[tuple[str, int], ...], bytes_DLK: Counts) -> list[Sent]:
    return [
        Sent(parts[k][0], parts[k][1], DIRECTIONS[d], LINK_CLASSES[at], int(bytes_DLK[d, at, k]))
        for d, at, k in np.argwhere(bytes_DLK).tolist()
    ]


def simulate(
    plan: Plan, heat: HeatProfile | None, steps: Iterable[Iterable[Cards]], ids: Mapping[str, IdMap] | None = None
) -> Simulated:
    """Count what the cards of a plan send while they train on these steps, each of which has the batches of all cards.

    All tables of the plan are taken to be one collection, in the plan's order. `heat` is what the plan was made with. `ids`:
    how ids become rows, by feature, where the model has maps that are not the plan's.
    """
    if plan.goal != "train":
        raise BadInput(f'the plan is made to {plan.goal}, and steps of training are simulated: plan with goal "train"')
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
        self.nodes, self.cards = plan.topology.nodes, plan.topology.gpus_per_node
        self.all = self.nodes * self.cards
        device = torch.device("cpu")
        maps = make_maps(plan.tables, heat, ids, self.nodes, self.cards, device)
        self.atlas = Atlas(plan.tables, maps, self.nodes, self.cards, device)
        self.routes = Routes(self.atlas.parts, self.nodes, self.cards, self.atlas.id_bytes)
        self.seated = seated(self.atlas, [table.features for table in plan.tables], heat, ids, self.cards)
        parts = len(self.atlas.parts)
        self.sent = np.zeros((self.all, len(DIRECTIONS), len(LINK_CLASSES), parts + 1), np.int64)
        self.messages = np.zeros((self.all, len(DIRECTIONS), len(LINK_CLASSES)), np.int64)
        self.time = StepTime(plan, self.atlas, self.routes)
        self.steps = 0

    def step(self, chunks: Iterable[Cards]) -> None:
        """One step of all cards."""
        for reach, direction, numbers in self._tellings():
            self._tell(reach, direction, numbers)
        first, anyone = 0, np.zeros(0, np.int64)
        for chunk in chunks:
            assert len(chunk.samples_C) % self.cards == 0
            asked, apart = self._asked(first, chunk)
            self._ask(asked)
            self._ask_for_sums(apart)
            anyone, _ = _distinct(np.concatenate([anyone, asked.row_N, apart.row_N]))
            first += len(chunk.samples_C)
        if first != self.all:
            raise BadInput(f"a step has the batches of {first} cards, and the plan is for {self.all}; give one for each card")
        self._spread(anyone)
        self.steps += 1
        self.time.end_step()

    def _tellings(self) -> Iterator[tuple[CommScope, Direction, int]]:
        """Where cards tell each other how much will come: so many numbers each."""
        routes = self.routes
        yield "everyone", "ids", routes.meeting
        if routes.relayed or routes.across:
            yield "across", "ids" if routes.relayed else "sync", TELLING
        if routes.across:
            yield "across", "sync", TELLING
        if routes.first:
            yield "node", "sync", TELLING

    def _tell(self, reach: CommScope, direction: Direction, numbers: int) -> None:
        """Every card sends some numbers to each other member of its group."""
        d = DIRECTIONS.index(direction)
        others = members(reach, self.nodes, self.cards) - 1
        near = 0 if reach == "across" else self.cards - 1
        for link, count in ((_NODE, near), (_CLUSTER, others - near)):
            self.sent[:, d, link, -1] += numbers * SIZE_BYTES * count
            self.messages[:, d, link] += count
        self.time.tell(direction, numbers * near, numbers * (others - near))

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def _asked(self, first: int, chunk: Cards) -> tuple[Asked, PooledByOwners]:
        """Distinct rows of each card, from card `first` on, and lookups that others pool."""
        keys, apart = [np.zeros(0, np.int64)], []
        summed = {part.table for part in self.atlas.parts if part.summed}
        ends_C = np.concatenate([[0], np.cumsum(chunk.samples_C)])
        for table, plan in enumerate(self.plan.tables):
            for feature in plan.features:
                bags = chunk.bags[feature]
                at_C = ends_C if bags.offsets is None else bags.offsets[ends_C]
                lookups_C = np.diff(at_C)
                card_N = np.repeat(np.arange(first, first + len(lookups_C)), lookups_C)
                row_N = self.ids[feature](torch.from_numpy(np.ascontiguousarray(bags.ids_N))).numpy()
                row_N = row_N + self.atlas.first[table]
                if table in summed:
                    mine_N, others = take_apart(self.routes, self._located, card_N, bags.offsets, row_N)
                    card_N, row_N = card_N[mine_N], row_N[mine_N]
                    apart.append(others)
                keys.append(card_N * self.atlas.rows + row_N)
                self.time.results(table, first, lookups_C, chunk.samples_C)
        key_N, lookups_N = _distinct(np.concatenate(keys))
        card_N, row_N = np.divmod(key_N, self.atlas.rows)
        row_U, _ = _distinct(row_N.copy())  # many cards ask for the same rows, and to locate one takes longest
        at_N, (part_U, home_U) = np.searchsorted(row_U, row_N), self._located(row_U)
        asked = Asked(card_N, row_N, part_U[at_N], home_U[at_N], lookups_N)
        self.time.lookups(asked)
        return asked, joined(apart)

    def _located(self, row_N: Counts) -> tuple[Counts, Counts]:
        where = self.atlas(torch.from_numpy(row_N))
        return where.part_N.numpy(), where.home_N.numpy()

    def _ask(self, asked: Asked) -> None:
        """What the cards of some nodes ask for, what they relay, and the sums that they send."""
        routes = self.routes
        route_N = routes.route_K[asked.part_N]
        in_node, first = _some(asked, route_N == NODE), _some(asked, route_N == HERE)
        asks = self._hop("everyone", "ask", _some(asked, route_N == FLAT)), self._hop("node", "ask", in_node)
        self._message(np.concatenate(asks), self._hop("node", "sync", first))
        self._flags([("everyone", _some(asked, route_N == FLAT)), ("node", in_node)])
        relayed = self._once_a_node(_some(in_node, routes.relayed_K[in_node.part_N]))
        relays = self._hop("across", "relay", relayed)
        self._flags([("across", relayed)])
        second = _some(in_node, routes.tier_K[in_node.part_N] == 2)
        copied = self._once_a_node(_joined(first, second) if routes.across else _some(first, np.zeros(0, np.int64)))
        self._message(relays, self._hop("across", "sync", copied))

    def _once_a_node(self, asked: Asked) -> Asked:
        """Distinct rows of each node, as the card has them that its cards ask, or send gradients to."""
        node_N = asked.card_N // self.cards
        _, at = np.unique(node_N * self.atlas.rows + asked.row_N, return_index=True)
        found = _some(asked, at)
        return found._replace(card_N=rank_of("node", found.card_N, member("node", found.home_N, self.cards), self.cards))

    def _spread(self, row_N: Counts) -> None:
        """Sums of copied rows that any card has asked for, from their homes to all who hold them."""
        part_N, home_N = self._located(row_N)
        self.time.updates(part_N, home_N)
        copied_N = self.routes.tier_K[part_N] < 3
        if self.routes.across:
            self._to_all("across", home_N[copied_N], part_N[copied_N])
        first_N = self.routes.tier_K[part_N] == 1
        self._to_all("node", member("node", home_N[first_N], self.cards), part_N[first_N])

    # -- counting -----------------------------------------------------------------------------------------------------------

    def _hop(self, reach: CommScope, kind: Kind, asked: Asked) -> Counts:
        """Each card sends each row to the member of its group that the row's home says, and has answers from there.

        Returns which card has anything for which other: sender * cards + receiver.
        """
        from_N, parts = asked.card_N, len(self.atlas.parts)
        to_N = rank_of(reach, from_N, member(reach, asked.home_N, self.cards), self.cards)
        link_N = links_of(from_N, to_N, self.cards)
        kept_N = np.flatnonzero((link_N != _CARD) | own_counts(kind))
        keys = [((end_N * len(LINK_CLASSES) + link_N) * parts + asked.part_N)[kept_N] for end_N in (from_N, to_N)]
        rows = [_counted(key_N, (self.all, len(LINK_CLASSES), parts)) for key_N in keys]
        for phase in PHASES[kind]:
            back = phase == "rows"
            d = DIRECTIONS.index(direction_of(kind, phase))
            out_CLK, in_CLK = (rows[end] * self.routes.bytes_K[phase] for end in (int(back), int(not back)))
            if back and len(self.seated[0]):
                more_N = self._more(asked)[kept_N]
                out_CLK, in_CLK = (
                    each + _weighed(keys[end], more_N, each.shape)
                    for end, each in ((int(back), out_CLK), (int(not back), in_CLK))
                )
            self.sent[:, d, :, :-1] += out_CLK
            self.time.hop(reach, kind, phase, out_CLK, in_CLK)
        return _distinct((from_N * self.all + to_N)[link_N != _CARD])[0]

    def _ask_for_sums(self, apart: PooledByOwners) -> None:
        """Ids of lookups go to who owns their rows, sums come back for every share of a bag, and its gradient goes there."""
        self.time.pools(apart.ids)
        for phase, out_CLK, in_CLK in sums_sent(apart, self.routes):
            self.sent[:, DIRECTIONS.index(phase), :, :-1] += out_CLK
            self.time.hop("everyone", "ask", phase, out_CLK, in_CLK)
        from_N, to_N, _ = apart.shares
        self._message((from_N * self.all + to_N)[from_N != to_N], np.zeros(0, np.int64))

    def _more(self, asked: Asked) -> Counts:
        """Bytes that rows take on their way because they are in slots."""
        rows_S, kind_S = self.seated
        at_N = np.minimum(np.searchsorted(rows_S, asked.row_N), len(rows_S) - 1)
        kind_N = np.where(rows_S[at_N] == asked.row_N, kind_S[at_N], STORED)
        sizes = np.array([[p.row_bytes, 4 * p.dim, p.dim + 4] for p in self.atlas.parts]) - self.routes.bytes_K["rows"][:, None]
        return np.asarray(sizes[asked.part_N, kind_N])

    def _flags(self, hops: Sequence[tuple[CommScope, Asked]]) -> None:
        """Bits of rows that may be in slots, ahead of the answers: of some hops that are one exchange."""
        parts = self.atlas.parts
        slotted_K = np.array([part.slots > 0 for part in parts])
        bits = 2 if any(part.near for part in parts) else 1
        pairs = []
        for reach, asked in hops:
            some = _some(asked, slotted_K[asked.part_N])
            to_N = rank_of(reach, some.card_N, member(reach, some.home_N, self.cards), self.cards)
            pairs.append(to_N * self.all + some.card_N)
        pair_P, count_P = np.unique(np.concatenate(pairs), return_counts=True)
        ends = pair_P // self.all, pair_P % self.all
        link_P, d = links_of(*ends, self.cards), DIRECTIONS.index("rows")
        other = link_P != _CARD
        np.add.at(self.sent, (ends[0][other], d, link_P[other], -1), -(-bits * count_P[other] // 8))
        np.add.at(self.messages, (ends[0][other], d, link_P[other]), 1)

    def _message(self, asks_P: Counts, syncs_P: Counts) -> None:
        """What one card has for another goes in one message: ids, answers, gradients. It is sync if it has nothing else."""
        asks_P = np.unique(asks_P)
        for direction, pair_P, back in (
            ("ids", asks_P, False), ("rows", asks_P, True), ("gradients", asks_P, False),
            *[("sync", np.setdiff1d(syncs_P, asks_P), False)] * 2,
        ):  # fmt: skip
            ends = pair_P // self.all, pair_P % self.all
            link_P = links_of(*ends, self.cards)
            sends = _counted(ends[back] * len(LINK_CLASSES) + link_P, (self.all, len(LINK_CLASSES)))
            self.messages[:, DIRECTIONS.index(direction)] += sends

    def _to_all(self, reach: CommScope, from_N: Counts, part_N: Counts) -> None:
        """Cards send rows to all other members of their groups. Inside nodes `from_N` are numbers of cards, on all of them."""
        others, link = members(reach, self.nodes, self.cards) - 1, _NODE if reach == "node" else _CLUSTER
        senders, parts = self.cards if reach == "node" else self.all, len(self.atlas.parts)
        rows_CK = np.tile(_counted(from_N * parts + part_N, (senders, parts)), (self.all // senders, 1))
        self.messages[:, DIRECTIONS.index("sync"), link] += others * rows_CK.any(axis=1)
        for phase in PHASES["spread"]:
            d = DIRECTIONS.index(direction_of("spread", phase))
            self.sent[:, d, link, :-1] += others * rows_CK * self.routes.bytes_K[phase]
            self.time.to_all(reach, phase, others, (rows_CK * self.routes.bytes_K[phase]).sum(axis=1))

    def result(self) -> Simulated:
        if not self.steps:
            raise BadInput("there was not one step to simulate; give a log with samples")
        parts = (*((part.name, part.tier) for part in self.atlas.parts), ("", 0))
        return Simulated(
            self.plan, self.steps, parts, self.sent, self.messages, self.time.result(self.steps), self.time.latency
        )


def _distinct(key_N: Counts) -> tuple[Counts, Counts]:
    """Distinct keys, ascending, and how often each occurs. Sorts the keys in their place."""
    key_N.sort()
    begins = np.flatnonzero(np.concatenate([[True], key_N[1:] != key_N[:-1]])) if len(key_N) else np.zeros(0, np.int64)
    return key_N[begins], np.diff(begins, append=len(key_N))


def _some(asked: Asked, which: Counts | NDArray[np.bool_]) -> Asked:
    return Asked(*(each[which] for each in asked))


def _joined(one: Asked, other: Asked) -> Asked:
    return Asked(*(np.concatenate(each) for each in zip(one, other, strict=True)))


def _weighed(key_N: Counts, weight_N: Counts, shape: tuple[int, ...]) -> Counts:
    return np.bincount(key_N, weight_N, minlength=int(np.prod(shape))).astype(np.int64).reshape(shape)


def _counted(key_N: Counts, shape: tuple[int, ...]) -> Counts:
    return np.bincount(key_N, minlength=int(np.prod(shape))).reshape(shape)
