"""Error buffers of GPU kernels: which arena, feature and thread an error belongs to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flat
import pytest
import torch
from torch import Tensor

from support import has
from thermocline import formats as F
from thermocline.errors import BadGradient, IdOutOfRange
from thermocline.kernels.gather import gpu as gpu_gather
from thermocline.kernels.gpu.errors import error_buffer, thread_error_buffer
from thermocline.kernels.update import gpu as gpu_update
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # NumPy's, in the interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def test_an_error_is_named_after_a_table_of_the_arena_that_made_it(make_training: Make, errors: Any, on: On) -> None:
    """Arenas alike but for the names of their tables; another one is at work when the error is found."""
    at_fault, other = (
        on(make_training(Arena([TableSpec(9, 3, "int8", name), TableSpec(9, 3, "int8", f"{name} 2")]), F.SGD))
        for name in ("ours", "theirs")
    )
    good, bad = (on((torch.tensor(ids), torch.tensor([0, 1, 2]), None)) for ids in ([1, 2], [3, 9]))

    def look_up(t: Any, lookup: Any) -> None:
        flat.gather_pool(gpu_gather, t.codes, t.meta, t.layout, *lookup, F.SUM, torch.float32, True)

    def update(t: Any, value: float) -> None:
        rows, grads = torch.tensor([10]), torch.full((1, 3), value)
        place = (t.codes, t.meta, t.states, t.layout, on(rows), on(grads), t.hyper, t.clock)
        flat.update_rows(gpu_update, *place, F.SGD, True)

    for each in (at_fault, other):
        look_up(each, good)
    look_up(at_fault, bad)
    _settle(other.codes)
    with pytest.raises(IdOutOfRange, check=has(table="ours 2", rows=9)):
        look_up(other, good)
    for each in (at_fault, other):
        update(each, 1.0)
    update(at_fault, float("nan"))
    _settle(other.codes)
    with pytest.raises(BadGradient, check=has(row=10, table="ours 2")):
        look_up(other, good)


def test_a_named_feature_is_named_in_the_error(make_training: Make, errors: Any, on: On) -> None:
    arena = Arena([TableSpec(9, 3, "int8", "shop")], [0, 0])
    arena.rename(["shop"], ["near; by, 3|4", "far"])
    for bad, feature in ((0, "near; by, 3|4"), (1, "far")):
        ids = torch.tensor([1, 2])
        ids[bad] = 9
        t = on(make_training(arena, F.SGD))
        flat.gather_pool(
            gpu_gather, t.codes, t.meta, t.layout, *on((ids, torch.tensor([0, 1, 2]), None)), F.SUM, torch.float32, True
        )
        _settle(t.codes)
        with pytest.raises(IdOutOfRange) as caught:
            errors.raise_pending()
        told = (
            f"Feature '{feature}' of table 'shop' has ids 0 to 8, but the id at position {bad} of the ids of all features is 9."
        )
        assert str(caught.value).startswith(told)


def _two_arenas(make_training: Make, on: On) -> list[Any]:
    """Alike but for the names of their tables."""
    return [on(make_training(Arena([TableSpec(9, 3, "int8", name)]), F.SGD)) for name in ("ours", "theirs")]


def _look_up(t: Any, id: int, on: On) -> Tensor:
    lookup = on((torch.tensor([id]), torch.tensor([0, 1]), None))
    out, _ = flat.gather_pool(gpu_gather, t.codes, t.meta, t.layout, *lookup, F.SUM, torch.float32, True)
    _settle(out)
    return out


def test_a_thread_with_its_own_buffer_raises_only_its_own_errors(make_training: Make, errors: Any, on: On) -> None:
    ours, theirs = _two_arenas(make_training, on)
    with ThreadPoolExecutor(1) as behind:
        aside = thread_error_buffer(ours.codes.device)
        behind.submit(aside.__enter__).result()
        behind.submit(_look_up, theirs, 9, on).result()
        _look_up(ours, 1, on)  # the buffer of the device has no error
        _look_up(ours, 11, on)
        with pytest.raises(IdOutOfRange, check=has(table="theirs", rows=9, id=9)):
            behind.submit(_look_up, theirs, 1, on).result()
        with pytest.raises(IdOutOfRange, check=has(table="ours", rows=9, id=11)):
            _look_up(ours, 1, on)
        rows, grads = on((torch.tensor([4]), torch.full((1, 3), float("nan"))))
        place = (theirs.codes, theirs.meta, theirs.states, theirs.layout, rows, grads, theirs.hyper, theirs.clock)
        behind.submit(flat.update_rows, gpu_update, *place, F.SGD, True).result()
        _look_up(ours, 1, on)
        with pytest.raises(BadGradient, check=has(row=4, table="theirs")):
            behind.submit(_look_up, theirs, 1, on).result()
        behind.submit(_look_up, theirs, 9, on).result()
        behind.submit(aside.__exit__, None, None, None).result()
        behind.submit(_look_up, theirs, 1, on).result()  # an error left in its own buffer stays there
        assert behind.submit(error_buffer, ours.codes).result() is errors


def test_a_thread_reuses_its_own_buffer(on: On) -> None:
    device = on(torch.zeros(1)).device
    found = []
    for _ in range(2):
        with thread_error_buffer(device):
            found.append(error_buffer(torch.zeros(1)))
    assert found[0] is found[1] is not error_buffer(torch.zeros(1, device=device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_threads_on_one_gpu_raise_only_their_own_errors(make_training: Make, errors: Any, on: On) -> None:
    """Every error is raised where it was made, and there it is named."""
    device = torch.device("cuda", torch.cuda.current_device())

    def work(t: Any, name: str) -> list[str]:
        stream, told = torch.cuda.Stream(device), []
        with torch.cuda.stream(stream), thread_error_buffer(device):
            for id in range(200):
                lookup = on((torch.tensor([id % 2 * 9 + id % 7]), torch.tensor([0, 1]), None))
                flat.gather_pool(gpu_gather, t.codes, t.meta, t.layout, *lookup, F.SUM, torch.float32, True)
                stream.synchronize()
                try:
                    error_buffer(t.codes).raise_pending()
                    told.append("")
                except IdOutOfRange as error:
                    told.append(f"{error.table} {error.id}")
        return told

    names = ("ours", "theirs")
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(work, _two_arenas(make_training, on), names))
    for name, told in zip(names, found, strict=True):
        assert told == [f"{name} {9 + id % 7}" if id % 2 else "" for id in range(200)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_launch_reports_to_the_buffer_of_its_recording_thread(make_training: Make, errors: Any, on: On) -> None:
    """Recorded on one stream and replayed on another: all streams share one buffer."""
    t, _ = _two_arenas(make_training, on)
    ids, offsets = on(torch.tensor([1])), on(torch.tensor([0, 1]))

    def look_up() -> None:
        flat.gather_pool(gpu_gather, t.codes, t.meta, t.layout, ids, offsets, None, F.SUM, torch.float32, True)

    look_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        look_up()
    graph.replay()
    torch.cuda.synchronize()
    errors.raise_pending()
    ids.fill_(9)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
        torch.cuda.synchronize()
    with pytest.raises(IdOutOfRange, check=has(table="ours")):
        errors.raise_pending()
