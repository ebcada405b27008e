"""Logs replayed on placements: what owners and requesting ranks serve."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.plan.replay import copies_within, predicted_imbalance, replay
from thermocline.plan.balance import Placement, PlacementInput, place, request_probability


def test_a_replay_counts_lookups_of_owners_and_requesting_ranks():
    # Two cards; row 0 has copies. Row 3 is cold and asked for by both cards in the first step, twice by the first.
    placement = Placement(4, 2, np.array([0]), np.zeros(2, np.uint16))
    log = np.array([3, 3, 0, 3, 1, 0])  # card 0: 3 3 0, card 1: 3 1 0
    owner, _ = placement.owner_and_place(np.array([3, 1]))
    load = np.zeros(2)
    load[0] += 2  # card 0 serves its second 3 and its 0
    load[1] += 1  # card 1 its 0
    load[owner[0]] += 2
    load[owner[1]] += 1
    assert replay([placement], [log], [3], window=3) == [pytest.approx(load.max() / 3)]


def test_a_partial_window_is_not_counted():
    placement = Placement(10, 2, np.zeros(0, np.int64), np.zeros(5, np.uint16))
    assert len(replay([placement], [np.arange(8 * 7 + 5) % 10], [4], window=7)) == 3
    assert replay([placement], [np.arange(8)], [4], window=5) == []


def test_a_replay_of_the_profiled_log_is_what_was_predicted():
    rng = np.random.default_rng(3)
    log = rng.permutation(2000)[np.minimum(rng.zipf(1.3, 400_000), 2000) - 1]
    ids, counts = np.unique(log, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    weights = request_probability(counts[order], 500)
    heat = PlacementInput(2000, ids[order], weights, 20)
    (placement,), load_C = place([heat], 8)
    found = replay([placement], [log], [500], window=10_000)
    assert predicted_imbalance(8 * load_C, 8 * 500) < 1.02 and max(found) < 1.05


def test_replicas_go_to_rows_with_most_weight_per_byte():
    tables = {"small": (4, np.array([9.0, 8.0, 7.0, 6.0]), 10.0), "wide": (4, np.array([55.0, 1.0, 1.0, 1.0]), 100.0)}
    assert copies_within(tables, 2, 40 / 440) == {"small": 4, "wide": 0}
    assert copies_within(tables, 2, 140 / 440) == {"small": 4, "wide": 1}
    assert copies_within(tables, 2, 0.0) == {"small": 0, "wide": 0}
