"""A batch as one card looks it up: its distinct rows, and a table of just these, in fp32, from which kernels pool.

The table is an arena of its own, with a table for each dimension and room for a power of two rows, so that few layouts occur.
It holds the rows in the order of their global numbers, and every row of it is looked up at least once.

Lookups that those who own the rows pool (`shares.py`) are taken out first; their sums are added to what is pooled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import IdOutOfRange
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.checks import raise_bad_offsets
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange.fields import DIM
from thermocline.kernels.gather import gather_pool, weight_gradient
from thermocline.kernels.layout import Layout
from thermocline.kernels.sum_gradients import sum_row_gradients
from thermocline.nn.inputs import JaggedIds
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

from .all_to_all import Target
from .batch_exchange import Gradients
from .owner_pooling import Apart, Shares


class Shelf:
    """The features of a collection, each named after its table: rows and first global row of that, and its dimension.

    `summed` tells which global rows are pooled by those who own them; None where there are none.
    """

    def __init__(
        self, names: Sequence[tuple[str, str]], tables: Sequence[tuple[int, int, int]], device: torch.device,
        summed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.names, self.device, self.summed = tuple(names), device, summed
        self.rows_F, self.first_F = (torch.tensor([table[at] for table in tables], device=device) for at in (0, 1))
        self.dims = sorted({dim for _, _, dim in tables})
        self._kinds = [self.dims.index(dim) for _, _, dim in tables]
        self.kind_F = torch.tensor(self._kinds, device=device)
        firsts = [min(first for _, first, dim in tables if dim == kind) for kind in self.dims]
        self.end = max(first + rows for rows, first, _ in tables)
        self.begin_G = torch.tensor(firsts, device=device)  # tables of one dimension follow each other
        self._layouts: dict[tuple[int, ...], tuple[Layout, int]] = {}

    def features_of(self, bags: JaggedIds) -> Tensor:
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
            rows, first = int(self.rows_F[feature]), int((feature_N < feature).sum())
            raise IdOutOfRange(feature, at, int(rows_N[at]), rows, *self.names[feature], first)
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

    def __init__(self, shelf: Shelf, bags: JaggedIds, rows_N: Tensor, mode: int, dedup: bool = True) -> None:
        self.shelf, self.mode, self.weights_N = shelf, mode, bags.weights_N
        self.apart: Apart | None
        self._scale_X: Tensor | None
        feature_N = shelf.features_of(bags)
        global_N = shelf.global_rows(rows_N, feature_N)
        self.offsets, self.apart, self._scale_X = bags.offsets, None, None
        if shelf.summed is not None and bags.weights_N is None:
            global_N, feature_N = self._take_apart(shelf.summed(global_N), global_N, feature_N)
        self.rows_U, self._inverse_N = implementation_for("exchange", global_N).distinct_rows(global_N, shelf.end, dedup)
        inverse_N = self._inverse_N
        self.begin_G = torch.searchsorted(self.rows_U, shelf.begin_G)
        self.ids_N = inverse_N - self.begin_G[shelf.kind_F[feature_N]]
        if mode == F.NONE:
            self.offsets = bags.offsets[:: bags.batch] if bags.batch else bags.offsets.new_zeros(len(shelf.names) + 1)
        begins = [*self.begin_G.tolist(), self.rows_U.numel()]
        self._begins = begins
        counts = [last - first for first, last in pairwise(begins)]
        self.layout, size = shelf.layout(counts)
        self.codes = torch.empty(size, dtype=torch.uint8, device=shelf.device)
        self.meta = torch.empty(0, dtype=torch.int32, device=shelf.device)

    def _take_apart(self, others_N: Tensor, global_N: Tensor, feature_N: Tensor) -> tuple[Tensor, Tensor]:
        """Lookups that others pool go apart. Means are sums until all of a bag is there."""
        lengths_X, mine_N = self.offsets.diff().long(), ~others_N
        bag_N = torch.repeat_interleave(lengths_X, output_size=global_N.numel())
        self.apart = Apart(global_N[others_N], bag_N[others_N])
        self.offsets = torch.nn.functional.pad(mine_N.cumsum(0), (1, 0))[self.offsets.long()]
        if self.mode == F.MEAN:
            self.mode, self._scale_X = F.SUM, 1.0 / lengths_X.float().clamp(min=1)
        return global_N[mine_N], feature_N[mine_N]

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

    def pool(self, dtype: torch.dtype, shares: Shares | None) -> tuple[Tensor, Tensor]:
        """What the collection returns, and the winners of max pooling."""
        if self.apart is None or shares is None:
            return gather_pool(self._rows, self._call(dtype))
        out, winners = gather_pool(self._rows, self._call())
        pooled_XW = shares.pooled(self.offsets.numel() - 1)
        for columns, at in self._features(out.shape[0]):
            out[:, columns] += pooled_XW[at, : columns.stop - columns.start]
        return self._scaled(out).to(dtype), winners

    def _features(self, batch: int) -> Iterator[tuple[slice, slice]]:
        """Columns of each feature, and its bags."""
        for f, field in enumerate(self.layout.tables.features):
            yield slice(field[F.COLUMN], field[F.COLUMN] + field[F.DIM]), slice(f * batch, (f + 1) * batch)

    def _scaled(self, out: Tensor) -> Tensor:
        """Sums as means, or gradients of means as those of sums."""
        if self._scale_X is None:
            return out
        return torch.cat([out[:, columns] * self._scale_X[at, None] for columns, at in self._features(out.shape[0])], dim=1)

    def gradients(self, winners: Tensor, grad: Tensor) -> Gradients:
        """Of each of `rows_U`, summed over its lookups, and of bags that others pool: [rows or bags, largest dimension]."""
        if self.apart is None:
            return Gradients(self._row_gradients(winners, grad))
        grad = self._scaled(grad.float())
        bags_XW = torch.zeros(self.offsets.numel() - 1, self.layout.tables.max_dim, device=grad.device)
        for columns, at in self._features(grad.shape[0]):
            bags_XW[at, : columns.stop - columns.start] = grad[:, columns]
        return Gradients(self._row_gradients(winners, grad), bags_XW)

    def _row_gradients(self, winners: Tensor, grad: Tensor) -> Tensor:
        if not self.rows_U.numel():
            return torch.zeros(0, self.layout.tables.max_dim, device=grad.device)
        rows, grads_UW = sum_row_gradients(self.layout, self._call(), winners, grad)
        assert rows.numel() == self.rows_U.numel()
        return grads_UW

    def weight_gradient(self, grad: Tensor) -> Tensor:
        return weight_gradient(self._rows, self._call(), grad)

    @property
    def _rows(self) -> RowArrays:
        return RowArrays(self.codes, self.meta, self.layout)

    def _call(self, dtype: torch.dtype = torch.float32) -> LookupCall:
        return LookupCall(self.ids_N, self.offsets, self.weights_N, self.mode, dtype)


class Exchanged(torch.autograd.Function):
    """Pooled rows of a batch, whose gradients `bring` takes to the cards that hold them."""

    @staticmethod
    def forward(
        ctx: Any, tie: Tensor, weights: Tensor | None, batch: Batch, shares: Shares | None,
        bring: Callable[[Gradients], None], dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.batch, ctx.bring = batch, bring
        out, ctx.winners = batch.pool(dtype, shares)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        batch, grad = ctx.batch, grad.contiguous()
        weights_grad = batch.weight_gradient(grad).to(batch.weights_N.dtype) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            ctx.bring(batch.gradients(ctx.winners, grad))
        return None, weights_grad, None, None, None, None
