"""`python -m benchmarks step`: the plan, contenders with a cache, and what they must get right before they are timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import benchmark as kernels
from benchmarks.kernels import cases
from benchmarks.kernels import gpu as kernels_gpu
from benchmarks.kernels import thermocline_contender as ours
from benchmarks.kernels.cases import STEP_ROWWISE, STEP_SGD, STEPS, Shape, Workload
from benchmarks.kernels.contender import Contender, WrongResult, check_step, chunk_of
from benchmarks.runner import record, show
from benchmarks.runner.race import cache_work
from support import has

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
SHAPE = Shape("tiny", tables=2, rows=1001, dim=8, batch=33, pooling=3)
JOB = Workload(SHAPE, "int8", STEP_ROWWISE, cache=0.05)


def test_every_asked_case_is_one_that_the_bench_measures() -> None:
    assert set(show.load_asked(ASKED)["step"]) <= set(cases.all_cases(STEPS))


def test_no_two_rows_share_a_name() -> None:
    names = cases.all_cases(STEPS)
    assert len(names) == len(set(names))


def test_gated_gpu_rows_are_measured_before_reported_ones() -> None:
    asked = show.load_asked(ASKED)["step"]
    gated = [any(case in asked for case in cases.gpu_cases(group)) for group in STEPS.gpu()]
    assert gated == sorted(gated, reverse=True)


def test_a_row_names_its_precision_and_its_cache() -> None:
    assert cases.CaseGroup(JOB, (cases.FBGEMM,)).case("cuda", "zipf") == "cuda/tiny/zipf/int8+5%/step-rowwise_adagrad"


@pytest.mark.parametrize("operation", [STEP_SGD, STEP_ROWWISE])
@pytest.mark.parametrize("precision, cache", [("int8", 0.05), ("int4", 0.05), ("int4", 0.01)])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_right_step_with_a_cache_passes(operation: str, precision: str, cache: float, pooled: bool) -> None:
    check_step(ours.build, Workload(replace(SHAPE, pooled=pooled), precision, operation, cache=cache), "cpu")


def spoilt(change: Any) -> Any:
    """A contender whose rows read differently after the checked step: cached rows that it looked up, as `change` says."""

    def build(job: Workload, device: str) -> Contender:
        right, steps = ours.build(job, device), 0
        before: dict[int, Tensor] = {}

        def run(args: Any) -> None:
            nonlocal steps
            right.run(args)
            steps += 1

        def read(table: int, rows_N: Tensor) -> Tensor:
            values_ND = right.read(table, rows_N)
            if steps < 4:
                before[table] = values_ND
                return values_ND
            assert right.cache is not None
            return change(values_ND, right.cache.holds(table) & (values_ND != before[table]).any(1))

        return replace(right, run=run, read=read)

    return build


def test_a_cached_row_that_is_off_by_less_than_a_code_is_refused() -> None:
    with pytest.raises(WrongResult, check=has(check="step")):
        check_step(spoilt(lambda values_ND, cached_N: values_ND + 1e-3 * cached_N[:, None]), JOB, "cpu")


def test_a_step_that_forgets_the_rows_in_the_cache_is_refused() -> None:
    with pytest.raises(WrongResult):
        check_step(spoilt(lambda values_ND, cached_N: values_ND * ~cached_N[:, None]), JOB, "cpu")


def test_a_cache_that_holds_nothing_is_refused() -> None:
    def build(job: Workload, device: str) -> Contender:
        empty = ours.build(replace(job, cache=0.0), device)
        cache = ours.build(job, device).cache
        return replace(empty, cache=cache)

    with pytest.raises(WrongResult, check=has(check="cached rows")):
        check_step(build, JOB, "cpu")


def test_a_contender_with_a_cache_settles_and_never_sees_a_batch_twice() -> None:
    seen: list[Tensor] = []
    right = ours.build(JOB, "cpu")
    contender = replace(right, run=lambda args: seen.append(args[0]))
    chunk = chunk_of(contender, JOB, "zipf", "cpu")
    assert right.cache is not None
    assert len(seen) == right.cache.settle > 256
    assert len(chunk(6)) == 2  # means of four steps in a row
    assert len(seen) == right.cache.settle + 4 + 8
    assert len({tuple(ids.tolist()) for ids in seen}) == len(seen)


def test_int8_stands_beside_another_precision_under_its_own_name() -> None:
    (contender,) = ours.int8_contenders(replace(JOB, precision="int4"), "cpu")
    assert contender.label == "ours int8+5%"


def test_what_a_cache_did_is_counted_between_two_readings() -> None:
    before, after = {"lookups": 100, "hits": 10, "admissions": 90}, {"lookups": 300, "hits": 160, "admissions": 100}
    assert cache_work(before, after) == {"hit_rate": 0.75, "admitted": 0.05}
    assert cache_work({}, {}) == {} == cache_work(after, after)


def test_the_gpu_plan_runs_where_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "GPU_SHAPES", (SHAPE,))
    recorder = record.Recorder("step", lambda line: None, judged=False)
    kernels_gpu.run(recorder, lambda case: "int4" in case, True, True, lambda *step: None, STEPS, device="cpu")
    assert [row.get("error") for row in recorder.rows] == [None] * len(recorder.rows)
    by_case = {row["case"]: row for row in recorder.rows}
    for kind in ("zipf", "uniform"):
        row = by_case[f"cuda/tiny/{kind}/int4+5%/step-rowwise_adagrad-vs-int8"]
        assert row["peer"] == "ours int8+5%" and row["ratio"] > 0
        assert 0 < row["hit_rate"] < 1


def test_a_small_run_measures_and_writes_what_show_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CPU_SHAPES", (SHAPE,))
    monkeypatch.delenv(kernels.PEER_PYTHON, raising=False)
    found = kernels.run("cpu", "vs-torch", quick=True, plan=STEPS)
    assert [row.get("error") for row in found["rows"]] == [None, None]
    assert found["bench"] == "step"
    assert all(row["hit_rate"] > 0.3 and row["ours"] > 0 for row in found["rows"])
    assert not show.parse(found, "test").short()


def test_rows_read_outside_a_step_are_those_of_the_cache() -> None:
    contender = ours.build(JOB, "cpu")
    rows_R = torch.arange(SHAPE.rows)
    chunk_of(contender, JOB, "zipf", "cpu")
    assert contender.cache is not None
    values_RD, cached_R = contender.read(0, rows_R), contender.cache.holds(0)
    codes_RD = values_RD / values_RD.abs().amax(1, keepdim=True) * 127
    whole_R = ((codes_RD - codes_RD.round()).abs() < 1e-3).all(1)
    assert bool(whole_R[~cached_R].all()) and not bool(whole_R[cached_R].any())
