"""Triton's sums of row gradients: the rows of the reference, close sums, and the same bits every time.

Whole numbers as gradients make sums exact in any order: where runs of equal rows cross the borders of tiles, spans and
chunks, sums must equal the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flat
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.sum_gradients import gpu, reference
from thermocline.rows.arena import Arena

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
MODES = range(len(F.MODES))
TABLES = [(31, 4, "int8"), (17, 3, "int4"), (23, 6, "fp16"), (5, 4, "int2"), (12, 4, "int8")]
NO_WINNERS = torch.zeros(0, dtype=torch.int32)
FEATURES = [0, 1, 2, 0, 3, 4, 1]  # tables 0 and 1 are shared


def _gradient(arena: Arena, lookup: Any, mode: int, whole: bool = False) -> tuple[Tensor, Tensor]:
    """(winners, gradient) of a lookup's output."""
    out, winners = flat.gather_pool(gather, arena.codes, arena.meta, arena.layout, *lookup, mode, torch.float32)
    generator = torch.Generator().manual_seed(out.numel())
    grad = torch.randn(out.shape, generator=generator)
    return winners, (grad * 100).round() if whole else grad


def _check(arena: Arena, lookup: Any, mode: int, winners: Tensor, grad: Tensor, on: On, exact: bool = False) -> Tensor:
    """Equal rows, close (or equal) sums, the same bits twice; returns the rows."""
    inputs = on((arena.layout, *lookup, mode, winners, grad))
    rows_U, grads_UW = flat.sum_row_gradients(gpu, *inputs)
    wanted_U, wanted_UW = flat.sum_row_gradients(reference, arena.layout, *lookup, mode, winners, grad)
    assert torch.equal(rows_U.cpu(), wanted_U)
    if exact:
        assert torch.equal(grads_UW.cpu(), wanted_UW)
    torch.testing.assert_close(grads_UW.cpu(), wanted_UW, rtol=1e-4, atol=1e-4)
    again_U, again_UW = flat.sum_row_gradients(gpu, *inputs)
    assert torch.equal(rows_U, again_U) and torch.equal(grads_UW, again_UW)
    return wanted_U


@pytest.mark.parametrize(
    ("mode", "weighted"),
    [(F.SUM, False), (F.SUM, True), (F.MEAN, False), (F.MAX, False), (F.NONE, False)],
    ids=["sum", "weighted sum", "mean", "max", "none"],
)
def test_every_mode_over_many_tables(mode: int, weighted: bool, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES, FEATURES)
    lookup = make_lookup(arena, None if mode == F.NONE else 5, 3, seed=mode, weighted=weighted)
    _check(arena, lookup, mode, *_gradient(arena, lookup, mode), on)


@pytest.mark.parametrize("mode", [F.SUM, F.MEAN, F.MAX], ids=["sum", "mean", "max"])
def test_bags_of_many_ids(mode: int, make_arena: Make, make_lookup: Make, on: On) -> None:
    """From four ids a bag on, bags are described several ids at a time."""
    arena = make_arena([(9, 2, "int8"), (40, 1, "fp32")])
    lookup = make_lookup(arena, 3, 19, seed=1, dtype=torch.int32)
    assert lookup.ids.numel() >= 4 * 6
    _check(arena, lookup, mode, *_gradient(arena, lookup, mode), on)


@pytest.mark.parametrize("dim", [1, 3, 48, 100, 128, 513])
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "int2"])
def test_distinct_rows_keep_their_gradient_bit_for_bit(
    precision: str, dim: int, make_arena: Make, make_lookup: Make, on: On
) -> None:
    arena = make_arena([(40, dim, precision)])
    lookup = make_lookup(arena, 19, 2, seed=dim, distinct=True)
    _check(arena, lookup, F.SUM, *_gradient(arena, lookup, F.SUM), on, exact=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_sixteen_bits_are_summed_in_fp32(dtype: torch.dtype, make_arena: Make, on: On) -> None:
    arena = make_arena([(3, 2, "int8")])
    lookup = (torch.zeros(300, dtype=torch.int64), torch.arange(301), None)
    grad = torch.full((300, 2), 1.0 + 2.0**-7, dtype=dtype)
    _check(arena, lookup, F.SUM, NO_WINNERS, grad, on, exact=True)


@pytest.mark.parametrize("batch", [0, 1, 63])
def test_batches_without_ids_have_no_rows(batch: int, make_arena: Make, make_lookup: Make, on: On) -> None:
    arena = make_arena(TABLES, FEATURES)
    lookup = make_lookup(arena, batch, 0)
    rows_U = _check(arena, lookup, F.SUM, *_gradient(arena, lookup, F.SUM), on)
    assert rows_U.numel() == 0


def test_a_gradient_that_is_a_transposed_view_is_read_in_the_right_order(make_arena: Make, on: On) -> None:
    arena = make_arena([(9, 3, "int8")])
    layout, lookup = on(arena.layout), (torch.tensor([4, 8]), torch.arange(3), None)
    grad = torch.arange(6.0).view(3, 2).t()
    turned = on(grad.t().contiguous()).t()
    _, grads_UW = flat.sum_row_gradients(gpu, layout, *on(lookup), F.SUM, on(NO_WINNERS), turned)
    assert torch.equal(grads_UW.cpu(), grad)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["ids", "offsets", "weights"])
