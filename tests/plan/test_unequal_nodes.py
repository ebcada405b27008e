"""Clusters whose nodes have different GPUs: what fits, where whole tables go, and how long a step takes."""

from __future__ import annotations

import pytest

from thermocline.errors import FormatError
from thermocline.heat.curve import Curve
from thermocline.plan import GpuSpec, Link, Links, TableConfig, TablesConfig, Topology, explain, make_plan
from thermocline.plan.calibration import to_yaml

SMALL = GpuSpec(memory="2MB", bandwidth="1GB/s")
LARGE = GpuSpec(memory="20MB", bandwidth="4GB/s")
LINKS = Links(node=Link(bandwidth="1GB/s"), cluster=Link(bandwidth="1GB/s"))


def cluster(nodes, gpu=SMALL, **others):
    return Topology(nodes=nodes, gpus_per_node=2, gpu=gpu, links=LINKS, **others)


def tables(*rows, dim=32):
    each = tuple(TableConfig(name=f"t{n}", rows=r, dim=dim, precision="fp32", lookups=20) for n, r in enumerate(rows))
    return TablesConfig(batch=64, tables=each)


def heat(*rows):
    return {f"t{n}": Curve.zipf(r, 1.05) for n, r in enumerate(rows)}


def planned(topology, *rows, **options):
    return make_plan(tables(*rows), heat(*rows), topology, **options)


def total_of(plan, rank):
    return next(group.total for group in plan.ranks if group.first <= rank < group.first + group.count)


def test_nodes_of_equal_gpus_may_be_listed_one_by_one():
    rows = (5000, 700, 63)
    listed, plain = (planned(each, *rows) for each in (cluster(2, other_gpus={0: SMALL, 1: SMALL}), cluster(2)))
    assert (listed.tables, listed.step, listed.ranks) == (plain.tables, plain.step, plain.ranks)


def test_a_table_that_fits_on_no_small_gpu_goes_to_a_large_one():
    rows = (70_000, 700, 63)  # 9 MB, of which a quarter is more than a small GPU has
    with pytest.raises(ValueError, match="do not fit"):
        planned(cluster(2), *rows)
    plan = planned(cluster(2, other_gpus={1: LARGE}), *rows)
    assert plan.table("t0").placement == "card" and plan.table("t0").rank in (2, 3)
    assert all(total_of(plan, rank) <= (2e6 if rank < 2 else 20e6) for rank in range(4))
    assert plan.budget == 20e6 and {plan.budget_of(group) for group in plan.ranks} == {2_000_000, 20_000_000}
    assert plan.fullest_rank.total <= plan.budget_of(plan.fullest_rank) and explain(plan)


def test_a_budget_limits_large_gpus_too():
    with pytest.raises(ValueError, match="do not fit"):
        planned(cluster(2, other_gpus={1: LARGE}), 70_000, 700, budget="4MB")


def test_the_slowest_gpu_limits_tables_that_are_split():
    rows = (20_000,)
    slow, fast, mixed = (
        planned(each, *rows).step.total for each in (cluster(2), cluster(2, LARGE), cluster(2, LARGE, other_gpus={1: SMALL}))
    )
    assert fast < slow
    assert fast < mixed <= slow * (1 + 1e-9)


def test_a_whole_table_goes_to_a_fast_gpu():
    fast = GpuSpec(memory=SMALL.memory, bandwidth=LARGE.bandwidth)
    plan = planned(cluster(2, other_gpus={1: fast}), *[9000] * 2)
    whole = {table.rank for table in plan.tables if table.placement == "card"}
    assert whole <= {2, 3}


def test_a_file_says_which_nodes_differ(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(to_yaml(cluster(3, other_gpus={2: LARGE})))
    found = Topology.load(path)
    assert found.other_gpus == {2: LARGE} and found.gpus == (SMALL, SMALL, LARGE)
    path.write_text(to_yaml(cluster(3, other_gpus={2: LARGE})).replace("nodes: 3", "nodes: 2"))
    with pytest.raises(FormatError) as raised:
        Topology.load(path)
    assert "no node 2" in str(raised.value)
