"""Training on several cards: what the loops need to know of it, and the one place where a plan becomes a sharded model.

Under torchrun every process is a card. Tables are sharded by the plan, dense parts are wrapped in DistributedDataParallel, each
rank trains on its own part of every batch, and losses are divided by the number of all ranks' samples. So the steps are those
of one process with all batches joined, to the order of sums; a rank with fewer samples than others, or none at the end of an
epoch, has its part of the loss and no more, and nobody waits for it.

One process without a plan is `ALONE`, and the same code.
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

from thermocline.data.sequences import Share
from thermocline.distributed.shard import Sharding, shard_
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.nn.collection import EmbeddingCollection
from thermocline.nn.rows_module import RowsModule
from thermocline.plan.model import Plan
from thermocline.plan.run_file import MeasuredRun

Given = str | Path


@dataclass
class Cards:
    """This card among all. `plan` says how tables are spread over them; without one there is only this card."""

    rank: int = 0
    size: int = 1
    plan: Plan | None = None
    heat: HeatProfile | Given | None = None
    sharding: Sharding | None = field(default=None, init=False)

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    @property
    def share(self) -> Share:
        return Share(self.rank, self.size)

    @property
    def ahead(self) -> bool:
        """Whether the next batch may come while one is trained on. Not where the plan's step has nothing that overlaps: where
        cards compute for a short time only, exchanging it takes longer than it saves."""
        return self.plan is None or bool(self.plan.step.overlaps)

    def fit(self, table: str, ids: IdMap) -> IdMap:
        """The map of a table's ids, made to fill the rows that the plan has for it: what it has more is for unknown ids."""
        names = [] if self.plan is None else [each.name for each in self.plan.tables]
        if self.plan is None or ids.kept is None or table not in names:
            return ids
        planned = self.plan.table(table).rows
        if planned < ids.rows:
            raise BadInput(
                f"table {table!r} has {planned:,} rows in the plan; the log has {ids.kept.count:,} ids to train on, and all "
                "others need a row too; plan with as many, or hash the ids to fewer (--hash, and the same rows in the plan)"
            )
        return IdMap.pruned(ids.kept, planned - ids.kept.count)

    def shard(self, tables: EmbeddingCollection, device: str) -> ShardedCollection:
        """This card's part, on a device, of tables that have no values yet (device "meta")."""
        assert self.plan is not None
        holder = nn.ModuleDict({"embeddings": tables})
        self.sharding = shard_(holder, self.plan, self.heat, device=device)
        found = holder["embeddings"]
        assert isinstance(found, ShardedCollection)
        return found

    def wrap(self, model: nn.Module) -> None:
        """DistributedDataParallel around every dense part of a model."""
        if self.size == 1:
            return
        for name, child in list(model.named_children()):
            if any(True for _ in child.parameters()) and not any(isinstance(part, RowsModule) for part in child.modules()):
                setattr(model, name, DistributedDataParallel(child))

    def add(self, *numbers: float) -> list[float]:
        """Sums over all ranks, which call this together."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device=_device())
        dist.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    def gather(self, mine: Any) -> list[Any]:
        """Something of every rank, on all of them."""
        found = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(found, mine)
        return found

    def wait(self) -> None:
        """Until all ranks are here."""
        self.add(0)

    def traffic(self) -> dict[str, float]:
        """Bytes a step that this card sends, as scalars to log."""
        if self.sharding is None:
            return {}
        steps = max([1, *(collection.meter.steps for collection in self.sharding.collections.values())])
        scalars: dict[str, float] = {}
        for line in self.sharding.sent():
            name = f"sent/{line.direction} ({line.link})"
            scalars[name] = scalars.get(name, 0.0) + line.bytes / steps
        return scalars

    def measured(self, batch: int, seconds: float) -> MeasuredRun | None:
        """What `plan check` compares with the plan, since the meters were reset; `seconds` of one step."""
        return None if self.sharding is None else self.sharding.run(batch, seconds)

    def reset_meters(self) -> None:
        if self.sharding is not None:
            self.sharding.reset_meters()


ALONE = Cards()


@contextmanager
def cards_of(plan: Given | None, heat: Given | None, device: str) -> Iterator[Cards]:
    """The cards of this job: those of torchrun, or one. Ends the process group that it begins."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if plan is None:
        if size > 1:
            raise BadInput(
                f"torchrun has started {size} processes, and there is no plan for the tables; give --plan and --heat"
            )
        if heat is not None:
            raise BadInput(f"--heat is '{heat}', which says what is hot in a plan, but there is no --plan")
        yield ALONE
        return
    planned = Plan.load(plan)
    if size == 1:
        yield Cards(plan=planned, heat=heat)
        return
    own = False
    if device.startswith("cuda"):
        cards, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        own = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= cards  # NCCL refuses two ranks on one card
        torch.cuda.set_device(local % cards)
    dist.init_process_group("nccl" if own else "gloo")
    try:
        yield Cards(dist.get_rank(), size, planned, heat)
    finally:
        dist.destroy_process_group()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
