"""A training script for torchrun: resumes by itself, and kills one of its ranks in each start, before a step.

A file `until` in the folder says before which step all ranks wait, for whoever wants to do something to them meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from cases import Model, batches, exact_loss, plan_of, table_plan

import thermocline as tc

STEPS = 10


def main(folder: Path, kill_at: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model()
    tables = [table_plan(name, 0, 0, "int8") for name in ("user", "item", "shop")]
    tc.shard_(model, plan_of(1, size, tables), reduce="sum")  # for as many ranks as there are
    progress = tc.resume(folder / "saved", model) or {"step": 0}
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"began-{start}-{rank}").write_text(str(progress["step"]))
    with open(folder / "log", "a") as log:
        log.write(f"{size} {progress['step']} {os.getppid()} {os.getpid()}\n")
    for step in range(progress["step"], STEPS):
        while (folder / "until").exists() and int((folder / "until").read_text()) <= step:
            time.sleep(0.02)
        if kill_at[start : start + 1] == [step] and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        each = 12 // size
        exact_loss(model.tables(batches(step, [each] * size)[rank]).values(), step, rank * each).backward()
        if step % 3 == 2:
            tc.save(model, folder / "saved", progress={"step": step + 1}, incremental=True)
    rows = [model.tables.get_rows(table.name) for table in model.tables.tables]
    if rank == 0:
        digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in rows)).hexdigest()
        (folder / "digest").write_text(digest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(step) for step in sys.argv[2:]])
