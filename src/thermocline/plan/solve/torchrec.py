"""Placements of TorchRec's `EmbeddingShardingPlanner` in the terms of plans: as a candidate, or as the plan itself.

    TorchRec                                                       here
    table_wise                                                     table-wise, on the same rank
    data_parallel                                                  replicated on every GPU
    row_wise                                                       row-wise, bags pooled by the owners of rows
    column_wise, table_row_wise, table_column_wise, grid_shard     as row_wise

The last four cut a table for a few ranks. Columns are never cut here: every cut would repeat the ids on the wire and the scale
of a row. The planned tables keep their numbers of rows and columns, so a checkpoint does not depend on the placement.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline.errors import BadInput

from .solver import Problem, Score, score
from .tiers import OWNER_POOLED, TABLE_WISE

NAME = "TorchRec's plan"  # among candidates
ROW_WISE = ("row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")


def placements_of(sharding_plan: Any) -> dict[str, tuple[str, int]]:
    """Sharding type and first rank of every table of a TorchRec `ShardingPlan`, whose tables have unique names."""
    found: dict[str, tuple[str, int]] = {}
    for module, tables in getattr(sharding_plan, "plan", sharding_plan).items():
        for name, sharding in tables.items():
            if name in found:
                words = f"two modules of the TorchRec plan have a table {name!r} (one is {module!r}); give tables unique names"
                raise BadInput(words, parameter="torchrec", table=name)
            if sharding.sharding_type not in ("table_wise", "data_parallel", *ROW_WISE):
                words = f"table {name!r} has the TorchRec sharding {sharding.sharding_type!r}, which is not known here"
                raise BadInput(words, parameter="torchrec", table=name, value=sharding.sharding_type)
            found[name] = sharding.sharding_type, min(sharding.ranks or [0])
    return found


def score_of(problem: Problem, sharding_plan: Any) -> Score:
    """The cost of TorchRec's placement of these tables."""
    placements = placements_of(sharding_plan)
    works, cluster = problem.workload.tables, problem.workload.cluster
    if missing := [work.name for work in works if work.name not in placements]:
        words = f"the TorchRec plan lacks the tables {', '.join(missing)}; it has {', '.join(placements)}"
        raise BadInput(words, parameter="torchrec", missing=missing)
    kinds = [placements[work.name][0] for work in works]
    ranks = np.array([placements[work.name][1] for work in works])
    if ranks.max() >= cluster.world_size:
        words = f"the TorchRec plan has a table on rank {ranks.max()}, and the topology has {cluster.world_size} ranks"
        raise BadInput(words, parameter="torchrec", needed=int(ranks.max()) + 1, available=cluster.world_size)
    copied = np.array([kind == "data_parallel" for kind in kinds])
    whole = np.array([kind == "table_wise" for kind in kinds]) & (cluster.world_size > 1)
    summed = ~copied & ~whole & problem.allowed()[:, OWNER_POOLED, 0]
    choice = np.where(whole, TABLE_WISE, np.where(summed, OWNER_POOLED, 0))
    first = np.where(copied, problem.grid.steps, 0)
    return score(problem, choice, first, first, ranks)
