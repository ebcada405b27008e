"""Triton's gather against the reference: every mode, precision and shape of batch, in one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flat
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels.gather import gpu, reference
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.layout import Layout, write_spec
from thermocline.rows.arena import Arena

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
MODES = range(len(F.MODES))
FORMATS = range(len(F.NAMES))
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}


def _check(arena: Arena, lookup: Any, mode: int, on: On, dtype: torch.dtype = torch.float32) -> Tensor:
    """Equal shapes and winners, close values; returns what the GPU kernel made of it."""
    got, winners = flat.gather_pool(gpu, on(arena.codes), on(arena.meta), on(arena.layout), *on(lookup), mode, dtype, True)
    wanted, wanted_winners = flat.gather_pool(reference, arena.codes, arena.meta, arena.layout, *lookup, mode, dtype)
    assert got.dtype == dtype and got.shape == wanted.shape
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu(), wanted, rtol=rtol, atol=atol)
    assert torch.equal(winners.cpu(), wanted_winners)
    return got.cpu()


@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_precision_in_every_mode(format: int, mode: int, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena([(41, 7, F.NAMES[format])], seed=format)
    _check(arena, make_lookup(arena, 13 if mode != F.NONE else None, 4, seed=mode), mode, on)


@pytest.mark.parametrize("dim", [1, 3, 48, 100, 128, 513])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4", "int2_affine"])
def test_every_dimension(precision: str, dim: int, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena([(19, dim, precision)], seed=dim)
    mode = (F.SUM, F.MAX, F.NONE)[dim % 3]
    _check(arena, make_lookup(arena, None if mode == F.NONE else 5, 3, seed=dim), mode, on)
    _check(arena, make_lookup(arena, 3, 12, seed=dim, full=True), F.MEAN, on)


TABLES = [(31, 8, "int8"), (17, 3, "int4"), (23, 20, "fp16"), (5, 8, "int2"), (9, 1, "fp8"), (12, 8, "int8")]
FEATURES = [0, 1, 2, 0, 3, 4, 5, 1]  # tables 0 and 1 are shared


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
def test_tables_of_different_dimensions_and_precisions_in_one_launch(
    mode: int, ids: torch.dtype, make_arena: Make, make_lookup: Make, on: On
) -> None:
    arena = make_arena(TABLES, FEATURES)
    _check(arena, make_lookup(arena, None if mode == F.NONE else 9, 3, seed=1, dtype=ids), mode, on)


def test_features_that_share_a_table_read_the_same_rows(make_arena: Make, on: On) -> None:
    arena = make_arena(TABLES, [1, 0, 1])
    lookup = (torch.tensor([4, 16, 0, 1, 4, 16]), torch.arange(7), None)
    out = _check(arena, lookup, F.SUM, on)
    assert torch.equal(out[:, :3], out[:, 11:])


@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("longest", [3, 25])
def test_per_sample_weights(longest: int, weights: torch.dtype, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES[:4], [0, 1, 2, 3, 0])
    lookup = make_lookup(arena, 3, longest, seed=2, weighted=True)
    _check(arena, lookup._replace(weights=lookup.weights.to(weights)), F.SUM, on)


@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_of_sixteen_bits(dtype: torch.dtype, mode: int, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES, FEATURES)
    _check(arena, make_lookup(arena, None if mode == F.NONE else 5, 3, seed=3), mode, on, dtype)


@pytest.mark.parametrize("mode", [F.SUM, F.MEAN, F.MAX], ids=["sum", "mean", "max"])
@pytest.mark.parametrize("batch", [0, 1, 63])
def test_empty_bags_are_zeros_whatever_the_batch(mode: int, batch: int, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES[:3], [0, 1, 2, 1])
    empty = _check(arena, make_lookup(arena, batch, 0), mode, on)
    assert empty.shape == (batch, 34) and not empty.any()
    some = make_lookup(arena, batch, 1, seed=4)
    out = _check(arena, some, mode, on)
    empty_bags = some.offsets.diff().view(4, batch).T == 0
    assert not out[:, :8][empty_bags[:, 0]].any()


@pytest.mark.parametrize("count", [0, 1, 63, 1000])
def test_unpooled_ids_of_one_feature(count: int, make_arena: Make, on: On) -> None:
    arena = make_arena([(97, 5, "int8")])
    ids = torch.arange(count) * 31 % 97
    out = _check(arena, (ids, torch.tensor([0, count]), None), F.NONE, on)
    assert torch.equal(out, arena_rows(arena, 0)[ids])


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 9), (0, 63, 0), (8, 8, 8), (0, 0, 1)], ids=str)
def test_unpooled_ids_of_several_features_end_in_zeros(counts: tuple[int, ...], make_arena: Make, on: On) -> None:
    arena = make_arena([(11, 3, "int4"), (13, 8, "fp32"), (7, 1, "bf16")])
    ids = torch.cat([torch.arange(count) % table.rows for count, table in zip(counts, arena.tables, strict=True)])
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    out = _check(arena, (ids, offsets, None), F.NONE, on)
    assert not out[: counts[0], 3:].any() and not out[counts[0] + counts[1] :, 1:].any()


@pytest.mark.parametrize("mode", [F.SUM, F.MEAN, F.MAX], ids=["sum", "mean", "max"])
@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 101])
def test_long_bags_take_another_path_to_the_same_sums(length: int, mode: int, make_arena: Make, on: On) -> None:
    """From gpu.LONG_BAG ids a bag on, on average, bags are taken one by one, a few ids at a time."""
    arena = make_arena([(57, 6, "int4"), (30, 2, "int8")])
    lengths = torch.tensor([0, 1, 2 * length - 1, length] * 2)
    ids = torch.cat([torch.arange(int(lengths[:4].sum())) * 5 % 57, torch.arange(int(lengths[4:].sum())) * 7 % 30])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    _check(arena, (ids, offsets, None), mode, on)


def test_the_first_of_equal_rows_wins(make_arena: Make, on: On) -> None:
    arena = make_arena([(9, 4, "fp32")])
    lookup = (torch.tensor([3, 3, 8, 8, 3, 5, 5]), torch.tensor([0, 5, 5, 7]), None)
    _, winners = flat.gather_pool(
        gpu, on(arena.codes), on(arena.meta), on(arena.layout), *on(lookup), F.MAX, torch.float32, True
    )
    assert set(winners[0].tolist()) <= {0, 2}
    assert winners[1].tolist() == [-1] * 4 and winners[2].tolist() == [0] * 4


def test_elements_past_two_to_the_31_are_found(tmp_path: Path, on: On) -> None:
    """A table of 4 GiB, in a file that is all holes but for what is written here."""
    rows, dim = (1 << 20) + 3, 2048
    codes = torch.from_file(str(tmp_path / "codes"), shared=True, size=2 * rows * dim, dtype=torch.uint8)
    if on(torch.zeros(1)).is_cuda:
        codes = torch.zeros(2 * rows * dim, dtype=torch.uint8, device="cuda")
    values_D = torch.arange(dim, dtype=torch.bfloat16)
    codes.view(torch.bfloat16).view(rows, dim)[-1] = values_D.to(codes.device)
    field = (0, 0, 0, 0, rows, dim, F.BF16, 0)
    layout = Layout.of(on(torch.tensor([field])), write_spec([field]))
    lookup = on((torch.tensor([rows - 1, 5]), torch.tensor([0, 1, 2]), None))
    out, _ = flat.gather_pool(gpu, codes, on(torch.zeros(0, dtype=torch.int32)), layout, *lookup, F.SUM, torch.float32, True)
    assert torch.equal(out.cpu(), torch.stack([values_D.float(), torch.zeros(dim)]))


@pytest.mark.parametrize("longest", [2, 9])
def test_weight_gradients_are_rows_times_gradients(longest: int, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES, FEATURES)
    lookup = make_lookup(arena, 5, longest, seed=6, weighted=True)
    grad = torch.randn(5, arena.layout.tables.width, generator=torch.Generator().manual_seed(1))
    ids, offsets, _ = lookup
    got = flat.weight_gradient(gpu, on(arena.codes), on(arena.meta), on(arena.layout), on(ids), on(offsets), on(grad))
    wanted = flat.weight_gradient(reference, arena.codes, arena.meta, arena.layout, ids, offsets, grad)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=2e-5)


def test_no_ids_have_no_weight_gradient(make_arena: Make, on: On) -> None:
    arena = make_arena([(5, 3, "int8")])
    none, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    table = (on(arena.codes), on(arena.meta), on(arena.layout))
    assert flat.weight_gradient(gpu, *table, on(none), on(offsets), on(torch.ones(3, 3))).shape == (0,)


@pytest.mark.parametrize("which", ["ids", "offsets", "weights"])
def test_strided_views_are_read_as_their_copies_are(which: str, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES, FEATURES)
    lookup = make_lookup(arena, 5, 3, seed=7, weighted=True)
    wanted, _ = flat.gather_pool(reference, arena.codes, arena.meta, arena.layout, *lookup, F.SUM, torch.float32)
    tensor = getattr(lookup, which)
    strided = on(torch.stack([tensor, torch.zeros_like(tensor)], 1))[:, 0]
    given = on(lookup)._replace(**{which: strided})
    got, _ = flat.gather_pool(gpu, on(arena.codes), on(arena.meta), on(arena.layout), *given, F.SUM, torch.float32, True)
    with contextlib.suppress(BadInput):
        error_buffer(got).raise_pending()  # what went wrong must not meet the next test
    torch.testing.assert_close(got.cpu(), wanted)


def test_weight_gradients_of_a_transposed_gradient(make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES, FEATURES)
    ids, offsets, _ = make_lookup(arena, 5, 3, seed=6)
    grad = torch.randn(arena.layout.tables.width, 5, generator=torch.Generator().manual_seed(1))
    table = on((arena.codes, arena.meta, arena.layout))
    got = flat.weight_gradient(gpu, *table, on(ids), on(offsets), on(grad).t())
    wanted = flat.weight_gradient(reference, arena.codes, arena.meta, arena.layout, ids, offsets, grad.t())
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=2e-5)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_tables_and_bags(data: st.DataObject, make_arena: Make, make_lookup: Make, on: On) -> None:
    table = st.tuples(st.integers(1, 40), st.integers(1, 17), st.sampled_from(F.NAMES))
    tables = data.draw(st.lists(table, min_size=1, max_size=3), "tables")
    features = data.draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=4), "features")
    mode = data.draw(st.sampled_from(MODES), "mode")
    batch = None if mode == F.NONE else data.draw(st.sampled_from([0, 1, 2, 9]), "batch")
    lookup = make_lookup(
        arena := make_arena(tables, features),
        batch,
        data.draw(st.sampled_from([0, 1, 3, 11]), "longest"),
        seed=data.draw(st.integers(0, 99), "seed"),
        dtype=data.draw(st.sampled_from([torch.int32, torch.int64]), "ids"),
        weighted=mode == F.SUM and data.draw(st.booleans(), "weighted"),
    )
    _check(arena, lookup, mode, on)


def arena_rows(arena: Arena, table: int) -> Tensor:
    """A table's rows, by the reference."""
    codes_RB, meta_RW, _, format, dim = arena.views(table)
    return reference.quantize.dequantize_rows(codes_RB, meta_RW, format, dim)
