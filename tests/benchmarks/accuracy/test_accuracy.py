"""`python -m benchmarks accuracy`: the rule on known numbers, its controls, and that no run is done twice."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.accuracy import arms as accuracy_arms
from benchmarks.accuracy import benchmark as accuracy
from benchmarks.accuracy import pareto
from benchmarks.accuracy import rows as accuracy_rows
from benchmarks.accuracy.arms import CONTROL, CRITEO, FP32, MOVIELENS, SYNTHETIC, ZEROED, AccuracyArm, arms_of
from benchmarks.accuracy.recipes import LARGE
from benchmarks.runner import record, show
from benchmarks.runner.noninferiority import BETTER, EQUAL, PASSES, REJECTED, Difference, Interval, interval, student
from benchmarks.runner.paired import RunResult
from support import has
from thermocline import EmbeddingCollection, FormatError, RowConfig, Table
from thermocline.data.click_log import Clicks, MemoryLog
from thermocline.train import DLRMSettings

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
TINY = accuracy.AccuracyPlan(DLRMSettings(samples=1501, rows=5003), dims=(8,), seeds=2, filter="int4-stochastic-1%")


# -- the rule --


@pytest.mark.parametrize(
    "freedom, expected", [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (19, 2.09302), (200, 1.97190)]
)
def test_students_t_is_that_of_the_tables(freedom: int, expected: float) -> None:
    assert student(freedom) == pytest.approx(expected, rel=1e-5)


def test_students_t_holds_at_other_confidences() -> None:
    assert student(9, 0.99) == pytest.approx(3.24984, rel=1e-5)
    assert student(10, 0.90) == pytest.approx(1.81246, rel=1e-5)


def test_an_interval_is_the_one_computed_by_hand() -> None:
    # mean 2, deviation 1, three values: 2 -+ 4.30265 / sqrt(3)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.48414, 2 + 2.48414), abs=1e-4)


def test_one_pair_proves_nothing() -> None:
    one = interval([0.0])
    assert (one.low, one.high) == (-math.inf, math.inf)
    assert Difference(one, one).verdict == REJECTED


NONE, SMALL = Interval(0.0, -1e-4, 1e-4), Interval(-4e-4, -4.9e-4, -3e-4)


@pytest.mark.parametrize(
    "auc, logloss, verdict, worse",
    [
        (NONE, NONE, PASSES, False),
        (SMALL, NONE, PASSES, True),  # a certain loss, but a small one
        (Interval(-2e-4, -5.1e-4, 1e-4), NONE, REJECTED, False),
        (NONE, Interval(2e-4, -1e-4, 5.1e-4), REJECTED, False),
        (NONE, Interval(2e-4, 1e-4, 3e-4), PASSES, True),
        (Interval(9e-4, 6e-4, 12e-4), Interval(-9e-4, -12e-4, -6e-4), PASSES, False),  # better than fp32
        (Interval(math.nan, math.nan, math.nan), NONE, REJECTED, False),
    ],
)
def test_the_rule_looks_at_the_bad_end_of_both_intervals(auc: Interval, logloss: Interval, verdict: str, worse: bool) -> None:
    found = Difference(auc, logloss)
    assert found.verdict == verdict and found.worse == worse
    assert found.meets(verdict) and not found.meets(REJECTED if verdict == PASSES else PASSES)


def test_equal_looks_at_both_ends() -> None:
    better = Interval(4e-4, 2e-4, 6e-4)
    assert Difference(NONE, SMALL).meets(EQUAL)
    assert not Difference(better, NONE).meets(EQUAL) and not Difference(NONE, better).meets(EQUAL)


def test_better_is_a_higher_auc_for_certain() -> None:
    assert Difference(Interval(4e-4, 1e-6, 8e-4), NONE).meets(BETTER)
    assert not Difference(Interval(4e-4, -1e-6, 8e-4), NONE).meets(BETTER)


# -- arms --


def test_the_gated_arms_and_the_controls_run_by_default() -> None:
    names = {kind: [arm.name for arm in arms_of(kind)] for kind in (CRITEO, MOVIELENS, SYNTHETIC)}
    shared = ["fp32", "plain", "int4-nearest-0%", "zeroed-89%"]
    assert names[CRITEO] == [*shared, "int8-stochastic-5%", "int4-stochastic-1%", "tiers-1%-5%-int2"]
    assert names[MOVIELENS] == [*shared, "int8-stochastic-0%", "int8-nearest-0%"]
    assert names[SYNTHETIC] == [*shared, "int4-stochastic-1%"]


def test_the_whole_grid_has_every_combination_once() -> None:
    names = [arm.name for arm in arms_of(CRITEO, whole_grid=True)]
    assert len(names) == len(set(names)) == 24 + 2 + 4 + 3  # with tiers, splits, and fp32, plain and zeroed


def test_a_filter_reaches_the_whole_grid_and_keeps_fp32() -> None:
    assert [arm.name for arm in arms_of(CRITEO, filter="int2-nearest-10")] == ["fp32", "int2-nearest-10%"]


def test_every_asked_case_is_an_arm_that_runs_by_default() -> None:
    for case in show.load_asked(ASKED)["accuracy"]:
        log, _, name = case.split("/")
        assert name in [arm.name for arm in arms_of(log.split("-")[0])]


def test_the_rule_wants_more_seeds_where_pairs_differ_more() -> None:
    assert [AccuracyArm("int8").seeds(kind) for kind in (CRITEO, MOVIELENS)] == [10, 20]
    assert AccuracyArm("int2").seeds(SYNTHETIC) == 20


def test_a_large_synthetic_log_has_batches_of_its_own_and_no_arm_in_plain_torch() -> None:
    plan = accuracy.AccuracyPlan(DLRMSettings(samples=20_000_000, rows=20_000_000), dims=(16,))
    assert plan.name == "synthetic-20M-rows-20M-samples" and plan.recipe == LARGE
    assert [arm.name for arm in plan.arms()] == ["fp32", "int4-nearest-0%", "zeroed-89%", "int4-stochastic-1%"]
    assert len(plan.jobs()) == 30 and {job.settings.batch for job in plan.jobs()} == {16_384}
    assert TINY.recipe != LARGE


def test_a_log_that_is_made_once_has_the_samples_of_one_that_is_streamed() -> None:
    settings = DLRMSettings(samples=1501, rows=5003, seed=3)
    for kept, streamed in zip(accuracy_arms._made(5003, 1501, 3, "cpu"), settings.logs(), strict=True):
        assert kept.rows == streamed.rows and kept.samples == streamed.samples
        for one, other in zip(kept.batches(700), streamed.batches(700), strict=True):
            assert all(torch.equal(*parts) for parts in zip(one, other, strict=True))


# -- the control that zeroes rows --


def test_the_control_keeps_the_hottest_rows_of_all_tables_and_zeroes_the_rest() -> None:
    ids_BF = torch.tensor([[0, 2], [0, 2], [0, 2], [1, 2], [1, 0], [3, 1]])  # heat: 3 2 0 1 0 | 1 1 4
    log = MemoryLog(Clicks(torch.zeros(6), torch.zeros(6, 0), ids_BF), (5, 3))
    assert [heat.tolist() for heat in accuracy_arms.heat_of(log)] == [[3, 2, 0, 1, 0], [1, 1, 4]]
    tables = EmbeddingCollection([Table("a", 5, 7), Table("b", 3, 7)], rows=RowConfig("fp32", cache=0.0))
    before = [tables.get_rows(name) for name in "ab"]
    accuracy_arms.zero_cold(tables, log, 3 / 8)
    for name, was_RD, kept in zip("ab", before, ([0, 1], [2]), strict=True):
        expected_RD = torch.zeros_like(was_RD)
        expected_RD[kept] = was_RD[kept]
        assert torch.equal(tables.get_rows(name), expected_RD)


# -- runs --


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    runs = tmp_path_factory.mktemp("accuracy") / "tiny.runs.jsonl"
    yield accuracy.run(TINY, runs), runs


def test_a_record_has_what_the_table_the_picture_and_bench_show_need(measured: tuple[dict[str, Any], Path]) -> None:
    found, _ = measured
    case = "synthetic-5003-rows-1501-samples/D8/"
    assert [row["case"] for row in found["rows"]] == [case + "fp32", case + "int4-stochastic-1%"]
    fp32, int4 = found["rows"]
    assert int4["peer_value"] == fp32["ours"] and int4["seeds"] == 2
    assert int4["memory_ratio"] > 3 and int4["memory_ratio_with_state"] < int4["memory_ratio"]
    assert 0 < int4["hit_rate"] < 1 and int4["flushed"]["verdict"] in (PASSES, REJECTED)
    assert int4["asked"] is None and int4["seeds_wanted"] == 10
    assert found["log"] and found["recipe"]["lr"] == 0.02
    assert len(show.parse(json.loads(json.dumps(found, allow_nan=False)), "test").rows) == 2
    assert accuracy_rows.table(found).row_count == 2 and accuracy_rows.table(found, only_short=True).row_count == 0
    ElementTree.fromstring(pareto.draw(found))


def test_differences_are_paired_by_seed(measured: tuple[dict[str, Any], Path]) -> None:
    found, path = measured
    runs = {(line["arm"], line["seed"]): line["measures"] for line in map(json.loads, path.read_text().splitlines())}
    assert set(runs) == {(arm, seed) for arm in ("fp32", "int4-stochastic-1%") for seed in (0, 1)}
    pairs = [runs["int4-stochastic-1%", s]["trained"]["auc"] - runs["fp32", s]["trained"]["auc"] for s in (0, 1)]
    assert found["rows"][1]["auc_difference"][0] == pytest.approx(sum(pairs) / 2)
    assert runs["fp32", 0]["zeroed"]["auc"] < runs["fp32", 0]["trained"]["auc"]


def test_finished_runs_are_not_repeated(measured: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found, runs = measured
    monkeypatch.setattr(accuracy, "run_job", lambda job: pytest.fail(f"{job.key} ran again"))
    assert accuracy.run(TINY, runs)["rows"] == found["rows"]


def test_a_run_that_was_cut_off_is_repeated_alone(measured: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    found, whole = measured
    runs, lines = tmp_path / "cut.jsonl", whole.read_text().splitlines()
    runs.write_text("\n".join([*lines[:3], lines[3][:50]]))
    told: list[tuple[int, int]] = []
    again = accuracy.run(TINY, runs, progress=lambda done, total, what: told.append((done, total)))
    assert told == [(3, 4), (4, 4)]
    assert [row["ours"] for row in again["rows"]] == [row["ours"] for row in found["rows"]]
    assert len(runs.read_text().splitlines()) == 4


def test_runs_on_another_log_do_not_count(measured: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Ran(Exception):
        pass

    def ran(job: accuracy_arms.Job) -> None:
        raise Ran

    monkeypatch.setattr(accuracy, "run_job", ran)
    with pytest.raises(Ran):
        accuracy.run(replace(TINY, log=replace(TINY.log, samples=1502)), measured[1])


def test_a_file_that_holds_no_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.runs.jsonl").write_text('{"arm": 1}\n')
    with pytest.raises(FormatError, check=has(path=tmp_path / "x.runs.jsonl")):
        accuracy.run(TINY, tmp_path / "x.runs.jsonl")


def test_two_processes_find_what_one_finds(measured: tuple[dict[str, Any], Path]) -> None:
    found = accuracy.run(TINY, jobs=2)
    assert [row["ours"] for row in found["rows"]] == [row["ours"] for row in measured[0]["rows"]]


def test_the_verb_goes_on_from_its_runs_and_draws(measured: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    found, runs = measured
    (tmp_path / "two.runs.jsonl").write_text(runs.read_text())
    command = [sys.executable, "-m", "benchmarks", "accuracy", "--samples", "1501", "--rows", "5003", "--dim", "8"]
    options = ["--seeds", "2", "--filter", "int4-stochastic-1%", "--json", str(tmp_path / "two.json")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert "int4-stochastic-1%" in done.stdout and "2 of 10" in done.stdout
    assert json.loads((tmp_path / "two.json").read_text())["rows"] == found["rows"]
    assert (tmp_path / "two.svg").read_text().startswith("<svg")


# -- rows --


def made_up(arm: str, seed: int, auc: float, **measures: float) -> RunResult:
    told = {when: {"auc": value, "logloss": 0.5} for when, value in {"trained": auc, **measures}.items()}
    return RunResult("log", arm, 16, seed, told, rows=100, seconds=1.0, commit="1")


def test_a_control_that_passes_falls_short_and_one_that_is_rejected_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"criteo/D16/int4-nearest-0%": REJECTED, "criteo/D16/zeroed-89%": REJECTED}
    monkeypatch.setattr(record, "read_asked", lambda bench: asked)
    results = []
    for seed in range(10):
        results.append(made_up("fp32", seed, 0.7 + seed * 1e-3, zeroed=0.69 + seed * 1e-3))
        results.append(made_up("int4-nearest-0%", seed, 0.7 + seed * 1e-3))
    recorder = record.Recorder("accuracy", lambda line: None)
    accuracy_rows.write(recorder, "criteo", CRITEO, [FP32, CONTROL, ZEROED], results)
    assert [row["ok"] for row in recorder.rows] == [True, False, True]
    assert [row.get("verdict") for row in recorder.rows] == [None, PASSES, REJECTED]
    few = record.Recorder("accuracy", lambda line: None)
    accuracy_rows.write(few, "criteo", CRITEO, [FP32, CONTROL, ZEROED], results[:18])
    assert [row["asked"] for row in few.rows] == [None] * 3 and all(row["ok"] for row in few.rows)


def test_an_arm_that_diverged_is_rejected_and_still_fits_json() -> None:
    results = [made_up("fp32", seed, 0.7) for seed in range(3)]
    results += [made_up("int4-nearest-0%", seed, math.nan) for seed in range(3)]
    recorder = record.Recorder("accuracy", lambda line: None)
    accuracy_rows.write(recorder, "criteo", CRITEO, [FP32, CONTROL], results)
    assert recorder.rows[1]["verdict"] == REJECTED and recorder.rows[1]["ours"] is None
    json.dumps(recorder.record, allow_nan=False)
    assert accuracy_rows.table(recorder.record).row_count == 2


def test_runs_of_several_commits_are_noted() -> None:
    recorder = record.Recorder("accuracy", lambda line: None)
    runs = [made_up("fp32", 0, 0.7), replace(made_up("fp32", 1, 0.7), commit="2")]
    accuracy_rows.write(recorder, "criteo", CRITEO, [FP32], runs)
    assert recorder.record["notes"] == ["these runs are of 2 commits: 1, 2"]


def test_runs_of_another_commit_than_the_records_are_noted() -> None:
    recorder = record.Recorder("accuracy", lambda line: None)
    accuracy_rows.write(recorder, "criteo", CRITEO, [FP32], [made_up("fp32", 0, 0.7)])
    assert recorder.record["notes"] == ["these runs are of commit 1"]
    recorder = record.Recorder("accuracy", lambda line: None)
    accuracy_rows.write(recorder, "criteo", CRITEO, [FP32], [replace(made_up("fp32", 0, 0.7), commit=record.commit())])
    assert recorder.record["notes"] == []


def test_the_front_keeps_what_nothing_beats_in_both() -> None:
    points = [(1.0, 0.0), (3.0, -1.0), (4.0, -0.5), (4.0, -9.0), (6.0, -2.0), (5.0, -3.0)]
    assert pareto.front(points) == [(1.0, 0.0), (4.0, -0.5), (6.0, -2.0)]


def test_names_in_the_picture_do_not_lie_on_each_other() -> None:
    found = {"auc_difference": [0.0, -1e-4, 1e-4], "memory_ratio": 3.2, "verdict": PASSES}
    drawn = ElementTree.fromstring(pareto.draw({"rows": [{"case": f"log/D16/arm{i}", **found} for i in range(5)]}))
    names = [text for text in drawn.iter() if (text.text or "").startswith("arm")]
    heights = sorted(float(text.get("y", "")) for text in names)
    assert len(names) == 5 and all(b - a >= 11 for a, b in pairwise(heights))
