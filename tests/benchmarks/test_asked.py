"""What is asked of the benchmarks, and whether they measure it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.kernels import cases
from benchmarks.runner import show

ASKED = Path(__file__).resolve().parents[2] / "benchmarks" / "asked.json"


def test_the_file_is_well_formed_and_names_no_case_twice() -> None:
    show.load_asked(ASKED)
    for entries in json.loads(ASKED.read_text()).values():
        names = [entry["case"] for entry in entries]
        assert len(names) == len(set(names))
        assert all(entry["issue"] for entry in entries)


def test_every_asked_case_is_one_that_the_bench_measures() -> None:
    assert set(show.load_asked(ASKED)["kernels"]) <= set(cases.all_cases())


def test_no_two_rows_share_a_name() -> None:
    names = cases.all_cases()
    assert len(names) == len(set(names))


def test_gated_gpu_rows_are_measured_before_reported_ones() -> None:
    asked = show.load_asked(ASKED)["kernels"]
    gated = [any(case in asked for case in cases.gpu_cases(group)) for group in cases.gpu_groups()]
    assert gated == sorted(gated, reverse=True)


def test_every_shape_and_thread_count_of_the_cpu_is_asked_for() -> None:
    asked = [case.split("/") for case in show.load_asked(ASKED)["kernels"] if case.startswith("cpu/")]
    assert {(case[1], case[-1]) for case in asked} == {(s, t) for s in ("26x100k", "8x1M") for t in ("1", "2")}
