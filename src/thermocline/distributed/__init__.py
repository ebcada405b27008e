"""Sharded embedding tables over torch.distributed. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .calibration import calibrate
    from .planned_tables import id_maps
    from .replanning.replan import ReplanProposal, replan
    from .shard import shard_
    from .sharded_collection import ShardedCollection
    from .sharding import Sharding
    from .simulation.log import SimulationLog
    from .simulation.simulator import Simulation, simulate

_HOMES = {
    "ReplanProposal": "replanning.replan",
    "ShardedCollection": "sharded_collection",
    "Sharding": "sharding",
    "Simulation": "simulation.simulator",
    "SimulationLog": "simulation.log",
    "calibrate": "calibration",
    "id_maps": "planned_tables",
    "replan": "replanning.replan",
    "shard_": "shard",
    "simulate": "simulation.simulator",
}

__all__ = [
    "ReplanProposal", "ShardedCollection", "Sharding", "Simulation", "SimulationLog",
    "calibrate", "id_maps", "replan", "shard_", "simulate",
]  # fmt: skip


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
