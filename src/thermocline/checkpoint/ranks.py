"""Ranks that save or load together: all ranks of a sharded model, or one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import nn

from thermocline.distributed.process_groups import ProcessGroups
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import ThermoclineError

T = TypeVar("T")


@contextmanager
def ended_by_all_replicas(model: nn.Module) -> Iterator[None]:
    """Leave together: the first replica of sharded rows writes, and the others wait for it. Its error is one of all."""
    groups = CheckpointRanks.of(model).groups
    replicas = None if groups is None else groups.replicas
    ended = 0
    try:
        yield
        ended = 1
    finally:
        if replicas is not None:
            ended_P = replicas.exchange_counts(np.full((len(replicas.ranks), 1), ended))[:, 0]
            if ended and not ended_P.all():
                rank = replicas.ranks[int(np.argmin(ended_P))]
                raise ThermoclineError(f"another replica stopped: see the error of rank {rank}")


@dataclass(frozen=True)
class CheckpointRanks:
    rank: int
    size: int
    groups: ProcessGroups | None = None

    @classmethod
    def of(cls, model: nn.Module) -> CheckpointRanks:
        for module in model.modules():
            if isinstance(module, ShardedCollection):
                return cls(module.groups.rank, module.groups.size, module.groups)
        return cls(0, 1)

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Do the work on every rank and return all results. If one rank fails, all ranks raise, so that none waits for it."""
        result: T | None = None
        failed: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failed = error
        results: Sequence[Any] = [(result, None)]
        if self.groups is not None and self.size > 1:
            results = self.groups.all_gather((result, f"{failed}" if failed else None))
        if failed is not None:
            raise failed
        for rank, (_, reason) in enumerate(results):
            if reason is not None:
                raise ThermoclineError(f"rank {rank} stopped: {reason}")
        return [each for each, _ in results]
