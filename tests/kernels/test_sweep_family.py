"""Small workloads of the sweep's family: CPU and Triton kernels against the reference, lookups and steps with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flat
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from benchmarks.sweep.family import MEAN, NONE, TINY, Family, SweepWorkload, draw
from benchmarks.sweep.ids import BatchStream
from thermocline import formats as F
from thermocline.kernels.gather import gpu as gpu_gather
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.sum_gradients import gpu as gpu_sums
from thermocline.kernels.sum_gradients import reference as sums
from thermocline.kernels.update import cpu as cpu_update
from thermocline.kernels.update import gpu as gpu_update
from thermocline.kernels.update import reference as update

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
OUTPUTS = {
    "fp32": (torch.float32, 1e-5, 2e-5),
    "fp16": (torch.float16, 2e-3, 2e-3),
    "bf16": (torch.bfloat16, 1.6e-2, 1.6e-2),
}
WIDE = Family(3, 40, 512, 5, 6, 40, 1 << 20, 1 << 20, smallest=1)  # rows of several passes and of partial vectors
drawn = st.builds(draw, st.just(TINY), st.integers(0, 1 << 31), st.integers(0, 999))
drawn_wide = st.builds(draw, st.just(WIDE), st.integers(0, 1 << 31), st.integers(0, 999))


def _narrower(workload: SweepWorkload, columns: int) -> SweepWorkload:
    """The workload with this many columns less in each table: kernels take any width."""
    return replace(workload, dims=tuple(max(1, dim - columns) for dim in workload.dims))


any_width = st.builds(_narrower, drawn | drawn_wide, st.integers(0, 3))
stored = st.sampled_from(["fp32", "int8", "int4"])
fixtures = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


class Bags(NamedTuple):
    """A batch as kernels take it."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


def _mode(workload: SweepWorkload) -> int:
    return {MEAN: F.MEAN, NONE: F.NONE}.get(workload.mode, F.SUM)


def _bags(workload: SweepWorkload, stream: BatchStream) -> Bags:
    batch = stream.draw()
    offsets = batch.offsets[:: workload.batch].contiguous() if workload.mode == NONE else batch.offsets
    return Bags(batch.ids, offsets, batch.weights)


def _arena(workload: SweepWorkload, precision: str, make_arena: Make) -> Any:
    tables = [(rows, dim, precision) for rows, dim in zip(workload.rows, workload.dims, strict=True)]
    slots = None if precision == "fp32" else [-(-rows // 8) for rows in workload.rows]
    return make_arena(tables, slots=slots, seed=workload.number)


def _gradient(training: Any, bags: Bags, workload: SweepWorkload) -> tuple[Tensor, Tensor]:
    """(winners, a gradient of the output)."""
    place, mode = (training.codes, training.meta, training.layout), _mode(workload)
    out, winners = flat.gather_pool(gather, *place, *bags, mode, cache=training.cache)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return winners, grad.to(OUTPUTS[workload.output][0])


def _counts(training: Any, bags: Bags, workload: SweepWorkload) -> Tensor:
    """How often each distinct row is looked up."""
    first = torch.tensor([field[F.ROW] for field in training.layout.tables.features])
    batch = 1 if workload.mode == NONE else workload.batch
    feature_N = gather.bag_of_each(bags.offsets.long(), bags.ids.numel()) // batch
    return torch.unique(first[feature_N] + bags.ids, return_counts=True)[1]


def _place(made: Any) -> tuple[Any, ...]:
    return made.codes, made.meta, made.states, made.layout


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.changed(), b.changed(), strict=True))


def _reference_step(training: Any, bags: Bags, workload: SweepWorkload, rows_U: Tensor, grads_UW: Tensor) -> None:
    counts_U = None if training.cache is None else _counts(training, bags, workload)
    state = (training.hyper, training.clock, F.ROWWISE_ADAGRAD, True, training.cache, counts_U)
    flat.update_rows(update, *_place(training), rows_U, grads_UW, *state)


@settings(max_examples=40, suppress_health_check=fixtures)
@given(workload=any_width, precision=stored)
def test_cpu_steps_and_lookups_equal_the_reference(
    workload: SweepWorkload, precision: str, make_arena: Make, make_training: Make, lookups_agree: Make
) -> None:
    arena, stream, mode = _arena(workload, precision, make_arena), BatchStream(workload, "cpu"), _mode(workload)
    wanted, got = (make_training(arena, F.ROWWISE_ADAGRAD) for _ in range(2))
    for _ in range(2):
        bags = _bags(workload, stream)
        winners, grad = _gradient(wanted, bags, workload)
        sums_UW = flat.sum_row_gradients(sums, wanted.layout, *bags, mode, winners, grad)
        _reference_step(wanted, bags, workload, *sums_UW)
        place = (*_place(got), *bags, mode, winners, grad, got.hyper, got.clock, F.ROWWISE_ADAGRAD, True, got.cache)
        flat.update_bags(cpu_update, *place)
        assert _same(got, wanted)
    lookups_agree(got, _bags(workload, stream), mode)


@settings(max_examples=6, suppress_health_check=fixtures)
@given(workload=drawn, precision=stored)
def test_triton_steps_and_lookups_agree_with_the_reference(
    workload: SweepWorkload, precision: str, make_arena: Make, make_training: Make, on: On
) -> None:
    arena, stream, mode = _arena(workload, precision, make_arena), BatchStream(workload, "cpu"), _mode(workload)
    wanted, bags = make_training(arena, F.ROWWISE_ADAGRAD), _bags(workload, stream)
    ours = on(wanted)
    winners, grad = _gradient(wanted, bags, workload)
    exact_U, exact_UW = flat.sum_row_gradients(sums, wanted.layout, *bags, mode, winners, grad)
    moved = (*on(bags), mode, on(winners), on(grad))
    rows_U, grads_UW = (part.cpu() for part in flat.sum_row_gradients(gpu_sums, ours.layout, *moved))
    assert torch.equal(rows_U, exact_U)
    torch.testing.assert_close(grads_UW, exact_UW, rtol=1e-5, atol=1e-4)
    _reference_step(wanted, bags, workload, rows_U, grads_UW)
    state = (ours.hyper, ours.clock, F.ROWWISE_ADAGRAD, True, ours.cache)
    flat.update_bags(gpu_update, *_place(ours), *moved, *state)
    assert _same(ours, wanted)
    dtype, rtol, atol = OUTPUTS[workload.output]
    later = _bags(workload, stream)
    place = (ours.codes, ours.meta, ours.layout)
    got, _ = flat.gather_pool(gpu_gather, *place, *on(later), mode, dtype, cache=ours.cache)
    place = (wanted.codes, wanted.meta, wanted.layout)
    exact, _ = flat.gather_pool(gather, *place, *later, mode, dtype, cache=wanted.cache)
    torch.testing.assert_close(got.cpu(), exact, rtol=rtol, atol=atol)
