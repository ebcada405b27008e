"""A batch on one rank: its distinct rows as a temporary fp32 table, from which kernels pool.

The table is an arena with one table per dimension and a power of two of rows, so that few layouts occur. Its rows are in order
of the global rows, and every row is looked up at least once. Lookups that owners pool (`owner_pooling.py`) are taken out first;
their sums are added to the pooled result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import IdOutOfRange
from thermocline.kernels import gather_pool, sum_row_gradients, weight_gradient
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.checks import raise_bad_offsets
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange.fields import DIM
from thermocline.kernels.layout import Layout
from thermocline.kernels.ops import is_for_rows, once
from thermocline.nn.inputs import JaggedIds
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

from .batch_exchange import BatchExchange, BatchGradients, RowDestination
from .context import ExchangeContext
from .host_numbers import to_device
from .owner_pooling import OwnerPooledLookups, PartialSums


def feature_offsets(bags: JaggedIds, features: int) -> Tensor:
    """The offsets of features, without those of bags."""
    return bags.offsets[:: bags.batch] if bags.batch else bags.offsets.new_zeros(features + 1)


class BatchTableLayout:
    """The features of a collection, and the layouts of its batch tables.

    `names` has (table, feature) and `tables` (rows, first global row, dimension) of each feature. `is_owner_pooled`
    flags the global rows that their owners pool.
    """

    def __init__(
        self, names: Sequence[tuple[str, str]], tables: Sequence[tuple[int, int, int]], device: torch.device,
        is_owner_pooled: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.names, self.device, self.is_owner_pooled = tuple(names), device, is_owner_pooled
        self.rows_F, self.first_F = (
            torch.tensor([table[at] for table in tables], dtype=torch.int64, device=device) for at in (0, 1)
        )
        self.dims = sorted({dim for _, _, dim in tables})
        self.dims_G = torch.tensor(self.dims, dtype=torch.int64, device=device)
        self._groups = [self.dims.index(dim) for _, _, dim in tables]
        self.group_F = torch.tensor(self._groups, dtype=torch.int64, device=device)
        firsts = [min(first for _, first, dim in tables if dim == group) for group in self.dims]
        self.end = max(first + rows for rows, first, _ in tables)
        self.fields_F2 = torch.stack([self.rows_F, self.first_F], dim=1)
        self.begin_G = torch.tensor(firsts, dtype=torch.int64, device=device)  # global rows of one dimension are contiguous
        self._layouts: dict[tuple[int, ...], tuple[Layout, int]] = {}

    def features_of(self, bags: JaggedIds, checked: bool = True) -> Tensor:
        """The feature of each id; any feature for some where offsets are wrong, which they may be unless `checked`."""
        ends_F, count = feature_offsets(bags, len(self.names)).long(), bags.ids_N.numel()
        if not checked:  # a GPU would stop the process
            ends_F = ends_F.clamp(0, count).cummax(0).values
            ends_F[0], ends_F[-1] = 0, count
        return torch.repeat_interleave(ends_F.diff(), output_size=count)

    def global_rows(self, rows_N: Tensor, feature_N: Tensor) -> Tensor:
        """Global rows of rows of tables; raises `IdOutOfRange` for a row that is not in its table."""
        bad_N = (rows_N < 0) | (rows_N >= self.rows_F[feature_N])
        if bool(bad_N.any()):
            at = int(bad_N.nonzero()[0])
            feature = int(feature_N[at])
            rows, first = int(self.rows_F[feature]), int((feature_N < feature).sum())
            raise IdOutOfRange(feature, at, int(rows_N[at]), rows, *self.names[feature], first)
        return self.first_F[feature_N] + rows_N

    def layout(self, counts: Sequence[int]) -> tuple[Layout, int]:
        """The layout and bytes of a table with `counts` rows of each dimension."""
        capacity = tuple(1 << max(0, count - 1).bit_length() for count in counts)
        if capacity not in self._layouts:
            specs = [TableSpec(rows, dim) for rows, dim in zip(capacity, self.dims, strict=True)]
            arena = Arena(specs, self._groups, device="meta")
            fields = torch.tensor(arena.layout.tables.features, dtype=torch.int64, device=self.device)
            self._layouts[capacity] = Layout.of(fields, arena.spec), arena.codes.numel()
        return self._layouts[capacity]


class BatchTable:
    """One batch: `rows_U` are the global rows of its lookups, ascending; distinct, or without `dedup` one per lookup.

    With `later`, rows are padded, the host does not know their number before `settle`, and kernels report bad ids, except
    where owners pool.
    """

    def __init__(
        self, layout: BatchTableLayout, bags: JaggedIds, rows_N: Tensor, mode: int, dedup: bool = True, later: bool = False
    ) -> None:  # fmt: skip
        self.table_layout, self.mode, self.weights_N, self._later = layout, mode, bags.weights_N, later
        self.owner_pooled: OwnerPooledLookups | None = None
        self._scale_X: Tensor | None = None
        self.offsets = bags.offsets
        kernels = implementation_for("exchange", rows_N)
        reported = later and layout.is_owner_pooled is None  # by kernels; bags that owners pool make the host wait anyway
        if bags.offsets.numel() and bags.offsets.is_cuda and not reported:  # `read_features` does not check those of a GPU
            raise_bad_offsets(bags.offsets, bags.ids_N.numel())
        feature_N = layout.features_of(bags, checked=not reported)
        if reported:
            global_N = kernels.global_rows(layout.fields_F2, rows_N, bags.offsets, layout.end)
        else:
            global_N = layout.global_rows(rows_N, feature_N)
        if layout.is_owner_pooled is not None and bags.weights_N is None:
            global_N, feature_N = self._take_owner_pooled(layout.is_owner_pooled(global_N), global_N, feature_N)
        numbers: list[Tensor] = []
        if later:
            self.rows_U, self._inverse_N, *numbers = kernels.distinct_padded(global_N, layout.end, dedup)
        else:
            self.rows_U, self._inverse_N = kernels.distinct_rows(global_N, layout.end, dedup)
        begin_G = torch.searchsorted(self.rows_U, layout.begin_G)
        self.ids_N = self._inverse_N - begin_G[layout.group_F[feature_N]]
        if mode == F.NONE:
            self.offsets = feature_offsets(bags, len(layout.names))
        self.meta = torch.empty(0, dtype=torch.int32, device=layout.device)
        self.begins = torch.cat([begin_G, *numbers])  # of dimensions in the rows, and with `later` the number of rows
        if not later:
            self.settle([*begin_G.tolist(), self.rows_U.numel()])

    def settle(self, begins: list[int]) -> None:
        """Take where dimensions begin in the rows, and the number of rows, which the host has read."""
        self._begins, self.rows_U = begins, self.rows_U[: begins[-1]]
        self.layout, size = self.table_layout.layout([last - first for first, last in pairwise(begins)])
        self.codes = torch.empty(size, dtype=torch.uint8, device=self.table_layout.device)

    def _take_owner_pooled(self, pooled_N: Tensor, global_N: Tensor, feature_N: Tensor) -> tuple[Tensor, Tensor]:
        """Take lookups out that owners pool. Means are computed as sums and scaled when a bag is complete."""
        lengths_X, mine_N = self.offsets.diff().long(), ~pooled_N
        bag_N = torch.repeat_interleave(lengths_X, output_size=global_N.numel())
        self.owner_pooled = OwnerPooledLookups(global_N[pooled_N], bag_N[pooled_N])
        self.offsets = torch.nn.functional.pad(mine_N.cumsum(0), (1, 0))[self.offsets.long()]
        if self.mode == F.MEAN:
            self.mode, self._scale_X = F.SUM, 1.0 / lengths_X.float().clamp(min=1)
        return global_N[mine_N], feature_N[mine_N]

    def exchange(self, context: ExchangeContext, trains: bool) -> BatchExchange:
        """The exchange of the rows; caches need to know how often each of `rows_U` is looked up."""
        lookups_U: Tensor | None = None
        if context.counts:
            lookups_U = torch.zeros_like(self.rows_U).scatter_add_(0, self._inverse_N, torch.ones_like(self._inverse_N))
        return BatchExchange(context, self.rows_U, trains, lookups_U, self.owner_pooled, self._later)

    def destination(self, fields_KF: Tensor) -> RowDestination:
        """The memory of the rows; `fields_KF` has the dimension of each part."""
        at = {f[F.DIM]: f[F.CODES] for f in self.layout.tables.distinct}
        dims = self.table_layout.dims
        begins = np.array([at[dim] - 4 * dim * begin for dim, begin in zip(dims, self._begins, strict=False)])
        dim_K = fields_KF[:, DIM].contiguous()
        group_K = torch.searchsorted(self.table_layout.dims_G, dim_K)
        return RowDestination(self.codes, to_device(begins, fields_KF.device)[group_K], 4 * dim_K)

    def pool(self, dtype: torch.dtype, sums: PartialSums | None) -> tuple[Tensor, Tensor]:
        """The pooled output, and the winners of max pooling."""
        if self.owner_pooled is None or sums is None:
            return gather_pool(self._rows, self._call(dtype))
        out, winners = gather_pool(self._rows, self._call())
        pooled_XW = sums.pooled(self.offsets.numel() - 1)
        for columns, at in self._features(out.shape[0]):
            out[:, columns] += pooled_XW[at, : columns.stop - columns.start]
        return self._scaled(out).to(dtype), winners

    def _features(self, batch: int) -> Iterator[tuple[slice, slice]]:
        """Columns and bags of each feature."""
        for f, field in enumerate(self.layout.tables.features):
            yield slice(field[F.COLUMN], field[F.COLUMN] + field[F.DIM]), slice(f * batch, (f + 1) * batch)

    def _scaled(self, out: Tensor) -> Tensor:
        """Sums as means, or gradients of means as gradients of sums."""
        if self._scale_X is None:
            return out
        return torch.cat([out[:, columns] * self._scale_X[at, None] for columns, at in self._features(out.shape[0])], dim=1)

    def gradients(self, winners: Tensor, grad: Tensor) -> BatchGradients:
        """Gradients of `rows_U`, summed over lookups, and of bags that owners pool: [rows or bags, largest dimension]."""
        if self.owner_pooled is None:
            return BatchGradients(self._row_gradients(winners, grad))
        grad = self._scaled(grad.float())
        bags_XW = torch.zeros(self.offsets.numel() - 1, self.layout.tables.max_dim, dtype=torch.float32, device=grad.device)
        for columns, at in self._features(grad.shape[0]):
            bags_XW[at, : columns.stop - columns.start] = grad[:, columns]
        return BatchGradients(self._row_gradients(winners, grad), bags_XW)

    def _row_gradients(self, winners: Tensor, grad: Tensor) -> Tensor:
        if not self.rows_U.numel():
            return torch.zeros(0, self.layout.tables.max_dim, dtype=torch.float32, device=grad.device)
        rows, grads_UW = sum_row_gradients(self.layout, self._call(), winners, grad, self.rows_U.numel())
        assert rows.numel() == self.rows_U.numel()
        return grads_UW

    def weight_gradient(self, grad: Tensor) -> Tensor:
        return weight_gradient(self._rows, self._call(), grad)

    @property
    def _rows(self) -> RowArrays:
        return RowArrays(self.codes, self.meta, self.layout)

    def _call(self, dtype: torch.dtype = torch.float32) -> LookupCall:
        return LookupCall(self.ids_N, self.offsets, self.weights_N, self.mode, dtype)


class ShardedLookup(torch.autograd.Function):
    """Pooled rows of a batch; backward passes their gradients to `reduce_gradients`."""

    @staticmethod
    def forward(
        ctx: Any, placeholder: Tensor, weights: Tensor | None, batch: BatchTable, sums: PartialSums | None,
        reduce_gradients: Callable[[BatchGradients], None], dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.batch, ctx.reduce_gradients, ctx.opened = batch, reduce_gradients, None
        out, ctx.winners = batch.pool(dtype, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        batch, grad = ctx.batch, grad.contiguous()
        weights_grad = once(batch.weight_gradient(grad).to(batch.weights_N.dtype), grad) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0] and is_for_rows(ctx.next_functions[0][0]):
            if ctx.opened is not None:
                ctx.opened(grad)
            ctx.reduce_gradients(batch.gradients(ctx.winners, grad))
        return None, weights_grad, None, None, None, None
