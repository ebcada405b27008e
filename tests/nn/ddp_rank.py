"""One rank of `test_rows_that_would_diverge_between_ranks_are_refused`: python ddp_rank.py RANK FOLDER."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import thermocline as tc

RANKS = 2


def unsharded(error: tc.BadInput) -> bool:
    return (error.parameter, error.ranks) == ("independent", RANKS)


def make(**fields: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(tc.EmbeddingBag(31, 6, mode="sum", rows=tc.RowConfig("fp32", **fields)), nn.Linear(6, 2))


def rows_of_all(model: nn.Sequential) -> list[Tensor]:
    rows_RD = model[0].get_rows(torch.arange(31))
    every = [torch.empty_like(rows_RD) for _ in range(RANKS)]
    torch.distributed.all_gather(every, rows_RD)
    return every


def check_update(update: str, ids_BL: Tensor) -> None:
    model = make(update=update)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        wrapped(ids_BL)  # looking is allowed
    for whole in (wrapped, nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))):
        with pytest.raises(tc.BadInput, check=lambda error: error.parameter == "module"):
            whole(ids_BL)
    dense = nn.parallel.DistributedDataParallel(model[1])
    with pytest.raises(tc.BadInput, check=unsharded):
        dense(model[0](ids_BL)).sum().backward()
    with pytest.raises(tc.BadInput, check=unsharded):
        torch.compile(model, backend="eager", fullgraph=True)(ids_BL)
    first, second = rows_of_all(model)
    assert torch.equal(first, second)
    alone = make(update=update, independent=True)
    alone(ids_BL).sum().backward()
    alone[0].fused_optimizer.step()
    first, second = rows_of_all(alone)
    assert not torch.equal(first, second)  # as asked for


def check_fully_shard(ids_BL: Tensor) -> None:
    with pytest.raises(tc.BadInput, check=lambda error: error.parameter == "ignored_params"):
        fully_shard(make())
    model = make()
    fully_shard(model, ignored_params={model[0].placeholder})
    with pytest.raises(tc.BadInput, check=unsharded):
        model(ids_BL).sum().backward()
    model = make()
    model[0].requires_grad_(False)
    fully_shard(model, ignored_params={model[0].placeholder})
    model(ids_BL).sum().backward()
    assert model[1].weight.grad is not None


def main(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ids_BL = torch.randint(31, (5, 3), generator=torch.Generator().manual_seed(rank))
    for update in ("backward", "step"):
        check_update(update, ids_BL)
    check_fully_shard(ids_BL)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # DDP keeps the group, and gloo's threads may abort an interpreter that shuts down (pytorch issue 190489)
