"""Measurements of one contender in a separate process, so that a crash, a CUDA error or a hang affects that contender only.

A module that is measured this way has `measure(job)`, which yields results as dicts. Each result is one line of output, so
results before a crash are kept. The last line of the error output becomes a result with an "error".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.runner.record import brief

Measurement = dict[str, Any]
LIMIT_S = 240.0


def results(module: str, job: dict[str, Any], tell: Callable[[str], None], limit_s: float = LIMIT_S) -> list[Measurement]:
    """Results of `measure(job)` of a module, from another process."""
    command = [sys.executable, "-m", __name__, module]
    with tempfile.TemporaryFile("w+", errors="replace") as log, tempfile.TemporaryFile("w+") as answers:
        tell(f"{module}: started")
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answers, stderr=log, text=True)
        try:
            process.communicate(json.dumps(job), timeout=limit_s)
            ended = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            ended = f"not finished after {limit_s:.0f} s"
        finally:
            process.kill()
            process.wait()
        answers.seek(0)
        found: list[Measurement] = [json.loads(line) for line in answers.read().splitlines() if line.endswith("}")]
        if ended:
            log.seek(0)
            lines = [line.strip() for line in log.read().splitlines() if line.strip()]
            found.append({"error": brief(f"{ended}; {lines[-1] if lines else 'no output'}")})
    return found


def tried(name: str, part: Callable[[], Measurement]) -> Measurement:
    """The named result of `part`, or the error that it raised."""
    try:
        return {"name": name, **part()}
    except Exception as error:
        return {"name": name, "error": brief(error)}


def main(module: str) -> None:
    # Results get a descriptor of their own: whatever a library prints to standard output goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for result in import_module(module).measure(json.load(sys.stdin)):
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
