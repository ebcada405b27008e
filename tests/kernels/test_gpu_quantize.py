"""Triton's quantize and dequantize equal the reference bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from thermocline import formats as F
from thermocline.kernels.quantize import gpu, reference

pytestmark = pytest.mark.usefixtures("poisoned")

On = Callable[[Any], Any]
DIMS = (1, 3, 48, 100, 128, 513)
FORMATS = range(len(F.NAMES))


# Ties: halfway between codes of int8 (largest value 127) and fp8 (448), and between neighbours of fp16 and bf16.
TIES = (
    [127.0, 0.5, 1.5, -0.5, -1.5],
    [448.0, 17.0, 19.0, -21.0, 0.0029296875],
    [1 + 2.0**-11, 1 + 3 * 2.0**-11],
    [1 + 2.0**-8, 1 + 3 * 2.0**-8],
)


def _values(count: int, dim: int, seed: int) -> torch.Tensor:
    """Normal rows of very different sizes; some constant, zero, subnormal, negative, with an outlier, or with ties."""
    generator = torch.Generator().manual_seed(seed)
    values_ND = torch.randn(count, dim, generator=generator)
    values_ND *= torch.exp2(torch.randint(-12, 12, (count, 1), generator=generator).float())
    for row, special in enumerate((0.0, 0.7, -3.0, 1e-40)[:count]):
        values_ND[row] = special
    if count > 5:
        values_ND[4, dim // 2] = 30000.0
        values_ND[5] = -values_ND[5].abs()
    for row, ties in enumerate(TIES if count > 9 else ()):
        values_ND[6 + row] = torch.tensor(ties).repeat(dim)[:dim]
    return values_ND


def _check(values_ND: torch.Tensor, format: int, clock: torch.Tensor | None, rows_N: torch.Tensor | None, on: On) -> None:
    codes_NB, meta_NW = gpu.quantize_rows(on(values_ND), format, on(clock), on(rows_N))
    wanted_NB, wanted_NW = reference.quantize_rows(values_ND, format, clock, rows_N)
    assert torch.equal(codes_NB.cpu(), wanted_NB)
    assert torch.equal(meta_NW.cpu(), wanted_NW)
    back_ND = gpu.dequantize_rows(on(wanted_NB), on(wanted_NW), format, values_ND.shape[1])
    wanted_ND = reference.dequantize_rows(wanted_NB, wanted_NW, format, values_ND.shape[1])
    assert torch.equal(back_ND.cpu().view(torch.int32), wanted_ND.contiguous().view(torch.int32))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_format_and_dimension_rounds_as_the_reference_does(format: int, dim: int, rounding: str, on: On) -> None:
    count = 11 if dim > 500 else 63
    values_ND = _values(count, dim, seed=dim)
    clock, rows_N = None, None
    if rounding == "stochastic":
        clock, rows_N = torch.tensor([1234567890123, 5 + (3 << 32)]), torch.arange(count).flip(0) * (1 << 30)
    _check(values_ND, format, clock, rows_N, on)


@pytest.mark.parametrize("row", [[-0.0], [-0.0, -0.0, -0.0], [-0.0, 1.0, 2.0], [0.0, -0.0, 1.0]], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_negative_zero_is_stored_as_the_reference_stores_it(format: int, row: list[float], on: On) -> None:
    _check(torch.tensor([row]), format, None, None, on)
    _check(torch.tensor([row]), format, torch.tensor([3, 4]), torch.tensor([5]), on)


@pytest.mark.parametrize("format", FORMATS[F.FP8 :], ids=F.NAMES[F.FP8 :])
def test_no_row_sets_the_sign_bit_of_its_scale(format: int, on: On) -> None:
    """It is reserved: the cache marks with it rows whose value lives elsewhere."""
    rows = [[0.0, 0.0, 0.0], [-0.0, -0.0, -0.0], [-2.0, -2.0, -2.0], [-3.0, 0.0, 1e-40], [-1e-45, -0.0, 0.0]]
    for meta_NW in (
        gpu.quantize_rows(on(torch.tensor(rows)), format, None, None)[1],
        reference.quantize_rows(torch.tensor(rows), format, None, None)[1],
    ):
        assert (meta_NW[:, 0] >= 0).all()


@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
@pytest.mark.parametrize("count", [0, 1, 17])
def test_no_row_one_row_and_a_row_more_than_a_tile(format: int, count: int, on: On) -> None:
    values_ND = _values(count, 5, seed=count)
    _check(values_ND, format, None, None, on)
    _check(values_ND, format, torch.tensor([-1, -2]), torch.arange(count, dtype=torch.int32), on)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    format=st.sampled_from(FORMATS),
    rows=st.integers(1, 40).flatmap(
        lambda dim: st.lists(
            st.lists(st.floats(-60000.0, 60000.0, width=32), min_size=dim, max_size=dim), min_size=1, max_size=3
        )
    ),
    clock=st.none() | st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1)),
)
def test_any_values_seed_and_step_give_the_same_bits(
    format: int, rows: list[list[float]], clock: tuple[int, int] | None, on: On
) -> None:
    ticking = None if clock is None else torch.tensor(clock)
    _check(torch.tensor(rows), format, ticking, None if clock is None else torch.arange(len(rows)) + 11, on)


@pytest.mark.parametrize("format", [F.FP16, F.FP8, F.INT8, F.INT2], ids=["fp16", "fp8", "int8", "int2"])
def test_stochastic_codes_depend_on_seed_step_and_row(format: int, on: On) -> None:
    values_ND, rows_N = _values(7, 48, seed=3), torch.arange(7)
    first, *others = (
        gpu.quantize_rows(on(values_ND), format, on(torch.tensor(clock)), on(rows_N + shift))[0].cpu()
        for clock, shift in (([1, 1], 0), ([2, 1], 0), ([1, 2], 0), ([1, 1], 1))
    )
    assert all(not torch.equal(first, other) for other in others)


def test_rows_that_are_a_transposed_view_are_read_in_the_right_order(on: On) -> None:
    values_ND = _values(5, 9, seed=1)
    turned_ND = on(values_ND.t().contiguous()).t()
    assert torch.equal(
        gpu.quantize_rows(turned_ND, F.INT8, None, None)[0].cpu(),
        reference.quantize_rows(values_ND, F.INT8, None, None)[0],
    )


@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_byte_of_codes_has_a_value(format: int, on: On) -> None:
    """All 256 bytes at once, so that every code occurs; quantize never writes NaN codes."""
    if F.BITS[format] > 8:
        dtype = {F.FP32: torch.float32, F.FP16: torch.float16, F.BF16: torch.bfloat16}[format]
        dim, codes_NB = 256, (torch.arange(256) - 127.5)[None].to(dtype).view(torch.uint8)
    else:
        dim, codes_NB = 256 * F.planes(format), torch.arange(256, dtype=torch.uint8)[None]
    if format in (F.FP8, F.INT8, F.INT8_AFFINE):
        meta_NW = torch.tensor([[0.75, -0.3]])[:, : F.META_WORDS[format]].contiguous().view(torch.int32)
    else:
        meta_NW = torch.tensor([[0x3F403E9A]], dtype=torch.int32)[:, : F.META_WORDS[format]]
    got_ND = gpu.dequantize_rows(on(codes_NB), on(meta_NW), format, dim).cpu()
    wanted_ND = reference.dequantize_rows(codes_NB, meta_NW, format, dim)
    ours_ND = ~wanted_ND.isnan()
    assert ours_ND.sum() >= dim - 2
    assert torch.equal(got_ND[ours_ND], wanted_ND[ours_ND])
