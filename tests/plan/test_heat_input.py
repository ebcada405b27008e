"""Access statistics of a profiled log against the rest of the log."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.cost.heat_input import row_stats_of, with_unseen
from thermocline.plan.cost.step_cost import Cluster, request_probability
from thermocline.plan.tables import TableConfig

ONE = Cluster(1, 1, 1.0, 1.0, 1.0)


def distinct(curve, lookups):
    return float((curve.rows_K * request_probability(curve.share_K, lookups, ONE).rank).sum())


@pytest.mark.parametrize(("rows", "exponent"), [(100_003, 0.8), (300_007, 1.05), (10_000_019, 1.2)])
def test_distinct_rows_of_a_step_as_large_as_the_log_are_predicted(rows, exponent):
    rng = np.random.default_rng(5)
    zipf = Curve.zipf(rows, exponent)
    step_N = rng.choice(len(zipf.rows_K), size=100_000, p=zipf.lookups_K / zipf.lookups)
    first_K = np.cumsum(zipf.rows_K) - zipf.rows_K
    ids_N = (first_K[step_N] + rng.integers(0, zipf.rows_K[step_N].astype(np.int64))).astype(np.int64)
    before_N, after_N = ids_N[:50_000], ids_N[50_000:]
    heat = profile_batches([{"item": before_N}], batch=8_191, cards_per_node=1)
    found = row_stats_of(heat, TableConfig(name="item", rows=rows, dim=8), shuffled=True).curve
    assert found.rows == rows and found.lookups == pytest.approx(50_000)
    truth = len(np.unique(after_N))
    assert distinct(found, 50_000.0) == pytest.approx(truth, rel=0.04)
    assert distinct(heat["item"].curve(), 50_000.0) < 0.9 * truth  # counts at face value


def test_rows_stay_in_the_order_of_the_heat_file():
    counts_H = np.array([90, 40, 7, 2, 1, 1, 1, 1, 1])
    for rows in (9, 10, 13, 1000):
        curve = with_unseen(Curve.of_counts(counts_H), rows, (5, 1))
        assert curve.rows == rows and curve.lookups == pytest.approx(counts_H.sum())
        assert (np.diff(curve.share_K) <= 1e-15).all()


def test_rows_that_were_all_seen_often_leave_nothing_for_others():
    counts_H = np.array([90, 40, 7])
    curve = with_unseen(Curve.of_counts(counts_H), 5, (0, 0))
    np.testing.assert_allclose(curve.rows_K, [1, 1, 1, 2])
    np.testing.assert_allclose(curve.lookups_K, [90, 40, 7, 0])
