"""Ranks of a training job: the one place where a plan becomes a sharded model.

Under torchrun every process is a rank. The plan shards tables, DistributedDataParallel wraps dense modules, each rank trains on
its part of every batch, and losses are divided by the samples of all ranks. The steps equal those of one process with all
batches joined, up to the order of sums. One process without a plan is `ONE_RANK` and runs the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thermocline.distributed.process_groups import gather_objects
from thermocline.distributed.shard import Sharding, shard_
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.nn.collection import EmbeddingCollection
from thermocline.nn.rows_module import RowsModule
from thermocline.plan.model import Plan
from thermocline.plan.run_file import MeasuredRun


@dataclass
class TrainingRanks:
    """This rank among all. `plan` shards the tables; without a plan there is one rank."""

    rank: int = 0
    size: int = 1
    plan: Plan | None = None
    heat: HeatProfile | str | Path | None = None
    sharding: Sharding | None = field(default=None, init=False)

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @property
    def prefetches(self) -> bool:
        """Whether to prefetch the next batch; it does not pay under a plan whose step overlaps nothing."""
        return self.plan is None or bool(self.plan.step.overlaps)

    def fit(self, table: str, ids: IdMap) -> IdMap:
        """The id map of a table, extended to the rows of the plan; extra rows are for unknown ids."""
        names = [] if self.plan is None else [each.name for each in self.plan.tables]
        if self.plan is None or ids.kept is None or table not in names:
            return ids
        planned = self.plan.table(table).rows
        if planned < ids.rows:
            words = f"table {table!r} has {planned:,} rows in the plan; the log has {ids.kept.count:,} ids, and unknown ids"
            way_out = "Plan with that many rows, or hash the ids to fewer (--hash, and the same rows in the plan)"
            raise BadInput(f"{words} need one more row. {way_out}", table=table, planned=planned, needed=ids.rows)
        return IdMap.pruned(ids.kept, planned - ids.kept.count)

    def shard(self, tables: EmbeddingCollection, device: str) -> ShardedCollection:
        """This rank's shard, on a device, of tables on device "meta"."""
        assert self.plan is not None
        self.sharding = shard_(tables, self.plan, self.heat, device=device)
        return self.sharding.collections[""]

    def wrap(self, model: nn.Module) -> None:
        """Wrap every dense child of a model in DistributedDataParallel.

        DDP sums gradients by bucket, and after its first step it puts parameters into other buckets, which changes the order of
        sums: a resumed job would differ from one that was not interrupted. Here buckets are final before the first step.
        """
        if self.size == 1:
            return
        for name, child in list(model.named_children()):
            if any(True for _ in child.parameters()) and not any(isinstance(part, RowsModule) for part in child.modules()):
                wrapped = DistributedDataParallel(child)
                wrapped.reducer._push_all_rebuilt_params()
                wrapped.reducer._rebuild_buckets()
                setattr(model, name, wrapped)

    def add(self, *numbers: float) -> list[float]:
        """Sums over all ranks, which call this together."""
        if self.size == 1:
            return list(numbers)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        sums = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    def gather(self, mine: Any) -> list[Any]:
        """The object of every rank, on all ranks."""
        return [mine] if self.size == 1 else gather_objects(mine)

    def traffic(self) -> dict[str, float]:
        """Mean bytes that this rank sends in a step, as scalars to log."""
        if self.sharding is None:
            return {}
        steps = max([1, *(meter.steps for meter in self.sharding.meters())])
        scalars: dict[str, float] = {}
        for line in self.sharding.sent():
            name = f"sent/{line.direction} ({line.link})"
            scalars[name] = scalars.get(name, 0.0) + line.bytes / steps
        return scalars

    def measured(self, batch: int, seconds: float) -> MeasuredRun | None:
        """Measurements for `plan check` since the meters were reset; `seconds` of one step."""
        return None if self.sharding is None else self.sharding.run(batch, seconds)

    def reset_meters(self) -> None:
        if self.sharding is not None:
            self.sharding.reset_meters()


ONE_RANK = TrainingRanks()


@contextmanager
def init_ranks(plan: str | Path | None, heat: str | Path | None, device: str) -> Iterator[TrainingRanks]:
    """The ranks of this job, under torchrun or not. Destroys the process group that it initialises."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if plan is None:
        if size > 1:
            raise BadInput(f"torchrun started {size} processes without a plan; give --plan and --heat", parameter="plan")
        if heat is not None:
            raise BadInput(f"--heat '{heat}' belongs to a plan, and --plan is missing", parameter="plan")
        yield ONE_RANK
        return
    planned = Plan.load(plan)
    if size == 1:
        yield TrainingRanks(plan=planned, heat=heat)
        return
    nccl = False
    if device.startswith("cuda"):
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        nccl = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus  # NCCL refuses two ranks on one GPU
        torch.cuda.set_device(local % gpus)
    dist.init_process_group("nccl" if nccl else "gloo")
    try:
        yield TrainingRanks(dist.get_rank(), size, planned, heat)
    finally:
        dist.destroy_process_group()
