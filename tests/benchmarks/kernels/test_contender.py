"""A wrong contender is not timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import torch_contender as peer_torch
from benchmarks.kernels.cases import FORWARD, STEP_ROWWISE, STEP_SGD, Shape, Workload
from benchmarks.kernels.contender import Contender, WrongResult, check_forward, check_step
from support import has

SHAPE = Shape("test", tables=3, rows=101, dim=8, batch=63, pooling=5)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("pooling", [1, 5])
def test_a_right_lookup_passes(precision: str, pooling: int) -> None:
    peer_torch.contenders(Workload(replace(SHAPE, pooling=pooling), precision, FORWARD), "cpu")


def test_a_right_unpooled_lookup_passes() -> None:
    peer_torch.contenders(Workload(replace(SHAPE, pooled=False), "fp32", FORWARD), "cpu")


def test_a_lookup_of_the_wrong_rows_is_refused() -> None:
    job = Workload(SHAPE, "int8", FORWARD)
    right = peer_torch.build(job, "cpu")

    def run(args: tuple[list[Tensor], Tensor]) -> Any:
        return right.run(([(ids + 1) % SHAPE.rows for ids in args[0]], args[1]))

    with pytest.raises(WrongResult, check=has(check="forward")):
        check_forward(replace(right, run=run), job, "cpu")


def test_a_right_step_passes() -> None:
    check_step(peer_torch.build, Workload(SHAPE, "int8", STEP_SGD), "cpu")


def test_a_step_that_updates_twice_is_refused() -> None:
    def build(job: Workload, device: str) -> Contender:
        right = peer_torch.build(job, device)

        def run(args: Any) -> None:
            right.run(args)
            right.run(args)

        return replace(right, run=run)

    with pytest.raises(WrongResult, check=lambda error: error.check in ("step", "mean step")):
        check_step(build, Workload(SHAPE, "fp32", STEP_SGD), "cpu")


def test_a_step_that_touches_other_rows_is_refused() -> None:
    def build(job: Workload, device: str) -> Contender:
        right = peer_torch.build(job, device)
        moved = 0.0

        def run(args: Any) -> None:
            nonlocal moved
            right.run(args)
            moved = 1e-3

        return replace(right, run=run, read=lambda table, rows: right.read(table, rows) + moved)

    with pytest.raises(WrongResult, check=has(check="untouched rows")):
        check_step(build, Workload(SHAPE, "fp32", STEP_SGD), "cpu")


def test_a_step_without_effect_is_refused_even_if_a_code_is_larger_than_a_step() -> None:
    def build(job: Workload, device: str) -> Contender:
        right = peer_torch.build(replace(job, operation=STEP_SGD), device)
        wide = lambda table, rows: right.read(table, rows) * 20  # noqa: E731 - so that a code is wide
        return replace(right, label="ours", run=lambda args: None, read=wide)

    with pytest.raises(WrongResult, check=has(check="mean step")):
        check_step(build, Workload(SHAPE, "int4", STEP_ROWWISE), "cpu")


def test_nan_is_not_taken_for_right() -> None:
    job = Workload(SHAPE, "fp32", FORWARD)
    right = peer_torch.build(job, "cpu")
    with pytest.raises(WrongResult):
        check_forward(replace(right, run=lambda args: torch.full_like(right.run(args), torch.nan)), job, "cpu")
