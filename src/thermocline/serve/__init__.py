"""Serving: quantized tables over several shards, in process or behind an Open Inference Protocol server.

    ShardGroup        tables of a checkpoint over shard processes or GPUs
    FrozenTables      the tables of a group as a module of a PyTorch model, exportable
    run_shard_host    holds shards for another host
    ServeError        base of Overloaded, ShardDown, NotReady, DeadlineExceeded; UnknownModel is a BadInput

Names load when they are used: a shard process imports this package and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline._lazy import lazy_exports

if TYPE_CHECKING:
    from .errors import DeadlineExceeded, NotReady, Overloaded, ServeError, ShardDown, UnknownModel
    from .frozen_tables import FrozenTables
    from .remote.shard_host import run_shard_host
    from .tables.shard_group import ShardGroup

__all__ = [
    "DeadlineExceeded", "FrozenTables", "NotReady", "Overloaded", "ServeError", "ShardDown", "ShardGroup", "UnknownModel",
    "run_shard_host",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
