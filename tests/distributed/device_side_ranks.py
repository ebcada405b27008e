"""Functions of `ranks.py` with the exchange of GPUs: Triton kernels in the interpreter, and sizes that the host reads late.

Arguments: rank, number of ranks, and those of the test. Messages go by gloo, from the memory in which the kernels work.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import ranks
import torch
import torch.distributed
from cases import Model, batches, exact_loss, sizes_of
from torch.utils._python_dispatch import TorchDispatchMode

import thermocline as tc
from thermocline.distributed import process_groups
from thermocline.distributed.exchange.context import ExchangeContext
from thermocline.kernels import dispatch
from thermocline.kernels.exchange import gpu

known = dispatch._module


def _module(kernel: str, device: str) -> ModuleType:
    return gpu if kernel == "exchange" else known(kernel, device)


@contextlib.contextmanager
def device_side() -> Iterator[None]:
    with mock.patch.object(dispatch, "_module", _module):
        yield


def train(rank: int, size: int, *given: Any) -> Any:
    with device_side():
        return ranks.train(rank, size, *given)


def fail(rank: int, size: int, plan: tc.Plan, heat: Any) -> list[str]:
    """Errors of each step: rank 1 looks up a bad id in the second, and has a bad gradient in the fourth."""
    with device_side():
        model, told = Model(precision="int8"), []
        tables: Any = tc.shard_(model, plan, heat).collections["tables"]
        tables.pipeline.overlap = False
        assert tables.state.context.device_side
        for step in range(7):
            batch = dict(batches(step, sizes_of(step, size))[rank])
            if rank == 1 and step == 1:
                batch["item"] = (torch.full_like(batch["item"][0], 61), batch["item"][1])
            told.append("")
            try:
                out = model.tables(batch).values()
                (out.sum() * (float("nan") if rank == 1 and step == 3 else 1.0)).backward()
            except tc.BadInput as error:
                told[-1] = f"{type(error).__name__}: {error}"
        return told


WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::bincount", "aten::_unique2", "aten::unique_dim",
    "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::item",
}  # fmt: skip


class _Sizes(TorchDispatchMode):
    """Counts operators whose result the host, or the size of which it, must wait for on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        masked = name == "aten::index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        sized = name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in WAITS or masked or sized:
            files = [frame.filename for frame in traceback.extract_stack()]
            if not any("/kernels/" in file and "/kernels/exchange/gpu" not in file for file in files):  # CPU kernels may ask
                self.found.append(f"{name}: {files[-3:]}")
        return function(*args, **(kwargs or {}))


def waits(rank: int, size: int, plan: tc.Plan, heat: Any) -> tuple[list[str], list[str], int]:
    """What a forward and a backward ask the device for, and how often numbers are read."""
    with device_side():
        model = Model(precision="int8")
        tables: Any = tc.shard_(model, plan, heat, count_every=0).collections["tables"]
        tables.pipeline.overlap = False
        found: list[list[str]] = []
        for step in range(2):  # the first makes what later steps keep
            sizes = sizes_of(0, size)
            batch = batches(0, sizes)[rank]
            with mock.patch.object(ExchangeContext, "count_by_rank", side_effect=AssertionError), _Sizes() as forward:
                out = model.tables(batch).values()
            loss = exact_loss(out, step, sum(sizes[:rank]))
            with _Sizes() as backward:
                loss.backward()
            found = [forward.found, backward.found]
        return found[0], found[1], tables.state.meter.steps


class _Launches:
    """Stands for the stream of NCCL's exchanges: jobs launch where the caller is, and waits order their kernels."""

    def __init__(self) -> None:
        self.open = self.waits = 0

    def launch(self, job: Callable[[], None]) -> None:
        self.open += 1
        with torch.no_grad():
            job()

    def wait(self) -> None:
        self.waits += self.open > 0
        self.open = 0


def like_nccl(rank: int, size: int, *given: Any) -> tuple[Any, list[tuple[Any, ...]], int]:
    """`train` by the branches of NCCL: no message to a single peer, no thread; the collectives in order, and waits for jobs."""
    launches, order, sent = _Launches(), [], torch.distributed.all_to_all_single
    made = process_groups.RankGroup.__post_init__

    def record(result: Any, send: Any, received: Any, counts: Any, group: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        order.append((tuple(torch.distributed.get_process_group_ranks(group)), str(send.dtype), bool(launches.open)))
        sent(result, send, received, counts, group=group)

    def without_gloo(group: Any) -> None:
        made(group)
        group.gloo = False

    with (
        device_side(),
        mock.patch.object(process_groups.RankGroup, "__post_init__", without_gloo),
        mock.patch.object(process_groups.ProcessGroups, "comm_stream", launches),
        mock.patch.object(process_groups.RankGroup, "_send_to_peers", side_effect=AssertionError("NCCL has one collective")),
        mock.patch.object(torch.distributed, "all_to_all_single", record),
    ):
        return ranks.train(rank, size, *given), order, launches.waits
