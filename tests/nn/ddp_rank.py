"""One rank of `test_training_inside_ddp_raises_and_the_way_out_works`: python ddp_rank.py RANK FOLDER."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

import thermocline as tc


def main(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ids_BL = torch.randint(31, (5, 3), generator=torch.Generator().manual_seed(rank))
    for update in ("backward", "step"):
        model = nn.Sequential(tc.EmbeddingBag(31, 6, mode="sum", rows=tc.RowConfig(update=update)), nn.Linear(6, 2))
        wrapped = nn.parallel.DistributedDataParallel(model)
        with torch.no_grad():
            wrapped(ids_BL)  # looking is allowed
        with pytest.raises(tc.BadInput):
            wrapped(ids_BL)
        with pytest.raises(tc.BadInput):
            nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))(ids_BL)
        dense = nn.parallel.DistributedDataParallel(model[1])
        dense(model[0](ids_BL)).sum().backward()  # the way out
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # DDP keeps the group, and gloo's threads may abort an interpreter that shuts down (pytorch issue 190489)
