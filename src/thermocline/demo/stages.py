"""Stages one after another, each done once: what a stage found is kept in the demo's folder and not done again.

A stage's result is written aside and renamed, after everything else that the stage writes. So whenever the demo is interrupted,
running it again begins with the first stage that had not ended. Results hold for the settings they were made with: a demo with
other settings begins anew.
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
# Told the steps done, the steps in all, and what is being worked on.
ReportProgress = Callable[[int, int, str], None]

_PROGRESS = "progress "  # how a line of a child begins that is meant for the bar


@dataclass
class Stages:
    """The folder, and what is told on the way."""

    folder: Path
    settings: Mapping[str, Any]
    say: Say
    report: ReportProgress
    count: int

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.settings, sort_keys=True, default=str)
        self._made_with = hashlib.sha256(text.encode()).hexdigest()
        self._number = 0

    def do(self, name: str, what: str, work: Callable[[], Found]) -> Found:
        """What `work` finds, or found before."""
        self._number += 1
        place = f"[{self._number}/{self.count}] {what}"
        file = self.folder / f"{name}.json"
        if (kept := self._kept(file)) is not None:
            self.say(f"{place}: done before")
            return kept
        self.say(place)
        self.report(0, 1, what)
        start = time.perf_counter()
        found = {**work(), "seconds": time.perf_counter() - start}
        write(file, {"made_with": self._made_with, "found": found})
        return found

    def _kept(self, file: Path) -> Found | None:
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        found: Found | None = kept.get("found") if kept.get("made_with") == self._made_with else None
        return found

    def call(self, *words: object) -> None:
        """Run our own command in the folder, as a reader would, and say so."""
        line = [str(word) for word in words]
        self.say(f"      $ thermocline {' '.join(line)}")
        self.python(["-m", "thermocline", *line, "--quiet"])

    def python(self, arguments: Sequence[str]) -> None:
        """Run Python in the folder. Its lines of progress go to the bar; it is ended with this process."""
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
            raise ThermoclineError(f"a step of the demo left with {code}: {last} (all it said: {self.folder / 'log.txt'})")


def show_progress(done: int, total: int, what: str) -> None:
    """Called by a child: a line for the bar of the process that started it."""
    print(_PROGRESS + json.dumps([done, total, what]), flush=True)


def write(file: Path, found: object) -> None:
    """JSON that is there whole or not at all."""
    aside = file.with_suffix(".part")
    aside.write_text(json.dumps(found, indent=1), encoding="utf-8")
    os.replace(aside, file)


def environment() -> dict[str, str]:
    """Of children: this package, one thread each, and threads that wait instead of spinning, for there are more than cores."""
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH")) if path)
    calm = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GRPC_VERBOSITY": "NONE"}
    return {**os.environ, **calm, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def end(child: subprocess.Popen[str]) -> None:
    """End a child and all that it started, in the order of politeness."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
    if child.stdout is not None:
        child.stdout.close()
