"""Splits of tables over shards: every row once, shards of equal size, and the same in numpy, in the kernels and in a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thermocline
from support import has
from thermocline import BadInput, IdMap
from thermocline import formats as F
from thermocline.heat.profiler import profile_batches
from thermocline.kernels.serve import reference
from thermocline.plan.tables import TableConfig
from thermocline.plan.tables import TablesConfig as PlanTables
from thermocline.plan.topology import Topology
from thermocline.serve.tables.checkpoint_source import CheckpointSource
from thermocline.serve.tables.gpu_shards import fill
from thermocline.serve.tables.load_job import FileSlice, LoadJob
from thermocline.serve.tables.partition import split_tables
from thermocline.serve.tables.row_split import TableSplit
from thermocline.serve.tables.segments import ServedTable, make_layout
from thermocline.serve.tables.shard_group import ShardGroup
from thermocline.serve.tables.version import TableVersion


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 500), shards=st.integers(1, 9), split=st.sampled_from(["hash", "range", "feature", "plan"]),
    cut=st.integers(0, 500), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_row_has_one_place_that_loaders_and_kernels_agree_on(
    make_tables: Any, rows: int, shards: int, split: str, cut: int, seed: int
) -> None:
    tables = make_tables([(rows, 3, "int8"), (11, 2, "fp32")])
    made, other = tables.splits(shards, split, seed)
    shard_R, place_R = made.owner_and_place(np.arange(rows))
    found: dict[int, tuple[int, int]] = {}
    for begin, end in ((0, min(cut, rows)), (min(cut, rows), rows)):
        for shard, owned, places in made.owned_runs(range(shards), begin, end):
            for row, place in zip(np.arange(begin, end)[owned], range(places.start, places.stop), strict=True):
                assert int(row) not in found and place < made.places(shard)
                found[int(row)] = (shard, place)
    assert made.everywhere or found == {r: (int(c), int(p)) for r, (c, p) in enumerate(zip(shard_R, place_R, strict=True))}
    placed = tables.version(shards, split, seed=seed).placed
    shard_N, place_N = reference.owners(placed, 0, torch.arange(rows))
    assert np.array_equal(shard_N.numpy(), shard_R) and np.array_equal(place_N.numpy(), place_R)
    if split in ("hash", "range") and rows >= shards:
        held_S = np.bincount(shard_R, minlength=shards)
        assert held_S.max() <= -(-rows // shards)
    assert sum(other.places(shard) for shard in range(shards)) >= 11


def test_the_partition_is_the_documented_one() -> None:
    """Golden values: rows must not move between shards with an update."""
    shapes = [ServedTable("user", 20, 128, F.INT8, ()), ServedTable("item", 9, 128, F.INT8, ())]
    user, item = split_tables(shapes, 4, "hash")
    assert user.owner_and_place(np.arange(20))[0].tolist() == GOLDEN["user"]
    assert item.owner_and_place(np.arange(9))[0].tolist() == GOLDEN["item"]
    assert split_tables(shapes, 4, "range")[0].owner_and_place(np.array([0, 4, 5, 19]))[0].tolist() == [0, 0, 1, 3]
    assert [each.first for each in split_tables(shapes, 4, "feature")] == [0, 1]


GOLDEN = {
    "user": [1, 2, 3, 0, 3, 0, 1, 2, 1, 2, 3, 0, 3, 0, 1, 2, 2, 3, 0, 1],
    "item": [0, 1, 2, 3, 2, 3, 0, 1, 3],
}


def test_a_load_job_survives_serialization() -> None:
    tables = [ServedTable("a", 50, 4, 4, ("a", "b")), ServedTable("c", 7, 3, 0, ("c",))]
    splits = [
        TableSplit(50, 3, "blocks", key=9, rotations_B=np.arange(17, dtype=np.uint8) % 3, copied_H=np.array([3, 8])),
        TableSplit(7, 3, "ranges", first=1, per=7),
    ]
    job = LoadJob(
        make_layout(tables, splits, True),
        ("x", "y"),
        ((FileSlice(0, 1, 2, 3, 4, 5),), (FileSlice(1, 0, 0, 7, 1, 2, 3, True),)),
        ((0, "ab"),),
    )
    again = LoadJob.from_bytes(job.to_bytes())
    assert (again.files, again.phases, again.checksums) == (job.files, job.phases, job.checksums)
    assert again.layout.sizes_S == job.layout.sizes_S
    for mine, theirs in zip(job.layout.tables, again.layout.tables, strict=True):
        assert mine.table == theirs.table and (mine.codes_S, mine.meta_S) == (theirs.codes_S, theirs.meta_S)
        assert all(map(np.array_equal, mine.split.owner_and_place(np.arange(7)), theirs.split.owner_and_place(np.arange(7))))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with a hashed table, its checkpoint, its heat, and a plan to serve it on three shards."""
    random = np.random.default_rng(1)
    ids = IdMap.hashed(400, salt=2)
    batches = [{"user": random.zipf(1.3, 512) % 5000, "item": random.zipf(1.2, 512) % 90} for _ in range(6)]
    heat = profile_batches(iter(batches))
    module = thermocline.EmbeddingCollection(
        [thermocline.Table("user", 400, 8, ids=ids), thermocline.Table("item", 90, 8)],
        rows=thermocline.RowConfig("int8", cache=0.0),
    )
    folder = tmp_path_factory.mktemp("planned")
    thermocline.save(module, folder / "saved")
    heat.save(folder / "heat.tc")
    tables = PlanTables(
        batch=512,
        tables=(
            TableConfig(name="user", rows=400, dim=8, precision="int8"),
            TableConfig(name="item", rows=90, dim=8, precision="int8"),
        ),
    )
    return module, folder, heat, tables, batches, ids


