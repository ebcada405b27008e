"""The processes that save or load together: all ranks of a sharded model, or this one alone.

Whatever one of them meets is told to all, so that none waits for a rank that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from thermocline.distributed.process_groups import ProcessGroups, world_size
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import ThermoclineError

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    rank: int
    size: int
    groups: ProcessGroups | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Team:
        for module in model.modules():
            if isinstance(module, ShardedCollection):
                return cls(module.groups.rank, module.groups.size, module.groups)
        return cls(0, 1)

    def do(self, work: Callable[[], T]) -> list[T]:
        """What the work of every rank gave; if one failed, all of them raise."""
        result: T | None = None
        failed: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failed = error
        everyone: Sequence[Any] = [(result, None)]
        if self.groups is not None and self.size > 1:
            everyone = self.groups.all_gather((result, f"{failed}" if failed else None))
        if failed is not None:
            raise failed
        for rank, (_, told) in enumerate(everyone):
            if told is not None:
                raise ThermoclineError(f"rank {rank} stopped: {told}")
        return [each for each, _ in everyone]


def writes(model: nn.Module) -> bool:
    """Whether this process has a part in saving: of copies of an unsharded model the first writes."""
    sharded = any(isinstance(module, ShardedCollection) for module in model.modules())
    return sharded or world_size() == 1 or dist.get_rank() == 0
