"""A process that builds contenders and runs them on request, so that two environments can race in turn.

The parent writes one JSON object a line and reads one back:

    {"do": "hello"}                                            -> {"versions": {...}}
    {"do": "build", "library": "fbgemm", "job": {...},
     "kind": "zipf"}                                           -> {"labels": [...]}       builds, checks, warms up
    {"do": "run", "label": "...", "iterations": 20}            -> {"ms": [...]}
    {"do": "stats", "label": "..."}                            -> {"stats": {...}}        of its cache so far
    {"do": "threads", "count": 2}                              -> {}
    {"do": "drop"}                                             -> {}                      frees every contender

A request that raises is answered with {"error": "..."}. Workers run with OMP_WAIT_POLICY=PASSIVE: idle threads of one
contender must not spin while the other is on the clock.

A peer's environment does not hold this package: `LOAD` brings this folder there as a package named `bench`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parents[1]  # of the package `benchmarks`
MODULES = {"ours": "thermocline", "ours-int8": "thermocline", "torch": "torch", "fbgemm": "fbgemm"}
LOAD = """
import importlib.util, sys
folder = sys.argv[1]
spec = importlib.util.spec_from_file_location("benchmarks", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["benchmarks"])
importlib.import_module("benchmarks.kernels.worker").main(sys.argv[2:])
"""
_LIMIT_S = 600.0


class WorkerError(RuntimeError):
    """A worker answered with an error, or ended."""


# -- the parent's side --


class Worker:
    """A worker process. It answers requests in order; a worker that does not answer in time is killed."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=dict(environment)
        )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin and self._process.stdout
        clock = threading.Timer(_LIMIT_S, self._process.kill)
        clock.start()
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            clock.cancel()
        if not line:
            raise WorkerError(f"the worker ended during '{do}': {self._last_output()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _last_output(self) -> str:
        code = self._process.wait(timeout=10)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"exit code {code}; {lines[-1] if lines else 'no output'}"

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}


def start_ours(threads: int) -> Worker:
    """A worker in this environment: this package and torch."""
    return Worker([sys.executable, "-m", f"{__package__}.worker", "ours", "torch"], _environment(threads))


def start_peer(python: str, threads: int) -> Worker:
    """A worker in a peer's environment."""
    environment = _environment(threads)
    environment.pop("PYTHONPATH", None)  # it names packages of this environment
    return Worker([python, "-c", LOAD, str(FOLDER), "fbgemm"], environment)


# -- the worker's side --


class ContenderServer:
    """The contenders that a worker has built, with their inputs."""

    def __init__(self, libraries: list[str]) -> None:
        self.libraries = libraries
        self.chunks: dict[str, Any] = {}
        self.contenders: dict[str, Any] = {}

    def hello(self) -> dict[str, Any]:
        versions: dict[str, Any] = {}
        for library in self.libraries:
            versions |= _module(library).versions()
        return {"versions": versions}

    def build(self, library: str, job: dict[str, Any], kind: str) -> dict[str, Any]:
        from benchmarks.kernels.cases import Workload
        from benchmarks.kernels.contender import chunk_of

        wanted = Workload.from_json(job)
        labels = []
        for contender in contenders_of(library, wanted, "cpu"):
            self.contenders[contender.label] = contender
            self.chunks[contender.label] = chunk_of(contender, wanted, kind, "cpu")
            self.chunks[contender.label](2)
            labels.append(contender.label)
        return {"labels": labels}

    def run(self, label: str, iterations: int) -> dict[str, Any]:
        return {"ms": self.chunks[label](iterations)}

    def stats(self, label: str) -> dict[str, Any]:
        cache = self.contenders[label].cache
        return {"stats": cache.stats() if cache else {}}

    def threads(self, count: int) -> dict[str, Any]:
        import torch

        torch.set_num_threads(count)
        return {}

    def drop(self) -> dict[str, Any]:
        self.chunks.clear()
        self.contenders.clear()
        gc.collect()
        return {}


def _module(library: str) -> Any:
    return import_module(f"benchmarks.kernels.{MODULES[library]}_contender")


def contenders_of(library: str, job: Any, device: str) -> list[Any]:
    """Build and check the contenders of a library."""
    module = _module(library)
    build = module.int8_contenders if library == "ours-int8" else module.contenders
    found: list[Any] = build(job, device)
    return found


def serve(server: Any, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until the input ends."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(libraries: list[str]) -> None:
    # Answers use a separate descriptor: output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(ContenderServer(libraries), sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
