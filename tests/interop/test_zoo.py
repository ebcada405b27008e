"""Models of other libraries train as they do unconverted: one seed of each (`python -m benchmarks zoo` trains five)."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from benchmarks.runner.paired import RunResult, TrainingJob
from benchmarks.zoo.benchmark import ARMS, FILES, apart, is_equal, run_job


@pytest.mark.parametrize("file", FILES)
def test_converted_models_of_other_libraries_learn_the_same(file):
    try:
        cases = import_module(f"benchmarks.zoo.{file}").CASES
    except ImportError as error:
        pytest.skip(f"no {error.name} here; docs/zoo.md says how to get it")
    for case in cases:
        jobs = [TrainingJob(arm, SimpleNamespace(dim=0, seed=0, case=case), case.name) for arm in ARMS]
        plain, rounding, fp32, int8 = (RunResult(**run_job(job)) for job in jobs)
        assert is_equal(apart(fp32, plain), apart(rounding, plain)), case.name
        assert 0 < apart(int8, plain) < 0.2, case.name
        assert fp32.stats["bytes_after"] == fp32.stats["bytes_before"] > 2 * int8.stats["bytes_after"], case.name
