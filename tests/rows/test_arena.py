"""The arena: where rows lie, what they cost, and what a round trip through each precision may change."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support import has
from thermocline import FormatError
from thermocline import formats as F
from thermocline.rows.arena import Arena
from thermocline.rows.precision import PRECISIONS, bytes_per_row, format_of
from thermocline.rows.table_spec import TableSpec

DIMS = [1, 3, 48, 100, 513, 2048]

# What an element may be off by after nearest rounding, in parts of the largest magnitude of its row. The affine formats
# divide a range of at most twice that into `levels` steps, and round scale and bias to 16 bits besides.
ERROR = {
    "fp32": 0.0,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-4,
    "int8": 0.501 / 127,
    "int4": 1.02 / 15,
    "int2": 1.02 / 3,
    "int8_affine": 1.001 / 255,
    "int4_affine": 1.01 / 15,
    "int2_affine": 1.01 / 3,
}


def written_and_read(values_ND: Tensor, precision: str) -> Tensor:
    arena = Arena([TableSpec(*values_ND.shape, precision)])
    arena.write(0, torch.arange(values_ND.shape[0]), values_ND)
    return arena.read(0)


def gaussian(rows: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


# -- layout ---------------------------------------------------------------------------------------------------------

tables = st.lists(
    st.builds(TableSpec, st.integers(1, 63), st.sampled_from([1, 3, 48, 100]), st.sampled_from(PRECISIONS)),
    min_size=1,
    max_size=7,
)


@given(tables)
def test_tables_lie_apart_and_runs_begin_on_128_bytes(specs):
    arena = Arena(specs)
    fields = [tuple(f) for f in arena.layout.fields_F8.tolist()]
    for spec, field in zip(specs, fields, strict=True):
        assert (field[F.ROWS], field[F.DIM], field[F.FORMAT]) == (spec.rows, spec.dim, format_of(spec.precision))
    for start, length_of in (
        (F.CODES, lambda f: f[F.ROWS] * F.row_bytes(f[F.FORMAT], f[F.DIM])),
        (F.META, lambda f: f[F.ROWS] * F.META_WORDS[f[F.FORMAT]]),
        (F.ROW, lambda f: f[F.ROWS]),
        (F.ELEMENT, lambda f: f[F.ROWS] * f[F.DIM]),
    ):
        spans = sorted((f[start], f[start] + length_of(f)) for f in fields if length_of(f))
        gaps = [after[0] - before[1] for before, after in pairwise(spans)]
        assert all(0 <= gap < 128 for gap in gaps)
        assert start == F.CODES or not any(gaps)
    assert all(run.codes % 128 == 0 for run in arena.layout.tables.runs)
    assert len(arena.layout.tables.runs) == len({(spec.dim, spec.precision) for spec in specs})


@given(tables)
def test_every_table_keeps_its_own_rows(specs):
    arena, values = Arena(specs), []
    for index, spec in enumerate(specs):
        values.append(torch.full((spec.rows, spec.dim), float(index + 1)))
        arena.write(index, torch.arange(spec.rows), values[-1])
    for index in range(len(specs)):
        torch.testing.assert_close(arena.read(index), values[index], rtol=1e-3, atol=0)


def test_features_that_share_a_table_differ_only_in_their_column():
    arena = Arena([TableSpec(7, 3, "int8"), TableSpec(5, 48, "int4")], features=[0, 1, 0])
    first, second, third = arena.layout.tables.features
    assert first[: F.COLUMN] == third[: F.COLUMN]
    assert (first[F.COLUMN], second[F.COLUMN], third[F.COLUMN]) == (0, 3, 51)
    assert arena.layout.tables.width == 54
    assert len(arena.layout.tables.distinct) == 2
    assert arena.rows == 12


def test_rows_cost_their_codes_and_metadata_and_no_padding():
    assert bytes_per_row("int8", 128) == 132
    assert bytes_per_row("int4", 64) == 36
    assert bytes_per_row("int2", 64) == 20
    assert bytes_per_row("fp8", 128) == 132
    assert bytes_per_row("fp32", 3) == 12
    assert bytes_per_row("int4", 3) == 6
    assert bytes_per_row("int8_affine", 128) == 136


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", DIMS)
def test_an_arena_allocates_what_its_rows_cost(precision, dim):
    spec = TableSpec(63, dim, precision)
    assert Arena([spec]).bytes == spec.bytes == 63 * bytes_per_row(precision, dim)


# -- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@given(dim=st.sampled_from(DIMS), seed=st.integers(0, 999), size=st.sampled_from([1e-4, 1.0, 1e3]))
def test_gaussian_rows_come_back_within_the_bound_of_their_precision(precision, dim, seed, size):
    values_ND = gaussian(5, dim, seed) * size
    largest_N1 = values_ND.abs().amax(1, keepdim=True)
    error_ND = (written_and_read(values_ND, precision) - values_ND).abs()
    assert (error_ND <= ERROR[precision] * largest_N1 + 2.0**-25).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("constant", [0.1, -3.7, 1e-6, 6e4])
def test_a_constant_row_comes_back_almost_as_it_was(precision, dim, constant):
    values_ND = torch.full((2, dim), constant)
    relative = 2.0**-4 if precision == "fp8" else 2.0**-8
    error_ND = (written_and_read(values_ND, precision) - values_ND).abs()
    assert (error_ND <= min(relative, ERROR[precision] + 2.0**-23) * abs(constant) + 2.0**-25).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_row_of_zeros_comes_back_as_zeros(precision, dim, zero):
    assert (written_and_read(torch.full((2, dim), zero), precision) == 0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("outlier", [1e4, -1e4, 6.5e4, -6.5e4])
def test_a_row_with_a_huge_outlier_is_off_by_at_most_its_share_of_it(precision, outlier):
    values_ND = gaussian(3, 100)
    values_ND[1, 41] = outlier
    back_ND = written_and_read(values_ND, precision)
    largest_N1 = values_ND.abs().amax(1, keepdim=True)
    assert ((back_ND - values_ND).abs() <= ERROR[precision] * largest_N1 + 2.0**-25).all()
    assert back_ND[1, 41] == pytest.approx(outlier, rel=2.0**-7)
    assert (back_ND[[0, 2]] - values_ND[[0, 2]]).abs().max() <= ERROR[precision] * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "int8", "int4", "int2", "int8_affine"])
def test_outliers_up_to_the_limit_of_fp32_are_bounded_too(precision):
    values_ND = gaussian(3, 63)
    values_ND[0, 0], values_ND[1, 62], values_ND[2, 5] = 1e30, -1e30, 2.0**126
    values_ND[2, 6] = -(2.0**126)
    largest_N1 = values_ND.abs().amax(1, keepdim=True)
    assert ((written_and_read(values_ND, precision) - values_ND).abs() <= ERROR[precision] * largest_N1).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_too_small_for_a_scale_become_tiny_or_zero_but_never_nan(precision):
    values_ND = gaussian(3, 63) * 1e-39
    assert ((written_and_read(values_ND, precision) - values_ND).abs() <= 2.0**-118).all()


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_raise_on_the_way_in_and_write_nothing(precision, bad):
    arena = Arena([TableSpec(4, 3, precision)])
    arena.write(0, torch.arange(4), gaussian(4, 3))
    before = arena.codes.clone(), arena.meta.clone()
    values_ND = gaussian(4, 3, seed=1)
    values_ND[2, 1] = bad
    with pytest.raises(FormatError, check=has(row=2)):
        arena.write(0, torch.arange(4), values_ND)
    assert torch.equal(arena.codes, before[0]) and torch.equal(arena.meta, before[1])


@pytest.mark.parametrize("precision", ["fp16", "int4_affine", "int2_affine"])
def test_values_past_what_fp16_holds_raise_where_fp16_must_hold_them(precision):
    with pytest.raises(FormatError, check=has(row=0, value=70000.0, limit=65504.0)):
        written_and_read(torch.tensor([[7e4, 1.0]]), precision)


def test_a_misspelt_precision_lists_the_valid_ones():
    with pytest.raises(FormatError) as error:
        TableSpec(10, 4, "in8")
    assert "'in8'" in str(error.value)
    assert all(name in str(error.value) for name in PRECISIONS)


@pytest.mark.parametrize("rows, dim, parameter, value", [(5, 0, "dim", 0), (5, 2049, "dim", 2049), (0, 8, "rows", 0)])
def test_impossible_tables_are_refused_by_name(rows, dim, parameter, value):
    with pytest.raises(FormatError, check=has(table="user", parameter=parameter, value=value)):
        TableSpec(rows, dim, "int8", "user")


def test_values_of_another_shape_are_refused():
    arena = Arena([TableSpec(5, 8)])
    with pytest.raises(FormatError, check=has(parameter="values", needed=(3, 8))):
        arena.write(0, torch.arange(3), gaussian(2, 8))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_read_can_be_changed_without_changing_the_table(precision):
    arena = Arena([TableSpec(5, 3, precision)])
    arena.read(0)[:] = 7.0
    assert torch.equal(arena.read(0), torch.zeros(5, 3))
