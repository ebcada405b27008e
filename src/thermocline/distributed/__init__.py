"""Sharded embedding tables over torch.distributed. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline._lazy import lazy_exports

if TYPE_CHECKING:
    from .calibration import calibrate
    from .planned_tables import id_maps
    from .replanning.replan import ReplanProposal, replan
    from .shard import Sharding, shard_
    from .sharded_collection import ShardedCollection
    from .simulation.log import SimulationLog
    from .simulation.result import Simulation
    from .simulation.simulator import simulate
    from .torchrec import shard_torchrec_

__all__ = [
    "ReplanProposal", "ShardedCollection", "Sharding", "Simulation", "SimulationLog", "calibrate", "id_maps", "replan",
    "shard_", "shard_torchrec_", "simulate",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