def test_strided_views_are_read_as_their_copies_are(which: int, make_arena: Make, on: On) -> None:
    arena = make_arena([(9, 3, "int8")])
    lookup = [torch.tensor([4, 8, 4, 1]), torch.tensor([0, 1, 3, 4]), torch.tensor([1.0, 2.0, 3.0, 4.0])]
    grad = torch.arange(9.0).view(3, 3)
    wanted_U, wanted_UW = flat.sum_row_gradients(reference, arena.layout, *lookup, F.SUM, NO_WINNERS, grad)
    given = on(lookup)
    given[which] = on(torch.stack([lookup[which], torch.zeros_like(lookup[which])], 1))[:, 0]
    rows_U, grads_UW = flat.sum_row_gradients(gpu, on(arena.layout), *given, F.SUM, on(NO_WINNERS), on(grad))
    assert torch.equal(rows_U.cpu(), wanted_U)
    assert torch.equal(grads_UW.cpu(), wanted_UW)


# -- runs of equal rows -----------------------------------------------------------------------------------------------


def _runs(lengths: Sequence[int], dim: int, make_arena: Make, on: On, mode: int = F.SUM, first: int = 0) -> None:
    """Row k of a table is looked up lengths[k] times; the lookups are shuffled, sorting makes runs of them again."""
    arena = make_arena([(len(lengths) + 2, dim, "int8")], seed=1)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + first
    ids = ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(2))]
    offsets = torch.tensor([0, ids.numel()]) if mode == F.NONE else torch.arange(ids.numel() + 1)
    lookup = (ids, offsets, None)
    _check(arena, lookup, mode, *_gradient(arena, lookup, mode, whole=True), on, exact=True)


BORDERS = [0, 1, 3, 4, 5, 15, 16, 17, 126, 127, 128, 129]


@pytest.mark.parametrize("before", BORDERS)
def test_a_run_that_begins_around_a_border(before: int, make_arena: Make, on: On) -> None:
    """After `before` rows that occur once: runs longer than a tile, a span, a chunk and several chunks."""
    length = [2, 5, 17, 129, 128, 300, 4, 127, 256, 257, 131, 33][BORDERS.index(before)]
    _runs([*[1] * before, length, *[1] * 5], 2, make_arena, on)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1153])
def test_a_batch_that_is_one_row(length: int, make_arena: Make, on: On) -> None:
    _runs([length], 1, make_arena, on)


@pytest.mark.parametrize(
    "lengths",
    [[128, 128, 128], [127, 1, 129, 255], [256, 1], [4, 4, 8, 16, 3, 5], [12, 130, 1, 2, 110, 300], [1, 383, 1, 127]],
    ids=str,
)
def test_runs_that_meet_at_the_borders_of_chunks(lengths: list[int], make_arena: Make, on: On) -> None:
    _runs(lengths, 2, make_arena, on)
    _runs(lengths, 1, make_arena, on, mode=F.NONE, first=1)


def test_more_whole_chunks_than_are_added_at_once(make_arena: Make, on: On) -> None:
    """A run of more than REST_TILE chunks, with a part of a chunk before and after, in each of two tables."""
    assert gpu.REST_TILE < 11 and gpu.CHUNK == 128
    arena = make_arena([(3, 1, "int8"), (3, 2, "int4")])
    count = 11 * 128 + 77
    ids = torch.cat([torch.arange(count).clamp(max=1), torch.arange(2 * 128 + 1).clamp(min=1, max=2)])
    offsets = torch.tensor([0, *range(1, count + 1), *range(count + 1, ids.numel() + 1)])
    offsets = torch.cat([offsets, torch.full((2 * count + 1 - offsets.numel(),), ids.numel())])
    lookup = (ids, offsets, None)
    _check(arena, lookup, F.SUM, *_gradient(arena, lookup, F.SUM, whole=True), on, exact=True)


@pytest.mark.parametrize("mode", [F.MEAN, F.MAX], ids=["mean", "max"])
def test_long_runs_with_factors_and_winners(mode: int, make_arena: Make, on: On) -> None:
    arena = make_arena([(7, 2, "fp32")])
    lengths = torch.tensor([2, 4] * 60)
    ids = torch.tensor([3, 5, 3, 3, 5, 6] * 60)
    lookup = (ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), None)
    _check(arena, lookup, mode, *_gradient(arena, lookup, mode, whole=True), on, exact=True)


def test_the_sum_of_a_row_does_not_depend_on_rows_of_other_tables(make_arena: Make, on: On) -> None:
    """Random numbers, the same lookups of one table, alone and beside others whose rows are sorted after it."""
    alone, beside = make_arena([(9, 2, "int8")]), make_arena([(9, 2, "int8"), (9, 3, "int8")], [0, 1])
    ids = torch.arange(200) % 3
    grad = torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    none = NO_WINNERS
    first = flat.sum_row_gradients(gpu, *on((alone.layout, ids, torch.arange(201), None, F.SUM, none, grad)))[1]
    both = on((beside.layout, ids.repeat(2), torch.arange(401), None, F.SUM, none, torch.cat([grad, grad, grad[:, :1]], 1)))
    assert torch.equal(flat.sum_row_gradients(gpu, *both)[1][:3, :2], first)


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 7, 40]), min_size=1, max_size=9),
    dim=st.integers(1, 3),
    unpooled=st.booleans(),
)
def test_any_run_lengths(lengths: list[int], dim: int, unpooled: bool, make_arena: Make, on: On) -> None:
    _runs(lengths, dim, make_arena, on, mode=F.NONE if unpooled else F.SUM)
