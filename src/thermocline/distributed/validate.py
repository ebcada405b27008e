"""Checks before sharding: a plan, a model and heat that do not fit together, or not the number of ranks.

Ranks compare their inputs first, so all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.nn.collection import EmbeddingCollection
from thermocline.nn.rows_module import RowsModule
from thermocline.plan.model import Plan, TablePlan

from .process_groups import world_size
from .sharded_collection import ShardedCollection


def validate(model: nn.Module, plan: Plan, heat: HeatProfile | None, found: Mapping[str, EmbeddingCollection]) -> None:
    """Raise if `shard_` cannot carry out a plan on a model with these collections."""
    topology, ranks = plan.topology, world_size()
    if topology.world_size != ranks:
        raise BadInput(
            f"the plan is for {topology.world_size} ranks ({topology.nodes} x {topology.gpus_per_node}), but {ranks} run; "
            f"start {topology.world_size} processes, or plan for {ranks}",
            parameter="plan", needed=topology.world_size, available=ranks,
        )  # fmt: skip
    _check_modules(model, found, ranks)
    check_heat(plan, heat)
    for name, collection in found.items():
        if collection.rows.update != "backward" or collection.rows.residency != "device":
            raise BadInput(
                f"collection {name!r} has update={collection.rows.update!r}, residency={collection.rows.residency!r}; "
                "sharded tables need update='backward' and residency='device'",
                parameter="rows", collection=name,
            )  # fmt: skip


def _check_modules(model: nn.Module, found: Mapping[str, EmbeddingCollection], ranks: int) -> None:
    left = [(n, m) for n, m in model.named_modules() if isinstance(m, RowsModule) and not isinstance(m, EmbeddingCollection)]
    for name, module in left:
        if isinstance(module, ShardedCollection):
            raise BadInput(
                f"{name!r} is already sharded; move it to another plan with `migrate` of the Sharding that `shard_` returned",
                parameter="model", module=name,
            )  # fmt: skip
        if ranks > 1 or not found:
            raise BadInput(
                f"{name!r} is an {type(module).__name__}, which cannot be sharded: each rank would train its own copy; build "
                "the tables of the model as an EmbeddingCollection",
                parameter="model", module=name,
            )  # fmt: skip
    if not found or "" in found:
        what = "is a collection itself, which shard_ cannot replace" if found else "has no EmbeddingCollection"
        raise BadInput(f"the model {what}; give a model that contains its collections", parameter="model")


def check_heat(plan: Plan, heat: HeatProfile | None) -> None:
    """Raise if the heat is not that of the plan."""
    if heat is not None and plan.heat and heat.sha256 != plan.heat:
        raise BadInput(
            f"the plan was made with heat {plan.heat[:12]}, but this is {heat.sha256[:12]}; give the heat file of the plan",
            parameter="heat", needed=plan.heat, available=heat.sha256,
        )  # fmt: skip


def check_table(planned: TablePlan) -> None:
    """Raise if sharded tables cannot carry out the plan of a table."""
    if planned.residency != "card":
        raise BadInput(
            f"table {planned.name!r} is planned in host memory, which sharded tables do not support yet; plan with more GPUs, "
            "or a lower precision",
            parameter="residency", table=planned.name,
        )  # fmt: skip
    if planned.pooled_by == "owner" and planned.exchange == "node":
        raise BadInput(
            f"table {planned.name!r} is planned to be pooled by owners and requested once per node, but sums go straight to "
            "the requester; plan again, or set its exchange to flat",
            parameter="exchange", table=planned.name,
        )  # fmt: skip