def make_plan(tables: Any, heat: Any, shards: int) -> Any:
    given = {"nodes": 1, "cards_per_node": shards, "card": {"memory": "1GiB", "bandwidth": "100GB/s"}}
    links = {"node": {"bandwidth": "10GB/s", "latency": "5us"}}
    return thermocline.make_plan(tables, heat, Topology.model_validate(given | {"links": links}), goal="serve")


def test_a_plan_copies_its_hot_rows_to_every_shard(planned: Any) -> None:
    module, folder, heat, tables, batches, ids = planned
    plan = with_hot(make_plan(tables, heat, 3), {"user": 20, "item": 90})
    plan.save(folder / "plan.json")
    with ShardGroup(folder / "saved", shards=3, split="plan", plan=folder / "plan.json", heat=folder / "heat.tc") as group:
        user, item = (each.split for each in group.current.layout.tables)
        counts_R = np.bincount(ids(torch.from_numpy(np.concatenate([b["user"] for b in batches]))).numpy(), minlength=400)
        assert set(user.copied_H) == set(np.lexsort((np.arange(400), -counts_R))[:20]) and item.everywhere
        for batch in batches:
            found = group.lookup({name: torch.from_numpy(each) for name, each in batch.items()})
            assert torch.equal(found["user"], module.get_rows("user", ids(torch.from_numpy(batch["user"]))))
            assert torch.equal(found["item"], module.get_rows("item", torch.from_numpy(batch["item"])))
        lookups = np.array([shard.lookups for shard in group.shards()])
        assert lookups.max() / lookups.mean() < 1.05


def with_hot(plan: Any, hot: dict[str, int]) -> Any:
    """The plan with some rows of each table in tier 1."""
    made = []
    for table in plan.tables:
        tier = table.tiers[-1]
        tiers = [tier.model_copy(update={"tier": 1, "rows": hot[table.name]})]
        if hot[table.name] < table.rows:
            tiers.append(tier.model_copy(update={"tier": 3, "rows": table.rows - hot[table.name]}))
        made.append(table.model_copy(update={"tiers": tuple(tiers), "placement": "tiers"}))
    return plan.model_copy(update={"tables": tuple(made)})


def test_a_plan_of_other_tables_is_refused(planned: Any) -> None:
    _, folder, heat, tables, _, _ = planned
    plan = with_hot(make_plan(tables, heat, 3), {"user": 20, "item": 90})
    source = CheckpointSource(folder / "saved")
    with pytest.raises(BadInput, check=has(parameter="plan", needed=3, available=2)):
        source.splits(2, "plan", plan, heat)
    with pytest.raises(BadInput, check=has(parameter="heat", table="user")):
        source.splits(3, "plan", plan, None)
    other = plan.model_copy(update={"tables": plan.tables[:1]})
    with pytest.raises(BadInput, check=has(parameter="plan", table="item")):
        source.splits(3, "plan", other, heat)
    other = plan.model_copy(update={"tables": (plan.tables[0].model_copy(update={"rows": 399}), plan.tables[1])})
    with pytest.raises(BadInput, check=has(parameter="plan", table="user")):
        source.splits(3, "plan", other, heat)


@pytest.mark.parametrize("split", ["hash", "plan"])
def test_segments_of_gpus_are_filled_with_the_same_rows(planned: Any, split: str) -> None:
    module, folder, heat, tables, _, _ = planned
    source = CheckpointSource(folder / "saved")
    plan = with_hot(make_plan(tables, heat, 3), {"user": 20, "item": 90})
    layout = make_layout(source.tables, source.splits(3, split, plan, heat), records=False)
    segments = [torch.zeros(size, dtype=torch.uint8) for size in layout.sizes_S]
    fill(source, layout, segments)
    placed = TableVersion.of("1", layout, segments, {}, source.modes).placed
    for n, name in enumerate(("user", "item")):
        rows = torch.arange(source.tables[n].rows)
        where = reference.locate(placed, n, rows, rows)
        assert torch.equal(reference.read(placed, n, *where), module.get_rows(name))
