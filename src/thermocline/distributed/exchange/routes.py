"""Which card asks which for a row, over which link, and what travels: the rules of the exchange, in one place.

The runtime (`journey.py`, `hop.py`) applies them to tensors, for the rows of one card; the simulator (`simulate.py`) to arrays,
for the rows of all cards at once. So both send, and count, the same.

    route    rows                reach
    HERE     tier 1              the row is here
    FLAT     tier 3, flat        everyone: asker -> owner
    NODE     tier 2, and tier 3  node: asker -> the card of its node with the number of the row's home; from there, if the row
             per node            does not lie there, across: -> the owner, once for the node

A reach is a set of groups that divide all cards: *everyone*, the cards of a *node*, or *across*: those of one number on all
nodes. Within its group, a row is asked of the member that its home says.

    kind     what travels
    ask      ids there, rows back, gradients there; the first way of a batch
    relay    the same, onward from the card that was asked
    sync     ids and gradients of copied rows to the card that sums
    spread   ids and sums from there to all other members

How many exchanges these are, one after the other, and who waits for them: `plan/cost/phases.py`.

Of *summed* parts, which are of tier 3, no rows travel but sums of them: see `shares.py`. Their reach is everyone, and what
travels is an id for every lookup, and back and forth what `sum_bytes_K` says, for every share of a bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thermocline.distributed.placement.row_index import Part
from thermocline.plan.cost.phases import CommScope, RowKinds
from thermocline.plan.model import LINK_CLASSES, Direction, LinkClass

Kind = Literal["ask", "relay", "sync", "spread"]
Phase = Literal["ids", "rows", "gradients"]
Counts = NDArray[np.int64]
Numbers = TypeVar("Numbers", int, Tensor, Counts)

HERE, FLAT, NODE = range(3)
SIZE_BYTES = 4  # of a number by which a card tells another how much will come
TELLING = 2  # such numbers before an exchange: rows that come, and of all
PHASES: dict[Kind, tuple[Phase, ...]] = {
    "ask": ("ids", "rows", "gradients"),
    "relay": ("ids", "rows", "gradients"),
    "sync": ("ids", "gradients"),
    "spread": ("ids", "gradients"),
}


def member(reach: CommScope, home: Numbers, cards: int) -> Numbers:
    """The place in its group of the card that is asked for rows with this home."""
    if reach == "everyone":
        return home
    return home % cards if reach == "node" else home // cards


def rank_of(reach: CommScope, rank: Numbers, place: Numbers, cards: int) -> Numbers:
    """The rank of a member of the group that `rank` is in."""
    if reach == "everyone":
        return place
    return rank // cards * cards + place if reach == "node" else place * cards + rank % cards


def members(reach: CommScope, nodes: int, cards: int) -> int:
    return {"everyone": nodes * cards, "node": cards, "across": nodes}[reach]


def link_of(one: int, other: int, cards: int) -> LinkClass:
    """What joins two cards."""
    return "card" if one == other else "node" if one // cards == other // cards else "cluster"


def links_of(one_N: Counts, other_N: Counts, cards: int) -> Counts:
    """`link_of` as places in LINK_CLASSES."""
    card, node, cluster = (LINK_CLASSES.index(link) for link in ("card", "node", "cluster"))
    near_N = np.where(one_N == other_N, card, node)
    return np.where(one_N // cards == other_N // cards, near_N, cluster)


def direction_of(kind: Kind, phase: Phase) -> Direction:
    """Under which direction the meter counts it."""
    return phase if kind in ("ask", "relay") else "sync"


def own_counts(kind: Kind) -> bool:
    """Whether rows that a card finds with itself are counted: where it asks, as the plan counts them."""
    return kind == "ask"


class Routes:
    """The parts of a collection, [K]: their routes, and the bytes of one row of them in each phase."""

    def __init__(self, parts: Sequence[Part], nodes: int, cards: int, id_bytes: int) -> None:
        self.nodes, self.cards = nodes, cards
        self.route_K = np.array([_route(part) for part in parts])
        self.tier_K = np.array([part.tier for part in parts])
        gradient_K = np.array([part.gradient_bytes for part in parts])
        self.bytes_K: dict[Phase, Counts] = {
            "ids": np.full(len(parts), id_bytes),
            "rows": np.array([part.row_bytes for part in parts]),
            "gradients": gradient_K,
        }
        self.first, self.second = bool((self.tier_K == 1).any()), bool((self.tier_K == 2).any())
        self.flat = bool((self.route_K == FLAT).any())
        self.relayed_K = (self.route_K == NODE) & (self.tier_K == 3)
        self.relayed = bool(self.relayed_K.any())
        self.in_node = bool((self.route_K == NODE).any())
        self.across = nodes > 1 and (self.first or self.second)  # sums of copied rows go between nodes
        self.summed_K = np.array([part.summed for part in parts])
        self.sums = bool(self.summed_K.any())
        self.uses = RowKinds(
            flat=bool(((self.route_K == FLAT) & ~self.summed_K).any()), relayed=self.relayed, second=self.second,
            first=self.first, summed=self.sums, slots=any(part.slots for part in parts),
        )  # fmt: skip
        dim_K = np.array([part.dim for part in parts])
        self.sum_bytes_K: dict[Phase, Counts] = self.bytes_K | {"rows": 4 * dim_K}
        self.exchanges = 1 + self.sums  # of rows, and of sums
        self.meeting = 1 + TELLING * self.exchanges  # numbers before a batch: what a card is about to do, and these


def _route(part: Part) -> int:
    return HERE if part.tier == 1 else FLAT if part.tier == 3 and part.exchange == "flat" else NODE
