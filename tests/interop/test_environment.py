"""The tests of this folder once more, in an environment that has the packages this one lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ.get("THERMOCLINE_INTEROP_PYTHON")


@pytest.mark.skipif(not PYTHON, reason="THERMOCLINE_INTEROP_PYTHON names no Python with these packages")
def test_these_tests_pass_where_their_packages_are():
    assert PYTHON is not None and sys.executable != PYTHON
    wanted = "import torchrec, lightning, accelerate, transformers"
    assert subprocess.run([PYTHON, "-W", "ignore", "-c", wanted]).returncode == 0, f"{PYTHON} cannot {wanted}"
    files = [str(file) for file in sorted(HERE.glob("test_*.py")) if file.name != Path(__file__).name]
    paths = os.pathsep.join(path for path in (str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH")) if path)
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-rs", *files], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stdout[-4000:]
    skipped = [line for line in done.stdout.splitlines() if "SKIPPED" in line]
    more = ("test_zoo", "test_ray")  # they need more packages
    assert all(any(name in line for name in more) for line in skipped), skipped
