"""The cost formulas against random exchanges in which every byte is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan.baselines import make_baseline_plan
from thermocline.heat.curve import Curve
from thermocline.plan.cost import memory
from thermocline.plan.cost.memory import ID_BYTES, RowPrecision, exchange_bytes, row_bytes
from thermocline.plan.cost.step_cost import (
    CLUSTER,
    GRADIENTS,
    IDS,
    NODE,
    ROWS,
    SYNC,
    Cluster,
    buffer_bytes,
    bytes_local,
    bytes_sent,
    expected_owners,
    memory_traffic,
    request_probability,
    wire_bytes,
)
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

WIRE, GRADIENT = 132.0, 512.0
STEPS = 3000


def cluster_of(nodes, gpus):
    return Cluster(nodes, gpus, 1e12, 1e11, 1e10)


def drawn(nodes, cards, share, lookups, rng):
    """Which ranks [step, node, GPU] request one row in many steps."""
    return rng.binomial(lookups, share, size=(STEPS, nodes, cards)) > 0


def counted(asked, tier, exchange, owner):
    """Bytes [link, direction] that a rank sends for the row in a step; `owner` is (node, GPU)."""
    steps, nodes, cards = asked.shape
    sent = np.zeros((2, 4))
    node, card = owner
    by_node = asked.any(axis=2)
    sizes = {IDS: ID_BYTES, ROWS: WIRE, GRADIENTS: GRADIENT}
    inside = asked.sum() - asked[:, :, card].sum()  # to the GPU of their own node with the owner's local rank
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
def test_expected_bytes_equal_those_of_random_exchanges(nodes, cards, share, lookups, tier, exchange, seed):
    rng = np.random.default_rng(seed)
    cluster = cluster_of(nodes, cards)
    asked = drawn(nodes, cards, share, lookups, rng)
    # The mean over all possible owners.
    owners = [(n, c) for n in range(nodes) for c in range(cards)]
    found = np.mean([counted(asked, tier, exchange, owner) for owner in owners], axis=0)
    expected = bytes_sent(
        request_probability(np.array([share]), lookups, cluster), cluster, tier, exchange, np.array([WIRE]), GRADIENT
    )[..., 0]
    chance = -np.expm1(lookups * np.log1p(-share))
    noise = 5 / np.sqrt(STEPS * nodes * cards * max(chance, 1e-4)) * (nodes * cards)
    np.testing.assert_allclose(found, expected, rtol=noise, atol=2.0 * nodes * cards * noise)


def test_rows_with_all_or_no_lookups_are_requested_always_or_never():
    asked = request_probability(np.array([1.0, 0.0, 0.5]), 3.0, cluster_of(2, 4))
    assert asked.rank.tolist() == [1.0, 0.0, pytest.approx(0.875)]
    assert asked.any[2] == pytest.approx(1 - 0.5**24)
    assert request_probability(np.array([1.0]), 0.0, cluster_of(2, 4)).rank.tolist() == [0.0]


def test_tiny_shares_keep_their_digits():
    asked = request_probability(np.array([1e-14]), 1000.0, cluster_of(512, 8))
    assert asked.rank[0] == pytest.approx(1e-11, rel=1e-9) and asked.any[0] == pytest.approx(4096e-11, rel=1e-6)


@pytest.mark.parametrize("tier", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["flat", "node"])
def test_a_single_rank_moves_nothing(tier, exchange):
    alone = cluster_of(1, 1)
    asked = request_probability(np.array([0.1, 0.9]), 10, alone)
    assert not bytes_sent(asked, alone, tier, exchange, np.array([WIRE, WIRE]), GRADIENT).any()
    looked, updated = memory_traffic(asked, alone, tier, exchange, np.array([WIRE, WIRE]), GRADIENT, 100.0)
    assert not looked.any() and updated.tolist() == (asked.any * 100).tolist()


def test_serving_sends_no_gradients_and_no_sync():
    cluster = cluster_of(2, 2)
    asked = request_probability(np.array([0.1]), 10, cluster)
    for tier in (1, 2, 3):
        sent = bytes_sent(asked, cluster, tier, "flat", np.array([WIRE]), 0.0)
        assert not sent[:, [GRADIENTS, SYNC]].any()


def test_replicas_send_no_fewer_bytes_between_nodes_than_per_node_exchange():
    cluster = cluster_of(4, 8)
    for share in (1e-6, 1e-4, 1e-2, 0.5):
        asked = request_probability(np.array([share]), 4096, cluster)
        per_node = bytes_sent(asked, cluster, 3, "node", np.array([GRADIENT]), GRADIENT)[CLUSTER].sum()
        copied = bytes_sent(asked, cluster, 1, "flat", np.array([GRADIENT]), GRADIENT)[CLUSTER].sum()
        assert copied >= per_node * 0.99


def test_buffers_equal_exchange_bytes():
    cluster = cluster_of(2, 4)
    asked = request_probability(np.array([0.001]), 512, cluster)
    given = (asked, cluster, 3, "flat", np.array([float(row_bytes(128, "int8"))]), 512.0)
    asks = float(asked.rank[0])  # from others and from itself
    found = buffer_bytes(bytes_sent(*given), bytes_local(*given))[0]
    assert found == pytest.approx(sum(exchange_bytes(asks, asks, 128, "int8").values()))


def test_the_hottest_rows_travel_in_the_precision_of_their_slots():
    wire, full, near = wire_bytes(64, RowPrecision("int4", 0.1, 0.2), np.array([0.0, 10.0, 25.0]), np.array([10.0, 15.0, 75.0]))
    assert full.tolist() == [1.0, 0.0, 0.0] and near.tolist() == [0.0, 1.0, pytest.approx(5 / 75)]
    assert wire.tolist() == [256.0, 68.0, pytest.approx((5 * 68 + 70 * 36) / 75)]


def test_expected_owners_of_a_bag():
    rng = np.random.default_rng(5)
    found = np.mean([len(set(rng.integers(0, 8, 20))) for _ in range(4000)])
    assert expected_owners([(20, 1)], 8) == pytest.approx(found, rel=0.01)
    assert expected_owners([(1, 1)], 8) == pytest.approx(1.0) and expected_owners([(20, 1)], 1) == 1.0


def test_owners_of_bags_of_many_lengths_with_hot_rows():
    rng = np.random.default_rng(6)
    lengths, hot = rng.geometric(1 / 9, 6000), np.array([0.3, 0.2, 0.05])
    taken = np.append(hot, np.zeros(5)) + (1 - hot.sum()) / 8
    found = np.mean([len(set(rng.choice(8, size, p=taken))) for size in lengths])
    known = [(float(size), float((lengths == size).mean())) for size in np.unique(lengths)]
    assert expected_owners(known, 8, hot) == pytest.approx(found, rel=0.015)
    assert expected_owners([(9.0, 1.0)], 8) > 1.2 * found  # what equal bags without hot rows would have


@pytest.mark.parametrize("alone, gpus, want", [(None, 4, 1e10), (3e10, 4, 3e10), (9e10, 4, 4e10), (5e9, 4, 1e10)])
def test_one_gpu_alone_has_at_most_the_link_of_its_node(alone, gpus, want):
    assert Link(bandwidth=1e10, alone=alone).peak(gpus) == want


@pytest.mark.parametrize("alone, busiest", [(None, 4e10), (2e10, 3e10)])
def test_an_exchange_takes_as_long_as_its_busiest_gpu_or_node(alone, busiest):
    links = Links(node=Link(bandwidth=1e12), cluster=Link(bandwidth=1e10, alone=alone))
    cluster = Cluster.of(Topology(nodes=2, gpus_per_node=2, gpu=GpuSpec(memory=1 << 40, bandwidth=1e12), links=links))
    sent = np.array([[9e10, 0, 0, 0], [4e10, 2e10, 1e10, 0]])  # [link, rank]; links are used at once
    assert float(cluster.uneven_seconds(sent)) == pytest.approx(busiest / 1e10)


def test_ids_of_large_collections_are_twice_as_wide_in_plans():
    rows = memory.SMALL
    ids = []
    for more in (0, 1):
        tables = TablesConfig(
            batch=512, tables=(TableConfig(name="item", rows=rows + more, dim=8, precision="int2", cache=0.0),)
        )
        links = Links(node=Link(bandwidth=1e9), cluster=Link(bandwidth=1e8))
        cluster = Topology(nodes=2, gpus_per_node=2, gpu=GpuSpec(memory=1 << 36, bandwidth=1e12), links=links)
        plan = make_baseline_plan("row-wise", tables, {"item": Curve.zipf(rows, 1.05, 1e9)}, cluster)
        ids.append(plan.bytes_over("cluster", "ids"))
    assert ids[1] == pytest.approx(2 * ids[0], rel=1e-6)
