"""Fused tables against the operators of torch that write and read them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support import has
from thermocline import BadInput, FormatError
from thermocline import formats as F
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.kernels.quantize import reference
from thermocline.rows import fused_quantized as fused
from thermocline.rows.arena import Arena
from thermocline.rows.fused_quantized import FORMAT_OF_BITS, check_fused, export_fused, unpack_into
from thermocline.rows.optimizers import SGD
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import Trainer, lookup

TORCH_NAMES = {8: "byte", 4: "4bit", 2: "2bit"}
BITS = sorted(TORCH_NAMES)
PRECISION = {8: "int8_affine", 4: "int4_affine", 2: "int2_affine"}


def torch_op(bits: int, name: str):
    return getattr(torch.ops.quantized, f"embedding_bag_{TORCH_NAMES[bits]}_{name}")


def rows(count: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def imported_arena(packed: Tensor, bits: int, dim: int) -> Arena:
    arena = Arena([TableSpec(packed.shape[0], dim, PRECISION[bits])])
    arena.import_fused(0, packed)
    return arena


def import_fused(packed, bits, dim=None, requantize_negative=False):
    """A fused table as (codes, meta, format, dim)."""
    format = FORMAT_OF_BITS[bits]
    dim = check_fused(packed, format, dim, requantize_negative)
    codes_RB = torch.empty((len(packed), F.row_bytes(format, dim)), dtype=torch.uint8)
    meta_RW = torch.empty((len(packed), F.META_WORDS[format]), dtype=torch.int32)
    unpack_into(packed, format, codes_RB, meta_RW)
    return codes_RB, meta_RW, format, dim


def to_fused(values_ND, bits):
    format = FORMAT_OF_BITS[bits]
    return export_fused(*quantize_rows(values_ND, format), format, values_ND.shape[1])


dims_of = {bits: st.integers(1, 60).map(lambda n, step=8 // bits: n * step) for bits in BITS}


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data())
def test_import_keeps_codes_and_metadata_and_export_gives_the_same_bytes(bits, data):
    count, dim = data.draw(st.sampled_from([0, 1, 63])), data.draw(dims_of[bits])
    packed = torch_op(bits, "prepack")(rows(count, dim))
    codes_RB, meta_RW, format, found = import_fused(packed, bits)
    assert (F.NAMES[format], found) == (PRECISION[bits], dim)
    # torch reads a row as one fused multiply-add; in float64 the same is exact but for the last rounding.
    scale_N1, bias_N1 = reference.scale_and_bias(meta_RW, format)
    exact_ND = reference.unpack(codes_RB, format, dim).double() * scale_N1.double() + bias_N1.double()
    assert torch.equal(exact_ND.float(), torch_op(bits, "unpack")(packed))
    assert torch.equal(export_fused(codes_RB, meta_RW, format, dim), packed)


@pytest.mark.parametrize("bits", [4, 2])
def test_dequantized_rows_equal_what_torch_unpacks(bits):
    packed = torch_op(bits, "prepack")(rows(63, 100))
    assert torch.equal(dequantize_rows(*import_fused(packed, bits)), torch_op(bits, "unpack")(packed))


def test_dequantized_bytes_equal_what_torch_unpacks_but_for_its_fused_multiply_add():
    values_ND = rows(63, 101)
    packed = torch_op(8, "prepack")(values_ND)
    ours_ND, theirs_ND = dequantize_rows(*import_fused(packed, 8)), torch_op(8, "unpack")(packed)
    spread_N1 = values_ND.amax(1, keepdim=True) - values_ND.amin(1, keepdim=True)
    assert ((ours_ND - theirs_ND).abs() <= 2.0**-23 * spread_N1).all()


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_pattern_survives_a_round_trip(bits):
    codes_RB = torch.arange(256, dtype=torch.uint8).view(16, 16)
    tail_NB = torch.tensor([[0.25, -3.0]] * 16, dtype=torch.float32 if bits == 8 else torch.float16).view(torch.uint8)
    packed = torch.cat([codes_RB, tail_NB], dim=1)
    assert torch.equal(export_fused(*import_fused(packed, bits)), packed)


@pytest.mark.parametrize("bits", BITS)
def test_blocks_of_rows_do_not_change_the_result(bits, monkeypatch):
    packed = torch_op(bits, "prepack")(rows(63, 48))
    whole = import_fused(packed, bits)
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 7 * packed.shape[1])
    codes_RB, meta_RW, format, dim = import_fused(packed, bits)
    assert torch.equal(codes_RB, whole[0]) and torch.equal(meta_RW, whole[1])
    assert torch.equal(export_fused(codes_RB, meta_RW, format, dim), packed)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_lookup_in_an_imported_table_equals_torchs_quantized_lookup(bits, weighted):
    generator = torch.Generator().manual_seed(bits)
    packed = torch_op(bits, "prepack")(rows(101, 48))
    ids = torch.randint(0, 101, (63,), generator=generator)
    offsets = torch.tensor([0, 5, 5, 20, 21, 63])
    weights = torch.rand(63, generator=generator) if weighted else None
    expected = torch_op(bits, "rowwise_offsets")(
        packed, ids, offsets, mode=0, per_sample_weights=weights, include_last_offset=True
    )
    ours = lookup(imported_arena(packed, bits, 48), ids, offsets, weights)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_an_imported_table_can_be_trained_and_exported_to_torch(bits):
    packed = torch_op(bits, "prepack")(rows(9, 16))
    arena = imported_arena(packed, bits, 16)
    before_ND = arena.read(0)
    out = lookup(arena, torch.tensor([3, 4]), torch.tensor([0, 1, 2]), trainer=Trainer(arena, SGD(lr=0.5)))
    out.backward(torch.ones_like(out))
    after_ND = torch_op(bits, "unpack")(arena.export_fused(0))
    assert torch.equal(after_ND[5:], torch_op(bits, "unpack")(packed)[5:])
    step = (before_ND.amax(1) - before_ND.amin(1))[3:5, None] / ((1 << bits) - 1)
    assert ((after_ND[3:5] - (before_ND[3:5] - 0.5)).abs() <= 1.02 * step + 1e-3).all()


@pytest.mark.parametrize("bits", BITS)
def test_fp32_rows_packed_by_us_are_read_by_torch(bits):
    values_ND = rows(63, 64)
    unpacked_ND = torch_op(bits, "unpack")(to_fused(values_ND, bits))
    spread_N1 = values_ND.amax(1, keepdim=True) - values_ND.amin(1, keepdim=True)
    assert ((unpacked_ND - values_ND).abs() <= 0.501 * spread_N1 / ((1 << bits) - 1) + 2e-3).all()


def test_an_imported_row_takes_as_many_bytes_as_the_fused_row():
    for bits in BITS:
        packed = torch_op(bits, "prepack")(rows(5, 64))
        codes_RB, meta_RW, _, _ = import_fused(packed, bits)
        assert codes_RB.shape[1] + 4 * meta_RW.shape[1] == packed.shape[1]
        assert TableSpec(5, 64, PRECISION[bits]).bytes == packed.numel()


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, dim, width", [(4, 3, 6), (4, 63, 36), (2, 2, 5), (2, 61, 20)])
def test_dimensions_that_torchs_packers_refuse_are_refused_by_name(bits, dim, width):
    with pytest.raises(RuntimeError, match="multiple of"):  # the message is torch's
        torch_op(bits, "prepack")(rows(2, dim))
    with pytest.raises(FormatError, check=has(parameter="dim", value=dim)):
        import_fused(torch.zeros(2, width, dtype=torch.uint8), bits, dim)
    with pytest.raises(FormatError, check=has(parameter="dim", value=dim)):
        to_fused(rows(2, dim), bits)


def test_a_dimension_that_the_bytes_do_not_hold_is_refused():
    with pytest.raises(FormatError, check=has(parameter="dim", value=20, available=16)):
        import_fused(torch.zeros(2, 12, dtype=torch.uint8), 4, 20)


@pytest.mark.parametrize("bits, width", [(8, 8), (4, 4), (2, 3)])
def test_rows_without_room_for_codes_are_refused(bits, width):
    with pytest.raises(FormatError, check=has(parameter="packed", value=width)):
        import_fused(torch.zeros(2, width, dtype=torch.uint8), bits)


def test_rows_longer_than_ours_may_be_are_refused():
    with pytest.raises(FormatError, check=has(parameter="dim", value=2049, available=2048)):
        import_fused(torch.zeros(1, 2049 + 8, dtype=torch.uint8), 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale, bias", [(float("inf"), 0.0), (float("nan"), 0.0), (1.0, float("-inf")), (1.0, float("nan"))])
def test_metadata_that_is_not_finite_is_refused_by_row(bits, scale, bias):
    packed = torch_op(bits, "prepack")(rows(63, 16))
    tail = torch.tensor([scale, bias], dtype=torch.float32 if bits == 8 else torch.float16).view(torch.uint8)
    packed[41, -tail.numel() :] = tail
    for negative in (False, True):
        with pytest.raises(FormatError, check=has(row=41, finite=False)):
            import_fused(packed, bits, requantize_negative=negative)


def test_rows_that_overflowed_in_torchs_packer_are_refused():
    with pytest.raises(FormatError, check=has(row=1, finite=False)):
        import_fused(torch_op(4, "prepack")(torch.tensor([[1.0, 2.0], [-7e4, 7e4]])), 4)


@pytest.mark.parametrize("bits", [4, 2])
def test_torchs_negative_scales_of_constant_rows_are_refused_or_quantized_again(bits, monkeypatch):
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 100)  # several blocks of rows
    values_ND = rows(63, 1).expand(63, 8).contiguous()
    values_ND[7] = rows(1, 8, seed=1)
    packed = torch_op(bits, "prepack")(values_ND)
    negative_N = torch.signbit(packed[:, -4:].contiguous().view(torch.float16)[:, 0])
    assert 0 < int(negative_N.sum()) < 63
    with pytest.raises(FormatError, check=has(row=int(negative_N.nonzero()[0]), finite=True)):
        import_fused(packed, bits)
    codes_RB, meta_RW, format, dim = import_fused(packed, bits, requantize_negative=True)
    assert not torch.signbit(reference.scale_and_bias(meta_RW, format)[0]).any()
    difference_ND = dequantize_rows(codes_RB, meta_RW, format, dim) - torch_op(bits, "unpack")(packed)
    assert (difference_ND[~negative_N] == 0).all()
    assert (difference_ND.abs() <= 2.0**-11 * values_ND.abs()).all()
    assert torch.equal(export_fused(codes_RB, meta_RW, format, dim)[~negative_N], packed[~negative_N])


def test_negative_zero_is_a_negative_scale():
    packed = torch_op(8, "prepack")(rows(3, 4))
    packed[2, 4:8] = torch.tensor([-0.0]).view(torch.uint8)
    with pytest.raises(FormatError, check=has(row=2, finite=True)):
        import_fused(packed, 8)


@pytest.mark.parametrize("packed", [torch.zeros(3, 12), torch.zeros(12, dtype=torch.uint8)])
def test_only_a_uint8_matrix_is_a_fused_table(packed):
    with pytest.raises(BadInput, check=has(parameter="packed", value=packed.dtype)):
        import_fused(packed, 8)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "fp8", "int8", "int4", "int2"])
def test_other_precisions_are_not_exported_but_told_what_to_do(precision):
    arena = Arena([TableSpec(3, 8, precision)])
    with pytest.raises(FormatError, check=has(parameter="precision", value=precision)):
        arena.export_fused(0)
    with pytest.raises(FormatError, check=has(parameter="precision", value=precision)):
        arena.import_fused(0, torch.zeros(3, 16, dtype=torch.uint8))


def test_codes_of_another_shape_are_not_exported():
    with pytest.raises(BadInput, check=has(parameter="codes", needed=(16, 2))):
        export_fused(torch.zeros(3, 15, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.int32), F.INT8_AFFINE, 16)


def test_a_refused_table_leaves_the_arena_as_it_was(monkeypatch):
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 1)
    packed = torch_op(8, "prepack")(rows(5, 16))
    arena = imported_arena(packed, 8, 16)
    worse = torch_op(8, "prepack")(rows(5, 16, seed=1))
    worse[4, -8:-4] = torch.tensor([-1.0]).view(torch.uint8)
    with pytest.raises(FormatError, check=has(row=4)):
        arena.import_fused(0, worse)
    with pytest.raises(FormatError, check=has(parameter="packed", value=4, needed=5)):
        arena.import_fused(0, packed[:4])
    assert torch.equal(arena.export_fused(0), packed)
