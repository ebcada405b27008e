"""One rank of the exchange benchmark with TorchRec: its row-wise `EmbeddingCollection`, rows in fp32.

Every lookup is exchanged, as in P0: `use_index_dedup`, which looks up each id of a rank once, needs FBGEMM's operator
`jagged_unique_indices`, which has no CPU implementation.
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
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.exchange.network import Net
from benchmarks.exchange.step import TIMEOUT, Clock, Dense, Input, Steps, add_line, fork_ranks, load_batches

DIM, TABLE = 128, "item"


class TorchRecModel(nn.Module):
    """The model of `rank.py` with TorchRec's tables."""

    def __init__(self, rows: int, net: Net, dense: float) -> None:
        super().__init__()
        config = torchrec.EmbeddingConfig(name=TABLE, embedding_dim=DIM, num_embeddings=rows, feature_names=[TABLE])
        whole = nn.ModuleDict({"rows": torchrec.EmbeddingCollection(tables=[config], device=torch.device("meta"))})
        apply_optimizer_in_backward(RowWiseAdagrad, whole.parameters(), {"lr": 0.01})
        row_wise = ParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
        )
        cluster = Topology(world_size=net.nodes * net.cards, local_world_size=net.cards, compute_device="cpu")
        sharder = EmbeddingCollectionSharder()
        plan = EmbeddingShardingPlanner(topology=cluster, constraints={TABLE: row_wise}).collective_plan(
            whole, [sharder], dist.group.WORLD
        )
        made = DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=[sharder])
        self.rows = made.module["rows"]
        self.dense = Dense(DIM, dense)

    def look_up(self, batch: Input) -> Tensor:
        found = self.rows(torchrec.KeyedJaggedTensor(keys=[TABLE], values=batch[0], offsets=batch[1]))
        return found[TABLE].values()


def run(given: dict[str, Any]) -> None:
    net, clock = Net(*given["net"]), Clock()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    links = None
    with clock.watching():
        for job in given["jobs"]:
            if rank == 0 and links != (links := job["links"]):
                net.shape(*job["rates"])
            rows, batches = load_batches(Path(given["logs"]), job, rank, ranks, given["batch"])
            model = TorchRecModel(rows, net, job["dense"])
            steps = Steps(net, clock, given["meet"], model.look_up, model.dense)
            alone = model.dense.alone(batches)
            steps.warm_up(batches[0])
            measured = steps.run(batches)
            if rank == 0:
                exposed = measured["step"] - alone
                add_line(given["out"], job | measured | {"alone": alone, "exposed": exposed, "version": torchrec.__version__})
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCHREC_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    sys.exit(fork_ranks(Path(sys.argv[1]), run))
