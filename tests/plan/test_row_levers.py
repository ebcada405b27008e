"""The three levers: harm against enumeration and simulation, choices against brute force, and the bytes they state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from support import has
from thermocline import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profile import TableHeat, hottest_first
from thermocline.plan.cost.collisions import harm, harms
from thermocline.plan.solve.row_levers import FeatureColumn, FeatureRows, hash_sizes, prune, unify


def harm_of(rows: Sequence[int], counts: Sequence[int]) -> float:
    """Of one assignment of ids to rows, by the definition."""
    total = {row: sum(c for r, c in zip(rows, counts, strict=True) if r == row) for row in rows}
    return sum(c * (1 - c / total[row]) for row, c in zip(rows, counts, strict=True)) / sum(counts)


def expected_harm(counts: Sequence[int], kept: int, shared: int) -> float:
    """Over all hash functions; hot ids first."""
    apart = [-1 - i for i in range(kept)]
    found = [harm_of([*apart, *rows], counts) for rows in product(range(shared), repeat=len(counts) - kept)]
    return sum(found) / len(found)


def zipf_counts(ids: int, seed: int) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(seed).zipf(1.7, ids).clip(max=10_000))[::-1]


# -- harm --


@pytest.mark.parametrize("counts", [[5], [7, 1], [3, 3, 3], [100, 10, 2, 1, 1], [1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("shared", [1, 2, 3])
def test_harm_is_the_mean_over_all_hash_functions(counts: list[int], shared: int) -> None:
    for kept in range(len(counts) + 1):
        expected = expected_harm(counts, kept, shared)
        assert harm(Curve.of_counts(np.array(counts)), kept, shared) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("shared", [1, 7, 150, 4000])
def test_harm_of_many_ids_is_what_simulation_finds(shared: int) -> None:
    counts, random, found = zipf_counts(3001, 1), np.random.default_rng(2), []
    for _ in range(100):
        row_R = random.integers(0, shared, len(counts))
        heat_B, squares_B = np.bincount(row_R, counts), np.bincount(row_R, counts**2)
        found.append(1 - (squares_B[heat_B > 0] / heat_B[heat_B > 0]).sum() / counts.sum())
    error = 5 * np.std(found) / 10 + 1e-3
    assert harm(Curve.of_counts(counts), 0, shared) == pytest.approx(np.mean(found), abs=error)


@pytest.mark.parametrize("curve", [Curve.of_counts(zipf_counts(777, 3)), Curve.zipf(10**7, 1.05), Curve.zipf(5000, 0.0)])
def test_harm_falls_convexly_with_the_rows(curve: Curve) -> None:
    shared_N = np.arange(1.0, 60.0)
    lost_KN = harms(curve, shared_N)
    assert (np.diff(lost_KN[0]) < 0).all() and (np.diff(lost_KN[0], 2) > -1e-7).all()
    assert (np.diff(lost_KN, axis=0) <= 1e-9).all() and (lost_KN[-1] == 0).all()


def test_harm_and_harms_agree() -> None:
    curve = Curve.of_counts(zipf_counts(3001, 4))
    lost_KN = harms(curve, np.array([1.0, 9.0, 300.0]))
    reach = np.cumsum(curve.rows_K)
    for step in (0, 1, 100, len(reach) - 1):
        kept = int(reach[step])
        assert [harm(curve, kept, shared) for shared in (1, 9, 300)] == pytest.approx(lost_KN[step + 1], abs=1e-4)


# -- hash sizes --


def best_by_brute_force(tables: Sequence[Sequence[int]], budget: float, row: float, id: float, hot: bool) -> float:
    """The least harm, in lookups, of all choices that fit."""
    choices = []
    for counts in tables:
        some = []
        for kept, shared in product(range(len(counts) + 1), range(1, len(counts) + 1)):
            if hot or kept == 0 or (kept == len(counts) and shared == 1):
                lost = harm(Curve.of_counts(np.array(counts)), kept, shared) * sum(counts)
                some.append((kept * (row + id) + shared * row, lost))
        choices.append(some)
    fitting = [sum(lost for _, lost in each) for each in product(*choices) if sum(b for b, _ in each) <= budget]
    return min(fitting)


SMALL = ([60, 20, 5, 2, 1], [30, 30, 10, 1, 1, 1], [9, 1])


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("row, id", [(1.0, 0.0), (8.0, 8.0), (64.0, 8.0)])
def test_the_choice_is_the_optimum_but_for_the_last_step(row: float, id: float, hot: bool) -> None:
    curves = {f"t{i}": Curve.of_counts(np.array(counts)) for i, counts in enumerate(SMALL)}
    lookups, beyond = sum(map(sum, SMALL)), []
    for rows in range(3, 15):
        found = hash_sizes(curves, rows * row, row, id, keep_hot=hot)
        assert found.bytes <= rows * row
        beyond.append(found.harm * lookups - best_by_brute_force(SMALL, rows * row, row, id, hot))
    # Where a step of the hull does not fit, others might together; they can win at most what that step would have.
    assert min(beyond) > -0.01 and max(beyond) < 0.025 * lookups
    assert sum(each < 0.01 for each in beyond) >= 8  # of 12 budgets


def test_rows_go_where_lookups_collide() -> None:
    flat, steep = Curve.zipf(10_000, 0.2, 1e5), Curve.zipf(10_000, 1.6, 1e5)
    sizes = hash_sizes({"flat": flat, "steep": steep}, 4000, id_bytes=0.0, keep_hot=False)
    assert sizes["flat"].rows > 2 * sizes["steep"].rows and 3950 <= sizes.rows <= 4000
    busy = hash_sizes({"flat": flat, "busy": Curve.zipf(10_000, 0.2, 1e7)}, 4000, id_bytes=0.0, keep_hot=False)
    assert busy["busy"].rows > busy["flat"].rows


def test_no_feature_gets_more_rows_than_ids() -> None:
    curves = {"few": Curve.of_counts(np.array([50, 3, 1])), "many": Curve.of_counts(zipf_counts(999, 5))}
    for hot in (True, False):
        ample = hash_sizes(curves, 10**6, 4.0, keep_hot=hot)
        assert ample.harm == 0 and all(f.kept + f.shared <= f.ids + 1 for f in ample.features)
        tight = hash_sizes(curves, 300.0, 4.0, keep_hot=hot)
        assert all(f.rows <= f.ids + 1 for f in tight.features)


def test_more_bytes_never_harm_more() -> None:
    curves = {f"t{i}": Curve.of_counts(zipf_counts(501 + i, i)) for i in range(3)}
    for hot in (True, False):
        harms_ = [hash_sizes(curves, budget, 16.0, keep_hot=hot).harm for budget in (48, 500, 3000, 9000, 20_000, 40_000)]
        assert harms_ == sorted(harms_, reverse=True)


def test_keeping_hot_ids_loses_no_more_than_hashing_them() -> None:
    curves = {f"t{i}": Curve.zipf(20_000, exponent, 1e6) for i, exponent in enumerate((0.6, 1.0, 1.3))}
    for budget in (10_000, 100_000, 1_000_000):
        assert hash_sizes(curves, budget, 68.0).harm <= hash_sizes(curves, budget, 68.0, keep_hot=False).harm


def test_an_expensive_map_leaves_ids_to_the_hash() -> None:
    assert hash_sizes({"t": Curve.zipf(5000, 0.0, 1e5)}, 2000.0, 4.0, id_bytes=400.0)["t"].kept == 0


def test_the_choice_has_kept_and_shared_rows_and_bytes() -> None:
    curve = Curve.of_counts(np.array([90, 5, 5]))
    one = hash_sizes({"t": curve}, 2 * 64 + 8, 64.0)
    assert (one["t"].kept, one["t"].shared) == (1, 1)
    assert (one.bytes, one.saved) == (2 * 64 + 8, 3 * 64 - 2 * 64 - 8)
    assert one.fallback == pytest.approx(0.1) and one.harm == pytest.approx(0.05)
    one = hash_sizes({"t": curve}, 64, 64.0)
    assert (one["t"].kept, one["t"].shared) == (0, 1)


def test_a_feature_that_was_never_seen_gets_one_row() -> None:
    nothing = np.empty(0)
    unseen = {"empty": Curve(nothing, nothing), "cold": Curve(np.array([5.0]), np.array([0.0]))}
    sizes = hash_sizes({"seen": Curve.zipf(100, 1.0, 1e4), **unseen}, 1000)
    assert [(f.kept, f.shared, f.harm) for f in sizes.features[1:]] == [(0, 1, 0.0)] * 2
    assert sizes["seen"].harm == 0


def test_rows_that_were_never_looked_up_are_not_kept() -> None:
    used = Curve.of_counts(np.array([9, 3, 1]))
    curve = Curve(np.append(used.rows_K, 50.0), np.append(used.lookups_K, 0.0))
    assert hash_sizes({"t": curve}, 10**6)["t"].rows <= 4


def test_a_budget_below_one_row_each_is_refused_with_both_numbers() -> None:
    with pytest.raises(BadInput, check=has(parameter="budget", available=100, needed=136)):
        hash_sizes({name: Curve.zipf(10, 1.0) for name in "ab"}, 100, 68.0)


# -- pruning --


def heat_of(name: str, counts: Sequence[int]) -> TableHeat:
    ids_H, counts_H = hottest_first(np.arange(len(counts)) * 1000, np.array(counts, np.int64))
    one = np.array([1])
    return TableHeat(name, sum(counts), sum(counts), len(counts), True, ids_H, counts_H, one, np.array([sum(counts)]))


def test_pruning_drops_rarely_seen_ids() -> None:
    heat = {"a": heat_of("a", [1, 6, 2, 1, 1]), "b": heat_of("b", [3, 1])}
    once = prune(heat, 1, row_bytes={"a": 16.0, "b": 32.0})
    assert [(f.kept, f.shared, f.ids) for f in once.features] == [(2, 1, 5), (1, 1, 2)]
    assert once["a"].fallback == pytest.approx(3 / 11) and once["a"].harm == pytest.approx(3 / 11 * 2 / 3)
    assert once["b"].harm == 0  # alone on the fallback row
    assert once.bytes == 2 * (16 + 8) + 16 + (32 + 8) + 32
    assert once.saved == 5 * 16 + 2 * 32 - once.bytes
    assert [prune(heat, seen)["a"].kept for seen in (0, 2, 6)] == [5, 1, 0]


def test_pruning_below_zero_is_refused() -> None:
    with pytest.raises(BadInput, check=has(parameter="seen", value=-1)):
        prune({}, -1)


# -- unified tables --


def test_features_of_one_id_space_share_rows_and_small_ones_a_table() -> None:
    columns = [
        FeatureColumn("item", 50_000, 64, space="items"),
        FeatureColumn("history", 40_000, 64, space="items"),
        FeatureColumn("day", 7, 64),
        FeatureColumn("hour", 24, 64),
        FeatureColumn("hour16", 24, 16),
        FeatureColumn("user", 90_000, 64),
    ]
    found = unify(columns, row_bytes=256.0)
    tables = {table.name: table for table in found.tables}
    assert {name: table.rows for name, table in tables.items()} == {
        "items": 50_000, "small_fp32_64": 31, "hour16": 24, "user": 90_000,
    }  # fmt: skip
    assert tables["items"].first == {"item": 0, "history": 0} and tables["small_fp32_64"].first == {"day": 0, "hour": 7}
    assert found.saved == 40_000 * 256 and found.launches_saved == 2


def test_features_rows_add_up() -> None:
    one = FeatureRows("t", 10, 3, 2, 100.0, 0.2, 0.1, 44.0, 80.0)
    assert one.rows == 5
