"""The traffic meter equals a count by hand in numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from cases import TABLES, batches, heat_of, plan_of, table_plan
from test_placement import CPU, IDS

from thermocline.distributed.placement.table_map import make_maps
from thermocline.plan.cost.memory import ID_BYTES
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES
from thermocline.plan.run_file import check_run

ROW_BYTES = {"user": 8 + 4, "item": 8 + 4, "shop": 5 + 4}  # int8 codes and a scale
SIZES = [4, 0, 7, 2]


def link(a, b, cards):
    return "card" if a == b else "node" if a // cards == b // cards else "cluster"


class Hand:
    """Bytes of every rank, counted one row at a time."""

    def __init__(self, nodes, cards, tables, heat):
        self.nodes, self.cards, self.all = nodes, cards, nodes * cards
        self.bytes = [Counter() for _ in range(self.all)]
        maps = make_maps(list(tables.values()), heat, IDS, nodes, cards, CPU)
        for (name, plan), found in zip(tables.items(), maps, strict=True):
            self.table(name, plan, *(each.tolist() for each in found.locate(torch.arange(plan.rows))))

    def add(self, a, b, name, tier, direction, size, own=False):
        if own or a != b:
            self.bytes[a][name, tier, direction, link(a, b, self.cards)] += size

    def table(self, name, plan, tier, home, _):
        rows, dim, features = TABLES[name]
        parts = batches(0, SIZES[: self.all])
        asked = [set(np.concatenate([part[f][0].numpy() for f in features]).tolist()) for part in parts]
        row, gradient = ROW_BYTES[name], 4 * dim
        for r in range(rows):
            who = [rank for rank in range(self.all) if r in asked[rank]]
            node, card = divmod(home[r], self.cards)
            count = {1: self.first, 2: self.second, 3: self.third}[tier[r]]
            count(who, node, card, name, row, gradient, plan.exchange)

    def round_trip(self, a, b, name, tier, row, gradient, own=True):
        """a requests a row of b."""
        self.add(a, b, name, tier, "ids", 4, own)
        self.add(b, a, name, tier, "rows", row, own)
        self.add(a, b, name, tier, "gradients", gradient, own)

    def third(self, who, node, card, name, row, gradient, exchange):
        owner = node * self.cards + card
        if exchange == "flat" or self.nodes == 1:
            for a in who:
                self.round_trip(a, owner, name, 3, row, gradient)
            return
        for n in sorted({a // self.cards for a in who}):
            relay = n * self.cards + card
            for a in who:
                if a // self.cards == n:
                    self.round_trip(a, relay, name, 3, row, gradient)
            self.round_trip(relay, owner, name, 3, row, gradient, own=False)

    def second(self, who, node, card, name, row, gradient, _):
        for a in who:
            self.round_trip(a, a // self.cards * self.cards + card, name, 2, row, gradient)
        self.between_nodes(who, node, card, name, 2, gradient)

    def first(self, who, node, card, name, _, gradient, __):
        for a in who:
            self.add(a, a // self.cards * self.cards + card, name, 1, "sync", 4 + gradient)
        self.between_nodes(who, node, card, name, 1, gradient)
        for n in range(self.nodes if who else 0):
            mine = n * self.cards + card
            for b in range(n * self.cards, (n + 1) * self.cards):
                if b != mine:
                    self.add(mine, b, name, 1, "sync", 4 + gradient)

    def between_nodes(self, who, node, card, name, tier, gradient):
        if self.nodes == 1:
            return
        home = node * self.cards + card
        for n in sorted({a // self.cards for a in who}):
            self.add(n * self.cards + card, home, name, tier, "sync", 4 + gradient)
        for n in range(self.nodes if who else 0):
            if n != node:
                self.add(home, n * self.cards + card, name, tier, "sync", 4 + gradient)


@pytest.mark.parametrize("nodes, cards", [(2, 2), (1, 3), (3, 1)])
def test_bytes_are_those_of_a_hand_count(on_ranks, nodes, cards):
    heat = heat_of()
    tables = {
        "user": table_plan("user", 9, 0, "int8", "flat"),
        "item": table_plan("item", 4, 11, "int8", "node"),
        "shop": table_plan("shop", 0, 0, "int8", "node"),
    }
    plan = plan_of(nodes, cards, list(tables.values()), heat)
    found = on_ranks("measure", nodes * cards, plan, heat, SIZES[: nodes * cards])
    hand = Hand(nodes, cards, tables, heat)
    for (lines, _, _), counted in zip(found, hand.bytes, strict=True):
        metered = {(t, tier, d, at): size for t, tier, d, at, size in lines if t}
        assert metered == {key: size for key, size in counted.items() if size}
    check_run_file(found, plan)


def test_nothing_empty_goes_to_other_nodes_where_nodes_ask_once(on_ranks):
    heat = heat_of()
    for exchange, sends_empty in (("node", False), ("flat", True)):
        plan = plan_of(2, 2, [table_plan(name, 0, 0, "int8", exchange) for name in TABLES], heat)
        found = on_ranks("measure_collectives", 4, plan, heat, SIZES)
        assert all(sent[0] == 1 for sent, *_ in found)  # they meet
        assert any(0 in sent for of_rank in found for sent in of_rank) == sends_empty


def check_run_file(found, plan):
    """run.json has the means over ranks, and can be compared with the plan."""
    run = found[0][2]
    for line in run.traffic:
        at, d = LINK_CLASSES.index(line.link), DIRECTIONS.index(line.direction)
        way = (line.direction, line.link)
        total = sum(each.bytes for lines, _, _ in found for each in lines if (each.direction, each.link) == way)
        assert line.bytes == total / len(found)
        assert line.messages == sum(int(messages[d, at]) for _, messages, _ in found) / len(found)
    sent = sum(each.bytes for lines, _, _ in found for each in lines)
    assert sum(line.bytes for line in run.traffic) == pytest.approx(sent / len(found))
    assert [each.rank for each in run.ranks] == list(range(len(found)))
    assert check_run(plan, run).lines


def test_a_baseline_sends_as_many_rows_as_there_are_lookups(on_ranks):
    heat = heat_of()
    plan = plan_of(1, 2, [table_plan(name, 0, 0, "int8") for name in TABLES], heat)
    found = on_ranks("measure", 2, plan, heat, SIZES[2:], False)
    batch = batches(0, SIZES[2:])
    for rank, (lines, _, _) in enumerate(found):
        for name, (_, dim, features) in TABLES.items():
            sent = {d: sum(each.bytes for each in lines if (each.table, each.direction) == (name, d)) for d in DIRECTIONS}
            lookups = sum(len(batch[rank][feature][0]) for feature in features)
            assert sent["ids"] == lookups * ID_BYTES and sent["gradients"] == lookups * 4 * dim
    for name in TABLES:
        rows = sum(each.bytes for lines, _, _ in found for each in lines if (each.table, each.direction) == (name, "rows"))
        assert rows == ROW_BYTES[name] * sum(len(part[feature][0]) for part in batch for feature in TABLES[name][2])
