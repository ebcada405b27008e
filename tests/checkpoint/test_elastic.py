"""Jobs that are killed and started again: by torchrun, and by the crash benchmark."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import elastic_job
import pytest
from cases import Model, batches, exact_loss, joined

HERE = Path(__file__).parent


def torchrun(folder: Path, kill_at: list[int], ranks: int = 2) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE.parent / "distributed"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/checkpoints.md says why
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    launcher += ["--max-restarts", "1", "--monitor-interval", "0.1"]
    command = [*launcher, str(HERE / "elastic_job.py"), str(folder), *map(str, kill_at)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.slow
def test_a_job_restarted_by_torchrun_dies_and_goes_on_alone_on_three_ranks_exactly(tmp_path):
    died = torchrun(tmp_path, [4, 7])
    assert died.returncode != 0 and "SIGKILL" in died.stderr
    assert began(tmp_path) == {"began-0-0": 0, "began-0-1": 0, "began-1-0": 3, "began-1-1": 3}
    done = torchrun(tmp_path, [], ranks=3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [began(tmp_path)[f"began-0-{rank}"] for rank in range(3)] == [6, 6, 6]
    assert (tmp_path / "digest").read_text() == digest_of_one_process([2] * 6 + [3] * (elastic_job.STEPS - 6))


def began(folder: Path) -> dict[str, int]:
    """The first step of each rank by start."""
    return {path.name: int(path.read_text()) for path in folder.glob("began-*")}


def digest_of_one_process(ranks: list[int]) -> str:
    """Of all rows after steps on so many ranks each; gradients are whole numbers: the order of sums makes no difference."""
    model = Model()
    for step, size in enumerate(ranks):
        exact_loss(model.tables(joined(batches(step, [12 // size] * size))).values(), step, 0).backward()
    rows = [model.tables.get_rows(table.name).numpy().tobytes() for table in model.tables.tables]
    return hashlib.sha256(b"".join(rows)).hexdigest()


@pytest.mark.slow
def test_ranks_killed_at_random_moments_lose_nothing(tmp_path):
    code = """
import json, pathlib, sys
from benchmarks.checkpoint import crash
crash.STEPS, crash._CACHE = 12, 0.0
print(json.dumps(crash.run(2, pathlib.Path(sys.argv[1]), lambda *_: None)["rows"]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert (row["kills"], row["lost"], row["corrupt"], row["ratio"]) == (2, 0, 0, 1.0)
