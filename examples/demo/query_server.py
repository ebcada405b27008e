"""Serves checkpoints from several shards and queries them with NVIDIA's client over gRPC.

Ids are drawn by the heat of the log. The first answers are compared with the rows of the checkpoint. Lookups per second are the
best of several short measurements, in turns with the other servers, because a small machine is never idle.
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
from thermocline.heat import HeatProfile

from .stages import Found, end, environment

IDS = 64  # per feature and request
REQUESTS = 32
ROUNDS = 6
NEEDED = {"tritonclient": "tritonclient[grpc]", "grpc": "thermocline[serve]", "aiohttp": "thermocline[serve]"}

Ids = NDArray[np.int64]


def check_installed() -> None:
    """Fail before minutes of training."""
    for module, package in NEEDED.items():
        if find_spec(module) is None:
            raise BadInput(f"the demo serves its models and needs {module}; run: pip install '{package}'", package=package)


def query(checkpoints: Mapping[str, Path], shards: int, seconds: float) -> dict[str, Found]:
    """Serve all checkpoints side by side, compare their first answers, and measure them in turns."""
    with ExitStack() as stack:
        clients = {name: stack.enter_context(_client(folder, shards)) for name, folder in checkpoints.items()}
        rates = [{name: _rate(*each[:2], seconds / ROUNDS) for name, each in clients.items()} for _ in range(ROUNDS)]
    found = {}
    for name, (_, _, ids) in clients.items():
        best = max(each[name] for each in rates)
        found[name] = {"requests/s": best, "lookups/s": best * ids, "equal": True}
    return found


@contextmanager
def _client(checkpoint: Path, shards: int) -> Iterator[tuple[Callable[[Any], object], list[Any], int]]:
    """A server with a verified first answer: an infer function, requests, and ids per request."""
    from tritonclient import grpc as grpcclient

    heat = HeatProfile.load(checkpoint.parent / "heat.tc")
    draw = np.random.default_rng(0)
    asked = [{name: _ids(heat, name, draw) for name in heat.tables} for _ in range(REQUESTS)]
    with serving(checkpoint, shards) as address:
        client = grpcclient.InferenceServerClient(address)
        requests = [[_input(grpcclient, name, ids_N) for name, ids_N in one.items()] for one in asked]
        first = client.infer("tables", requests[0])
        _compare(checkpoint, asked[0], {name: first.as_numpy(name) for name in asked[0]})
        yield lambda one: client.infer("tables", one), requests, IDS * len(heat.tables)
        client.close()


def _rate(infer: Callable[[Any], object], requests: Sequence[Any], seconds: float) -> float:
    """Requests per second, measured for some seconds."""
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
    """Compare answers with the rows of the checkpoint, bit for bit; cached rows are rounded to their table's precision."""
    import torch

    from thermocline.checkpoint import load

    tables: Any = load(checkpoint)
    tables.flush()
    for name, ids_N in asked.items():
        rows_N = tables.id_maps[name](torch.from_numpy(ids_N))
        if not np.array_equal(tables.get_rows(name, rows_N).numpy(), answered[name]):
            raise ThermoclineError(f"the answer for {name} differs from {checkpoint}")


@contextmanager
def serving(checkpoint: Path, shards: int) -> Iterator[str]:
    """Start a server on free ports and yield its gRPC address; ends it with the block."""
    command = [sys.executable, "-m", "thermocline", "serve", "run", str(checkpoint), "--shards", str(shards)]
    with open(checkpoint.parent / "log.txt", "a", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*command, "--http-port", "0", "--grpc-port", "0"],
            env=environment(), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            ready = next((found for line in server.stdout if (found := re.search(r"grpc (\S+)", line))), None)
            if ready is None:
                raise ThermoclineError(f"the server exited with {server.wait()}; see {checkpoint.parent / 'log.txt'}")
            yield ready[1]
        finally:
            end(server)
