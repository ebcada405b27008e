"""Recorded sorts, and scratch arrays of one allocation.

Without a GPU the recorded work runs directly: everything but the graph itself is tested, with more room than keys, as for a
smaller batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu import launch as gpu_launch
from thermocline.kernels.gpu import sort as gpu_sort
from thermocline.kernels.gpu.launch import ScratchArray, as_tensor
from thermocline.kernels.update import gpu

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

Make = Callable[..., Any]
On = Callable[[Any], Any]
ROOM = 1_003


class ByHand(gpu_sort._SortGraph):
    """Runs the work instead of replaying a graph."""

    def _record(self) -> Callable[[], None]:
        return self._work


def _trained(sorter: Callable[..., Any], make_arena: Make, make_lookup: Make, make_training: Make, on: On) -> list[Tensor]:
    """Arrays after steps with batches of several sizes, with this function in place of `_sort_graph`."""
    arena = make_arena([(97, 12, "int8"), (41, 12, "int4")], slots=[7, 5])
    side = on(make_training(arena, F.ROWWISE_ADAGRAD))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_sort, "_sort_graph", sorter)
        for step, batch in enumerate((40, 11, 40, 3)):  # a smaller batch after a larger one must not find its keys
            ids, offsets, weights = on(tuple(make_lookup(arena, batch, 5, seed=step)))
            grad = torch.randn(batch, arena.layout.tables.width, generator=torch.Generator().manual_seed(step))
            flat.update_bags(
                gpu, side.codes, side.meta, side.states, side.layout, ids, offsets, weights, F.SUM, ids[:0].int(), on(grad),
                side.hyper, side.clock, F.ROWWISE_ADAGRAD, True, side.cache,
            )  # fmt: skip
    changed: list[Tensor] = side.changed()
    return changed


def test_rows_train_to_the_same_bits_with_recorded_sorts(make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    sorters: dict[torch.dtype, gpu_sort._SortGraph] = {}

    def roomy(count: int, kind: torch.dtype, device: torch.device, _: gpu_sort.SortGraphs) -> gpu_sort._SortGraph:
        assert count <= ROOM
        if kind not in sorters:
            sorters[kind] = (gpu_sort._SortGraph if device.type == "cuda" else ByHand)(ROOM, kind, device)
        return sorters[kind]

    recorded = _trained(roomy, make_arena, make_lookup, make_training, on)
    plain = _trained(lambda *args: None, make_arena, make_lookup, make_training, on)
    assert sorters and all(torch.equal(a, b) for a, b in zip(recorded, plain, strict=True))


def test_an_interrupted_sort_leaves_no_keys_for_the_next(on: On):
    device = on(torch.zeros(1)).device
    sorter = (gpu_sort._SortGraph if device.type == "cuda" else ByHand)(16, torch.int32, device)
    sorter.buffer()[:9] = 3
    sorter.buffer()[:2] = torch.tensor([8, 7], dtype=torch.int32)
    keys, order = sorter.sort(2)
    assert as_tensor(keys).tolist() == [7, 8] and as_tensor(order).tolist() == [1, 0]
    assert sorter.buffer().unique().tolist() == [torch.iinfo(torch.int32).max]


def test_scratch_arrays_are_disjoint_aligned_and_readable_as_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_launch, "INTERPRETED", False)
    wanted = [(5, torch.int32), (0, torch.float32), (33, torch.uint8), (7, torch.int64)]
    pieces = gpu_launch.scratch(torch.device("cpu"), *wanted)
    for number, (piece, (length, dtype)) in enumerate(zip(pieces, wanted, strict=True)):
        assert isinstance(piece, ScratchArray) and piece.numel() == length
        assert piece.data_ptr() % 16 == pieces[0].data_ptr() % 16
        as_tensor(piece).fill_(number)
        assert as_tensor(piece).dtype == dtype
    assert [as_tensor(piece).tolist() for piece in pieces] == [[n] * length for n, (length, _) in enumerate(wanted)]
