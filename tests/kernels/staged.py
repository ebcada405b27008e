"""A training run on Triton's kernels with a staging area, and what two runs must have in common."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import flat
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather import gpu as gather
from thermocline.kernels.layout import Staging
from thermocline.kernels.stage import gpu, gpu_area, reference
from thermocline.kernels.update import gpu as update

On = Callable[[Any], Any]
Make = Callable[..., Any]
# Two pools, one of two tables, and rows that cannot be staged; two features share a table.
TABLES = [(70, 4, "int8"), (40, 3, "int4"), (50, 4, "int8"), (20, 8, "fp32")]
FEATURES = [0, 1, 2, 2, 3]
SLOTS = [6, 3, 4, 0]


class _Waiting:
    """Stands for a stream: waiting for copies is doing them."""

    @staticmethod
    def wait_event(run: Run) -> None:
        run.copy()


class Run:
    """A training run on Triton's kernels, with or without a staging area."""

    def __init__(
        self, made: Any, places: tuple[int, ...] = (), module: Any = gpu, most: tuple[int, ...] | None = None, slices: int = 1
    ) -> None:
        self.made, self.module, self.under_way = made, module, False
        self.staging: Staging | None = None
        if places:
            self.staging = reference.make_staging(made.codes, made.meta, made.layout.tables.pools, places, most, slices)
            self.area = gpu_area.StagingArea(self.staging, made.codes, made.meta)
            made.cache = made.cache._replace(home=torch.tensor(self.area.home))
            self._open()

    @property
    def table(self) -> tuple[Any, ...]:
        return self.made.meta, self.staging, self.made.layout, self.made.codes

    def copy(self) -> None:
        """Once, at any time before it must have been: what was copied too early or too late must not matter."""
        if self.under_way:
            self.area._copies = None
            self.module.copy(*self.table)
            self.under_way = False

    def choose(self) -> None:
        """When all that was chosen is open, at any time before the next decision or commit."""
        assert self.staging is not None
        if self.slices_left == 0:
            self.module.choose(*self.table)
            self.slices_left = self.staging.slices

    def _open(self) -> None:
        self.module.choose(*self.table)
        self.module.send(*self.table)
        self.slices_left = 0
        self.choose()

    def _start_copies(self) -> None:
        self.under_way = True
        self.area.start_copies(self)  # type: ignore[arg-type]

    def prefetch(self, *lookups: Any) -> None:
        self.copy()
        self.choose()
        self.module.commit(*self.table, True)
        batches = [(lookup.ids, lookup.offsets) for lookup in lookups]
        if self.module is reference:
            reference.claim(*self.table, batches)
        elif (keys := self.area.sort_rows(self.made.layout, batches)) is not None:
            gpu.claim(*self.table[:3], keys)
        self.module.send(*self.table)
        self.slices_left -= 1
        self._start_copies()

    def arrive(self) -> None:
        self.copy()
        self.choose()
        self.module.commit(*self.table, False)

    def settle(self) -> None:
        assert self.staging is not None
        self.arrive()
        for _ in range(self.staging.rounds):
            self.module.choose(*self.table, True)
            self.module.send(*self.table, True)
            self._start_copies()
            self.arrive()
        self._open()

    def forward(self, lookup: Any, mode: int) -> tuple[Tensor, Tensor]:
        made = self.made
        return flat.gather_pool(gather, made.codes, made.meta, made.layout, *lookup, mode, torch.float32, True, made.cache)

    def backward(self, lookup: Any, mode: int, winners: Tensor, grad: Tensor) -> None:
        made = self.made
        with mock.patch.object(gpu_area, "current_stream", lambda _: _Waiting):
            flat.update_bags(
                update, made.codes, made.meta, made.states, made.layout, *lookup, mode, winners, grad, made.hyper, made.clock,
                F.ROWWISE_ADAGRAD, True, made.cache,
            )  # fmt: skip

    def states(self) -> tuple[dict[int, tuple[int, list[int], bytes]], list[int]]:
        """What every staged row goes through and has in its place, and how many rows moved."""
        assert self.staging is not None
        held = {}
        for number in range(len(self.staging.places)):
            here = reference.Places(self.made.codes, self.made.meta, self.staging, self.made.layout.tables.pools, number)
            places = torch.arange(len(here.rows_P), device=here.rows_P.device)
            for place, at, word in zip(*(t.tolist() for t in here.found(places)), strict=True):
                if not (F.STAGED <= word < 0 and word & F.PLACE_BITS == place):
                    continue  # its row went elsewhere
                codes = bytes(here.codes_PB[place].tolist()) if not word & F.ARRIVING else b""
                held[at + here.pool.row] = (word & ~F.PLACE_BITS, here.meta_PW[place].tolist(), codes)
        return held, self.staging.counts[:, [F.FREE, F.LEFT, F.ROWS_IN, F.ROWS_OUT]].flatten().tolist()


def same(a: Any, b: Any) -> bool:
    """Compares everything but the staging area, and what cached rows have in their tables: nobody reads that."""
    for made in (a, b):
        for field in made.layout.tables.distinct:
            width, words, rows = F.row_bytes(field[F.FORMAT], field[F.DIM]), F.META_WORDS[field[F.FORMAT]], field[F.ROWS]
            if words:
                meta_RW = made.meta[field[F.META] : field[F.META] + rows * words].view(rows, words)
                cached_R = meta_RW[:, 0] < 0
                made.codes[field[F.CODES] : field[F.CODES] + rows * width].view(rows, width)[cached_R] = 0
                meta_RW[cached_R, 1:] = 0
    ours, wanted = (made.changed()[:-1] for made in (a, b))
    return all(torch.equal(x, y) for x, y in zip(ours, wanted, strict=True))


def batch_of(on: On, ids: list[int], offsets: list[int] | None = None) -> Any:
    """What a prefetch takes of a batch; one bag unless told."""
    return SimpleNamespace(ids=on(torch.tensor(ids)), offsets=on(torch.tensor(offsets or [0, len(ids)])))
