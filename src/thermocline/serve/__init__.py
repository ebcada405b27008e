"""Serving: quantized tables over several shards, in process or behind an Open Inference Protocol server.

    ShardGroup        tables of a checkpoint over shard processes or GPUs
    FrozenTables      the tables of a group as a module of a PyTorch model, exportable
    run_shard_host    holds shards for another host
    ServeError        base of Overloaded, ShardDown, NotReady, DeadlineExceeded; UnknownModel is a BadInput

Names load when they are used: a shard process imports this package and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import DeadlineExceeded, NotReady, Overloaded, ServeError, ShardDown, UnknownModel
    from .frozen_tables import FrozenTables
    from .remote.shard_host import run_shard_host
    from .tables.shard_group import ShardGroup

_HOMES = {
    "DeadlineExceeded": "errors",
    "FrozenTables": "frozen_tables",
    "NotReady": "errors",
    "Overloaded": "errors",
    "ServeError": "errors",
    "ShardDown": "errors",
    "ShardGroup": "tables.shard_group",
    "UnknownModel": "errors",
    "run_shard_host": "remote.shard_host",
}
__all__ = [
    "DeadlineExceeded",
    "FrozenTables",
    "NotReady",
    "Overloaded",
    "ServeError",
    "ShardDown",
    "ShardGroup",
    "UnknownModel",
    "run_shard_host",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
