"""Replicas of shard groups: the rows of a 2-D mesh [replica, shard], in which every group of ranks has all rows by one plan.

    every step      gradients are summed over replicas, in replica order, before the update: replicas stay equal bit for bit,
                    and equal one process on the batches of all ranks
    every k steps   each replica trains on its own batches; after every k-th update, rows that any replica has updated since
                    the last sync become means over replicas, and so does their optimizer state

A mean is the sum of dequantized rows in replica order in fp64, divided, and rounded to fp32. Rows are then rounded to their
precision stochastically, with bits that follow from seed, step, row and column, so that all replicas store the same codes;
rows in fp32 slots keep the fp32 mean. A replica that has not updated a row counts with its value. Clocks are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thermocline import formats as F
from thermocline.errors import BadInput, ThermoclineError
from thermocline.plan.model import Plan

from .exchange.all_to_all import gather_updates
from .exchange.context import ExchangeContext
from .placement.local_shard import LocalShard, ReplicaMismatch, SummedGradients
from .process_groups import RankGroup, gather_objects, world_size
from .shard_source import ShardSource

BLOCK = 1 << 16  # rows that are averaged at a time
_SEED = 0x5C_A1AB1E  # bits of a mean differ from those of the update of the step
_COMPACT = 16  # updates after which the lists of updated rows become one


def replica_layout(
    mesh: DeviceMesh | None, plan: Plan, sources: Sequence[ShardSource], every: object
) -> list[list[int]] | None:
    """The ranks of each replica; None without a mesh.

    Raises:
        BadInput: the mesh does not fit the plan, or the rows of a module cannot be averaged.
    """
    if not isinstance(every, int) or every < 1:
        raise BadInput(f"sync_every is {every!r}; use 1 or more steps", parameter="sync_every", value=every)
    if mesh is None:
        if every > 1:
            raise BadInput("sync_every needs replicas; give the mesh of them", parameter="sync_every", value=every)
        return None
    size, ranks = plan.topology.world_size, world_size()
    if mesh.ndim != 2 or mesh.shape[1] != size or sorted(mesh.mesh.flatten().tolist()) != list(range(ranks)):
        raise BadInput(
            f"the mesh is {' x '.join(map(str, mesh.shape))}; use one of {ranks // size or 1} x {size}: all {ranks} ranks, and "
            f"in each replica the {size} ranks of the plan",
            parameter="mesh", value=tuple(mesh.shape), needed=size, available=ranks,
        )  # fmt: skip
    if size == 1:
        raise BadInput("each replica is one rank; plan for all ranks, and rows of tier 1 are on each of them", parameter="mesh")
    for source in sources:
        if any(ids.is_elastic for ids in source.id_maps.values()):
            raise BadInput(f"{source.name!r} has elastic ids, which replicas would admit apart", parameter="mesh")
        slots = [tier for table in plan.tables for tier in table.tiers if tier.cached or tier.near]
        if every > 1 and slots and (source.rows.policy != "fixed" or any(tier.near for tier in slots)):
            raise BadInput(
                f"sync_every is {every}, and {source.name!r} has a cache whose rows would differ between replicas; use "
                "policy='fixed' without int8 slots, no cache, or sync_every=1",
                parameter="sync_every", value=every, collection=source.name,
            )  # fmt: skip
    return [[int(rank) for rank in ranks] for ranks in mesh.mesh.tolist()]


class Replicas:
    """The replicas of one collection: `group` are the ranks with this place in all of them."""

    def __init__(self, name: str, group: RankGroup, every: int) -> None:
        self.name, self.group, self.every = name, group, every
        self._updated: list[Tensor] = []  # global rows since the last sync
        self._updates = 0

    @property
    def size(self) -> int:
        return len(self.group.ranks)

    @contextmanager
    def agreeing(self, trains: bool) -> Iterator[None]:
        """Before a lookup whose gradients replicas sum: an error of one replica is an error of all."""
        if not trains or self.every > 1:
            yield
            return
        try:
            yield
        except Exception:
            with suppress(ThermoclineError):  # the other replicas have ended, too
                self._tell(0)
            raise
        told_P = self._tell(1)
        if not told_P.all():
            rank = self.group.ranks[int(np.argmin(told_P))]
            raise BadInput(f"another replica stopped: see the error of rank {rank}", rank=rank)

    def _tell(self, word: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return self.group.exchange_counts(np.full((self.size, 1), word))[:, 0]

    def sum(self, context: ExchangeContext, sums: SummedGradients) -> SummedGradients:
        """Gradients of the rows of this rank, over all replicas, in their order."""
        found = reduce(SummedGradients.concat, gather_updates(context, self.group, sums))
        return context.sum_rows(*found)

    def after_update(self, shard: LocalShard, rows_V: Tensor, clock: Tensor) -> bool:
        """Rows were updated: average them if it is time. Returns whether rows of other updates have changed."""
        if self.every == 1:
            return False
        self._updates += 1
        self._updated.append(rows_V)
        if len(self._updated) > _COMPACT:
            self._updated = [torch.unique(torch.cat(self._updated))]
        if self._updates % self.every:
            return False
        self.sync(shard, clock)
        return True

    def sync(self, shard: LocalShard, clock: Tensor) -> None:
        """Average rows that any replica has updated since the last sync. Collective over all replicas."""
        mine_V = torch.cat(self._updated).unique() if self._updated else shard.row_index.tier_K[:0]
        steps_PJ = np.stack([np.full(self.size, mine_V.numel()), np.full(self.size, self._updates)], axis=1)
        counts_PJ = self.group.exchange_counts(steps_PJ)
        if len(set(counts_PJ[:, 1].tolist())) > 1:
            shown = dict(zip(self.group.ranks, counts_PJ[:, 1].tolist(), strict=True))
            raise BadInput(f"{self.name}: replicas have made different numbers of updates, by rank: {shown}", parameter="step")
        rows_U = torch.cat(self._gather(mine_V, counts_PJ[:, 0].tolist())).unique()
        clock = clock.clone()
        clock[F.SEED] ^= _SEED
        for rows_N in rows_U.split(BLOCK):
            for k, at_K, index_K in shard.local(shard.row_index.locate(rows_N)):
                self._average(shard, k, index_K, rows_N[at_K], clock)
        self._updated = []

    def _average(self, shard: LocalShard, k: int, index_K: Tensor, names_K: Tensor, clock: Tensor) -> None:
        """Average rows of a part and their optimizer state."""
        states = [state.view(len(state), -1) for state in shard.states(k)]
        values_KD = shard.arena.read(k, index_K)
        mine = torch.cat([values_KD, *(state[index_K] for state in states)], dim=1)
        everyone = self._gather(mine.view(-1), [mine.numel()] * self.size)
        mean = reduce(torch.add, (each.double() for each in everyone)).div(self.size).float().view(mine.shape)
        values_KD, *found = mean.split([values_KD.shape[1], *(state.shape[1] for state in states)], dim=1)
        shard.arena.write(k, index_K, values_KD.contiguous(), clock, names_K)
        for state, each in zip(states, found, strict=True):
            state[index_K] = each

    def _gather(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """A vector of every replica, in their order."""
        received = [size * (p != self.group.index) for p, size in enumerate(sizes)]
        found = self.group.broadcast(mine, received, large=max(sizes) * mine.element_size() > 1 << 18)
        return [mine if p == self.group.index else each for p, each in enumerate(found)]

    def check(self, shard: LocalShard) -> None:
        """Raise if replicas differ in a bit. Collective."""
        with self.group.collective():
            everyone = gather_objects(shard.replica_digests(every_tier=True), self.group.process_group)
        for what, wanted in everyone[0].items():
            wrong = [rank for rank, each in zip(self.group.ranks, everyone, strict=True) if each[what] != wanted]
            if wrong:
                raise ReplicaMismatch(self.name, what, self.group.ranks[0], wrong)
