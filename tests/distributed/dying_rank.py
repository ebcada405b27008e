"""One of three ranks that train: python dying_rank.py STORE RANK. Rank 1 is killed, as by a machine that has no memory left."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from cases import Model, batches, exact_loss
from test_training import MIXED, tiers_plan

import thermocline as tc

if __name__ == "__main__":
    store, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timeout)
    model = Model()
    tc.shard_(model, *tiers_plan(1, 3, MIXED, "int8"))
    try:
        for step in range(1, 6):
            out = model.tables(batches(step, [3, 2, 4])[rank]).values()
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            exact_loss(out, step, 0).backward()
        model.tables.wait_for_exchange()
    except tc.ThermoclineError as error:
        print(error, flush=True)
        os._exit(7)
