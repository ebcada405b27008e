"""Memory limits of the machine and of its control groups, and loads that do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support import has
from thermocline.errors import BadInput
from thermocline.serve.tables import memory_limits
from thermocline.serve.tables.memory_limits import free_bytes, reserve

V1 = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A made-up machine with 1 GiB, and a function that makes a control group."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1048576 kB\n")
    monkeypatch.setattr(memory_limits, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory_limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory_limits, "_GROUPS", tmp_path / "groups")

    def make(line, folder, limit, used, cache=0, prefix="", names=("memory.max", "memory.current")):
        (tmp_path / "own").write_text(line + "\n")
        path = tmp_path / "groups" / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, value in zip((*names, "memory.stat"), (limit, used, f"{prefix}inactive_file {cache}"), strict=True):
            (path / name).write_text(f"{value}\n")

    return make


def test_without_control_groups_the_machine_is_the_limit(groups):
    assert free_bytes() == 1 << 30


def test_nested_groups_of_version_2_all_count(groups):
    line = "0::/pod/container"
    groups(line, "pod/container", "max", 7 * MIB)
    groups(line, "pod", 300 * MIB, 100 * MIB, cache=50 * MIB)
    assert free_bytes() == 250 * MIB
    groups(line, "pod/container", 100 * MIB, 90 * MIB)
    assert free_bytes() == 10 * MIB
    groups(line, "pod", 100 * MIB, 120 * MIB)
    assert free_bytes() == 0


def test_groups_of_version_1_count_also_in_a_container(groups):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    line = "4:cpu,memory:/docker/0123"
    groups(line, "memory/docker/0123", 200 * MIB, 60 * MIB, cache=20 * MIB, prefix="total_", names=names)
    assert free_bytes() == 160 * MIB
    groups("4:memory:/of the host", "memory", 90 * MIB, 60 * MIB, prefix="total_", names=names)  # the root is the container's
    assert free_bytes() == 30 * MIB


def test_loads_at_the_same_time_do_not_take_the_same_memory(groups):
    with reserve(600 * MIB, "one"):
        with pytest.raises(BadInput, check=has(needed=600 * MIB, available=(1024 - 600) * MIB)), reserve(600 * MIB, "other"):
            pass
        with reserve(400 * MIB, "another"):
            pass
    with reserve(1000 * MIB, "one again"):
        pass


@pytest.mark.skipif(not os.access(V1 / "memory.limit_in_bytes", os.W_OK), reason="needs control groups of version 1, and root")
def test_the_limit_of_a_real_group_around_a_process_is_found():
    outer = V1 / f"thermocline-test-{os.getpid()}"
    try:
        (outer / "inner").mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(256 * MIB))
    except OSError as error:
        outer.exists() and outer.rmdir()
        pytest.skip(f"groups cannot be made here: {error}")
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from thermocline.serve.tables.memory_limits import free_bytes; print(free_bytes())"
    )
    command = [sys.executable, "-c", code, str(outer / "inner" / "cgroup.procs")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        for folder in (outer / "inner", outer):
            with suppress(OSError):
                folder.rmdir()
    assert 64 * MIB < int(done.stdout) <= 256 * MIB, done.stderr
