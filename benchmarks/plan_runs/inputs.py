"""The inputs of a plan for a random case. Heat comes from batches that are not measured."""

from __future__ import annotations

from typing import Any

from benchmarks.plan_runs.case import PROFILED, RandomCase
from thermocline.heat.profile import HeatProfile
from thermocline.heat.profiler import profile_batches
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology


def heat_of(case: RandomCase) -> HeatProfile:
    """The heat of the batches before the measured ones."""
    batches = [case.bags(step - PROFILED, rank) for step in range(PROFILED) for rank in range(case.ranks)]
    samples = len(batches) * case.batch
    return profile_batches(batches, samples=samples, batch=case.batch, cards_per_node=case.cards)


def tables_of(case: RandomCase, dense: float) -> TablesConfig:
    """The tables, with the measured seconds of the dense part."""
    same: dict[str, Any] = {"pooling": case.pooling, "precision": case.precision, "cache": 0.0}
    each = zip(case.names, case.tables, strict=True)
    tables = tuple(TableConfig(name=name, rows=table.rows, dim=table.dim, **same) for name, table in each)
    return TablesConfig(batch=case.batch, dense=dense, below=case.dense / 2, optimizer="rowwise_adagrad", tables=tables)


def nominal_topology(case: RandomCase, rate: float) -> Topology:
    """Links of this rate between nodes, before they are measured."""
    node, cluster = ({"bandwidth": each, "latency": "1ms"} for each in (rate * case.inside, rate))
    data: dict[str, Any] = {
        "nodes": case.nodes, "cards_per_node": case.cards, "card": {"memory": "1GB", "bandwidth": "5GB/s"},
        "links": {"node": node, "cluster": cluster},
    }  # fmt: skip
    return Topology.model_validate(data)
