"""One rank of the random runs with TorchRec: the plan of its `EmbeddingShardingPlanner`, rows in fp32.

With bf16 gradients its communication is quantized: sums and gradients travel in bf16, as ours do then.
"""

# mypy: ignore-errors

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.exchange.network import Net
from benchmarks.exchange.step import TIMEOUT, Clock, Steps, Wait, add_line, fork_ranks
from benchmarks.plan_runs.case import FRAMES, RandomCase


class Tables(nn.Module):
    """All tables in one collection of TorchRec."""

    def __init__(self, case: RandomCase) -> None:
        super().__init__()
        bags = case.pooling != "none"
        kind = torchrec.EmbeddingBagConfig if bags else torchrec.EmbeddingConfig
        configs = [
            kind(name=name, embedding_dim=table.dim, num_embeddings=table.rows, feature_names=[name])
            for name, table in zip(case.names, case.tables, strict=True)
        ]
        made = torchrec.EmbeddingBagCollection if bags else torchrec.EmbeddingCollection
        self.rows = made(tables=configs, device=torch.device("meta"))

    def forward(self, batch: torchrec.KeyedJaggedTensor) -> Any:
        return self.rows(batch)


def shard(case: RandomCase) -> tuple[nn.Module, dict[str, str]]:
    """The sharded tables, and how TorchRec's planner has placed each."""
    whole = Tables(case)
    apply_optimizer_in_backward(RowWiseAdagrad, whole.parameters(), {"lr": 0.01})
    codecs = None
    if case.gradients == "bf16":
        config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
        codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    sharder = (EmbeddingCollectionSharder if case.pooling == "none" else EmbeddingBagCollectionSharder)(
        qcomm_codecs_registry=codecs
    )
    known = {
        name: ParameterConstraints(pooling_factors=[table.length]) for name, table in zip(case.names, case.tables, strict=True)
    }
    cluster = Topology(world_size=case.ranks, local_world_size=case.cards, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=cluster, batch_size=case.batch, constraints=known)
    plan = planner.collective_plan(whole, [sharder], dist.group.WORLD)
    chosen = {name: f"{each.sharding_type} {each.ranks}" for name, each in plan.plan["rows"].items()}
    return DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=[sharder]), chosen


class PlainDense(nn.Module):
    """The dense part of `rank.py`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.context = seconds / 2, nn.Parameter(torch.zeros(1))

    def below(self) -> torch.Tensor:
        return Wait.apply(self.context, self.seconds)

    def forward(self, context: torch.Tensor, values: torch.Tensor, offsets: None) -> torch.Tensor:
        return Wait.apply(values, self.seconds).square().mean() + context.sum()


def run(given: dict[str, Any]) -> None:
    net, clock = Net(*given["net"]), Clock()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    with clock.watching():
        for job in given["jobs"]:
            if rank == 0:
                net.shape(*job["rates"], frames=FRAMES)
            case = RandomCase.draw(job["seed"])
            model, chosen = shard(case)

            def look_up(batch, case=case, model=model):
                out = model(batch[0])
                if case.pooling != "none":
                    return out.values()
                return torch.cat([out[name].values().reshape(-1) for name in case.names])

            batches = []
            for step in range(job["steps"]):
                bags = case.bags(step, rank)
                ids = torch.cat([torch.from_numpy(bags[name][0]) for name in case.names])
                lengths = torch.cat([torch.from_numpy(bags[name][1]).diff() for name in case.names])
                batches.append((torchrec.KeyedJaggedTensor(keys=case.names, values=ids, lengths=lengths), None))
            steps = Steps(net, clock, given["meet"], look_up, PlainDense(case.dense))
            steps.run(batches[:1])
            measured = steps.run(batches)
            if rank == 0:
                found = {"exposed": measured["step"] - case.dense, "placements": chosen, "version": torchrec.__version__}
                add_line(given["out"], job | measured | found)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCHREC_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    sys.exit(fork_ranks(Path(sys.argv[1]), run))
