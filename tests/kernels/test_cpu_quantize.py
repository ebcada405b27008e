"""Quantize and dequantize on the CPU: the bits of the reference, in every format."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.quantize import cpu, reference

pytestmark = pytest.mark.usefixtures("poisoned")

FORMATS = range(len(F.NAMES))
DIMS = [1, 3, 48, 100, 128, 513]


def _same(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def _check(values_ND: Tensor, format: int, stochastic: bool) -> None:
    rows_N = torch.arange(values_ND.shape[0]) * 12_345_678_901 if stochastic else None
    clock = torch.tensor([2**40 + 5, 7]) if stochastic else None
    codes_NB, meta_NW = cpu.quantize_rows(values_ND, format, clock, rows_N)
    wanted_codes, wanted_meta = reference.quantize_rows(values_ND, format, clock, rows_N)
    _same(codes_NB, wanted_codes)
    _same(meta_NW, wanted_meta)
    dim = values_ND.shape[1]
    _same(cpu.dequantize_rows(codes_NB, meta_NW, format, dim), reference.dequantize_rows(codes_NB, meta_NW, format, dim))


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_format_and_dimension_has_the_bits_of_the_reference(format: int, stochastic: bool) -> None:
    for dim in DIMS:
        generator = torch.Generator().manual_seed(dim)
        values_ND = torch.randn(63, dim, generator=generator) * torch.randn(63, 1, generator=generator).exp() * 0.1
        _check(values_ND, format, stochastic)


@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_rows_at_the_edge_have_the_bits_of_the_reference(format: int) -> None:
    huge = 65504.0 if format == F.FP16 else 2.0**126
    edge = [0.0, -0.0, 1.5, -1.5, huge, -huge, 2e-39, -2e-39, 2.0**-126, 1e-30, 448.0, 6.1e-5, 5.9e-8, 3e-8, 2.0**-149]
    constant_ND = torch.tensor(edge)[:, None].expand(-1, 19).contiguous()
    mixed_ND = torch.tensor(edge)[torch.randint(0, len(edge), (200, 19), generator=torch.Generator().manual_seed(3))]
    outlier_ND = torch.full((4, 19), 1e-4)
    outlier_ND[:, 7] = torch.tensor([huge, -huge, 60000.0, -1.0])
    for values_ND in (constant_ND, mixed_ND, outlier_ND):
        for stochastic in (False, True):
            _check(values_ND, format, stochastic)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(0, 9), st.sampled_from([0, 1, 63, 1000]), st.integers(1, 70), st.booleans(), st.integers(0, 2**31))
def test_any_shape_has_the_bits_of_the_reference(format: int, count: int, dim: int, stochastic: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size_N1 = 10.0 ** torch.randint(-20, 4, (count, 1), generator=generator)
    values_ND = torch.randn(count, dim, generator=generator) * size_N1
    _check(values_ND, format, stochastic)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    values_ND = torch.randn(5000, 33, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _check(values_ND, F.INT8, True)
        _check(values_ND, F.INT4, True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("format", [F.FP8, F.FP16, F.BF16], ids=["fp8", "fp16", "bf16"])
def test_every_code_of_a_short_float_is_read_as_torch_reads_it(format: int) -> None:
    codes_N = torch.arange(256 if format == F.FP8 else 65536)
    bytes_NB = reference.pack(codes_N[:, None], format)
    meta_NW = torch.ones(codes_N.numel(), F.META_WORDS[format]).view(torch.int32)
    got_N = cpu.dequantize_rows(bytes_NB, meta_NW, format, 1)[:, 0]
    wanted_N = reference.decode_float(codes_N, format)
    assert torch.equal(got_N.isnan(), wanted_N.isnan())
    assert torch.equal(got_N[~got_N.isnan()].view(torch.int32), wanted_N[~wanted_N.isnan()].view(torch.int32))


def test_stochastic_rounding_is_unbiased_and_follows_the_seed() -> None:
    values_ND = torch.full((20_000, 8), 0.3)
    values_ND[:, 0] = 127.0  # a scale of one
    rows_N = torch.arange(20_000)
    first, _ = cpu.quantize_rows(values_ND, F.INT8, torch.tensor([1, 1]), rows_N)
    other, _ = cpu.quantize_rows(values_ND, F.INT8, torch.tensor([2, 1]), rows_N)
    mean = first[:, 1:].float().mean().item()
    assert abs(mean - 0.3) < 5 * (0.3 * 0.7 / 140_000) ** 0.5
    assert not torch.equal(first, other)
