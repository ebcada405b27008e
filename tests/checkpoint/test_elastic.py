"""Jobs that are killed and started again: by torchrun, and by the crash benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def torchrun(folder: Path, kill_at: int) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    paths = [str(HERE.parent / "distributed"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    command = [*launcher, "--monitor-interval", "0.1", str(HERE / "elastic_job.py"), str(folder), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_was_killed_and_it_ends_as_if_nothing_had_happened(tmp_path):
    done = torchrun(tmp_path / "killed", 7)
    assert done.returncode == 0, done.stderr[-3000:]
    began = {path.name: int(path.read_text()) for path in (tmp_path / "killed").glob("began-*")}
    assert began == {"began-0-0": 0, "began-0-1": 0, "began-1-0": 6, "began-1-1": 6}
    assert torchrun(tmp_path / "whole", -1).returncode == 0
    assert (tmp_path / "killed" / "digest").read_text() == (tmp_path / "whole" / "digest").read_text()


@pytest.mark.slow
def test_ranks_killed_at_random_moments_lose_nothing(tmp_path):
    code = (
        "import json, sys, pathlib\nfrom thermocline.bench import crash\n"
        "crash.STEPS = 12\nmeasured = crash.run(2, pathlib.Path(sys.argv[1]), lambda *_: None)\n"
        "print(json.dumps(measured['rows']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert (row["kills"], row["lost"], row["corrupt"], row["ratio"]) == (2, 0, 0, 1.0)
