"""The way of one batch to its rows, and of their gradients back.

A card asks for distinct rows only. By part:

    tier 1           the row is here
    tier 3, flat     asker -> owner
    tier 2           asker -> the card of its own node that holds the row
    tier 3, node     asker -> the card of its node with the owner's number -> owner, so that a node asks once for a row

Gradients go the same ways, and wherever several meet they are summed in the order of the ranks, so the sum is the same in every
run. Copied rows are then made equal: tier 1 over the cards of the node, then both tiers between the nodes, to the row's home;
the sum made there goes back to all who hold the row, and each of them takes the same step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.layout import Layout
from ..rows.arena import Arena, TableSpec
from .atlas import Atlas, Where
from .held import Held, Records
from .hop import Hop, spread, sum_rows
from .meter import Meter
from .routes import FLAT, HERE, NODE, Kind, Reach, Routes, member
from .world import Group, World


class Ways:
    """What all journeys of a collection share."""

    def __init__(self, world: World, atlas: Atlas, held: Held, meter: Meter) -> None:
        self.world, self.atlas, self.held, self.meter = world, atlas, held, meter
        self.routes = Routes(atlas.parts, world.nodes, world.cards)
        self.route_K = torch.from_numpy(self.routes.route_K).to(atlas.device)
        self.width = max(part.dim for part in atlas.parts)
        # Sums of gradients by global row: one table of all rows, in no memory.
        arena = Arena([TableSpec(atlas.rows, self.width)], device="meta")
        fields = [list(field) for field in arena.layout.tables.features]
        self.all_rows = Layout.of(torch.tensor(fields, device=atlas.device), arena.spec)


class Journey:
    """One batch: `rows_U` are its distinct global rows, ascending."""

    def __init__(self, ways: Ways, rows_U: Tensor) -> None:
        self.ways, self.rows_U = ways, rows_U
        self.where = ways.atlas(rows_U)
        route_U = ways.route_K[self.where.part_N]
        self.here_H, self.flat_N, self.node_N = ((route_U == route).nonzero()[:, 0] for route in (HERE, FLAT, NODE))
        self.flat: Hop | None = None
        self.node: Hop | None = None
        self.far: Hop | None = None

    # -- forward ------------------------------------------------------------------------------------------------------------

    def fetch(self) -> list[tuple[Tensor, Tensor]]:
        """The rows, dequantized: (which of `rows_U`, their values), some at a time."""
        ways, found = self.ways, [(self.here_H, self.ways.held.records(self.where.at(self.here_H)))]
        if ways.routes.flat:
            self.flat = self._ask(self.flat_N, "everyone", ways.world.everyone)
            found.append((self.flat_N, self.flat.answer(ways.held.records(self.flat.where))))
        if ways.routes.in_node:
            self.node = self._ask(self.node_N, "node", ways.world.node)
            found.append((self.node_N, self.node.answer(self._of_node(self.node))))
        return [
            (at_N[at_K], ways.held.values(k, bytes_KB)) for at_N, records in found for k, (at_K, bytes_KB) in records.items()
        ]

    def _ask(self, at_N: Tensor, reach: Reach, group: Group) -> Hop:
        return self._hop(group, reach, self.rows_U[at_N], self.where.at(at_N), "ask")

    def _hop(self, group: Group, reach: Reach, rows_N: Tensor, where: Where, kind: Kind) -> Hop:
        ways = self.ways
        to_N = member(reach, where.home_N, ways.world.cards)
        return Hop(group, ways.atlas, ways.routes, ways.meter, rows_N, where, to_N, kind)

    def _of_node(self, hop: Hop) -> Records:
        """Rows that the cards of this node ask of this one: those of tier 2 lie here, others are asked for in turn, once."""
        ways = self.ways
        if not ways.routes.relayed:
            return ways.held.records(hop.where)
        mine_M = ways.atlas.tier_K[hop.where.part_N] == 2
        self.asked_A = (~mine_M).nonzero()[:, 0]
        rows_V, inverse_A = torch.unique(hop.rows_M[self.asked_A], return_inverse=True)
        where_V = ways.atlas(rows_V)
        self.far = self._hop(ways.world.across, "across", rows_V, where_V, "relay")
        got = self.far.answer(ways.held.records(self.far.where))
        here = mine_M.nonzero()[:, 0]
        records = {k: (here[at_K], bytes_KB) for k, (at_K, bytes_KB) in ways.held.records(hop.where.at(here)).items()}
        for k, (at_K, bytes_KB) in got.items():
            slot_V = torch.zeros_like(rows_V)
            slot_V[at_K] = torch.arange(at_K.numel(), device=slot_V.device)
            wants_A = (where_V.part_N[inverse_A] == k).nonzero()[:, 0]
            records[k] = self.asked_A[wants_A], bytes_KB[slot_V[inverse_A[wants_A]]]
        return records

    # -- backward -----------------------------------------------------------------------------------------------------------

    def bring(self, grads_UW: Tensor) -> tuple[Tensor, Tensor]:
        """Bring summed gradients to where rows are updated: (distinct rows that this card holds, their sums over all cards)."""
        ways = self.ways
        found: list[tuple[Tensor, Tensor]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        if self.flat is not None:
            found.append(self._summed(self.flat.rows_M, self.flat.bring(grads_UW[self.flat_N])))
        if self.node is not None:
            rows_V, sums_VW = self._summed(self.node.rows_M, self.node.bring(grads_UW[self.node_N]))
            tier_V = ways.atlas.tier_K[ways.atlas(rows_V).part_N]
            if ways.routes.second:
                copied.append((rows_V[tier_V == 2], sums_VW[tier_V == 2]))
            if self.far is not None:
                found.append(self._summed(self.far.rows_M, self.far.bring(sums_VW[tier_V == 3])))
        if ways.routes.first:
            copied.append(self._summed_in_node(grads_UW[self.here_H]))
        if copied:
            found.append(self._made_equal(*(torch.cat(each) for each in zip(*copied, strict=True))))
        rows, grads = (torch.cat(each) for each in zip(*found, strict=True))
        return rows, grads

    def _summed(self, rows_M: Tensor, grads_MW: Tensor) -> tuple[Tensor, Tensor]:
        return sum_rows(self.ways.all_rows, rows_M, grads_MW)

    def _summed_in_node(self, grads_HW: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of tier 1, summed over the cards of the node by those with the numbers of the rows' homes."""
        hop = self._hop(self.ways.world.node, "node", self.rows_U[self.here_H], self.where.at(self.here_H), "sync")
        return self._summed(hop.rows_M, hop.bring(grads_HW))

    def _made_equal(self, rows_V: Tensor, sums_VW: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of this node's cards become sums of all nodes', on every card that holds the row."""
        ways, world = self.ways, self.ways.world
        if ways.routes.across:
            hop = self._hop(world.across, "across", rows_V, ways.atlas(rows_V), "sync")
            rows_V, sums_VW = self._summed(hop.rows_M, hop.bring(sums_VW))
            rows_V, sums_VW = spread(world.across, ways.atlas, ways.routes, ways.meter, rows_V, sums_VW)
        if not ways.routes.first:
            return rows_V, sums_VW
        first_V = ways.atlas.tier_K[ways.atlas(rows_V).part_N] == 1
        rows_F, sums_FW = spread(world.node, ways.atlas, ways.routes, ways.meter, rows_V[first_V], sums_VW[first_V])
        return torch.cat([rows_V[~first_V], rows_F]), torch.cat([sums_VW[~first_V], sums_FW])
