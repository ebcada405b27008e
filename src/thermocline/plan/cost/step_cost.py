"""What a step costs, from how hot the rows are: expected bytes over every class of links, and through card memory.

Askers. With n lookups of a table on a card in a step, of which a share p goes to a row, the row is asked for

    by a given card         q1 = 1 - (1 - p)^n
    by a given node         qG = 1 - (1 - p)^(n G)       G cards a node
    by any card at all      qW = 1 - (1 - p)^(n W)       W = N G cards, N nodes

A log has sessions and fashions: consecutive samples repeat ids more often than independent ones. Where the heat file has
counted repeats, n is cut to the number of independent lookups that have as many distinct ids (`read_heat.fresh`).

Only distinct rows travel: each card (flat) or each node asks once. Bytes that one card sends in a step for one row, as a mean
over cards; i bytes of an id, b of a row on the wire, g of a gradient:

    tier 3, flat       node     q1 (G-1)/W  (i | b | g)            ids, rows, gradients
                       cluster  q1 (W-G)/W  (i | b | g)
    tier 3, per node   node     q1 (G-1)/G  (i | b | g)            to the card of the node that has the owner's place
                       cluster  qG/G (N-1)/N  (i | b | g)          and from there, once, to the owner
    tier 2             node     q1 (G-1)/G  (i | b | g)
                       cluster  (qG/G (N-1)/N + qW/W (N-1)) (i+g)  sync: to the one who sums, and the sum to all nodes
    tier 1             node     (q1 + qW) (G-1)/G (i+g)            sync, inside the node
                       cluster  as tier 2

A row on the wire is as it is stored; one with an fp32 slot travels in fp32, one with an int8 slot in int8.

Card memory. An exchanged row is read by its owner, written to a buffer and read from it again where it arrives; an update reads
and writes the row and its state on every card that holds a copy, which is what replicas cost even where no link is busy.

Host memory. The codes of a table may lie in host memory, split row-wise, where nothing else fits. Rows without a slot are then
read over the card's link to the host when they are asked for, and read and written when they are updated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput
from thermocline.plan.model import DIRECTIONS, Exchange
from thermocline.plan.topology import Topology

from .memory import ID_BYTES, Store, row_bytes

Floats = NDArray[np.float64]

NODE, CLUSTER = range(2)  # link classes as array indices
IDS, ROWS, GRADIENTS, SYNC = range(len(DIRECTIONS))
TOUCHES = 3  # times that card memory is read or written for a row that is exchanged


@dataclass(frozen=True)
class Machine:
    """The cluster as the cost model sees it: rates in bytes a second and card, latencies in seconds."""

    nodes: int
    cards: int  # of a node
    memory_rate: float
    node_rate: float
    cluster_rate: float
    node_latency: float = 0.0
    cluster_latency: float = 0.0
    host_rate: float = 0.0  # 0: no rows in host memory
    id_bytes: int = ID_BYTES  # of an id on the wire

    @property
    def all(self) -> int:
        return self.nodes * self.cards

    @classmethod
    def of(cls, topology: Topology, id_bytes: int = ID_BYTES) -> Machine:
        links = topology.links
        if topology.nodes > 1 and links.cluster is None:
            raise BadInput(f"the topology has {topology.nodes} nodes, but no links.cluster between them: add it")
        far = links.cluster or links.node
        return cls(
            topology.nodes, topology.cards_per_node, topology.card.bandwidth,
            links.node.bandwidth, far.bandwidth, links.node.latency, far.latency,
            links.host.bandwidth if links.host else 0.0, id_bytes,
        )  # fmt: skip

    @property
    def seconds_L(self) -> Floats:
        """Seconds a byte over each class of links."""
        return np.array([1 / self.node_rate, 1 / self.cluster_rate])


class Askers(NamedTuple):
    """How probable it is that a row is asked for in a step: by a given card, by a given node, by any card."""

    card: Floats
    node: Floats
    any: Floats


class Fresh(NamedTuple):
    """How many of the lookups of a card, a node and the cluster count as drawn on their own; the others repeat ids of the same
    step more often than chance would (see `read_heat.fresh`)."""

    card: float | Floats = 1.0
    node: float | Floats = 1.0
    any: float | Floats = 1.0


INDEPENDENT = Fresh()


def askers(share: Floats, lookups: float | Floats, machine: Machine, fresh: Fresh = INDEPENDENT) -> Askers:
    """Of rows that take these shares of a table's lookups, `lookups` of them a card and step."""
    with np.errstate(divide="ignore", invalid="ignore"):
        stay = np.where(share > 0, np.log1p(-np.minimum(share, 1.0)), 0.0) * lookups  # log of the chance that a card stays away
    stay = np.where(np.isnan(stay), 0.0, stay)
    counts = (fresh.card, fresh.node * machine.cards, fresh.any * machine.all)
    return Askers(*(np.asarray(-np.expm1(stay * count), np.float64) for count in counts))


