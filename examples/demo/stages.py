"""Stages that run once: the result of a stage is kept in the demo's folder.

The result is written atomically, after everything else that the stage writes. So an interrupted demo continues with the first
unfinished stage. Results belong to their settings: a demo with other settings starts again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thermocline.errors import ThermoclineError

Found = dict[str, Any]
Say = Callable[[str], None]
# Called with steps done, total steps, and the current work.
ReportProgress = Callable[[int, int, str], None]

_PROGRESS = "progress "  # prefix of a child's progress lines


@dataclass
class Stages:
    """Runs stages in a folder and reports progress."""

    folder: Path
    settings: Mapping[str, Any]
    say: Say
    report: ReportProgress
    count: int

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.settings, sort_keys=True, default=str)
        self._settings_hash = hashlib.sha256(text.encode()).hexdigest()
        self._number = 0

    def do(self, name: str, what: str, work: Callable[[], Found]) -> Found:
        """The result of `work`, or its kept result."""
        self._number += 1
        place = f"[{self._number}/{self.count}] {what}"
        file = self.folder / f"{name}.json"
        if (kept := self._kept(file)) is not None:
            self.say(f"{place}: kept")
            return kept
        self.say(place)
        self.report(0, 1, what)
        start = time.perf_counter()
        found = {**work(), "seconds": time.perf_counter() - start}
        write(file, {"made_with": self._settings_hash, "found": found})
        return found

    def _kept(self, file: Path) -> Found | None:
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        found: Found | None = kept.get("found") if kept.get("made_with") == self._settings_hash else None
        return found

    def call(self, *words: object) -> None:
        """Run a thermocline command in the folder, and print it."""
        line = [str(word) for word in words]
        self.say(f"      $ thermocline {' '.join(line)}")
        self.python(["-m", "thermocline", *line, "--quiet"])

    def python(self, arguments: Sequence[str]) -> None:
        """Run Python in the folder and forward its progress; the child ends with this process."""
        command = [sys.executable, *arguments]
        with open(self.folder / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    if line.startswith(_PROGRESS):
                        self.report(*json.loads(line.removeprefix(_PROGRESS)))
                    else:
                        log.write(line)
                code = child.wait()
            finally:
                end(child)
        if code:
            last = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
            raise ThermoclineError(f"a step of the demo exited with {code}: {last} (see {self.folder / 'log.txt'})")


def show_progress(done: int, total: int, what: str) -> None:
    """Print a progress line for the parent process."""
    print(_PROGRESS + json.dumps([done, total, what]), flush=True)


def write(file: Path, found: object) -> None:
    """Write JSON atomically."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1), encoding="utf-8")
    os.replace(part, file)


def environment() -> dict[str, str]:
    """Environment of children: the checkout, and one thread each that sleeps when idle, because processes outnumber cores."""
    checkout = str(Path(__file__).parents[2])
    paths = os.pathsep.join(path for path in (checkout, os.environ.get("PYTHONPATH")) if path)
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GRPC_VERBOSITY": "NONE"}
    return {**os.environ, **threads, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def end(child: subprocess.Popen[str]) -> None:
    """End a child and its children: SIGTERM first, SIGKILL after 20 seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
    if child.stdout is not None:
        child.stdout.close()
