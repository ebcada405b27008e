"""The definition of quantize and dequantize, against torch's casts and against its own promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.quantize import reference
from thermocline.kernels.quantize.reference import (
    dequantize_rows,
    encode_float,
    quantize_rows,
    random_bits,
    scale_and_bias,
    unpack,
)

QUANTIZED = range(F.FP8, len(F.NAMES))
SHORTER = range(F.FP16, len(F.NAMES))
DTYPE = {F.FP16: torch.float16, F.BF16: torch.bfloat16, F.FP8: torch.float8_e4m3fn}
named = {"ids": lambda format: F.NAMES[format]}


def gaussian(rows: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def clock(seed: int = 7, step: int = 3) -> Tensor:
    return torch.tensor([seed, step])


def back(values_ND: Tensor, format: int, clock: Tensor | None = None, rows_N: Tensor | None = None) -> Tensor:
    return dequantize_rows(*quantize_rows(values_ND, format, clock, rows_N), format, values_ND.shape[1])


# -- nearest --------------------------------------------------------------------------------------------------------


def every_exponent(limit: float) -> Tensor:
    """fp32 numbers of both signs of all magnitudes below `limit`: random bits, exact halves between neighbours, zeros."""
    bits = torch.randint(-(2**31), 2**31, (20_001,), generator=torch.Generator().manual_seed(0))
    ties = (bits & ~0xFFFFF) | 0x80000
    halves = (bits & ~0x1FFF) | 0x1000
    numbers = torch.cat([bits, ties, halves]).to(torch.int32).view(torch.float32)
    return torch.cat([numbers[numbers.abs() <= limit], torch.tensor([0.0, -0.0, limit, -limit])])


@pytest.mark.parametrize("format, limit", [(F.FP16, 65504.0), (F.BF16, 3.3e38), (F.FP8, 448.0)])
def test_nearest_shorter_floats_are_torchs_casts(format, limit):
    numbers = every_exponent(limit)
    expected = numbers.to(DTYPE[format])
    codes = expected.view(torch.uint8 if format == F.FP8 else torch.int16).long() & ((1 << F.BITS[format]) - 1)
    assert torch.equal(encode_float(numbers, format, None), codes)


@pytest.mark.parametrize(
    "format, beyond, largest", [(F.FP16, 1e6, 65504.0), (F.BF16, 3.4e38, 3.3895e38), (F.FP8, 480.0, 448.0)]
)
def test_shorter_floats_saturate(format, beyond, largest):
    code = encode_float(torch.tensor([beyond, -beyond]), format, None)
    raw = code.to(torch.uint8) if format == F.FP8 else torch.where(code >= 1 << 15, code - (1 << 16), code).short()
    assert raw.view(DTYPE[format]).float().tolist() == pytest.approx([largest, -largest], rel=1e-4)


@pytest.mark.parametrize("format", [F.FP16, F.BF16], **named)
@given(rows=st.sampled_from([0, 1, 63]), dim=st.integers(1, 130))
def test_rows_of_shorter_floats_are_torchs_casts(format, rows, dim):
    values_ND = gaussian(rows, dim)
    assert torch.equal(back(values_ND, format), values_ND.to(DTYPE[format]).float())


def test_fp32_rows_are_stored_as_they_are():
    values_ND = gaussian(5, 3)
    assert torch.equal(back(values_ND, F.FP32), values_ND)


def test_fp8_rows_are_torchs_casts_of_the_scaled_row():
    values_ND = gaussian(63, 100)
    scale_N1 = values_ND.abs().amax(1, keepdim=True) / 448.0
    expected_ND = (values_ND * (1.0 / scale_N1)).to(torch.float8_e4m3fn).float() * scale_N1
    assert torch.equal(back(values_ND, F.FP8), expected_ND)


@pytest.mark.parametrize("format", QUANTIZED, **named)
@given(rows=st.sampled_from([1, 63]), dim=st.integers(1, 200), stochastic=st.booleans())
def test_codes_fill_their_range_and_never_leave_it(format, rows, dim, stochastic):
    values_ND = gaussian(rows, dim) * 3 + 1
    randomness = (clock(), torch.arange(rows)) if stochastic else (None, None)
    codes_NB, meta_NW = quantize_rows(values_ND, format, *randomness)
    assert tuple(codes_NB.shape) == (rows, F.row_bytes(format, dim)) and codes_NB.dtype == torch.uint8
    assert tuple(meta_NW.shape) == (rows, F.META_WORDS[format]) and meta_NW.dtype == torch.int32
    assert (meta_NW[:, 0] >= 0).all(), "the sign bit of the first word is reserved"
    codes_ND = unpack(codes_NB, format, dim)
    assert tuple(codes_ND.shape) == (rows, dim)
    if format == F.INT8:
        assert codes_ND.abs().amax(1).tolist() == [127] * rows
    elif format == F.FP8:
        assert (codes_ND & 0x7F).amax(1).tolist() == [0x7E] * rows
    else:
        assert codes_ND.min() >= 0 and codes_ND.max() <= F.levels(format)


@pytest.mark.parametrize("format", QUANTIZED, **named)
@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_codes_are_clamped_where_the_random_bits_would_carry_them_past_the_ends(format, bits, monkeypatch):
    monkeypatch.setattr(reference, "random_bits", lambda clock, rows_N, dim: torch.full((rows_N.numel(), dim), bits))
    values_ND = torch.tensor([[1.0, 0.3, -1.0]]) * torch.linspace(0.5, 3, 4001)[:, None]
    codes_NB, meta_NW = quantize_rows(values_ND, format, clock(), torch.arange(4001))
    codes_ND = unpack(codes_NB, format, 3)[:, [0, 2]]
    if format == F.INT8:
        assert codes_ND.min() == -127 and codes_ND.max() == 127
    error_ND = (dequantize_rows(codes_NB, meta_NW, format, 3) - values_ND).abs()
    assert (error_ND <= 1.01 * values_ND.abs() * {F.FP8: 2.0**-3}.get(format, 2.05 / F.levels(format)))[:, [0, 2]].all()


@pytest.mark.parametrize("format", [f for f in QUANTIZED if f not in (F.FP8, F.INT8)], **named)
def test_affine_rows_use_the_lowest_and_the_highest_code(format):
    codes_ND = unpack(quantize_rows(gaussian(63, 100), format, None, None)[0], format, 100)
    assert codes_ND.amin(1).tolist() == [0] * 63
    assert codes_ND.amax(1).tolist() == [F.levels(format)] * 63


def metadata_error(values_ND, format):
    """How far the rounding of 16-bit metadata may put the ends of a row off."""
    share = {F.INT4: 2.0**-7, F.INT2: 2.0**-7, F.INT4_AFFINE: 2.0**-10, F.INT2_AFFINE: 2.0**-10}.get(format, 0.0)
    return share * values_ND.abs().amax(dim=1, keepdim=True)


@pytest.mark.parametrize("format", [f for f in QUANTIZED if f != F.FP8], **named)
@given(dim=st.integers(1, 200), seed=st.integers(0, 999))
def test_nearest_is_off_by_half_a_step(format, dim, seed):
    values_ND = gaussian(7, dim, seed)
    codes_NB, meta_NW = quantize_rows(values_ND, format, None, None)
    scale_N1, _ = scale_and_bias(meta_NW, format)
    error_ND = (dequantize_rows(codes_NB, meta_NW, format, dim) - values_ND).abs()
    assert (error_ND <= 0.5 * scale_N1 + metadata_error(values_ND, format) + 1e-6).all()


@pytest.mark.parametrize("format", SHORTER, **named)
@given(dim=st.sampled_from([1, 3, 48, 100, 513]), seed=st.integers(0, 999), offset=st.sampled_from([0.0, 0.5]))
def test_requantizing_an_unchanged_row_to_nearest_changes_nothing(format, dim, seed, offset):
    values_ND = gaussian(63, dim, seed) + offset
    if format >= F.INT4:  # where zero is not in a row's range, its 16-bit bias may move: see the next test
        values_ND = values_ND[(values_ND.amin(1) < 0) & (values_ND.amax(1) > 0)]
    codes_NB, meta_NW = quantize_rows(values_ND, format, None, None)
    again_NB, again_NW = quantize_rows(dequantize_rows(codes_NB, meta_NW, format, dim), format, None, None)
    assert torch.equal(again_NB, codes_NB)
    last_places = 1 if format == F.INT8_AFFINE else 0
    assert ((again_NW - meta_NW).abs() <= last_places).all()


@pytest.mark.parametrize("format", [F.INT8, F.INT4, F.INT2, F.INT4_AFFINE, F.INT2_AFFINE], **named)
def test_a_row_with_a_tiny_bias_keeps_its_scale_although_its_range_is_rounded(format):
    values_ND = torch.rand(4001, 5, generator=torch.Generator().manual_seed(0)) + 0.5
    values_ND[:, 2] = -(10.0 ** -torch.linspace(1, 9, 4001))
    codes_NB, meta_NW = quantize_rows(values_ND, format, None, None)
    again_NB, again_NW = quantize_rows(dequantize_rows(codes_NB, meta_NW, format, 5), format, None, None)
    # A tiny fp16 bias rounds to minus zero, and comes back as zero.
    kept = again_NW >> 16 == meta_NW >> 16 if format >= F.INT4_AFFINE else again_NW == meta_NW
    assert torch.equal(again_NB, codes_NB) and bool(kept.all())


def test_training_noise_does_not_push_the_range_of_a_row_outwards():
    values_ND = torch.rand(63, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows_N, generator = torch.arange(63), torch.Generator().manual_seed(1)
    values_ND = back(values_ND, F.INT4)
    width_N = values_ND.amax(1) - values_ND.amin(1)
    for step in range(100):
        values_ND = values_ND - 1e-4 * torch.randn(63, 64, generator=generator)
        values_ND = back(values_ND, F.INT4, clock(0, step), rows_N)
    assert ((values_ND.amax(1) - values_ND.amin(1)).mean() / width_N.mean() - 1).abs() < 0.02


@pytest.mark.parametrize("format", QUANTIZED, **named)
@given(dim=st.sampled_from([1, 3, 48, 100, 513]), seed=st.integers(0, 999), offset=st.sampled_from([3.0, -40.0]))
def test_requantizing_moves_a_row_by_at_most_half_a_step_and_its_metadata_error(format, dim, seed, offset):
    codes_NB, meta_NW = quantize_rows(gaussian(63, dim, seed) + offset, format, None, None)
    values_ND = dequantize_rows(codes_NB, meta_NW, format, dim)
    scale_N1, _ = scale_and_bias(meta_NW, format)
    assert ((back(values_ND, format) - values_ND).abs() <= 0.5 * scale_N1 + metadata_error(values_ND, format) + 1e-6).all()


# -- stochastic -----------------------------------------------------------------------------------------------------

# (seed, step, row) -> bits of columns 0, 1, 2 and 2047. These may never change: checkpoints resume by them, and replicas
# of a row on different machines stay equal by them.
GOLDEN = {
    (0, 0, 0): [0x00000000, 0x92CA2F0E, 0x3CD6E3F3, 0x5F2CA110],
    (1, 0, 0): [0xCE3BEBA9, 0x096C22AF, 0x3D597CCF, 0x93CF3248],
    (0, 1, 0): [0x0CD9E56E, 0xB5357805, 0x800B6FB2, 0xAC225044],
    (0, 0, 1): [0x2FEF5C8F, 0x50653BED, 0xCC56A2EB, 0xCBBA0FD8],
    (42, 1000, 123456789): [0x7126A184, 0xD23AC4A1, 0x22E0DB8E, 0xF004FA01],
    (2**32, 0, 0): [0x70549279, 0x4D31DABB, 0x17E8523C, 0xC99917A6],
    (0, 2**32, 0): [0x5CE6C067, 0xFCE98D62, 0xC22178DE, 0xA7A9CA6F],
    (0, 0, 2**32): [0x5716F995, 0x8A22B018, 0x3BDB8D87, 0x1CA7E557],
    (2**63 - 1, 2**40 + 5, 2**35 + 7): [0x351B497D, 0xA27BC132, 0x44C95D9C, 0x886890AB],
    (-1, 1, 1): [0x9D3615D4, 0xB0D64249, 0x9630C2E7, 0xD30EC1BF],
}


@pytest.mark.parametrize("seed, step, row", GOLDEN)
def test_random_bits_are_the_ones_they_have_always_been(seed, step, row):
    bits = random_bits(clock(seed, step), torch.tensor([row]), 2048)
    assert bits[0, [0, 1, 2, 2047]].tolist() == GOLDEN[seed, step, row]


@pytest.mark.parametrize("seed, step, row", [(8, 3, 0), (7, 4, 0), (7, 3, 1000), (7 + 2**32, 3, 0), (7, 3 + 2**32, 0)])
def test_random_bits_depend_on_seed_step_and_row(seed, step, row):
    rows_N = torch.arange(1000)
    ours, theirs = random_bits(clock(7, 3), rows_N, 5), random_bits(clock(seed, step), rows_N + row, 5)
    assert (ours == theirs).float().mean() < 0.01


def test_random_bits_are_fair_and_do_not_follow_their_neighbours():
    bits = random_bits(clock(), torch.arange(4001), 25)
    ones = (bits[..., None] >> torch.arange(32)) & 1
    sigma = 0.5 / ones[..., 0].numel() ** 0.5
    assert ((ones.double().mean((0, 1)) - 0.5).abs() < 5 * sigma).all()
    for axis in (0, 1):
        length = ones.shape[axis] - 1
        same = ones.narrow(axis, 0, length) == ones.narrow(axis, 1, length)
        assert ((same.double().mean((0, 1)) - 0.5).abs() < 5.1 * sigma).all()


@pytest.mark.parametrize("format", SHORTER, **named)
def test_stochastic_rounding_is_unbiased(format):
    count = 40_001
    values_D = gaussian(1, 9, seed=format)[0] + 0.3
    rounded_ND = back(values_D.expand(count, 9).contiguous(), format, clock(), torch.arange(count)).double()
    low_D, high_D = rounded_ND.amin(0), rounded_ND.amax(0)
    step_D = high_D - low_D
    assert (step_D > 0).sum() >= 7, "only the ends of a row are exact"
    spread = values_D.max() - values_D.min()
    # The ends of a row are clamped to what its metadata can say (`metadata_error`); between them the mean is the value.
    between_D = (values_D > values_D.min()) & (values_D < values_D.max())
    assert ((low_D <= values_D) & (values_D <= high_D))[between_D].all()
    off_D = (rounded_ND.mean(0) - values_D.double()).abs()
    assert (off_D <= 5 * rounded_ND.std(0) / count**0.5 + 1e-6 * spread)[between_D].all()
    assert (off_D <= metadata_error(values_D[None], format)[0] + 5 * rounded_ND.std(0) / count**0.5 + 1e-6 * spread).all()


@pytest.mark.parametrize("format", SHORTER, **named)
@pytest.mark.parametrize("seed, step, row", [(8, 3, 0), (7, 4, 0), (7, 3, 1)])
def test_stochastic_rounding_depends_on_seed_step_and_row(format, seed, step, row):
    values_ND, rows_N = gaussian(63, 48), torch.arange(63)
    ours = back(values_ND, format, clock(7, 3), rows_N)
    assert not torch.equal(ours, back(values_ND, format, clock(seed, step), rows_N + row))
    assert torch.equal(ours, back(values_ND, format, clock(7, 3), rows_N))


@pytest.mark.parametrize("format", SHORTER, **named)
def test_stochastic_rounding_depends_on_the_column(format):
    values_ND = torch.full((63, 48), 0.777)
    values_ND[:, 0], values_ND[:, 1] = 1.0, -1.0
    inner_ND = back(values_ND, format, clock(), torch.arange(63))[:, 2:]
    assert (inner_ND.amax(1) > inner_ND.amin(1)).sum() > 50


@pytest.mark.parametrize("format", SHORTER, **named)
def test_a_row_is_rounded_alike_in_every_batch(format):
    values_ND, rows_N = gaussian(63, 48), torch.arange(1000, 1063)
    order = torch.randperm(63, generator=torch.Generator().manual_seed(1))
    whole = back(values_ND, format, clock(), rows_N)
    assert torch.equal(whole[order], back(values_ND[order], format, clock(), rows_N[order]))
    assert torch.equal(whole[5:6], back(values_ND[5:6], format, clock(), rows_N[5:6].int()))


@pytest.mark.parametrize("format", [F.FP16, F.BF16], **named)
def test_stochastic_rounding_leaves_exact_values_alone(format):
    exact_ND = gaussian(63, 48).to(DTYPE[format]).float()
    assert torch.equal(back(exact_ND, format, clock(), torch.arange(63)), exact_ND)