def moved(asked: Askers, machine: Machine, tier: int, exchange: Exchange, wire: Floats, gradient: float | Floats) -> Floats:
    """Bytes [link, direction, ...] that a card sends in a step for one row; `gradient` is 0 where nothing trains."""
    cards, nodes, all_cards = machine.cards, machine.nodes, machine.all
    sent = np.zeros((2, len(DIRECTIONS), *np.shape(asked.card)))
    payload = (float(machine.id_bytes), wire, gradient)  # by direction: ids, rows, gradients
    inside, between = asked.card * (cards - 1) / cards, asked.node / cards * (nodes - 1) / nodes
    if tier == 3 and exchange == "flat":
        inside, between = asked.card * (cards - 1) / all_cards, asked.card * (all_cards - cards) / all_cards
    if tier != 1:
        for direction, size in enumerate(payload):
            sent[NODE, direction] = inside * size
            if tier == 3:
                sent[CLUSTER, direction] = between * size
    if tier != 3:
        summed = np.where(np.asarray(gradient) > 0, machine.id_bytes + np.asarray(gradient), 0.0)
        sent[CLUSTER, SYNC] = (between + asked.any / all_cards * (nodes - 1)) * summed
        if tier == 1:
            sent[NODE, SYNC] = (inside + asked.any * (cards - 1) / cards) * summed
    return sent


def touched(asked: Askers, machine: Machine, tier: int, exchange: Exchange, wire: Floats, gradient: float | Floats,
            update: float | Floats) -> tuple[Floats, Floats]:  # fmt: skip
    """Bytes of card memory for one row, beyond what a table on one card would read anyway: in the lookup, and in the update.

    `update` is what updating one copy of the row reads and writes.
    """
    copies = {1: 1.0, 2: 1 / machine.cards, 3: 1 / machine.all}[tier]  # on a card, as a mean
    here = {1: 0.0, 2: 1 / machine.cards, 3: 1 / (machine.cards if exchange == "node" else machine.all)}[tier]
    passing = asked.card * (1 - here) if tier != 1 else np.zeros_like(asked.card)
    if tier == 3 and exchange == "node":
        passing = passing + asked.node / machine.cards * (machine.nodes - 1) / machine.nodes
    return TOUCHES * passing * wire, TOUCHES * passing * gradient + asked.any * copies * update


def stays(asked: Askers, machine: Machine, tier: int, exchange: Exchange, wire: Floats, gradient: float | Floats) -> Floats:
    """Bytes [direction, ...] of one row that a card finds with itself when it asks: no link sees them. One card asks nobody."""
    here = {1: 0.0, 2: 1 / machine.cards, 3: 1 / (machine.cards if exchange == "node" else machine.all)}[tier]
    found = np.zeros((len(DIRECTIONS), *np.shape(asked.card)))
    if machine.all == 1:
        return found
    found[IDS], found[ROWS], found[GRADIENTS] = (asked.card * here * size for size in (float(machine.id_bytes), wire, gradient))
    return found


def passing(asked: Askers, machine: Machine, tier: int, exchange: Exchange, wire: Floats, gradient: float | Floats) -> Floats:
    """What `stays`, and more that a card has in the messages of a step without a link that sees it: what it relays to itself,
    and its own part of the sums of copied rows."""
    found = stays(asked, machine, tier, exchange, wire, gradient)
    if machine.all == 1:
        return found
    once = asked.node / machine.all  # of a row that a node asks for, on the card that asks for it and has it
    if tier == 3 and exchange == "node":
        found[:SYNC] += [once * size for size in (float(machine.id_bytes), wire + 0 * once, gradient + 0 * once)]
    if tier != 3:
        summed = np.where(np.asarray(gradient) > 0, machine.id_bytes + np.asarray(gradient), 0.0)
        found[SYNC] = (once + asked.card / machine.cards * (tier == 1)) * summed
    return found


def held_buffers(sent: Floats, passing: Floats, ahead: int = 2) -> Floats:
    """Bytes of exchange buffers: messages of a step, traffic [link, direction, ...] and what goes with it to the card itself,
    as much again that is received; ids and rows of `ahead` batches, gradients and sums of one."""
    each = sent.sum(axis=0) + passing
    return np.asarray(2 * (ahead * (each[IDS] + each[ROWS]) + each[GRADIENTS] + each[SYNC]), np.float64)


def wire_bytes(dim: int, store: Store, first_K: Floats, rows_K: Floats) -> tuple[Floats, Floats, Floats]:
    """Of the rows of each step (its first row's rank, its rows): bytes of a row on the wire, shares with an fp32 and an int8
    slot. The hottest rows have the slots."""
    total = float(rows_K.sum())
    full = min(store.full, 1.0) * total
    near = min(store.near * total, total - full)
    with_full_K = np.clip((full - first_K) / rows_K, 0.0, 1.0)
    with_near_K = np.clip((full + near - first_K) / rows_K, 0.0, 1.0) - with_full_K
    stored = float(row_bytes(dim, store.base))
    wire_K = stored + with_full_K * (4.0 * dim - stored) + with_near_K * (row_bytes(dim, "int8") - stored)
    return wire_K, with_full_K, with_near_K


def owners_of_bag(lookups_a_bag: float, cards: int) -> float:
    """On how many of so many cards the rows of one bag lie, expected."""
    return -cards * float(np.expm1(lookups_a_bag * np.log1p(-1.0 / cards))) if cards > 1 else min(1.0, lookups_a_bag)
