"""Triton's cache: after every refresh and every update the bits of the reference, in every array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cache import gpu as gpu_cache
from thermocline.kernels.cache import reference as caching
from thermocline.kernels.gather import gpu as gpu_gather
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.update import gpu, reference

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
CACHED = [name for name, words in zip(F.NAMES, F.META_WORDS, strict=True) if words]
# Two pools, one of two tables; an fp32 table between them.
TABLES = [(300, 4, "int8"), (40, 3, "int4"), (90, 4, "int8"), (20, 8, "fp32")]
SLOTS = [12, 5, 7, 0]


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.changed(), b.changed(), strict=True))


def _lookups(rows: int, count: int, seed: int) -> Tensor:
    """Sorted arena rows, a few of them often."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator) ** 3 * rows).long().sort()[0]


def _refresh_both(ours: Any, wanted: Any, keys_N: Tensor, on: On, stochastic: bool = True) -> None:
    gpu_cache.refresh(ours.codes, ours.meta, ours.cache, ours.layout, on(keys_N), stochastic)
    rows_U, counts_U = torch.unique(keys_N, return_counts=True)
    caching.refresh(wanted.codes, wanted.meta, wanted.cache, wanted.layout, rows_U, counts_U, stochastic)
    assert _same(ours, wanted)


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
@pytest.mark.parametrize("format", CACHED)
def test_every_format_while_the_cache_thrashes(format: str, policy: str, make_arena: Make, make_training: Make, on: On) -> None:
    for dim, slots in ((1, 1), (5, 9), (16, 40)):
        arena = make_arena([(40, dim, format)], seed=dim, slots=[slots], policy=policy)
        wanted = make_training(arena, F.SGD)
        ours = on(wanted)
        for step in range(3):
            _refresh_both(ours, wanted, _lookups(40, 30, step), on, stochastic=step != 1)
        assert wanted.cache.ledger[0, F.ADMISSIONS] > 0


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
def test_many_steps_over_several_pools_and_a_halving(policy: str, make_arena: Make, make_training: Make, on: On) -> None:
    arena = make_arena(TABLES, slots=SLOTS, policy=policy)
    wanted = make_training(arena, F.SGD)
    ours = on(wanted)
    for step in range(16):
        _refresh_both(ours, wanted, _lookups(arena.rows, 150, step), on)
    assert wanted.cache.ledger[:, F.EVICTIONS].min() > 0
    if policy != "lru":
        assert (wanted.cache.ledger[:, F.SINCE] < wanted.cache.ledger[:, F.LOOKUPS]).any(), "nothing was halved"


def test_the_window_is_steered_as_in_the_reference(make_arena: Make, make_training: Make, on: On) -> None:
    arena = make_arena([(2000, 1, "int8"), (9, 1, "fp32")], slots=[17, 0], policy="adaptive")
    wanted = make_training(arena, F.SGD)
    ours = on(wanted)
    seen = set()
    for step in range(40):  # hot rows that change from step to step; then the same ones for a while
        keys_N = step * 3 + _lookups(60, 40, step) if step < 28 else _lookups(300, 40, step)
        _refresh_both(ours, wanted, keys_N if step % 13 else torch.tensor([2001]), on)  # now and then none of this pool
        seen.add(tuple(wanted.cache.ledger[0, F.WINDOW :].tolist()))
    assert [len(set(field)) > 3 for field in zip(*seen, strict=True)] == [True, True, True], "it was not put to the test"
    assert wanted.cache.ledger[0, F.SINCE] < wanted.cache.ledger[0, F.LOOKUPS], "nothing was halved"


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
def test_more_lookups_and_slots_than_one_tile(
    policy: str, monkeypatch: pytest.MonkeyPatch, make_arena: Make, make_training: Make, on: On
) -> None:
    monkeypatch.setattr(gpu_cache, "TILE", 64)
    arena = make_arena([(900, 2, "int8")], slots=[150], policy=policy)
    wanted = make_training(arena, F.SGD)
    ours = on(wanted)
    for step in range(3):
        _refresh_both(ours, wanted, _lookups(900, 261, step), on)


@pytest.mark.parametrize("optimizer", range(len(F.OPTIMIZERS)), ids=F.OPTIMIZERS)
def test_rows_are_updated_where_they_live(optimizer: int, make_arena: Make, make_training: Make, on: On) -> None:
    arena = make_arena(TABLES, slots=SLOTS)
    wanted = make_training(arena, optimizer)
    ours = on(wanted)
    for step in range(4):
        seen_N = _lookups(arena.rows, 40, step)
        rows_U, counts_U = torch.unique(seen_N, return_counts=True)
        grads_UW = torch.randn(rows_U.numel(), 8, generator=torch.Generator().manual_seed(step))
        counted = step % 2 == 0
        for module, made, place in ((gpu, ours, on), (reference, wanted, lambda x: x)):
            table = (made.codes, made.meta, made.states, made.layout, place(rows_U), place(grads_UW), made.hyper, made.clock)
            counts = (place(seen_N) if module is gpu else counts_U) if counted else None
            flat.update_rows(module, *table, optimizer, True, made.cache, counts)
        assert _same(ours, wanted)
    assert int((wanted.meta < 0).sum()) > 5


@pytest.mark.parametrize("mode", range(len(F.MODES)), ids=F.MODES)
def test_lookups_find_rows_where_they_live(mode: int, make_arena: Make, make_lookup: Make, make_training: Make, on: On) -> None:
    arena = make_arena([*TABLES, (30, 9, "int2")], slots=[*SLOTS, 4])
    made = make_training(arena, F.SGD)
    rows_U = torch.arange(0, arena.rows, 3)
    caching.refresh(made.codes, made.meta, made.cache, made.layout, rows_U, torch.ones_like(rows_U), True)
    made.cache.values.add_(1.0)  # a stale copy of a cached row would be told from it
    ours = on(made)
    lookup = make_lookup(arena, None if mode == F.NONE else 7, 6, weighted=mode == F.SUM)
    wanted, winners = flat.gather_pool(
        gather, made.codes, made.meta, made.layout, *lookup, mode, torch.float32, cache=made.cache
    )
    table = (ours.codes, ours.meta, ours.layout)
    got, won = flat.gather_pool(gpu_gather, *table, *on(lookup), mode, torch.float32, True, ours.cache)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(won.cpu(), winners)
    if mode == F.SUM:
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
        place = (made.codes, made.meta, made.layout, lookup.ids, lookup.offsets, grad, made.cache)
        weights = flat.weight_gradient(gpu_gather, *table, on(lookup.ids), on(lookup.offsets), on(grad), ours.cache)
        torch.testing.assert_close(weights.cpu(), flat.weight_gradient(gather, *place), rtol=1e-5, atol=1e-5)
