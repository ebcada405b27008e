"""Workers: the protocol, and that a peer's environment can load one without this package."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.kernels.cases import FORWARD, Shape, Workload
from benchmarks.kernels.worker import FOLDER, LOAD, ContenderServer, Worker, WorkerError, serve
from support import mentions

JOB = Workload(Shape("test", tables=2, rows=50, dim=8, batch=7, pooling=3), "int8", FORWARD)


def talk(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    serve(ContenderServer(["torch"]), lines, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_worker_builds_runs_and_drops() -> None:
    build = {"do": "build", "library": "torch", "job": JOB.to_json(), "kind": "zipf"}
    run = {"do": "run", "label": "torch quantized", "iterations": 3}
    hello, built, ran, dropped, missing = talk({"do": "hello"}, build, run, {"do": "drop"}, run)
    assert "torch" in hello["versions"]
    assert built == {"labels": ["torch quantized", "torch quantized, joined"]}
    assert len(ran["ms"]) == 3
    assert dropped == {}
    assert "KeyError" in missing["error"]


def test_a_job_survives_the_trip() -> None:
    assert Workload.from_json(json.loads(json.dumps(JOB.to_json()))) == JOB


def test_a_worker_that_dies_is_an_error_with_its_last_words() -> None:
    worker = Worker([sys.executable, "-c", "import sys; input(); sys.exit('no such library')"], {})
    with pytest.raises(WorkerError, check=mentions("exit code 1", "no such library")):
        worker.ask("hello")
    worker.close()


def test_what_a_peer_loads_imports_nothing_else_of_this_package() -> None:
    probe = (
        LOAD.rsplit("\n", 2)[0]
        + """
for module in ("kernels.worker", "kernels.contender", "runner.timing", "kernels.torch_contender", "kernels.fbgemm_contender"):
    importlib.import_module("benchmarks." + module)
print([name for name in sys.modules if name.startswith("thermocline")])
"""
    )
    done = subprocess.run([sys.executable, "-c", probe, str(FOLDER)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
