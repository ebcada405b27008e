"""All counters of a step lie on the device: repeated launches, as a CUDA graph repeats them, train as eager steps do.

Triton's interpreter has no graphs. Here a step's launches, fills and sorts are recorded and run again, with other ids in the
same memory and without any Python of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.gather import gpu as gpu_gather
from thermocline.kernels.gpu.launch import INTERPRETED
from thermocline.kernels.update import gpu as gpu_update
from thermocline.rows.arena import Arena
from thermocline.rows.optimizers import Adagrad, Adam, RowwiseAdagrad
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import Trainer

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are captured in tests/nn/test_matrix.py"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

ROWS, DIM, BATCH, IDS, STEPS = 37, 5, 3, 11, 3


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], Any]]]:
    """The launches, fills and sorts of the context, each to be run again on the same memory."""
    work: list[Callable[[], Any]] = []
    launch, sort, fills = interpreter.GridExecutor.__call__, torch.sort, {"full": torch.full, "zeros": torch.zeros}

    def launch_and_record(grid: Any, *args: Any, **constants: Any) -> Any:
        work.append(lambda: launch(grid, *args, **constants))
        return launch(grid, *args, **constants)

    def sort_and_record(keys: Tensor, **how: Any) -> Any:
        outs = sort(keys, **how)
        work.append(lambda: [out.copy_(new) for out, new in zip(outs, sort(keys, **how), strict=True)])
        return outs

    def fill_and_record(name: str, *args: Any, **how: Any) -> Tensor:
        filled = fills[name](*args, **how)
        work.append(lambda: filled.copy_(fills[name](*args, **how)))
        return filled

    with monkeypatch.context() as patched:
        patched.setattr(interpreter.GridExecutor, "__call__", launch_and_record)
        patched.setattr(torch, "sort", sort_and_record)
        for name in fills:
            patched.setattr(torch, name, partial(fill_and_record, name))
        yield work


def make(precision: str, policy: str, near: int, optimizer: Any) -> tuple[Arena, Trainer]:
    arena = Arena([TableSpec(ROWS, DIM, precision)], slots=[4], int8_slots=[near], policy=policy)
    draw = torch.Generator().manual_seed(3)
    arena.write(0, torch.arange(ROWS), torch.randn(ROWS, DIM, generator=draw))
    return arena, Trainer(arena, optimizer, seed=7)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, IDS + 1, (BATCH - 1,), generator=draw).sort()[0]
    ids = (torch.rand(IDS, generator=draw) ** 2 * ROWS).long()
    return ids, torch.cat([torch.tensor([0]), ends, torch.tensor([IDS])]), torch.randn(BATCH, DIM, generator=draw)


def step(arena: Arena, trainer: Trainer, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    call = LookupCall(given[0], given[1], None, F.SUM)
    out, winners = gpu_gather.gather_pool(arena.arrays, call)
    gpu_update.update_bags(arena.arrays, trainer.arrays, call, winners, given[2])
    return out


@pytest.mark.parametrize(
    "precision, policy, near, optimizer",
    [
        ("int8", "lfu", 0, Adam(lr=0.1)),
        ("int4", "adaptive", 0, RowwiseAdagrad(lr=0.1)),
        ("int2", "lru", 6, Adagrad(lr=0.1)),
    ],
)
def test_repeated_launches_train_to_the_bits_of_eager_steps(precision, policy, near, optimizer, monkeypatch):
    eager, replayed = (make(precision, policy, near, optimizer) for _ in range(2))
    outs = [step(*eager, batch(n)) for n in range(STEPS)]
    static = batch(0)
    with recorded(monkeypatch) as work:
        out = step(*replayed, static)
    assert torch.equal(out, outs[0])
    launches = len(work)
    for n in range(1, STEPS):
        for mine, new in zip(static, batch(n), strict=True):
            mine.copy_(new)
        for again in work:
            again()
        assert torch.equal(out, outs[n])
    assert len(work) == launches
    for one, other in zip(eager, replayed, strict=True):
        arrays = [
            [a.codes, a.meta, *a.cache[:-2]] if isinstance(a, Arena) else [*a.states, a.hyper, a.clock] for a in (one, other)
        ]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*arrays, strict=True))
    assert replayed[1].clock.tolist() == [7, STEPS]  # new rounding bits in every repetition
    assert replayed[0].stats() == eager[0].stats()
