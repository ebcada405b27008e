"""Plans that place tables as TorchRec's `EmbeddingShardingPlanner` has placed them (`solve/torchrec.py`), without search."""

from __future__ import annotations

from typing import Any

from .cost.heat_input import HeatInput
from .make import read_request
from .model import Plan
from .report.assemble import assemble
from .solve.solver import Problem, Search
from .solve.torchrec import NAME, score_of
from .tables import TablesConfig
from .topology import Topology


def plan_from_torchrec(sharding_plan: Any, tables: TablesConfig, heat: HeatInput, topology: Topology) -> Plan:
    """The plan that places tables as a TorchRec `ShardingPlan` does, at any cost."""
    request = read_request(tables, heat, topology)
    problem = Problem.of(request.workload())
    found = score_of(problem, sharding_plan)
    return assemble(request, problem, [(NAME, found)], Search(problem, problem.allowed(), found), {}, (), ())
