"""A batch as one card looks it up: its distinct rows, and a table of just these, in fp32, from which kernels pool.

The table is an arena of its own, with a table for each dimension and room for a power of two rows, so that few layouts occur.
It holds the rows in the order of their global numbers, and every row of it is looked up at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import formats as F
from ..errors import IdOutOfRange
from ..kernels.checks import raise_bad_offsets
from ..kernels.dispatch import serving
from ..kernels.exchange.fields import DIM
from ..kernels.gather import gather_pool, weight_gradient
from ..kernels.layout import Layout
from ..kernels.sum_gradients import sum_row_gradients
from ..nn.features import Bags
from ..rows.arena import Arena, TableSpec
from .hop import Target


class Shelf:
    """The features of a collection: rows and first global row of each one's table, and its dimension."""

    def __init__(self, names: Sequence[str], tables: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self.names, self.device = tuple(names), device
        self.rows_F, self.first_F = (torch.tensor([table[at] for table in tables], device=device) for at in (0, 1))
        self.dims = sorted({dim for _, _, dim in tables})
        self._kinds = [self.dims.index(dim) for _, _, dim in tables]
        self.kind_F = torch.tensor(self._kinds, device=device)
        firsts = [min(first for _, first, dim in tables if dim == kind) for kind in self.dims]
        self.end = max(first + rows for rows, first, _ in tables)
        self.begin_G = torch.tensor(firsts, device=device)  # tables of one dimension follow each other
        self._layouts: dict[tuple[int, ...], tuple[Layout, int]] = {}

    def features_of(self, bags: Bags) -> Tensor:
        """The feature of each id."""
        features = len(self.names)
        if bags.offsets.numel() and bags.offsets.is_cuda:  # which `read_features` does not wait for
            raise_bad_offsets(bags.offsets, bags.ids_N.numel())
        ends = bags.offsets[:: bags.batch] if bags.batch else bags.offsets.new_zeros(features + 1)
        each_F = torch.arange(features, device=self.device)
        return torch.repeat_interleave(each_F, ends.diff().long(), output_size=bags.ids_N.numel())

    def global_rows(self, rows_N: Tensor, feature_N: Tensor) -> Tensor:
        """Rows of their tables as global rows; those that are none raise."""
        bad_N = (rows_N < 0) | (rows_N >= self.rows_F[feature_N])
        if bool(bad_N.any()):
            at = int(bad_N.nonzero()[0])
            feature = int(feature_N[at])
            raise IdOutOfRange(feature, at, int(rows_N[at]), int(self.rows_F[feature]), self.names[feature])
        return self.first_F[feature_N] + rows_N

    def layout(self, counts: Sequence[int]) -> tuple[Layout, int]:
        """For so many rows of each dimension, and the bytes it takes."""
        rooms = tuple(1 << max(0, count - 1).bit_length() for count in counts)
        if rooms not in self._layouts:
            specs = [TableSpec(room, dim) for room, dim in zip(rooms, self.dims, strict=True)]
            arena = Arena(specs, self._kinds, device="meta")
            fields = torch.tensor([list(field) for field in arena.layout.tables.features], device=self.device)
            self._layouts[rooms] = Layout.of(fields, arena.spec), arena.codes.numel()
        return self._layouts[rooms]


class Batch:
    """One batch: `rows_U` are the global rows of its lookups, ascending, each once or, without `dedup`, for every lookup."""

    def __init__(self, shelf: Shelf, bags: Bags, rows_N: Tensor, mode: int, dedup: bool = True) -> None:
        self.shelf, self.mode, self.weights_N = shelf, mode, bags.weights_N
        feature_N = shelf.features_of(bags)
        global_N = shelf.global_rows(rows_N, feature_N)
        self.rows_U, self._inverse_N = serving("exchange", global_N).distinct_rows(global_N, shelf.end, dedup)
        inverse_N = self._inverse_N
        self.begin_G = torch.searchsorted(self.rows_U, shelf.begin_G)
        self.ids_N = inverse_N - self.begin_G[shelf.kind_F[feature_N]]
        self.offsets = bags.offsets
        if mode == F.NONE:
            self.offsets = bags.offsets[:: bags.batch] if bags.batch else bags.offsets.new_zeros(len(shelf.names) + 1)
        begins = [*self.begin_G.tolist(), self.rows_U.numel()]
        self._begins = begins
        counts = [last - first for first, last in pairwise(begins)]
        self.layout, size = shelf.layout(counts)
        self.codes = torch.empty(size, dtype=torch.uint8, device=shelf.device)
        self.meta = torch.empty(0, dtype=torch.int32, device=shelf.device)

    def lookups(self) -> Tensor:
        """How often each of `rows_U` is looked up."""
        return torch.bincount(self._inverse_N, minlength=self.rows_U.numel())

    def target(self, fields_KF: Tensor) -> Target:
        """Where rows are put; `fields_KF` says what the rows of each part are."""
        at = {f[F.DIM]: f[F.CODES] for f in self.layout.tables.distinct}
        begins = [at[dim] - 4 * dim * begin for dim, begin in zip(self.shelf.dims, self._begins, strict=False)]
        dim_K, device = fields_KF[:, DIM].contiguous(), fields_KF.device
        kind_K = torch.searchsorted(torch.tensor(self.shelf.dims, device=device), dim_K)
        return Target(self.codes, torch.tensor(begins, device=device)[kind_K], 4 * dim_K)

    def pool(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the collection returns, and the winners of max pooling."""
        return gather_pool(self.codes, self.meta, self.layout, self.ids_N, self.offsets, self.weights_N, self.mode, dtype)

    def gradients(self, winners: Tensor, grad: Tensor) -> Tensor:
        """The gradient of each of `rows_U`, summed over its lookups: [rows, largest dimension]."""
        if not self.rows_U.numel():
            return torch.zeros(0, self.layout.tables.max_dim, device=grad.device)
        call = (self.ids_N, self.offsets, self.weights_N, self.mode, winners, grad)
        rows, grads_UW = sum_row_gradients(self.layout, *call)
        assert rows.numel() == self.rows_U.numel()
        return grads_UW

    def weight_gradient(self, grad: Tensor) -> Tensor:
        return weight_gradient(self.codes, self.meta, self.layout, self.ids_N, self.offsets, grad)


class Exchanged(torch.autograd.Function):
    """Pooled rows of a batch, whose gradients `bring` takes to the cards that hold them."""

    @staticmethod
    def forward(
        ctx: Any, tie: Tensor, weights: Tensor | None, batch: Batch, bring: Callable[[Tensor], None], dtype: torch.dtype
    ) -> Tensor:
        ctx.batch, ctx.bring = batch, bring
        out, ctx.winners = batch.pool(dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        batch, grad = ctx.batch, grad.contiguous()
        weights_grad = batch.weight_gradient(grad).to(batch.weights_N.dtype) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            ctx.bring(batch.gradients(ctx.winners, grad))
        return None, weights_grad, None, None, None
