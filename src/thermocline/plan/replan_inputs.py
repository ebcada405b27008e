"""A plan's tables planned again: for other heat, or for another number of nodes.

A plan has all that its tables file had, as it was settled: rows, dimensions, precisions, lookups. Levers stay what they were,
for another id map would give rows to other ids.
"""

from __future__ import annotations

from thermocline.heat.profile import HeatProfile

from .make import make_plan
from .model import Plan, TablePlan
from .tables import TableFile, Tables
from .topology import Topology


def tables_of(plan: Plan) -> Tables:
    """The tables of a plan as a tables file has them; lookups are left to heat."""
    files = tuple(_file(table) for table in plan.tables)
    return Tables(batch=plan.batch, dense=plan.dense, optimizer=plan.optimizer, tables=files)


def _file(table: TablePlan) -> TableFile:
    return TableFile(
        name=table.name, rows=table.rows, dim=table.dim, pooling=table.pooling, features=table.features,
        precision=table.precision, cache=table.cache,
    )  # fmt: skip


def plan_again(plan: Plan, heat: HeatProfile, topology: Topology | None = None) -> Plan:
    """The same tables in the same precisions and budget, by this heat, whose ids are rows; `topology`: where it is another."""
    cluster = plan.topology if topology is None else topology
    made = make_plan(tables_of(plan), heat, cluster, plan.budget, plan.goal, plan.gradients)
    levers = {table.name: table.levers for table in plan.tables}
    return made.model_copy(
        update={"tables": tuple(t.model_copy(update={"levers": levers[t.name]}) for t in made.tables), "offers": ()}
    )
