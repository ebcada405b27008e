"""Arenas and batches that kernel tests share, made with the reference alone: one implementation is tested at a time.

Everything is made on the CPU from a seed; `on` moves it to where the Triton kernels run: a card if there is one, else
the CPU, in Triton's interpreter. References are computed on the CPU. Runs with staged rows are a module beside the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.ids.idmap import IdMap, RowRange
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.gather import cpu as cpu_gather
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.layout import Cache, Layout
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.update.reference import STATES
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

sys.path.insert(0, str(Path(__file__).parent))

Table = tuple[int, int, str]  # rows, dimension, precision


@pytest.fixture
def errors(on: Callable[[Any], Any]) -> Iterator[Any]:
    """The error buffer of GPU kernels, empty before the test and after it."""
    from thermocline.kernels.gpu.errors import error_buffer

    buffer = error_buffer(on(torch.zeros(1)))
    buffer.raise_pending()
    yield buffer
    buffer.raise_pending()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty and its relatives holds NaN, bytes 0x7F, and wider integers 1.

    1, not a wild number: a kernel that takes an unwritten row, place or winner for its own would mask a wild one away.
    """
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned_make(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        if made.dtype.is_floating_point:
            return made.fill_(float("nan"))
        return made.fill_(0x7F if made.element_size() == 1 else 1)

    return poisoned_make


@pytest.fixture
def poisoned_scratch(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and scratch memory of CPU kernels holds NaN and wild numbers."""
    make = np.empty

    def poisoned_make(*args: Any, **kwargs: Any) -> Any:
        array = make(*args, **kwargs)
        array.fill(np.nan if array.dtype.kind == "f" else 0x7F)
        return array

    monkeypatch.setattr(np, "empty", poisoned_make)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _move(thing: Any, device: str) -> Any:
    """A copy of tensors, layouts and lists and tuples of them on a device."""
    if isinstance(thing, Tensor):
        return thing.detach().clone().to(device)
    if isinstance(thing, Layout):
        return Layout(_move(thing.fields_F8, device), thing.tables)
    if isinstance(thing, list):
        return [_move(each, device) for each in thing]
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_move(each, device) for each in thing))
    if isinstance(thing, tuple):
        return tuple(_move(each, device) for each in thing)
    return thing


class Lookup(NamedTuple):
    """What every kernel takes of a batch, in the order it takes it."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


@dataclass
class Training:
    """An arena's rows with optimizer state, hyperparameters, clock and cache: what updates change."""

    codes: Tensor
    meta: Tensor
    states: list[Tensor]
    layout: Layout
    hyper: Tensor
    clock: Tensor
    cache: Cache | None = None

    def to(self, device: str) -> Training:
        """A copy on a device."""
        moved = (self.codes, self.meta, self.states, self.layout, self.hyper, self.clock, self.cache)
        return Training(*(_move(each, device) for each in moved))

    def changed(self) -> list[Tensor]:
        """Every tensor that an update may change, on the CPU, floats as bits."""
        tensors = (self.codes, self.meta, *self.states, self.hyper, self.clock, *(self.cache or ()))
        return [t.cpu().clone().view(torch.uint8) for t in tensors]


@pytest.fixture(scope="session")
def on() -> Callable[[Any], Any]:
    """Copies tensors, layouts and tuples of them to where the Triton kernels run."""
    from thermocline.kernels.gpu.launch import INTERPRETED

    device = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
    return lambda thing: thing.to(device) if isinstance(thing, Training) else _move(thing, device)


@pytest.fixture(scope="session")
def make_arena() -> Callable[..., Arena]:
    """make_arena([(rows, dim, precision), ...], features=None, seed=0): normal values, quantized by the reference.

    `slots` and `near`: so many full and near slots of the cache for each table; `policy`: who is kept there.
    """

    def make(
        tables: Sequence[Table],
        features: Sequence[int] | None = None,
        seed: int = 0,
        slots: Sequence[int] | None = None,
        policy: str = "lfu",
        near: Sequence[int] | None = None,
    ) -> Arena:
        specs = [TableSpec(*table, name=f"t{i}") for i, table in enumerate(tables)]
        arena = Arena(specs, features, slots=slots, policy=policy, int8_slots=near)
        generator = torch.Generator().manual_seed(seed)
        for i, table in enumerate(arena.tables):
            codes_RB, meta_RW, _, format, dim = arena.views(i)
            values_RD = torch.randn(table.rows, dim, generator=generator)
            codes, meta = quantize.quantize_rows(values_RD, format, None, None)
            codes_RB.copy_(codes)
            meta_RW.copy_(meta)
        return arena

    return make


@pytest.fixture(scope="session")
def make_lookup() -> Callable[..., Lookup]:
    """make_lookup(arena, batch, longest, seed=0, ...): jagged bags of 0 to `longest` random ids.

    `full`: exactly so many. `batch` None: unpooled, so many ids for each feature. `distinct`: no row of a table twice.
    """

    def make(
        arena: Arena,
        batch: int | None,
        longest: int,
        seed: int = 0,
        dtype: torch.dtype = torch.int64,
        weighted: bool = False,
        distinct: bool = False,
        full: bool = False,
    ) -> Lookup:
        generator = torch.Generator().manual_seed(seed)
        ids, lengths = [], []
        unused = {t: torch.randperm(table.rows, generator=generator) for t, table in enumerate(arena.tables)}
        for table in arena.features:
            shape = (1 if batch is None else batch,)
            lengths.append(torch.randint(longest if full else 0, longest + 1, shape, generator=generator))
            count = int(lengths[-1].sum())
            if distinct:
                assert count <= unused[table].numel(), "too few rows for distinct ids"
                ids.append(unused[table][:count])
                unused[table] = unused[table][count:]
            else:
                ids.append(torch.randint(0, arena.tables[table].rows, (count,), generator=generator))
        flat = torch.cat(ids)
        weights = torch.rand(flat.numel(), generator=generator) * 2 - 0.5 if weighted else None
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
        return Lookup(flat.to(dtype), offsets.to(dtype), weights)

    return make


@pytest.fixture(scope="session")
def make_training() -> Callable[..., Training]:
    """make_training(arena, optimizer, seed=0): as after some steps, so that no state is zero."""

    def make(arena: Arena, optimizer: int, seed: int = 0) -> Training:
        generator = torch.Generator().manual_seed(seed)
        size = arena.rows if optimizer == F.ROWWISE_ADAGRAD else arena.elements
        states = [torch.rand(size, generator=generator) for _ in range(STATES[optimizer])]
        # by place: learning rate, eps, betas, weight decay, powers of the betas after seven steps
        hyper = torch.tensor([0.3, 1e-6, 0.9, 0.999, 0.01, 0.9**7, 0.999**7], dtype=torch.float64)
        clock = torch.tensor([seed + (5 << 33), 7], dtype=torch.int64)
        cache = Cache(*(t.clone() for t in arena.cache)) if arena.cache else None
        return Training(arena.codes.clone(), arena.meta.clone(), states, arena.layout, hyper, clock, cache)

    return make


@pytest.fixture(scope="session")
def make_raw() -> Callable[..., tuple[Tensor, Tensor]]:
    """make_raw(maps, batch, longest, seed=0): raw ids of every kind for some maps, and their offsets.

    Some ids are kept ones, some their neighbours, some any 64 bits; maps that refuse ids get ids they take.
    """

    def make(
        maps: Sequence[IdMap | None], batch: int, longest: int, seed: int = 0, dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids, lengths = [], []
        for each in maps:
            lengths.append(torch.randint(0, longest + 1, (batch,), generator=generator))
            count = int(lengths[-1].sum())
            wild_N = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)
            ids_N = wild_N >> torch.randint(0, 64, (count,), generator=generator)
            if each is not None and each.kept is not None and each.kept.count:
                kept_N = each.kept.ids[torch.randint(0, each.kept.count, (count,), generator=generator)]
                near_N = kept_N + torch.randint(-1, 2, (count,), generator=generator)
                ids_N = torch.where(torch.rand(count, generator=generator) < 0.7, near_N, ids_N)
            if each is not None and isinstance(each.start, RowRange):
                ids_N = ids_N.remainder(each.start.rows)
            ids.append(ids_N)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
        return torch.cat(ids).to(dtype), offsets.to(dtype)

    return make


@pytest.fixture(scope="session")
def lookups_agree() -> Callable[[Any, Any, int], None]:
    """lookups_agree(training, lookup, mode): every kind of lookup through a cache on the CPU equals the reference's."""

    def agree(made: Any, lookup: Any, mode: int) -> None:
        rows, call = RowArrays(made.codes, made.meta, made.layout, made.cache), LookupCall(*lookup, mode)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            wanted, winners = gather.gather_pool(rows, call._replace(dtype=dtype))
            got, won = cpu_gather.gather_pool(rows, call._replace(dtype=dtype))
            assert torch.equal(got, wanted) and torch.equal(won, winners)
        if mode == F.SUM:
            grad = torch.randint(-3, 4, wanted.shape, generator=torch.Generator().manual_seed(1)).float()
            ours, theirs = (module.weight_gradient(rows, call, grad) for module in (cpu_gather, gather))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)

    return agree
