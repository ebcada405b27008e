"""Placements of TorchRec's planner as a candidate of `make_plan`, and as a plan. `tests/interop` has TorchRec itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thermocline.distributed import shard_torchrec_
from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.plan import TableConfig, TablesConfig, Topology, make_plan
from thermocline.plan.torchrec import plan_from_torchrec

ROWS = {"long": 90_000, "short": 63, "middle": 4_000, "node": 700}
KINDS = {"long": "table_wise", "short": "data_parallel", "middle": "row_wise", "node": "table_row_wise"}


def torchrec_plan(ranks=(3,), **kinds):
    found = {name: SimpleNamespace(sharding_type=kind, ranks=[*ranks]) for name, kind in (KINDS | kinds).items()}
    return SimpleNamespace(plan={"sparse": found})


def inputs(**table):
    each = tuple(
        TableConfig(name=name, rows=rows, dim=16, lookups=10, precision="int8", **table) for name, rows in ROWS.items()
    )
    heat = {name: Curve.zipf(rows, 1.1) for name, rows in ROWS.items()}
    return (
        TablesConfig(batch=256, tables=each),
        heat,
        Topology.load("hgx-h100", nodes=2).model_copy(update={"gpus_per_node": 2}),
    )


def test_tables_are_where_torchrec_has_them():
    plan = plan_from_torchrec(torchrec_plan(), *inputs())
    found = {table.name: (table.placement, table.rank, table.pooled_by) for table in plan.tables}
    assert found["long"][:2] == ("card", 3) and found["short"][0] == "replicated"
    assert found["middle"] == found["node"] == ("tiers", None, "owner")
    assert all(tier.tier == 3 for name in ("middle", "node") for tier in plan.table(name).tiers)


def test_sequences_are_row_wise_without_sums():
    plan = plan_from_torchrec(torchrec_plan(), *inputs(pooling="none"))
    assert plan.table("middle").pooled_by == "asker"


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "grid_shard", "data_parallel"])
def test_a_plan_is_never_slower_than_that_of_torchrec(kind):
    given = torchrec_plan(**dict.fromkeys(KINDS, kind))
    plan = make_plan(*inputs(), torchrec=given)
    rival = plan_from_torchrec(given, *inputs())
    assert plan.step.total <= rival.step.total * (1 + 1e-9)
    [named] = [each for each in plan.candidates if each.name == "TorchRec's plan"]
    assert named.time == pytest.approx(rival.step.total)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (SimpleNamespace(plan={"sparse": {}}), {"missing": [*ROWS]}),
        (torchrec_plan(ranks=(4,)), {"needed": 5, "available": 4}),
        (torchrec_plan(middle="diagonal"), {"table": "middle", "value": "diagonal"}),
        (SimpleNamespace(plan={"a": torchrec_plan().plan["sparse"], "b": torchrec_plan().plan["sparse"]}), {"table": "long"}),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(given, fields):
    with pytest.raises(BadInput) as raised:
        make_plan(*inputs(), torchrec=given)
    assert raised.value.parameter == "torchrec"
    assert {name: getattr(raised.value, name) for name in fields} == fields


class Bags(torch.nn.Module):
    """What `shard_torchrec_` asks of a collection of TorchRec."""

    def __init__(self):
        super().__init__()
        self.embedding_bags = torch.nn.ModuleDict({"item": torch.nn.EmbeddingBag(63, 8, mode="sum")})

    def embedding_bag_configs(self):
        pooling = SimpleNamespace(name="SUM")
        table = {"name": "item", "num_embeddings": 63, "embedding_dim": 8, "feature_names": ["item"], "pooling": pooling}
        return [SimpleNamespace(**table)]


def test_a_collection_with_two_names_is_replaced_under_both():
    bags = Bags()
    model = torch.nn.ModuleDict({"first": bags, "second": torch.nn.Sequential(bags)})
    given = SimpleNamespace(plan={"first": {"item": SimpleNamespace(sharding_type="row_wise", ranks=[0])}})
    shard_torchrec_(model, given, batch=9)
    assert model["first"] is model["second"][0] and model["first"] is not bags
