"""The formulas of the exchange against exchanges that are drawn: rows, askers, owners, and every byte counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.heat.curve import Curve
from thermocline.plan.cost import memory
from thermocline.plan.cost.memory import ID_BYTES, Store, exchange_bytes, row_bytes
from thermocline.plan.cost.step_cost import (
    CLUSTER,
    GRADIENTS,
    IDS,
    NODE,
    ROWS,
    SYNC,
    Machine,
    askers,
    held_buffers,
    moved,
    owners_of_bag,
    passing,
    touched,
    wire_bytes,
)
from thermocline.plan.make import make_plain
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.topology import Card, Link, Links, Topology

WIRE, GRADIENT = 132.0, 512.0
STEPS = 3000


def machine(nodes, cards):
    return Machine(nodes, cards, 1e12, 1e11, 1e10)


def drawn(nodes, cards, share, lookups, rng):
    """Which cards [step, node, card] ask for one row in many steps."""
    return rng.binomial(lookups, share, size=(STEPS, nodes, cards)) > 0


def counted(asked, tier, exchange, owner):
    """Bytes [link, direction] a card sends for the row in a step, from who asked; `owner` is (node, card)."""
    steps, nodes, cards = asked.shape
    sent = np.zeros((2, 4))
    node, card = owner
    by_node = asked.any(axis=2)
    sizes = {IDS: ID_BYTES, ROWS: WIRE, GRADIENTS: GRADIENT}
    inside = asked.sum() - asked[:, :, card].sum()  # to the card of their own node that has the owner's place
    if tier == 3 and exchange == "flat":
        near = asked[:, node].sum() - asked[:, node, card].sum()
        far = asked.sum() - asked[:, node].sum()
    else:
        near, far = inside, by_node.sum() - by_node[:, node].sum()
    if tier != 1:
        for direction, size in sizes.items():
            sent[NODE, direction] = near * size
            sent[CLUSTER, direction] = far * size * (tier == 3)
    if tier != 3:
        anyone = asked.any(axis=(1, 2)).sum()
        sent[CLUSTER, SYNC] = (by_node.sum() - by_node[:, node].sum() + anyone * (nodes - 1)) * (ID_BYTES + GRADIENT)
        if tier == 1:
            sent[NODE, SYNC] = (inside + anyone * nodes * (cards - 1)) * (ID_BYTES + GRADIENT)
    return sent / steps / (nodes * cards)


@settings(max_examples=30, deadline=None)
@given(
    nodes=st.integers(1, 4), cards=st.integers(1, 4), share=st.sampled_from([1e-4, 1e-3, 0.01, 0.2]),
    lookups=st.sampled_from([1, 7, 100]), tier=st.sampled_from([1, 2, 3]), exchange=st.sampled_from(["flat", "node"]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_expected_bytes_are_what_drawn_exchanges_send(nodes, cards, share, lookups, tier, exchange, seed):
    rng = np.random.default_rng(seed)
    cluster = machine(nodes, cards)
    asked = drawn(nodes, cards, share, lookups, rng)
    # The owner is anyone, so count for every one of them.
    owners = [(n, c) for n in range(nodes) for c in range(cards)]
    found = np.mean([counted(asked, tier, exchange, owner) for owner in owners], axis=0)
    expected = moved(askers(np.array([share]), lookups, cluster), cluster, tier, exchange, np.array([WIRE]), GRADIENT)[..., 0]
    chance = -np.expm1(lookups * np.log1p(-share))
    noise = 5 / np.sqrt(STEPS * nodes * cards * max(chance, 1e-4)) * (nodes * cards)
    np.testing.assert_allclose(found, expected, rtol=noise, atol=2.0 * nodes * cards * noise)


def test_a_row_of_all_lookups_is_asked_for_by_everyone_and_one_of_none_by_nobody():
    asked = askers(np.array([1.0, 0.0, 0.5]), 3.0, machine(2, 4))
    assert asked.card.tolist() == [1.0, 0.0, pytest.approx(0.875)]
    assert asked.any[2] == pytest.approx(1 - 0.5**24)
    assert askers(np.array([1.0]), 0.0, machine(2, 4)).card.tolist() == [0.0]


def test_tiny_shares_keep_their_digits():
    asked = askers(np.array([1e-14]), 1000.0, machine(512, 8))
    assert asked.card[0] == pytest.approx(1e-11, rel=1e-9) and asked.any[0] == pytest.approx(4096e-11, rel=1e-6)


@pytest.mark.parametrize("tier", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["flat", "node"])
def test_on_one_card_nothing_moves(tier, exchange):
    alone = machine(1, 1)
    asked = askers(np.array([0.1, 0.9]), 10, alone)
    assert not moved(asked, alone, tier, exchange, np.array([WIRE, WIRE]), GRADIENT).any()
    looked, updated = touched(asked, alone, tier, exchange, np.array([WIRE, WIRE]), GRADIENT, 100.0)
    assert not looked.any() and updated.tolist() == (asked.any * 100).tolist()


def test_a_cluster_that_serves_sends_no_gradients_and_needs_no_sync():
    cluster = machine(2, 2)
    asked = askers(np.array([0.1]), 10, cluster)
    for tier in (1, 2, 3):
        sent = moved(asked, cluster, tier, "flat", np.array([WIRE]), 0.0)
        assert not sent[:, [GRADIENTS, SYNC]].any()


def test_replicas_send_no_less_between_nodes_than_asking_once_a_node():
    # Point 2 of the study: exact replication buys time, not bytes.
    cluster = machine(4, 8)
    for share in (1e-6, 1e-4, 1e-2, 0.5):
        asked = askers(np.array([share]), 4096, cluster)
        per_node = moved(asked, cluster, 3, "node", np.array([GRADIENT]), GRADIENT)[CLUSTER].sum()
        copied = moved(asked, cluster, 1, "flat", np.array([GRADIENT]), GRADIENT)[CLUSTER].sum()
        assert copied >= per_node * 0.99


def test_buffers_are_those_of_the_memory_arithmetic():
    cluster = machine(2, 4)
    asked = askers(np.array([0.001]), 512, cluster)
    given = (asked, cluster, 3, "flat", np.array([float(row_bytes(128, "int8"))]), 512.0)
    asks = float(asked.card[0])  # of others, and of the card itself
    found = held_buffers(moved(*given), passing(*given))[0]
    assert found == pytest.approx(sum(exchange_bytes(asks, asks, 128, "int8").values()))


def test_the_hottest_rows_travel_as_their_slots_hold_them():
    wire, full, near = wire_bytes(64, Store("int4", 0.1, 0.2), np.array([0.0, 10.0, 25.0]), np.array([10.0, 15.0, 75.0]))
    assert full.tolist() == [1.0, 0.0, 0.0] and near.tolist() == [0.0, 1.0, pytest.approx(5 / 75)]
    assert wire.tolist() == [256.0, 68.0, pytest.approx((5 * 68 + 70 * 36) / 75)]


def test_a_bag_is_summed_by_as_many_owners_as_its_rows_have():
    rng = np.random.default_rng(5)
    found = np.mean([len(set(rng.integers(0, 8, 20))) for _ in range(4000)])
    assert owners_of_bag(20, 8) == pytest.approx(found, rel=0.01)
    assert owners_of_bag(1, 8) == pytest.approx(1.0) and owners_of_bag(20, 1) == 1.0


def test_ids_of_large_collections_are_twice_as_wide_and_plans_know():
    rows = memory.SMALL
    ids = []
    for more in (0, 1):
        tables = Tables(batch=512, tables=(TableFile(name="item", rows=rows + more, dim=8, precision="int2", cache=0.0),))
        links = Links(node=Link(bandwidth=1e9), cluster=Link(bandwidth=1e8))
        cluster = Topology(nodes=2, cards_per_node=2, card=Card(memory=1 << 36, bandwidth=1e12), links=links)
        plan = make_plain("row-wise", tables, {"item": Curve.zipf(rows, 1.05, 1e9)}, cluster)
        ids.append(plan.bytes_over("cluster", "ids"))
    assert ids[1] == pytest.approx(2 * ids[0], rel=1e-6)
