"""The launch file for Ray Train on a real cluster of Ray: a worker is killed, a node is lost, and the job goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from thermocline.checkpoint import Checkpoint

pytest.importorskip("ray.train", reason="no Ray here; CONTRIBUTING.md says how to get it")

TRAIN = Path(__file__).parents[2] / "examples" / "cluster" / "train.py"
STEP = re.compile(r"RayTrainWorker pid=(\d+).* step (\d+) on (\d+) ranks")


class Job:
    """A job under Ray, and the steps that it has reported: process, step, ranks, and seconds since the start."""

    def __init__(self, least, folder, steps):
        command = [sys.executable, str(Path(__file__).with_name("ray_job.py")), str(least), str(folder), str(steps)]
        environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.lines, self.at = [], 0.0

    def reach(self, reached):
        """Read until a reported step is such, and return it with the seconds since the last call."""
        for line in self.process.stdout:
            self.lines.append(line)
            found = STEP.search(line)
            if found and reached(*map(int, found.groups())):
                now, before = time.monotonic(), self.at
                self.at = now
                return [*map(int, found.groups()), now - before]
        raise AssertionError("".join(self.lines[-40:]))

    def end(self):
        rest = self.process.communicate()[0]
        assert "the job has ended" in rest, rest[-4000:]


def values(folder):
    checkpoint = Checkpoint.open(folder / "saved")
    assert checkpoint.manifest.progress["step"] == 60
    return {t.name: torch.cat([block for _, block in checkpoint.values(t.name)]) for t in checkpoint.manifest.tables}


def test_a_killed_worker_changes_no_bit(tmp_path):
    job = Job(4, tmp_path / "killed", 60)
    process, *_ = job.reach(lambda process, step, ranks: step >= 19)
    os.kill(process, signal.SIGKILL)
    _, step, ranks, seconds = job.reach(lambda other, step, ranks: other != process)
    print(f"a worker was killed: {ranks} ranks went on from step {step} after {seconds:.1f} s")
    assert step >= 15 and ranks == 4
    job.end()

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(TRAIN)]
    arguments = ["--folder", str(tmp_path / "whole"), "--steps", "60", "--save-every", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*launcher, *arguments], check=True, env=environment, capture_output=True)
    found, expected = values(tmp_path / "killed"), values(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_job_goes_on_without_a_lost_node(tmp_path):
    job = Job(2, tmp_path / "run", 60)
    _, _, ranks, _ = job.reach(lambda process, step, ranks: step >= 19)
    assert ranks == 4
    job.process.stdin.write("\n")
    job.process.stdin.flush()
    _, step, ranks, seconds = job.reach(lambda process, step, ranks: ranks < 4)
    print(f"a node was lost: {ranks} ranks went on from step {step} after {seconds:.1f} s")
    assert step >= 15
    job.end()
    values(tmp_path / "run")
