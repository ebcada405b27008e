"""The solver against the optimum: by looking at everything, by an integer program, and by plans that anyone would try."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from as_milp import milp_optimum
from hypothesis import given, settings
from hypothesis import strategies as st
from small_jobs import choices_of, coarse, fitting, optimum, random_job, random_work

from thermocline.heat.curve import Curve
from thermocline.plan.cost.memory import Store
from thermocline.plan.cost.step_cost import Machine
from thermocline.plan.cost.step_work import Grid, Job, Work, finer
from thermocline.plan.report.details import ASK, detail
from thermocline.plan.report.reasons import _instead
from thermocline.plan.solve import candidates
from thermocline.plan.solve.candidates import everything, plain
from thermocline.plan.solve.solver import Problem, Score, ahead, alike, apart, latency, needs, phases, score, used
from thermocline.plan.solve.tiers import CARD, OPTIONS, SETS, splits

CLOSE = 1.02


def solved(job: Job) -> Score:
    found, search = everything(Problem.of(job))
    assert search is not None
    assert found[0][1].fullest <= job.budget
    return found[0][1]


@pytest.mark.parametrize("seed", range(10))
def test_two_tables_are_within_two_per_cent_of_the_best_of_all_plans(seed):
    job = random_job(np.random.default_rng(seed), tables=2, steps=3)
    assert solved(job).time <= CLOSE * optimum(coarse(job))


@pytest.mark.parametrize("seed", range(4))
def test_three_tables_are_too(seed):
    job = random_job(np.random.default_rng(100 + seed), tables=3, steps=1)
    assert solved(job).time <= CLOSE * optimum(coarse(job))


@pytest.mark.parametrize("seed", [200, 201, 202, 203, 205, 207, 208])
def test_six_tables_are_within_two_per_cent_of_the_integer_program(seed):
    job = random_job(np.random.default_rng(seed), tables=6, steps=5, latency=False)
    assert solved(job).time <= CLOSE * milp_optimum(coarse(job))


def test_the_integer_program_finds_the_optimum_that_looking_at_everything_finds():
    for seed in (1, 5, 8):
        problem = coarse(random_job(np.random.default_rng(seed), tables=2, steps=3, latency=False))
        assert milp_optimum(problem) == pytest.approx(optimum(problem), rel=2e-3)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), tables=st.integers(1, 5), steps=st.integers(1, 6))
def test_no_plan_is_worse_than_a_plain_one_that_fits(seed, tables, steps):
    job = random_job(np.random.default_rng(seed), tables, steps)
    problem = Problem.of(job)
    fitting_plain = [found.time for _, found in plain(problem) if found.fullest <= job.budget]
    assert solved(job).time <= min(fitting_plain) * (1 + 1e-8)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_what_a_plan_says_of_its_parts_adds_up_to_what_it_was_chosen_for(seed):
    job = random_job(np.random.default_rng(seed), tables=3, steps=4)
    problem = Problem.of(job)
    for _, found in everything(problem)[0]:
        details = [detail(problem, found, table) for table in range(3)]
        split = found.solution.choice != CARD
        held = sum(d.bytes.sum() for d, here in zip(details, split, strict=True) if here)
        for table in np.flatnonzero(~split):
            held = held + details[table].bytes.sum() * (np.arange(job.machine.all) == found.solution.card[table])
        np.testing.assert_allclose(np.max(held), found.fullest, rtol=1e-9, atol=1e-3)
        seconds = sum(d.seconds for d, here in zip(details, split, strict=True) if here)
        need = needs(problem, found.solution.choice, found.solution.first, found.solution.second)
        waits, hidden_waits, _ = latency(problem, need.any(axis=1, keepdims=True))[:, 0]
        if split.all():
            more_ids, more = apart(problem.owners.standing(found.solution.choice, found.solution.second).more())
            seconds[ASK], waits = seconds[ASK] + more_ids, waits + more
            hidden = seconds[ASK] + sum(d.early for d in details)
            assert seconds.sum() - hidden + waits == pytest.approx(found.exposed, rel=1e-9)
            assert hidden + hidden_waits == pytest.approx(found.hidden, rel=1e-9)


def test_the_best_split_at_given_prices_is_the_best_of_all_splits():
    rng = np.random.default_rng(7)
    for _ in range(20):
        problem = coarse(random_job(rng, tables=3, steps=5))
        mu, lam = rng.random(), 10 ** rng.uniform(-16, -10)
        for n in np.flatnonzero(problem.may().any(axis=(0, 2))[: len(OPTIONS)]):
            option = problem.options[n]
            one, two, three = option.exposed + mu * option.hidden + lam * option.bytes
            found = splits(option, problem.grid, mu, lam)
            for t in np.flatnonzero(problem.may()[:, n].any(axis=1)):
                steps = int(problem.grid.steps[t])
                every = []
                for i in range(steps + 1):
                    for j in range(i, steps + 1):
                        if j > i and not problem.may()[t, n, 2]:
                            continue
                        maps = sum(problem.grid.maps[t, k] for k in {i, j} - {0, steps})
                        cost = one[t, i] + two[t, j] - two[t, i] + three[t, -1] - three[t, j]
                        every.append(cost + lam * maps)
                allowed = [split.cost[t] for s, split in enumerate(found) if problem.may()[t, n, s]]
                assert min(allowed) == pytest.approx(min(every), rel=1e-9)


def test_every_card_is_filled_no_further_than_its_budget_with_whole_tables_on_some():
    rng = np.random.default_rng(11)
    machine = Machine(2, 4, 1e12, 1e9, 1e8)
    works = tuple(random_work(rng, n, 3) for n in range(30))
    job = fitting(Job(machine, works, 1, 1e-4, "fp32"), rng)
    found = solved(job)
    assert (found.bytes_C <= job.budget).all()


def test_rows_that_nobody_looks_up_get_no_copies():
    curve = Curve(np.append(np.arange(1.0, 40.0), 9000.0), np.append(np.arange(4000.0, 3961.0, -1), 0.0))
    work = Work("t", 32, False, 512.0, 512.0, curve, Store("int8"), 4)
    found = solved(Job(Machine(2, 4, 1e12, 1e9, 1e8), (work,), 2 * 10**6, 1e-3, None))  # serving: copies always help
    reach = np.cumsum(finer(curve, 256).rows_K)
    assert found.solution.second[0] > 0 and reach[found.solution.second[0] - 1] <= curve.rows_K[:-1].sum()


def test_rows_are_chosen_by_who_asks_for_them_not_by_raw_counts():
    # The same heat file; one table is looked up a thousand times as often in a step: copies are worth most where cards ask.
    curve = Curve.zipf(20_000, 0.9, 1e6)
    often, seldom = (Work(name, 64, False, n, n, curve, Store("fp32"), 4) for name, n in (("often", 2e4), ("seldom", 20.0)))
    problem = Problem.of(Job(Machine(1, 8, 1e13, 1e9, 1e9), (often, seldom), 10**9, 0.0, None))
    first = splits(problem.options[0], problem.grid, 1.0, 1e-10)[3].first
    rows = [problem.grid.rows[t, : first[t]].sum() for t in range(2)]
    assert rows[0] > 10 * rows[1] > 0


def test_steps_grow_with_the_logarithm_of_the_rows():
    def width(rows):
        work = Work("t", 64, False, 100.0, 100.0, Curve.zipf(rows, 1.0), Store("int8"), 4)
        return Grid.of(Job(Machine(512, 8, 1e12, 1e11, 1e10), (work,), 1, 0.0, None)).rows.shape[1]

    assert width(10**10) < 1.5 * width(10**7)


def test_finer_steps_are_the_same_curve():
    curve = Curve(np.array([1.0, 7.0, 1000.0]), np.array([50.0, 70.0, 9.0]))
    cut = finer(curve, 100)
    assert cut.rows == curve.rows and cut.lookups == pytest.approx(curve.lookups)
    assert len(cut.rows_K) > 30 and (cut.rows_K == np.round(cut.rows_K)).all()
    assert sorted(set(np.round(cut.share_K, 9))) == sorted(set(np.round(curve.share_K, 9)))


def test_choices_of_a_small_table_can_be_listed():
    problem = coarse(random_job(np.random.default_rng(3), tables=1, steps=2))
    assert len(set(choices_of(problem, 0))) == len(choices_of(problem, 0)) and len(SETS) == 7


def test_a_plan_that_only_a_plain_one_fits_is_found():
    # Bags of many lookups: rows, buffers counted, fit no card; sums from one card do.
    curve = Curve(np.array([200_000.0]), np.array([1.0]))
    works = tuple(Work(f"t{n}", 64, True, 60_000.0, 60.0, curve, Store("fp32"), 0) for n in range(4))
    job = Job(Machine(1, 4, 1e12, 1e9, 1e9), works, 1, 0.0, "fp32")
    by_name = dict(plain(Problem.of(job)))
    assert by_name["table-wise"].fullest < 0.9 * by_name["row-wise"].fullest
    found = solved(replace(job, budget=int(by_name["table-wise"].fullest) + 1))
    assert found.time <= by_name["table-wise"].time


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_runner_up_costs_what_the_plan_would_cost_with_it(seed):
    rng = np.random.default_rng(seed)
    problem = Problem.of(random_job(rng, tables=3, steps=4))
    steps = problem.grid.steps
    second = rng.integers(0, steps + 1)
    now, then = (
        (rng.choice([0, 2], 3), rng.integers(0, second + 1) * (rng.random() < 0.7), second * (rng.random() < 0.7))
        for _ in range(2)
    )
    now, then = ((choice, np.minimum(first, last), last) for choice, first, last in (now, then))
    times, sizes = _instead(problem, score(problem, *now), *then)
    for table in range(3):
        mixed = (np.where(np.arange(3) == table, new, old) for old, new in zip(now, then, strict=True))
        truth = score(problem, *mixed)
        assert times[table] == pytest.approx(truth.time, rel=1e-9)
        assert sizes[table] == pytest.approx(truth.fullest, rel=1e-9, abs=2e-3)


def test_ways_out_of_an_exchange_that_only_one_table_needs_save_its_latency():
    # Everything is small and copied; a runner-up with rows that others have to be asked for waits for them.
    work = Work("t", 16, False, 64.0, 64.0, Curve.zipf(1000, 1.0), Store("int8"), 4)
    problem = Problem.of(Job(Machine(2, 4, 1e12, 1e11, 1e11, 1e-5, 2e-5), (work,), 10**9, 1.0, "fp32"))
    steps, zero = problem.grid.steps, np.zeros(1, np.int64)
    copied = score(problem, zero, steps, steps)
    (time,), _ = _instead(problem, copied, zero, steps - 1, steps - 1)
    assert time - copied.time == pytest.approx(3e-5, rel=1e-3)  # rows, and gradients that leave the node; ids go ahead


def small_tables(latencies, dense, tables=3):
    """Tables that weigh nothing, on two nodes of four cards with memory for everything."""
    works = tuple(Work(f"t{n}", 16, False, 64.0, 64.0, Curve.zipf(1000, 1.0), Store("int8"), 4) for n in range(tables))
    return Problem.of(Job(Machine(2, 4, 1e12, 1e11, 1e11, *latencies), works, 10**9, dense, "fp32"))


@pytest.mark.parametrize("dense", [0.0, 1e-3])
def test_copies_are_not_taken_where_keeping_them_equal_waits_longer_than_asking(dense):
    problem = small_tables((1e-5, 2e-5), dense)
    best = everything(problem)[0][0][1]
    assert not used(problem, best.solution).first and not used(problem, best.solution).second
    steps, zero = problem.grid.steps, np.zeros(3, np.int64)
    copied, asked = score(problem, zero, steps, steps), score(problem, zero, zero, zero)
    assert best.time <= asked.time < copied.time - 5e-5


def test_plans_without_copies_are_searched_for_where_each_table_alone_would_rather_have_some():
    # Long bags are best summed by their owners, hot rows best asked for. By its bytes every table of these is better off with
    # copies, but all of them together save less than the waits of the first. No plain plan treats tables apart.
    even, hot = Curve(np.array([50_000.0]), np.array([1.0])), Curve.zipf(20_000, 1.2)
    bags = [Work(f"b{n}", 32, True, 2000.0, 40.0, even, Store("fp32"), 4) for n in range(35)]
    rows = [Work(f"r{n}", 128, False, 400.0, 400.0, hot, Store("fp32"), 4) for n in range(35)]
    problem = Problem.of(Job(Machine(2, 4, 1e13, 1e11, 1e10, 1e-5, 2e-5), (*bags, *rows), 10**9, 0.0, "bf16"))
    scores, _ = everything(problem)
    assert used(problem, dict(scores)["tiers"].solution).second and "without copies" in scores[0][0]
    others = [found.time for name, found in scores if "without copies" not in name]
    assert scores[0][1].time < 0.98 * min(others) and min(found.time for _, found in plain(problem)) in others


def test_a_solution_that_several_searches_found_is_polished_once(monkeypatch):
    problem, polished = small_tables((1e-5, 2e-5), 0.0), []

    def noted(problem, found, allowed, weights):
        polished.append(np.stack([found.solution.choice, found.solution.first, found.solution.second]).tobytes())
        return found

    monkeypatch.setattr(candidates, "polish", noted)
    scores, _ = everything(problem)
    assert len(candidates.different(scores)) < len(scores)
    assert len(set(polished)) == candidates.POLISHED == len(polished) / 2  # by what it exchanges anyway, and by everything


def test_no_search_is_made_twice():
    works = small_tables((1e-5, 2e-5), 0.0).job.works
    for nodes, cards in ((3, 1), (1, 4), (2, 4)):  # one card a node has no exchange per node
        problem = Problem.of(Job(Machine(nodes, cards, 1e12, 1e11, 1e11, 1e-5, 2e-5), works, 10**9, 0.0, "fp32"))
        masks = [search.allowed.tobytes() for _, search in candidates.searched(problem, 1.0)]
        assert len(masks) == len(set(masks)) > 1


def test_a_dense_part_that_hides_less_than_prefetching_waits_longer_has_no_batch_ahead():
    rows = np.zeros(3, np.int64)
    for dense, comes in ((0.0, False), (5e-5, False), (1e-3, True)):
        problem = small_tables((1e-5, 2e-5), dense)
        found = score(problem, rows, rows, rows)
        assert ahead(problem.job, found) == comes == any(turn.ahead for turn in phases(problem, found))
        waits = 20e-6 * (3 if comes else 4)  # meeting, rows and gradients; ids where they do not come ahead
        assert found.time - dense == pytest.approx(waits, rel=0.05)


def test_what_needs_no_other_exchange_is_what_a_solution_makes_anyway():
    problem = small_tables((1e-5, 2e-5), 0.0)
    steps, zero = problem.grid.steps, np.zeros(3, np.int64)
    cases = (((zero, zero, zero), {(3,)}), ((zero, steps, steps), {(1,)}), ((zero, zero, steps - 1), {(3,), (2,), (2, 3)}))
    for solution, sets in cases:
        may = alike(problem, score(problem, *solution).solution)[0]
        assert {SETS[s] for s in np.flatnonzero(may[0])} == sets
        assert not may[1][SETS.index((3,))] and not may[CARD - 1].any()
