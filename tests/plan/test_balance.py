"""Where cold rows lie: a bijection, even by number and by heat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.plan.balance import Placement, PlacementInput, imbalance, place, scatter


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 1000, 99_991])
def test_scatter_is_a_bijection(count):
    assert sorted(scatter(np.arange(count), count)) == list(range(count))


def test_scatter_is_fixed_for_all_time():
    assert scatter(np.array([0, 1, 2, 999_999]), 1_000_000).tolist() == [0, 639398, 900651, 967753]


def test_scatter_of_ten_billion_rows_stays_in_range():
    found = scatter(np.arange(0, 10**10, 10**7 + 19), 10**10)
    assert found.min() >= 0 and found.max() < 10**10 and len(set(found.tolist())) == len(found)


def zipf_heat(rows, exponent, copies, rng):
    ids = rng.permutation(rows)
    return PlacementInput(rows, ids, np.arange(1, rows + 1) ** -exponent, copies)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 3000), cards=st.integers(1, 40), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_rows_without_replicas_are_spread_evenly_over_ranks(rows, cards, share, seed):
    heat = zipf_heat(rows, 1.1, int(share * rows), np.random.default_rng(seed))
    (placement,), _ = place([heat], cards)
    cold = np.setdiff1d(np.arange(rows), placement.copied_H)
    owner, at = placement.owner_and_place(cold)
    assert len(set(zip(owner.tolist(), at.tolist(), strict=True))) == len(cold)
    assert (np.bincount(owner, minlength=cards) <= -(-len(cold) // cards)).all()
    assert placement.has_copies(np.arange(rows)).sum() == heat.copies


@pytest.mark.parametrize("cards", [8, 32])
def test_rotations_balance_heat_that_a_bijection_does_not(cards):
    heat = zipf_heat(4001, 0.8, 16, np.random.default_rng(1))
    (placement,), load_C = place([heat], cards)
    ids, weights = heat.ids_H[16:], heat.weights_H[16:]
    plain = Placement(heat.rows, cards, placement.copied_H, np.zeros_like(placement.rotations_B))
    alone, _ = plain.owner_and_place(ids)
    assert imbalance(np.bincount(alone, weights, minlength=cards)) > 1.05
    assert imbalance(load_C) < 1.01
    turned, _ = placement.owner_and_place(ids)
    np.testing.assert_allclose(np.bincount(turned, weights, minlength=cards), load_C)


def test_tables_balance_each_other():
    rng = np.random.default_rng(2)
    tables = [zipf_heat(rows, 1.0, 0, rng) for rows in (5, 11, 40, 700)]
    tables[0] = PlacementInput(5, tables[0].ids_H, tables[0].weights_H * 1e-3, 0)
    _, load_C = place(tables[2:], 8)
    assert imbalance(load_C) < 1.6
    placements, load_C = place(tables, 8)
    by_hand = sum(
        np.bincount(p.owner_and_place(t.ids_H)[0], t.weights_H, minlength=8) for p, t in zip(placements, tables, strict=True)
    )
    np.testing.assert_allclose(by_hand, load_C)
