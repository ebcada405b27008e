"""Summing the gradients of repeated rows on the CPU: the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from support import has
from thermocline import formats as F
from thermocline.errors import BadInput, IdOutOfRange
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.sum_gradients import cpu, reference
from thermocline.rows.arena import Arena

pytestmark = pytest.mark.usefixtures("poisoned")

Make = Callable[..., Any]
TABLE = st.tuples(st.sampled_from([1, 2, 70, 5000]), st.integers(1, 150), st.just("int8"))
MODES = range(len(F.MODES))
TABLES = [(31, 8, "int8"), (17, 3, "int4"), (2000, 20, "fp16"), (5, 200, "int2"), (1, 64, "int8")]
FEATURES = [0, 1, 2, 0, 3, 4, 2]


def _gradient(arena: Arena, lookup: Any, mode: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(winners, a gradient of the output)."""
    out, winners = flat.gather_pool(gather, arena.codes, arena.meta, arena.layout, *lookup, mode, torch.float32)
    return winners, torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))


def _check(arena: Arena, lookup: Any, mode: int, dtype: torch.dtype = torch.float32) -> None:
    winners, grad = _gradient(arena, lookup, mode)
    got_rows, got = flat.sum_row_gradients(cpu, arena.layout, *lookup, mode, winners, grad.to(dtype))
    rows, wanted = flat.sum_row_gradients(reference, arena.layout, *lookup, mode, winners, grad.to(dtype))
    assert torch.equal(got_rows, rows)
    assert got.shape == wanted.shape and torch.equal(got.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
def test_every_mode_and_type_of_gradient(mode: int, dtype: torch.dtype, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    for batch, longest in ((1, 0), (2, 3), (63, 6), (300, 12)):
        _check(arena, make_lookup(arena, None if mode == F.NONE else batch, longest, seed=batch), mode, dtype)
    if mode == F.SUM:
        _check(arena, make_lookup(arena, 63, 9, weighted=True), mode, dtype)


@pytest.mark.parametrize("dim", [1, 3, 48, 100, 128, 513])
def test_every_dimension(dim: int, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena([(19, dim, "fp32")])
    for mode in MODES:
        _check(arena, make_lookup(arena, None if mode == F.NONE else 21, 5), mode)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    tables=st.lists(TABLE, min_size=1, max_size=4),
    batch=st.sampled_from([0, 1, 63]),
    longest=st.integers(0, 40),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**31),
)
def test_any_batch(tables: Any, batch: int, longest: int, mode: int, seed: int, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(tables, [*range(len(tables)), 0], seed=seed)
    _check(arena, make_lookup(arena, None if mode == F.NONE else batch, longest, seed=seed), mode)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_skewed_ids_do_not_change_a_bit(threads: int, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena([(70_000, 20, "int8")])  # one table: its rows are shared between threads
    ids, offsets, _ = make_lookup(arena, 3000, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for skewed in (ids, torch.where(ids % 3 > 0, 7, ids), torch.full_like(ids, 69_999), ids % 2):
            _check(arena, (skewed, offsets, None), F.SUM)
    finally:
        torch.set_num_threads(before)


def test_empty_bags_between_full_ones(make_arena: Make) -> None:
    arena = make_arena([(9, 5, "int8"), (9, 5, "int8")])
    offsets = torch.tensor([0, 0, 3, 3, 3, 3, 4, 4, 4])
    for mode in (F.SUM, F.MEAN, F.MAX):
        _check(arena, (torch.tensor([8, 0, 8, 3]), offsets, None), mode)


def test_bad_ids_and_offsets_raise(make_arena: Make) -> None:
    arena = make_arena([(9, 5, "int8"), (4, 5, "int8")])
    winners, grad = torch.empty(0, dtype=torch.int32), torch.zeros(1, 10)
    with pytest.raises(IdOutOfRange) as error:
        flat.sum_row_gradients(cpu, arena.layout, torch.tensor([8, 4]), torch.tensor([0, 1, 2]), None, F.SUM, winners, grad)
    assert (error.value.feature, error.value.position, error.value.rows) == (1, 1, 4)
    for offsets in ([0, 3, 2], [1, 1, 2], [0, 1, 1], [0, 2**60, 2], [0, -5, 2]):
        with pytest.raises(BadInput, check=has(parameter="offsets")):
            flat.sum_row_gradients(cpu, arena.layout, torch.tensor([1, 1]), torch.tensor(offsets), None, F.SUM, winners, grad)
