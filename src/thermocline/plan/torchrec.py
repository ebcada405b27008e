"""Plans that place tables as TorchRec's `EmbeddingShardingPlanner` has placed them (`solve/torchrec.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cost.heat_input import HeatInput
from .make import read_request
from .model import Plan
from .report.assemble import assemble
from .solve.solver import Problem, Search
from .solve.torchrec import score_of
from .tables import TablesConfig
from .topology import Topology

NAME = "TorchRec's plan"


def plan_from_torchrec(
    sharding_plan: Any, tables: TablesConfig | str | Path, heat: HeatInput | str | Path, topology: Topology | str | Path,
    gradients: str = "fp32", sums: str = "fp32",
) -> Plan:  # fmt: skip
    """Make the plan that places tables as a plan of TorchRec does, without search.

    To compare both, give the TorchRec plan to `make_plan(..., torchrec=sharding_plan)`: it is then one of the candidates.

    Args:
        sharding_plan: What `EmbeddingShardingPlanner.plan` returns, or `plan` of a `DistributedModelParallel`.
        tables: The tables of the model, or a tables file.
        heat: A heat profile, a heat file, or a heat curve for each table.
        topology: The cluster, a topology file, or the name of a preset; with the ranks of the TorchRec plan.
        gradients: Precision of gradients on the wire, "fp32" or "bf16".
        sums: Precision of pooled sums on the wire, "fp32" or "bf16".

    Returns:
        The plan. Columns are never cut: a table that TorchRec cuts by columns or over one node is row-wise.

    Raises:
        BadInput: The TorchRec plan lacks a table, or has more ranks than the topology.

    Example::

        plan = plan_from_torchrec(planner.plan(model, sharders), "tables.yaml", "heat.tc", "hgx-h200")
    """
    request = read_request(tables, heat, topology, gradients=gradients, sums=sums)
    problem = Problem.of(request.workload())
    found = score_of(problem, sharding_plan)
    return assemble(request, problem, [(NAME, found)], Search(problem, problem.allowed(), found), {}, (), ())
