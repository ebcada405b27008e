"""One of two ranks that save in the background: python dying_saver.py STORE RANK DYING FOLDER. One is killed while it writes.

Processes meet with a long timeout, since the machine may be busy; only the wait for the save has a short one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

import torch
import torch.distributed as dist
from cases import heat_of, plan_of, table_plan
from sharded_ranks import made, steps

import thermocline as tc
from thermocline.checkpoint import rank_watch
from thermocline.checkpoint.save_job import SaveJob
from thermocline.distributed.process_groups import ExchangeFailed

if __name__ == "__main__":
    store, rank, dying, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    heat = heat_of()
    plan = plan_of(1, 2, [table_plan(name, 5, 0, "int8") for name in ("user", "item", "shop")], heat)
    model, dense, _ = made(plan, heat, {})
    steps(model, dense, rank, 2, 0, 2)
    model.tables.wait_for_exchange()
    rank_watch.group_timeout = lambda device: timedelta(seconds=3)
    if rank == dying:
        SaveJob.write = lambda self, background: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        tc.save_async(model, folder, optimizers=dense).wait()
    except ExchangeFailed as error:
        print(json.dumps({"rank": error.rank, "unresponsive": error.unresponsive}), flush=True)
        os._exit(7)
