"""The example under torchrun, as a reader would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WATCHED = Path(__file__).with_name("gloo_threads.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sequence_many_gpus.py"


def test_the_example_runs_on_two_ranks_and_has_at_most_40_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(WATCHED),
        str(EXAMPLE),
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 sent " in done.stdout
    # The threads of the group that DDP keeps. A thread that releases a tensor at interpreter shutdown aborts the process.
    assert done.stdout.count("threads of gloo left: 2\n") == 2, done.stdout
