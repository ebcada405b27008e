"""The solver against the optimum: by enumeration, by an integer program, and against baselines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from milp import milp_optimum
from small_workloads import choices_of, coarse, fitting, optimum, random_work, random_workload

from thermocline.heat.curve import Curve
from thermocline.plan.cost.memory import RowPrecision
from thermocline.plan.cost.step_cost import Cluster
from thermocline.plan.cost.step_work import Grid, TableWork, Workload, subdivide
from thermocline.plan.report.reasons import exchange_one
from thermocline.plan.report.table_cost import SEND_IDS, table_cost
from thermocline.plan.solve import candidates
from thermocline.plan.solve.candidates import baseline_plans, solve
from thermocline.plan.solve.solver import (
    Problem,
    Score,
    latency,
    phases,
    prefetches,
    row_kind_masks,
    row_kinds_of,
    same_exchanges,
    score,
    split_off_ids,
)
from thermocline.plan.solve.tiers import OPTIONS, TABLE_WISE, TIER_SETS, best_splits

CLOSE = 1.02


def solved(workload: Workload) -> Score:
    found, search = solve(Problem.of(workload))
    assert search is not None
    assert found[0][1].peak_bytes <= workload.budget
    return found[0][1]


@pytest.mark.parametrize("seed", range(10))
def test_two_tables_are_within_two_percent_of_the_optimum(seed):
    workload = random_workload(np.random.default_rng(seed), tables=2, steps=3)
    assert solved(workload).time <= CLOSE * optimum(coarse(workload))


@pytest.mark.parametrize("seed", range(4))
def test_three_tables_are_within_two_percent_of_the_optimum(seed):
    workload = random_workload(np.random.default_rng(100 + seed), tables=3, steps=1)
    assert solved(workload).time <= CLOSE * optimum(coarse(workload))


@pytest.mark.parametrize("seed", [200, 201, 202, 203, 205, 207, 208])
def test_six_tables_are_within_two_percent_of_the_integer_program(seed):
    workload = random_workload(np.random.default_rng(seed), tables=6, steps=5, latency=False)
    assert solved(workload).time <= CLOSE * milp_optimum(coarse(workload))


def test_integer_program_and_enumeration_find_the_same_optimum():
    for seed in (1, 5, 8):
        problem = coarse(random_workload(np.random.default_rng(seed), tables=2, steps=3, latency=False))
        assert milp_optimum(problem) == pytest.approx(optimum(problem), rel=2e-3)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), tables=st.integers(1, 5), steps=st.integers(1, 6))
def test_no_plan_is_worse_than_a_baseline_that_fits(seed, tables, steps):
    workload = random_workload(np.random.default_rng(seed), tables, steps)
    problem = Problem.of(workload)
    fitting_plain = [found.time for _, found in baseline_plans(problem) if found.peak_bytes <= workload.budget]
    assert solved(workload).time <= min(fitting_plain) * (1 + 1e-8)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_table_costs_add_up_to_the_score(seed):
    workload = random_workload(np.random.default_rng(seed), tables=3, steps=4)
    problem = Problem.of(workload)
    for _, found in solve(problem)[0]:
        details = [table_cost(problem, found, table) for table in range(3)]
        split = found.solution.choice != TABLE_WISE
        held = sum(d.bytes.sum() for d, here in zip(details, split, strict=True) if here)
        for table in np.flatnonzero(~split):
            held = held + details[table].bytes.sum() * (np.arange(workload.cluster.world_size) == found.solution.rank[table])
            held = held + problem.table_wise.requested[table]
        np.testing.assert_allclose(np.max(held), found.peak_bytes, rtol=1e-9, atol=1e-3)
        seconds = sum(d.seconds for d, here in zip(details, split, strict=True) if here)
        need = row_kind_masks(problem, found.solution.choice, found.solution.first, found.solution.second)
        waits, hidden_waits, _ = latency(problem, need.any(axis=1, keepdims=True))[:, 0]
        if split.all():
            more_ids, more = split_off_ids(problem.hot_owner.loads(found.solution.choice, found.solution.second).excess())
            seconds[SEND_IDS], waits = seconds[SEND_IDS] + more_ids, waits + more
            hidden = seconds[SEND_IDS] + sum(d.early for d in details)
            assert seconds.sum() - hidden + waits == pytest.approx(found.exposed, rel=1e-9)
            assert hidden + hidden_waits == pytest.approx(found.hidden, rel=1e-9)


def test_best_split_at_given_prices_is_the_best_of_all_splits():
    rng = np.random.default_rng(7)
    for _ in range(20):
        problem = coarse(random_workload(rng, tables=3, steps=5))
        mu, lam = rng.random(), 10 ** rng.uniform(-16, -10)
        for n in np.flatnonzero(problem.allowed().any(axis=(0, 2))[: len(OPTIONS)]):
            option = problem.options[n]
            one, two, three = option.exposed + mu * option.hidden + lam * option.bytes
            found = best_splits(option, problem.grid, mu, lam)
            for t in np.flatnonzero(problem.allowed()[:, n].any(axis=1)):
                steps = int(problem.grid.steps[t])
                every = []
                for i in range(steps + 1):
                    for j in range(i, steps + 1):
                        if j > i and not problem.allowed()[t, n, 2]:
                            continue
                        maps = sum(problem.grid.maps[t, k] for k in {i, j} - {0, steps})
                        cost = one[t, i] + two[t, j] - two[t, i] + three[t, -1] - three[t, j]
                        every.append(cost + lam * maps)
                allowed = [split.cost[t] for s, split in enumerate(found) if problem.allowed()[t, n, s]]
                assert min(allowed) == pytest.approx(min(every), rel=1e-9)


def test_no_rank_exceeds_its_budget_with_table_wise_tables():
    rng = np.random.default_rng(11)
    cluster = Cluster(2, 4, 1e12, 1e9, 1e8)
    works = tuple(random_work(rng, n, 3) for n in range(30))
    workload = fitting(Workload(cluster, works, 1, 1e-4, "fp32"), rng)
    found = solved(workload)
    assert (found.bytes_R <= workload.budget).all()


def test_rows_without_lookups_get_no_replicas():
    curve = Curve(np.append(np.arange(1.0, 40.0), 9000.0), np.append(np.arange(4000.0, 3961.0, -1), 0.0))
    work = TableWork("t", 32, False, 512.0, 512.0, curve, RowPrecision("int8"), 4)
    found = solved(Workload(Cluster(2, 4, 1e12, 1e9, 1e8), (work,), 2 * 10**6, 1e-3, None))  # serving: copies always help
    reach = np.cumsum(subdivide(curve, 256).rows_K)
    assert found.solution.second[0] > 0 and reach[found.solution.second[0] - 1] <= curve.rows_K[:-1].sum()


def test_replicas_are_chosen_by_requests_not_by_raw_counts():
    # Equal heat, but one table has a thousand times the lookups per step: its replicas are worth more.
    curve = Curve.zipf(20_000, 0.9, 1e6)
    often, seldom = (
        TableWork(name, 64, False, n, n, curve, RowPrecision("fp32"), 4) for name, n in (("often", 2e4), ("seldom", 20.0))
    )
    problem = Problem.of(Workload(Cluster(1, 8, 1e13, 1e9, 1e9), (often, seldom), 10**9, 0.0, None))
    first = best_splits(problem.options[0], problem.grid, 1.0, 1e-10)[3].first
    rows = [problem.grid.rows[t, : first[t]].sum() for t in range(2)]
    assert rows[0] > 10 * rows[1] > 0


def test_steps_grow_with_the_logarithm_of_the_rows():
    def width(rows):
        work = TableWork("t", 64, False, 100.0, 100.0, Curve.zipf(rows, 1.0), RowPrecision("int8"), 4)
        return Grid.of(Workload(Cluster(512, 8, 1e12, 1e11, 1e10), (work,), 1, 0.0, None)).rows.shape[1]

    assert width(10**10) < 1.5 * width(10**7)


def test_finer_steps_are_the_same_curve():
    curve = Curve(np.array([1.0, 7.0, 1000.0]), np.array([50.0, 70.0, 9.0]))
    cut = subdivide(curve, 100)
    assert cut.rows == curve.rows and cut.lookups == pytest.approx(curve.lookups)
    assert len(cut.rows_K) > 30 and (cut.rows_K == np.round(cut.rows_K)).all()
    assert sorted(set(np.round(cut.share_K, 9))) == sorted(set(np.round(curve.share_K, 9)))


def test_choices_of_a_small_table_can_be_listed():
    problem = coarse(random_workload(np.random.default_rng(3), tables=1, steps=2))
    assert len(set(choices_of(problem, 0))) == len(choices_of(problem, 0)) and len(TIER_SETS) == 7


def test_a_plan_is_found_if_only_a_baseline_fits():
    # Bags of many lookups: rows, buffers counted, fit no card; sums from one card do.
    curve = Curve(np.array([200_000.0]), np.array([1.0]))
    works = tuple(TableWork(f"t{n}", 64, True, 60_000.0, 60.0, curve, RowPrecision("fp32"), 0) for n in range(4))
    workload = Workload(Cluster(1, 4, 1e12, 1e9, 1e9), works, 1, 0.0, "fp32")
    by_name = dict(baseline_plans(Problem.of(workload)))
    assert by_name["table-wise"].peak_bytes < 0.9 * by_name["row-wise"].peak_bytes
    found = solved(replace(workload, budget=int(by_name["table-wise"].peak_bytes) + 1))
    assert found.time <= by_name["table-wise"].time


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_runner_up_costs_equal_the_score_of_the_changed_plan(seed):
    rng = np.random.default_rng(seed)
    problem = Problem.of(random_workload(rng, tables=3, steps=4))
    steps = problem.grid.steps
    second = rng.integers(0, steps + 1)
    now, then = (
        (rng.choice([0, 2], 3), rng.integers(0, second + 1) * (rng.random() < 0.7), second * (rng.random() < 0.7))
        for _ in range(2)
    )
    now, then = ((choice, np.minimum(first, last), last) for choice, first, last in (now, then))
    times, sizes = exchange_one(problem, score(problem, *now), *then)
    for table in range(3):
        mixed = (np.where(np.arange(3) == table, new, old) for old, new in zip(now, then, strict=True))
        truth = score(problem, *mixed)
        assert times[table] == pytest.approx(truth.time, rel=1e-9)
        assert sizes[table] == pytest.approx(truth.peak_bytes, rel=1e-9, abs=2e-3)


def test_an_exchange_that_only_one_table_needs_costs_its_latency():
    # Everything is small and copied; a runner-up with rows that others have to be asked for waits for them.
    work = TableWork("t", 16, False, 64.0, 64.0, Curve.zipf(1000, 1.0), RowPrecision("int8"), 4)
    problem = Problem.of(Workload(Cluster(2, 4, 1e12, 1e11, 1e11, 1e-5, 2e-5), (work,), 10**9, 1.0, "fp32"))
    steps, zero = problem.grid.steps, np.zeros(1, np.int64)
    copied = score(problem, zero, steps, steps)
    (time,), _ = exchange_one(problem, copied, zero, steps - 1, steps - 1)
    assert time - copied.time == pytest.approx(3e-5, rel=1e-3)  # rows, and gradients that leave the node; ids go ahead


def small_tables(latencies, dense, tables=3):
    """Tables that weigh nothing, on two nodes of four cards with memory for everything."""
    works = tuple(
        TableWork(f"t{n}", 16, False, 64.0, 64.0, Curve.zipf(1000, 1.0), RowPrecision("int8"), 4) for n in range(tables)
    )
    return Problem.of(Workload(Cluster(2, 4, 1e12, 1e11, 1e11, *latencies), works, 10**9, dense, "fp32"))


@pytest.mark.parametrize("dense", [0.0, 1e-3])
def test_no_replicas_if_their_sync_waits_longer_than_requests(dense):
    problem = small_tables((1e-5, 2e-5), dense)
    best = solve(problem)[0][0][1]
    assert not row_kinds_of(problem, best.solution).first and not row_kinds_of(problem, best.solution).second
    steps, zero = problem.grid.steps, np.zeros(3, np.int64)
    copied, asked = score(problem, zero, steps, steps), score(problem, zero, zero, zero)
    assert best.time <= asked.time < copied.time - 5e-5


def test_plans_without_replicas_are_searched_although_tables_prefer_them():
    # Long bags are best summed by their owners, hot rows best asked for. By its bytes every table of these is better off with
    # copies, but all of them together save less than the waits of the first. No plain plan treats tables apart.
    even, hot = Curve(np.array([50_000.0]), np.array([1.0])), Curve.zipf(20_000, 1.2)
    bags = [TableWork(f"b{n}", 32, True, 2000.0, 40.0, even, RowPrecision("fp32"), 4) for n in range(35)]
    rows = [TableWork(f"r{n}", 128, False, 400.0, 400.0, hot, RowPrecision("fp32"), 4) for n in range(35)]
    problem = Problem.of(Workload(Cluster(2, 4, 1e13, 1e11, 1e10, 1e-5, 2e-5), (*bags, *rows), 10**9, 0.0, "bf16"))
    scores, _ = solve(problem)
    assert row_kinds_of(problem, dict(scores)["tiers"].solution).second and "without copies" in scores[0][0]
    others = [found.time for name, found in scores if "without copies" not in name]
    assert scores[0][1].time < 0.98 * min(others) and min(found.time for _, found in baseline_plans(problem)) in others


def test_equal_solutions_are_refined_once(monkeypatch):
    problem, refined = small_tables((1e-5, 2e-5), 0.0), []

    def noted(problem, found, allowed):
        refined.append(np.stack([found.solution.choice, found.solution.first, found.solution.second]).tobytes())
        return found

    monkeypatch.setattr(candidates, "local_search", noted)
    scores, _ = solve(problem)
    assert len(candidates.unique_solutions(scores)) < len(scores)
    assert len(set(refined)) == candidates.REFINED == len(refined) / 2  # with equal exchanges, and with all choices


def test_no_search_runs_twice():
    works = small_tables((1e-5, 2e-5), 0.0).workload.tables
    for nodes, cards in ((3, 1), (1, 4), (2, 4)):  # one card a node has no exchange per node
        problem = Problem.of(Workload(Cluster(nodes, cards, 1e12, 1e11, 1e11, 1e-5, 2e-5), works, 10**9, 0.0, "fp32"))
        masks = [search.allowed.tobytes() for _, search in candidates.searches(problem, 1.0)]
        assert len(masks) == len(set(masks)) > 1


def test_no_prefetch_if_the_dense_part_hides_less_than_it_waits():
    rows = np.zeros(3, np.int64)
    for dense, comes in ((0.0, False), (5e-5, False), (1e-3, True)):
        problem = small_tables((1e-5, 2e-5), dense)
        found = score(problem, rows, rows, rows)
        assert prefetches(problem.workload, found) == comes == any(phase.prefetch for phase in phases(problem, found))
        waits = 20e-6 * (3 if comes else 4)  # meeting, rows and gradients; ids where they do not come ahead
        assert found.time - dense == pytest.approx(waits, rel=0.05)


def test_same_exchanges_allows_only_those_of_the_solution():
    problem = small_tables((1e-5, 2e-5), 0.0)
    steps, zero = problem.grid.steps, np.zeros(3, np.int64)
    cases = (((zero, zero, zero), {(3,)}), ((zero, steps, steps), {(1,)}), ((zero, zero, steps - 1), {(3,), (2,), (2, 3)}))
    for solution, sets in cases:
        may = same_exchanges(problem, score(problem, *solution).solution)[0]
        assert {TIER_SETS[s] for s in np.flatnonzero(may[0])} == sets
        assert not may[1][TIER_SETS.index((3,))] and not may[TABLE_WISE - 1].any()
