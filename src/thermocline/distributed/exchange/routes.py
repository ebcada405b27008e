"""The rules of the exchange: which rank requests a row from which, over which link, and what travels.

The runtime (`batch_exchange.py`, `all_to_all.py`) applies the rules to the tensors of one rank, the simulator to arrays of all
ranks. Both therefore send and count the same bytes.

    route    rows                 reach
    LOCAL    tier 1               the row is on every rank
    FLAT     tier 3, flat         everyone: requester -> owner
    NODE     tier 2, and tier 3   node: requester -> the rank of its node with the local rank of the row's home; from there,
             per node             unless that rank has the row, across: -> the owner, once per node

A reach partitions all ranks into groups: *everyone*, the ranks of a *node*, or *across*: one local rank on all nodes. Within a
group, the row's home determines the member that receives the request.

    kind        what travels
    request     ids to the row, rows back, gradients to the row; the first all-to-all of a batch
    relay       the same, from the rank of the node on to the owner
    sync        ids and gradients of replicated rows to the rank that sums them
    broadcast   ids and sums from that rank to all other members

`plan/cost/phases.py` lists how many exchanges follow one another, and which of them a step waits for.

*Owner-pooled* parts, all of tier 3, exchange sums instead of rows (`owner_pooling.py`), with reach everyone: an id for every
lookup, then the bytes of `sum_bytes_K` for every partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from torch import Tensor

from thermocline.distributed.placement.row_index import TablePart
from thermocline.distributed.placement.table_map import Counts
from thermocline.plan.cost.phases import CommScope, RowKinds
from thermocline.plan.model import LINK_CLASSES, Direction

Kind = Literal["request", "relay", "sync", "broadcast"]
Phase = Literal["ids", "rows", "gradients"]
Numbers = TypeVar("Numbers", int, Tensor, Counts)

LOCAL, FLAT, NODE = range(3)
COUNT_BYTES = 4  # of a number that announces the size of a message
COUNTS = 2  # numbers before an all-to-all: ids to this rank, and ids of all
PHASES: dict[Kind, tuple[Phase, ...]] = {
    "request": ("ids", "rows", "gradients"),
    "relay": ("ids", "rows", "gradients"),
    "sync": ("ids", "gradients"),
    "broadcast": ("ids", "gradients"),
}


def receiver(reach: CommScope, rank: Numbers, home: Numbers, local_size: int) -> Numbers:
    """The rank in the group of `rank` that answers for rows with this home."""
    if reach == "everyone":
        return home
    node, local = (rank, home) if reach == "node" else (home, rank)
    return node // local_size * local_size + local % local_size


def members(reach: CommScope, nodes: int, local_size: int) -> int:
    return {"everyone": nodes * local_size, "node": local_size, "across": nodes}[reach]


def links_of(one_N: Counts, other_N: Counts, local_size: int) -> Counts:
    """The links between pairs of ranks, as indices into LINK_CLASSES."""
    card, node, cluster = (LINK_CLASSES.index(link) for link in ("card", "node", "cluster"))
    near_N = np.where(one_N == other_N, card, node)
    return np.where(one_N // local_size == other_N // local_size, near_N, cluster)


def direction_of(kind: Kind, phase: Phase) -> Direction:
    """The direction under which the traffic meter counts it."""
    return phase if kind in ("request", "relay") else "sync"


class Routes:
    """The routes of the parts of a collection, [K], and the bytes of one row in each phase."""

    def __init__(self, parts: Sequence[TablePart], nodes: int, local_size: int, id_bytes: int) -> None:
        self.nodes, self.local_size = nodes, local_size
        self.route_K = np.array([_route(part) for part in parts])
        self.tier_K = np.array([part.tier for part in parts])
        self.bytes_K: dict[Phase, Counts] = {
            "ids": np.full(len(parts), id_bytes),
            "rows": np.array([part.row_bytes for part in parts]),
            "gradients": np.array([part.gradient_bytes for part in parts]),
        }
        self.tier1, self.tier2 = bool((self.tier_K == 1).any()), bool((self.tier_K == 2).any())
        self.flat = bool((self.route_K == FLAT).any())
        self.relayed_K = (self.route_K == NODE) & (self.tier_K == 3)
        self.relayed = bool(self.relayed_K.any())
        self.in_node = bool((self.route_K == NODE).any())
        self.syncs_nodes = nodes > 1 and (self.tier1 or self.tier2)  # sums of replicated rows cross nodes
        self.owner_pooled_K = np.array([part.owner_pooled for part in parts])
        self.owner_pooled = bool(self.owner_pooled_K.any())
        self.uses = RowKinds(
            flat=bool(((self.route_K == FLAT) & ~self.owner_pooled_K).any()), relayed=self.relayed, second=self.tier2,
            first=self.tier1, summed=self.owner_pooled, slots=any(part.slots for part in parts),
        )  # fmt: skip
        self.sum_bytes_K: dict[Phase, Counts] = self.bytes_K | {"rows": np.array([part.sum_bytes for part in parts])}
        self.exchanges = 1 + self.owner_pooled  # of rows, and of sums
        self.header_numbers = 1 + COUNTS * self.exchanges  # before a batch: what the rank does, and counts


def _route(part: TablePart) -> int:
    return LOCAL if part.tier == 1 else FLAT if part.tier == 3 and part.exchange == "flat" else NODE
