"""The inputs of a plan, recovered from the plan: to plan its tables again for other heat or another number of nodes.

A plan contains everything its tables file had, with all choices settled. Levers are kept as they are, because another id map
would assign rows to other ids.
"""

from __future__ import annotations

from thermocline.heat.profile import HeatProfile

from .make import make_plan
from .model import Plan, TablePlan
from .tables import TableConfig, TablesConfig
from .topology import Topology


def tables_of_plan(plan: Plan) -> TablesConfig:
    """The tables of a plan as a tables file; lookups are left to the heat."""
    tables = tuple(_table_config(table) for table in plan.tables)
    return TablesConfig(batch=plan.batch, dense=plan.dense, optimizer=plan.optimizer, tables=tables)


def _table_config(table: TablePlan) -> TableConfig:
    return TableConfig(
        name=table.name, rows=table.rows, dim=table.dim, pooling=table.pooling, features=table.features,
        precision=table.precision, cache=table.cache,
    )  # fmt: skip


def plan_with_heat(plan: Plan, heat: HeatProfile, topology: Topology | None = None) -> Plan:
    """Plan the tables of a plan again, with the same precisions and budget.

    Args:
        plan: The present plan.
        heat: New heat, whose ids are rows.
        topology: Another cluster; default: that of the plan.
    """
    cluster = plan.topology if topology is None else topology
    made = make_plan(tables_of_plan(plan), heat, cluster, plan.budget, plan.goal, plan.gradients)
    levers = {table.name: table.levers for table in plan.tables}
    return made.model_copy(
        update={"tables": tuple(t.model_copy(update={"levers": levers[t.name]}) for t in made.tables), "suggestions": ()}
    )
