"""What ranks do in the tests of the simulator, of replanning and of migration."""

from __future__ import annotations

from typing import Any

from cases import Model, batches

import thermocline as tc


def metered(rank: int, size: int, plan: tc.Plan, heat: Any, sizes: list[list[int]]) -> Any:
    """Some steps; what the meter of this rank has counted: lines and messages."""
    model = Model()
    sharding = tc.shard_(model, plan, heat)
    for step, each in enumerate(sizes):
        model.tables(batches(step, each)[rank]).values().sum().backward()
    return sharding.sent(), sharding.collections["tables"].meter.messages_DL
