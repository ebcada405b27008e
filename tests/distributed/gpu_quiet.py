"""Functions for one rank under NCCL that sends to itself: what a step waits for, its errors, and exchanges on a stream."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import gpu_ranks
import torch
from cases import Model, sizes_of, smooth_loss

import thermocline as tc
from thermocline.distributed.comm_stream import ORDER_VARIABLE, runs_in_launch_order
from thermocline.distributed.exchange.host_numbers import HostNumbers


def quiet(rank: int, size: int, plan: tc.Plan, heat: Any) -> list[int]:
    """How often the host reads numbers in forwards and in backwards; any other wait for the GPU is an error."""
    read: list[int] = []

    def get(numbers: HostNumbers) -> Any:
        read[-1] += 1
        return known(numbers)

    known = HostNumbers.get
    with gpu_ranks._sent_to_itself(), mock.patch.object(HostNumbers, "get", get):
        model = Model(precision="int8").to("cuda")
        tables: Any = tc.shard_(model, plan, heat, count_every=0).collections["tables"]
        assert tables.state.context.device_side and not tables.row_index.unsharded
        batch = gpu_ranks.batch_of(0, rank, size, "cuda")
        for step in range(12):  # sorts of a size are recorded from the eighth on
            torch.cuda.set_sync_debug_mode("error" if step >= 10 else "default")
            read.append(0)
            out = tables(batch).values()
            torch.cuda.set_sync_debug_mode("default")
            loss = smooth_loss(out, step, sum(sizes_of(step, size)[:rank]))
            torch.cuda.set_sync_debug_mode("error" if step >= 10 else "default")
            read.append(0)
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
    return read[-4:]


def told(rank: int, size: int, plan: tc.Plan, heat: Any) -> list[str]:
    """Errors of each step, with a bad id in the second, a bad gradient in the fourth and wrong offsets in the sixth."""
    found = []
    with gpu_ranks._sent_to_itself():
        model = Model(precision="int8").to("cuda")
        tables: Any = tc.shard_(model, plan, heat).collections["tables"]
        for step in range(7):
            batch = gpu_ranks.batch_of(step, rank, size, "cuda")
            if step == 1:
                batch["item"] = (torch.full_like(batch["item"][0], 61), batch["item"][1])
            if step == 5:  # features would have lengths below 0, at which operators of PyTorch stop the process
                batch["item"] = (batch["item"][0], batch["item"][1].flip(0))
            found.append("")
            try:
                (tables(batch).values().sum() * (float("nan") if step == 3 else 1.0)).backward()
            except tc.BadInput as error:
                found[-1] = f"{type(error).__name__}: {error}"
    return found


def on_a_stream(rank: int, size: int, *given: Any) -> Any:
    """`both_alone` with gradients on a stream of their own."""
    with mock.patch.dict(os.environ, {ORDER_VARIABLE: "1"}):
        assert runs_in_launch_order()
        return gpu_ranks.both_alone(rank, size, *given)
