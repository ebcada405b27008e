"""TorchRec's planner and `DistributedModelParallel` beside `shard_torchrec_`: equal outputs while both train, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="no TorchRec here; CONTRIBUTING.md says how to get it")


def test_a_model_sharded_by_a_plan_of_torchrec_trains_as_torchrec_does(tmp_path):
    script = str(Path(__file__).with_name("torchrec_ranks.py"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHREC_LOG_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(tmp_path / "store"), str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        said = rank.communicate(timeout=300)[0]
        assert rank.returncode == 0, said[-4000:]
