"""Training of a sharded collection: gradients of a backward pass are summed over all ranks, and rows updated.

With update="backward" both happen in the background of the following steps, where the backend allows it. With update="step" the
sums are pending until the fused optimizer steps, on the ranks that store the rows. Clipping and GradScaler change them on each
rank and must see the same numbers on all: a norm counts each row once, on its home rank, and an Inf on one rank is one on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from thermocline.errors import BadGradient
from thermocline.nn.optimizer import Trained
from thermocline.nn.placeholder import PendingGradients
from thermocline.rows.training import synchronize

from .exchange.batch_exchange import BatchExchange
from .exchange.pipeline import ExchangePipeline, Reduction
from .placement.local_shard import SummedGradients, check_replicas
from .replicas import Replicas
from .shard_state import ShardState

Reduce = Literal["mean", "sum"]


class ShardedTrained(Trained):
    """The rows of a sharded collection, for an optimizer."""

    def __init__(
        self, trained: Trained, name: str, state: ShardState, pipeline: ExchangePipeline, padding_idx: int | None
    ) -> None:  # fmt: skip
        super().__init__(trained.arena, trained.trainer, trained.placeholder, trained.independent)
        self.name, self.state, self.pipeline, self.padding_idx = name, state, pipeline, padding_idx
        self.reduce: Reduce = "mean"
        self.check_every = self._updates = 0
        self.replicas: Replicas | None = None  # of this shard group
        self._refused: BadGradient | None = None  # of the last update
        self._exchanges: list[BatchExchange] = []  # of the pending gradients

    def reduce_gradients(self, reductions: list[Reduction]) -> None:
        """Sum the gradients of a backward pass over all ranks, and update rows or keep the sums for `step`."""
        self.pipeline.lookups = 0
        exchanges = [exchange for exchange, _ in reductions]
        if self.placeholder.update == "step":
            self.pipeline.wait(self.state.meter)
            sums = self._sum(reductions)
            sums = sums.at(sums.rows_V.argsort())
            seen_N = sums.rows_V[:0] if sums.lookups_V is None else torch.repeat_interleave(sums.rows_V, sums.lookups_V)
            self.placeholder.accumulate(PendingGradients(sums.rows_V, sums.grads_VW, seen_N, ranks=self))
            self._exchanges += exchanges
            return
        clocks = self.state.shard.tick()
        self.pipeline.submit(self.state.meter, lambda: self._update(self._sum(reductions), exchanges, *clocks))

    def apply(self, pending: PendingGradients) -> None:
        state, exchanges = self.state, self._exchanges
        if state.row_index.unsharded:
            super().apply(pending)
            return
        lookups_V: Tensor | None = None
        if state.context.counts:
            place_N = torch.searchsorted(pending.rows_U, pending.seen_N)
            lookups_V = torch.bincount(place_N, minlength=pending.rows_U.numel())
        sums, clocks, self._exchanges = SummedGradients(pending.rows_U, pending.grads_UW, lookups_V), state.shard.tick(), []
        self.pipeline.submit(state.meter, lambda: self._update(sums, exchanges, *clocks))

    def forget(self) -> None:
        super().forget()
        self._exchanges = []

    def _sum(self, reductions: list[Reduction]) -> SummedGradients:
        """Gradients of the rows that this rank stores, over all ranks."""
        sums = reduce(
            SummedGradients.concat,
            [self._trained(exchange.dense, exchange.reduce_gradients(grads)) for exchange, grads in reductions],
        )
        if len(reductions) > 1:
            sums = self.state.context.sum_rows(*sums)
        ranks = self.state.context.groups.size
        if self.replicas is not None and self.replicas.every == 1:
            sums, ranks = self.replicas.sum(self.state.context, sums), ranks * self.replicas.size
        return sums._replace(grads_VW=sums.grads_VW / ranks) if self.reduce == "mean" else sums

    def _trained(self, dense: bool, sums: SummedGradients) -> SummedGradients:
        """The gradients that update rows: not the padding row, and of a read of all rows those that are not zero."""
        if dense:
            return sums.at((sums.grads_VW != 0).any(1))
        if self.padding_idx is None:
            return sums
        return sums.at(sums.rows_V != self.state.row_index.first[0] + self.padding_idx)

    def _update(self, sums: SummedGradients, exchanges: list[BatchExchange], clock: Tensor, hyper: Tensor) -> None:
        state, groups = self.state, self.state.context.groups
        if (refused := state.shard.update(sums, clock, hyper)) is not None:
            if groups.size == 1:
                raise state.with_table(refused)
            self._refused = state.with_table(refused)
        state.meter.steps += 1
        if self.replicas is not None and self.replicas.after_update(state.shard, sums.rows_V, clock):
            self.pipeline.invalidate_prefetched()
        for exchange in exchanges:
            self.pipeline.after_update(exchange)
        self._updates += 1  # as the clock, which the host would have to wait for
        if self.check_every and self._updates % self.check_every == 0:
            check_replicas(groups, self.name, state.shard, (clock, hyper))

    def raise_refused(self) -> None:
        """Raise the error of the last update, in forward, where all ranks meet."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        if self.state.context.device_side:
            return  # errors arrive with the step headers (`exchange/handshake.py`)
        try:
            synchronize(self.arena)  # a GPU reports errors later
        except BadGradient as error:
            raise self.state.with_table(error) from None

    def sync_replicas(self) -> None:
        """Average the rows of replicas now, if they are apart. Collective over all replicas."""
        self.pipeline.wait(self.state.meter)
        if self.replicas is not None and self.replicas.every > 1:
            self.replicas.sync(self.state.shard, self.trainer.clock)
            self.pipeline.invalidate_prefetched()

    @contextmanager
    def agreeing(self, trains: bool) -> Iterator[None]:
        """Around what precedes an exchange: an error is one of all replicas, where they sum gradients."""
        with nullcontext() if self.replicas is None else self.replicas.agreeing(trains):
            yield

    # -- what clipping and GradScaler see -----------------------------------------------------------------------------------

    def norm(self, pending: PendingGradients, order: float) -> Tensor:
        """The norm of the gradients of all ranks, the same on each. Collective."""
        groups = self.state.context.groups
        mine_V = self.state.row_index.locate(pending.rows_U).home_N == groups.rank
        size_VW = pending.grads_UW[mine_V].double().abs()
        if order == float("inf"):
            found = max(groups.all_gather(float(size_VW.max()) if size_VW.numel() else 0.0))
        else:
            found = sum(groups.all_gather(float((size_VW**order).sum()))) ** (1 / order)
        return torch.tensor(found, dtype=torch.float32, device=pending.grads_UW.device)

    def any(self, flag: Tensor) -> None:
        """Set a flag if it is set on any rank. Collective."""
        flag.fill_(max(self.state.context.groups.all_gather(float(flag))))
