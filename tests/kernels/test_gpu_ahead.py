"""Batches that were sorted when they were prefetched: their update does not sort them again, and ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from staged import FEATURES, SLOTS, TABLES, Make, On, Run, same
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu import sort as gpu_sort
from thermocline.kernels.gpu.launch import INTERPRETED
from thermocline.kernels.stage import gpu_area, reference
from thermocline.kernels.update import gpu as update

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]


def _sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lookups each sort of an update has, from now on."""
    sort, seen = update.sort_lookups, []

    def counted(layout: Any, ids_N: Tensor, *rest: Any) -> Any:
        seen.append(ids_N.numel())
        return sort(layout, ids_N, *rest)

    monkeypatch.setattr(update, "sort_lookups", counted)
    return seen


class _ByHand(gpu_sort._SortGraph):
    """Does its work anew instead of replaying it."""

    def _record(self) -> Callable[[], None]:
        return self._work


def _record_all_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sort is one of those that are recorded, and overwrites what the last one with the same sorters left."""
    kept: dict[Any, gpu_sort._SortGraph] = {}

    def sorter(count: int, kind: torch.dtype, device: torch.device, sorters: gpu_sort.SortGraphs) -> gpu_sort._SortGraph:
        if (sorters, kind) not in kept:
            kept[sorters, kind] = (_ByHand if INTERPRETED else gpu_sort._SortGraph)(301, kind, device)
        return kept[sorters, kind]

    monkeypatch.setattr(gpu_sort, "_sort_graph", sorter)


@pytest.mark.parametrize("mode", [F.SUM, F.NONE, F.MEAN])
def test_the_update_of_a_batch_that_was_prefetched_does_not_sort_it_again(
    mode, make_arena: Make, make_lookup: Make, make_training: Make, on: On, monkeypatch
):
    _record_all_sorts(monkeypatch)
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    staged, plain, seen = Run(on(made), (25, 40)), Run(on(made)), _sorts(monkeypatch)
    batches = [on(make_lookup(arena, None if mode == F.NONE else 4, 3, seed=seed, weighted=False)) for seed in range(4)]
    counts = [batch.ids.numel() for batch in batches]
    staged.prefetch(batches[0])
    for step, batch in enumerate(batches[:3]):
        staged.prefetch(batches[step + 1])  # sorted between the sort of this batch and its update
        (ours, winners), (wanted, _) = (run.forward(batch, mode) for run in (staged, plain))
        assert torch.equal(ours, wanted)
        for run in (staged, plain):
            run.backward(batch, mode, winners, torch.randn(ours.shape, generator=torch.Generator().manual_seed(step)).to(ours))
    assert seen == (counts[:3] if mode != F.MEAN else [count for count in counts[:3] for _ in range(2)])
    staged.settle()
    assert same(staged.made, plain.made)


@pytest.mark.parametrize("what", ["ids", "offsets"])
def test_a_batch_that_changed_since_it_was_prefetched_is_sorted_anew(
    what, make_arena: Make, make_lookup: Make, make_training: Make, on: On, monkeypatch
):
    arena = make_arena([(50, 4, "int8"), (50, 4, "int8")], slots=[3, 2])
    made, batch = make_training(arena, F.ROWWISE_ADAGRAD), on(make_lookup(arena, 4, 3, weighted=False, full=True))
    staged, plain, seen = Run(on(made), (30,)), Run(on(made)), _sorts(monkeypatch)
    staged.prefetch(batch)
    if what == "ids":
        batch.ids[2:7] = batch.ids[:5].clone()
    else:
        batch.offsets[4] -= 1  # an id of the second feature instead of the first
    for run in (staged, plain):
        out, winners = run.forward(batch, F.SUM)
        run.backward(batch, F.SUM, winners, torch.ones_like(out))
    assert len(seen) == 2
    staged.settle()
    assert same(staged.made, plain.made)


def test_a_buffer_refilled_past_autograd_is_updated_with_its_newest_ids(
    make_arena: Make, make_lookup: Make, make_training: Make, on: On, monkeypatch
):
    arena = make_arena([(50, 4, "int8"), (50, 4, "int8")], slots=[3, 2])
    made, batch = make_training(arena, F.ROWWISE_ADAGRAD), on(make_lookup(arena, 4, 3, weighted=False, full=True))
    staged, plain, seen = Run(on(made), (30,)), Run(on(made)), _sorts(monkeypatch)
    for step in range(5):
        batch.ids.data.copy_((batch.ids + 7) % 50)  # raises no version, as a collective does
        for _ in range((1, 2, 1, 0, 1)[step]):
            staged.prefetch(batch)
        for run in (staged, plain):
            out, winners = run.forward(batch, F.SUM)
            run.backward(batch, F.SUM, winners, (1 + step) * torch.ones_like(out))
    assert len(seen) == 5 + 1  # the one that was not prefetched
    staged.settle()
    assert same(staged.made, plain.made)


@pytest.mark.parametrize("between", [0, 2])
def test_a_refilled_buffer_that_was_sorted_alone_is_not_updated_with_its_old_ids(
    between, make_arena: Make, make_lookup: Make, make_training: Make, on: On
):
    """Prefetched alone and never trained, and then with others, or not, two prefetches later."""
    arena = make_arena([(50, 4, "int8"), (50, 4, "int8")], slots=[3, 2])
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    batch, *others = (on(make_lookup(arena, 4, 3, seed=seed, weighted=False, full=True)) for seed in range(3))
    staged, plain = Run(on(made), (30,)), Run(on(made))
    staged.prefetch(batch)
    for _ in range(between):
        staged.prefetch(*others)
    batch.ids.data.copy_((batch.ids + 7) % 50)  # raises no version, as a collective does
    if between == 0:
        staged.prefetch(batch, *others)
    for run in (staged, plain):
        out, winners = run.forward(batch, F.SUM)
        run.backward(batch, F.SUM, winners, torch.ones_like(out))
    staged.settle()
    assert same(staged.made, plain.made)


def test_what_was_sorted_ahead_is_not_for_captured_graphs(make_arena: Make, make_lookup: Make, on: On, monkeypatch):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    made, batch = on(arena.arrays), on(make_lookup(arena, 4, 3, weighted=False))
    staging = reference.make_staging(made.codes, made.meta, made.layout.tables.pools, (9,))
    area = gpu_area.StagingArea(staging, made.codes, made.meta)
    area.sort_batch(made.layout, batch.ids, batch.offsets)
    found = partial(area.take_sorted, batch.ids, batch.offsets, F.SUM, batch.ids)
    with monkeypatch.context() as captured:
        captured.setattr(gpu_area, "_is_captured", lambda _: True)
        assert found() is None
    assert found() is not None and found() is None, "once"
