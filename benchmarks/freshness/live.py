"""A trainer that changes 100,000 rows a second, a server that it publishes to, and clients of that server.

The trainer is this process; the server and the clients are others. In quiet windows the trainer trains and does not publish, so
the difference between windows is publishing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thermocline
from thermocline.errors import BadInput

RATE, DIM, STEPS = 100_000, 64, 20  # changed rows and steps a second


class LiveServer:
    """A server's process, and its addresses. `ports`: those of another that has ended."""

    def __init__(
        self, folder: Path, secret: Path, shards: int = 4, host: str = "127.0.0.1", ports: Mapping[str, int] | None = None
    ) -> None:
        ready = folder.parent / "ready.json"
        ready.unlink(missing_ok=True)
        start = "import sys; sys.argv[0] = 'thermocline'; from thermocline.cli import main; main()"
        options = ["--shards", str(shards), "--host", host, "--secret-file", str(secret), "--json", str(ready)]
        for name in ("http", "grpc", "publish"):
            options += [f"--{name}-port", str((ports or {}).get(name, 0))]
        command = [sys.executable, "-c", start, "serve", "run", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            with suppress(OSError, ValueError):
                found = json.loads(ready.read_text())
                break
            if self.process.poll() is not None:
                raise BadInput(f"the server ended with code {self.process.returncode}")
            time.sleep(0.05)
        self.ports = {name: int(found[f"{name}_port"]) for name in ("http", "grpc", "publish")}
        self.grpc, self.publish = (f"127.0.0.1:{self.ports[name]}" for name in ("grpc", "publish"))

    def private_bytes(self) -> int:
        """Memory of the front end beside the rows: anonymous pages, and segments of changed rows that it still maps."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
        return sum(1024 * int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


class LiveTrainer:
    """Trains in a thread, `STEPS` steps a second, and publishes in windows."""

    def __init__(self, folder: Path, rows: int) -> None:
        config = thermocline.RowConfig("int8", cache=0.05, optimizer=thermocline.SGD(lr=0.01))
        self.model = thermocline.Embedding(rows, DIM, rows=config)
        self.folder, self._rows, self._draw = folder, rows, np.random.default_rng(0)
        self.publisher: thermocline.Publisher | None = None
        self.publishing, self._ended = False, False
        self.steps = 0
        self.seconds = {True: 0.0, False: 0.0}  # processor time of steps in windows with and without publishing
        self.counts = {True: 0, False: 0}
        self._open: list[tuple[float, int]] = []  # time and rows of steps that no publish has yet
        self.latencies: list[tuple[float, int]] = []

    def step(self) -> None:
        """Change `RATE / STEPS` rows; publish if it is time."""
        began, publishing = time.thread_time(), self.publishing
        ids = torch.from_numpy(self._draw.integers(0, self._rows, RATE // STEPS))
        self.model(ids).sum().backward()
        self._open.append((time.time(), len(ids)))
        if publishing and self.publisher is not None and self.publisher.step():
            threading.Thread(target=self._watch, args=(self.publisher.number, self._open), daemon=True).start()
            self._open = []
        self.seconds[publishing] += time.thread_time() - began
        self.counts[publishing] += 1
        self.steps += 1

    def _watch(self, number: int, steps: list[tuple[float, int]]) -> None:
        assert self.publisher is not None
        if self.publisher._links[0].wait_for(number, 60.0):
            now = time.time()
            self.latencies += [(now - at, rows) for at, rows in steps]

    def run(self) -> None:
        following = time.monotonic()
        while not self._ended:
            self.step()
            following = max(following + 1 / STEPS, time.monotonic() - 1 / STEPS)
            time.sleep(max(0.0, following - time.monotonic()))

    @contextmanager
    def training(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._ended = True
            thread.join()

    def start_window(self, publishing: bool) -> None:
        """Publish from now on, or not; rows of the other window do not count as late."""
        if publishing and self.publisher is not None:
            self.publishing = False
            self.publisher.flush()
            self._open = []
        self.publishing = publishing


def ask(server: LiveServer, seconds: float, rows: int) -> dict[str, Any]:
    """The latencies of clients in a process of their own."""
    job = {
        "address": server.grpc, "pid": server.process.pid, "clients": 2, "seconds": seconds, "ids": 64, "rows": rows,
        "features": ["table"],
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.serve.load_client"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def quantile(weighted: list[tuple[float, int]], share: float) -> float:
    """A quantile of values with weights."""
    if not weighted:
        return float("nan")
    ordered = sorted(weighted)
    cut = np.searchsorted(np.cumsum([weight for _, weight in ordered]), share * sum(weight for _, weight in ordered))
    return ordered[min(int(cut), len(ordered) - 1)][0]
