"""What is refused before anything is made: a plan, a model or heat that do not go together, or with the ranks there are.

Ranks have compared what they were given by then, so all of them refuse the same."""

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


def check_possible(model: nn.Module, plan: Plan, heat: HeatProfile | None, found: Mapping[str, EmbeddingCollection]) -> None:
    """Refuse what cannot be carried out."""
    topology, ranks = plan.topology, world_size()
    if topology.world_size != ranks:
        raise BadInput(
            f"the plan is for {topology.world_size} cards ({topology.nodes} x {topology.gpus_per_node}), and there are {ranks} "
            f"ranks; start {topology.world_size} processes, or plan for {ranks} cards"
        )
    _check_modules(model, found, ranks)
    check_heat(plan, heat)
    for name, collection in found.items():
        if collection.rows.update != "backward" or collection.rows.residency != "device":
            raise BadInput(
                f"collection {name!r} has update={collection.rows.update!r}, residency={collection.rows.residency!r}; "
                "sharded tables are updated in backward, and lie on the cards"
            )


def _check_modules(model: nn.Module, found: Mapping[str, EmbeddingCollection], ranks: int) -> None:
    left = [(n, m) for n, m in model.named_modules() if isinstance(m, RowsModule) and not isinstance(m, EmbeddingCollection)]
    for name, module in left:
        if isinstance(module, ShardedCollection):
            raise BadInput(f"{name!r} is sharded already; `migrate` of what `shard_` returned moves it to another plan")
        if ranks > 1 or not found:
            raise BadInput(
                f"{name!r} is an {type(module).__name__}, which cannot be sharded, and each rank would train one of its own; "
                "build the tables of the model as an EmbeddingCollection"
            )
    if not found or "" in found:
        what = "is a collection itself, so there is nothing to replace it in" if found else "has no EmbeddingCollection"
        raise BadInput(f"the model {what}; give a model that holds its collections")


def check_heat(plan: Plan, heat: HeatProfile | None) -> None:
    if heat is not None and plan.heat and heat.sha256 != plan.heat:
        raise BadInput(f"the plan was made with heat {plan.heat[:12]}, and this is {heat.sha256[:12]}; give that file")


def check_table(planned: TablePlan) -> None:
    """Refuse a table whose plan cannot be carried out."""
    if planned.residency != "card":
        raise BadInput(
            f"table {planned.name!r} is planned with rows in host memory, which sharded tables cannot have yet: plan with more "
            "cards, or a lower precision"
        )
    if planned.pooled_by == "owner" and planned.exchange == "node":
        raise BadInput(
            f"table {planned.name!r} is planned to be pooled by the owners of its rows and asked for once a node; sums go "
            "straight from card to card: plan again, or set its exchange to flat"
        )
