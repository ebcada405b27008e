"""Two ranks of `test_torchrec_plans.py`, on which TorchRec trains, and our shards: python torchrec_ranks.py STORE RANK."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import thermocline as tc
from thermocline.distributed import shard_torchrec_
from thermocline.errors import BadInput

ROWS = {"whole": 101, "rows": 640, "copies": 7, "node": 200}
ELSEWHERE = {"rows": "row_wise", "copies": "data_parallel", "node": "table_row_wise"}  # what TorchRec has on GPUs


def begin(weight):
    """The first rows of a table. DistributedModelParallel makes new rows, so they are a function of nothing but the shape."""
    values = torch.sin(torch.arange(weight.numel(), dtype=torch.float32)).view_as(weight)
    return weight.detach().copy_(values / weight.shape[0] ** 0.5)


class Model(torch.nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        configs = [
            torchrec.EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=16, feature_names=[f"f_{name}"], init_fn=begin
            )
            for name, rows in ROWS.items()
        ]
        self.sparse = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device(device))


def batch(step, rank):
    draw = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(ROWS) * 9,), generator=draw)
    counts = lengths.view(len(ROWS), 9).sum(1).tolist()
    ids = [torch.randint(rows, (count,), generator=draw) for rows, count in zip(ROWS.values(), counts, strict=True)]
    return torchrec.KeyedJaggedTensor(keys=[f"f_{name}" for name in ROWS], values=torch.cat(ids), lengths=lengths)


def train(model, rank):
    found = []
    for step in range(4):
        out = model.sparse(batch(step, rank)) if isinstance(model, Model) else model.module.sparse(batch(step, rank))
        found.append({name: values.detach().clone() for name, values in out.to_dict().items()})
        out.values().square().sum().backward()
    return found


if __name__ == "__main__":
    store, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    theirs = Model()
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in ROWS}
    sharder = EmbeddingBagCollectionSharder()
    cluster = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=cluster, batch_size=9, constraints=constraints)
    plan = planner.collective_plan(theirs, [sharder], dist.group.WORLD)
    apply_optimizer_in_backward(torch.optim.SGD, [theirs.sparse.embedding_bags[n].weight for n in ROWS], {"lr": 0.1})
    wrapped = DistributedModelParallel(theirs, device=torch.device("cpu"), plan=plan, sharders=[sharder])

    for name, kind in ELSEWHERE.items():
        plan.plan["sparse"][name].sharding_type = kind
    ours = Model()
    rows = tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.1))
    sharding = shard_torchrec_(ours, plan, rows, batch=9)
    kinds = {table.name: (table.placement, table.pooled_by) for table in sharding.plan.tables}
    assert kinds["whole"][0] == "card" and kinds["copies"][0] == "replicated", kinds
    assert kinds["rows"] == kinds["node"] == ("tiers", "owner"), kinds
    assert sharding.plan.table("whole").rank == plan.plan["sparse"]["whole"].ranks[0]
    outputs = train(wrapped, rank)
    for expected, found in zip(outputs, train(ours, rank), strict=True):
        torch.testing.assert_close({name: found[name] for name in expected}, expected)  # TorchRec orders them by sharding type

    int8 = Model()
    shard_torchrec_(int8, plan, tc.RowConfig("int8", cache=0.1, optimizer=tc.SGD(lr=0.1)), batch=9)
    for expected, found in zip(outputs, train(int8, rank), strict=True):
        assert all((found[name] - expected[name]).abs().max() < 0.05 for name in expected)
    fresh = Model("meta")
    shard_torchrec_(fresh, plan, batch=9)
    assert all(bool(values.any()) for out in train(fresh, rank) for values in out.values())

    for wrong in (wrapped, ours.sparse.collection, torch.nn.Linear(1, 1)):
        try:
            shard_torchrec_(wrong, plan, batch=9)
        except BadInput as error:
            assert error.parameter == "model"
        else:
            raise AssertionError(type(wrong))
    dist.barrier()
    dist.destroy_process_group()
