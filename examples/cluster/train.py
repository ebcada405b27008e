"""Training that starts, dies and resumes on one GPU, eight, or 16 nodes of eight. The launch files of this folder run it.

    python train.py --folder run
    torchrun --nproc-per-node 8 train.py --folder run --topology hgx-h200

Launchers set the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE); without them there is one process.
The job plans its tables for the ranks that it has, and resumes from the last save in `--folder`, which all nodes share.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thermocline as tc
from thermocline.heat import HeatProfile, profile_batches
from thermocline.plan import TablesConfig, Topology

BATCH = 4096  # samples of all ranks, which divide it
TABLES: dict[str, Any] = {
    "batch": BATCH,
    "tables": [
        {"name": "item", "rows": 200_000, "dim": 32, "lookups": 8, "precision": "int8", "cache": 0.05},
        {"name": "user", "rows": 50_000, "dim": 32, "precision": "int8", "cache": 0.05},
    ],
}


def make_model(device: torch.device) -> nn.ModuleDict:
    """Two tables below a small network. Rows on "meta" do not exist until `shard_` makes those of this rank."""
    tables = [tc.Table(t["name"], t["rows"], t["dim"], row_config=tc.RowConfig(t["precision"])) for t in TABLES["tables"]]
    top = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    return nn.ModuleDict({"rows": tc.EmbeddingCollection(tables, device="meta"), "top": top})


def samples(step: int, rank: int = 0, ranks: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's part of the batch of a step. Put your log here; a step that is repeated must have the same samples."""
    draw = torch.Generator().manual_seed(step)
    items = (torch.rand(BATCH, 8, generator=draw) ** 4 * 200_000).long()
    users = (torch.rand(BATCH, 1, generator=draw) ** 2 * 50_000).long()
    clicked = (items[:, 0] % 3 == users[:, 0] % 3).float()
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    return {"item": items[mine], "user": users[mine]}, clicked[mine]


def offsets(ids_BN: Tensor) -> Tensor:
    """Where the bag of each sample begins in the flat ids, and where the last one ends."""
    return torch.arange(len(ids_BN) + 1) * ids_BN.shape[1]


def heat_of(folder: Path) -> HeatProfile:
    """The heat of the first steps, counted once for a job. Usually: `thermocline heat profile day_*.parquet -o heat.tc`."""
    path = folder / "heat.tc"
    if not path.exists():
        batches = ({name: ids.numpy() for name, ids in samples(step)[0].items()} for step in range(20))
        profile_batches(batches).save(path)
    return HeatProfile.load(path)


def main(folder: str, topology: str = "hgx-h200", steps: int = 100, save_every: int = 10) -> None:
    """Train, from the last save on if there is one."""
    place, environment = Path(folder), os.environ
    rank, ranks = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_ranks = int(environment.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= local_ranks:
        device = torch.device("cuda", int(environment.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if ranks > 1 and not dist.is_initialized():  # Ray Train initialises it
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timedelta(minutes=5))

    plan = heat = None  # ranks use those of rank 0
    if rank == 0:
        place.mkdir(parents=True, exist_ok=True)
        cluster = Topology.load(topology).model_copy(update={"nodes": ranks // local_ranks, "gpus_per_node": local_ranks})
        tables = TablesConfig.model_validate(TABLES | {"batch": BATCH // ranks})
        heat = heat_of(place)
        plan = tc.make_plan(tables, heat, cluster)
        plan.save(place / "plan.json")

    torch.manual_seed(0)  # the same dense part on every rank
    model = make_model(device)
    tc.shard_(model, plan, heat, device=device)
    rows, top, adam = model["rows"], model["top"], torch.optim.Adam(model["top"].parameters(), lr=1e-3)
    progress = tc.resume(place / "saved", model, optimizers=adam) or {"step": 0}
    if ranks > 1:  # the flag keeps the order of sums of the first step, so that a resumed job gives the same bits
        top = DistributedDataParallel(top, find_unused_parameters=True)

    for step in range(progress["step"], steps):
        ids, clicked = samples(step, rank, ranks)
        bags = {name: (each.flatten().to(device), offsets(each).to(device)) for name, each in ids.items()}
        logits = top(rows(bags).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked.to(device))
        loss.backward()  # updates rows
        adam.step()
        adam.zero_grad()
        if rank == 0 and (step == progress["step"] or step % 10 == 9):
            print(f"{datetime.now():%H:%M:%S} step {step} on {ranks} ranks: loss {loss.item():.4f}", flush=True)
        if step % save_every == save_every - 1:
            tc.save(model, place / "saved", optimizers=adam, progress={"step": step + 1}, incremental=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def read_arguments(given: Sequence[str] | None = None) -> dict[str, Any]:
    """The arguments of `main`."""
    parser = argparse.ArgumentParser(description="train two tables and a small network, and resume from the last save")
    parser.add_argument("--folder", default="run", help="folder for heat, plan and saves, which all nodes share")
    parser.add_argument("--topology", default="hgx-h200", help="a file of `thermocline calibrate`, or a preset")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    return vars(parser.parse_args(given))


if __name__ == "__main__":
    main(**read_arguments())
