"""Serves checkpoints over cards and asks them as a stranger would: by NVIDIA's own client, over gRPC.

Ids are drawn as often as the log has them. The first answers are compared with the rows of the checkpoint, read without the
server; then it is asked for a few seconds, one request at a time, and the lookups are counted: of several short stretches, in
turns with the other servers, the best, for on a small machine something else is always going on.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput, ThermoclineError
from thermocline.heat.profile import HeatProfile

from .stages import Found, end, environment

IDS = 64  # of a feature and request
REQUESTS = 32  # different ones, asked in turns
STRETCHES = 6
NEEDED = {"tritonclient": "tritonclient[grpc]", "grpc": "thermocline[serve]", "aiohttp": "thermocline[serve]"}

Ids = NDArray[np.int64]


def check_installed() -> None:
    """Fail before minutes of training, not after them."""
    for module, package in NEEDED.items():
        if find_spec(module) is None:
            raise BadInput(f"the demo ends with serving, which needs {module}; install it with: pip install '{package}'")


def ask(checkpoints: Mapping[str, Path], cards: int, seconds: float) -> dict[str, Found]:
    """Serve all of them side by side, ask each, compare, and count in turns, so that what else goes on meets all alike."""
    with ExitStack() as stack:
        asking = {name: stack.enter_context(_asking(folder, cards)) for name, folder in checkpoints.items()}
        rates = [{name: _rate(*each[:2], seconds / STRETCHES) for name, each in asking.items()} for _ in range(STRETCHES)]
    found = {}
    for name, (_, _, ids) in asking.items():
        best = max(each[name] for each in rates)
        found[name] = {"requests/s": best, "lookups/s": best * ids, "equal": True}
    return found


@contextmanager
def _asking(checkpoint: Path, cards: int) -> Iterator[tuple[Callable[[Any], object], list[Any], int]]:
    """A server whose first answer is right: how to ask it, what, and for how many ids at a time."""
    from tritonclient import grpc as grpcclient

    heat = HeatProfile.load(checkpoint.parent / "heat.tc")
    draw = np.random.default_rng(0)
    asked = [{name: _ids(heat, name, draw) for name in heat.tables} for _ in range(REQUESTS)]
    with serving(checkpoint, cards) as address:
        client = grpcclient.InferenceServerClient(address)
        requests = [[_input(grpcclient, name, ids_N) for name, ids_N in one.items()] for one in asked]
        first = client.infer("tables", requests[0])
        _compare(checkpoint, asked[0], {name: first.as_numpy(name) for name in asked[0]})
        yield lambda one: client.infer("tables", one), requests, IDS * len(heat.tables)
        client.close()


def _rate(infer: Callable[[Any], object], requests: Sequence[Any], seconds: float) -> float:
    """Requests that are answered in a second, in a stretch of so many seconds."""
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        infer(requests[done % len(requests)])
        done += 1
    return done / (time.perf_counter() - started)


def _ids(heat: HeatProfile, name: str, draw: np.random.Generator) -> Ids:
    table = heat.tables[name]
    ids_N: Ids = draw.choice(table.ids_H, IDS, p=table.counts_H / table.counts_H.sum())
    return ids_N


def _input(client: Any, name: str, ids_N: Ids) -> Any:
    given = client.InferInput(name, ids_N.shape, "INT64")
    given.set_data_from_numpy(ids_N)
    return given


def _compare(checkpoint: Path, asked: dict[str, Ids], answered: dict[str, NDArray[np.float32]]) -> None:
    """Answers are the rows of the checkpoint, bit for bit; those that were cached are rounded to their table's precision."""
    import torch

    from thermocline.checkpoint import load

    tables: Any = load(checkpoint)
    tables.flush()
    for name, ids_N in asked.items():
        rows_N = tables.id_maps[name](torch.from_numpy(ids_N))
        if not np.array_equal(tables.get_rows(name, rows_N).numpy(), answered[name]):
            raise ThermoclineError(f"the server's answer for {name} is not what {checkpoint} holds")


@contextmanager
def serving(checkpoint: Path, cards: int) -> Iterator[str]:
    """A server of its own on free ports, ended with this block; gives its gRPC address."""
    command = [sys.executable, "-m", "thermocline", "serve", "run", str(checkpoint), "--shards", str(cards)]
    with open(checkpoint.parent / "log.txt", "a", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*command, "--http-port", "0", "--grpc-port", "0"],
            env=environment(), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            ready = next((found for line in server.stdout if (found := re.search(r"grpc (\S+)", line))), None)
            if ready is None:
                raise ThermoclineError(f"the server left with {server.wait()}; what it said: {checkpoint.parent / 'log.txt'}")
            yield ready[1]
        finally:
            end(server)
