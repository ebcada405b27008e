"""The forkserver: starts shard processes, detects their end, and is replaced when it is gone."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thermocline.serve.errors import ShardDown
from thermocline.serve.tables import forkserver as module
from thermocline.serve.tables.forkserver import Forkserver, ShardProcess

PATIENCE_S = 120.0


@pytest.fixture
def forkserver() -> Iterator[Forkserver]:
    forkserver = Forkserver()
    yield forkserver
    forkserver.close()


def replies(shard: ShardProcess) -> bool:
    shard.send({"do": "drop", "version": "unknown"})
    return shard.reply() == {}


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_forked_shard_processes_reply_independently(forkserver: Forkserver) -> None:
    shards = [forkserver.start(number) for number in range(3)]
    assert len({shard.pid for shard in shards}) == 3 and all(map(replies, shards))
    assert {parent_of(shard.pid) for shard in shards} == {forkserver.process.pid}
    shards[1].socket.close()  # no other process has a copy of it
    assert shards[1].wait(PATIENCE_S) and replies(shards[0]) and replies(shards[2])
    for shard in shards:
        shard.end()


def test_a_killed_process_is_detected_and_reaped_at_the_next_start(forkserver: Forkserver) -> None:
    shard = forkserver.start(0)
    assert replies(shard) and not shard.wait(0)
    os.kill(shard.pid, signal.SIGKILL)
    assert shard.wait(PATIENCE_S)
    with pytest.raises(EOFError):
        shard.reply()
    other = forkserver.start(0)
    assert replies(other)
    with pytest.raises(ProcessLookupError):
        os.kill(shard.pid, 0)  # not a zombie either
    other.end()


def test_processes_outlive_their_forkserver_and_another_replaces_it(forkserver: Forkserver) -> None:
    first = forkserver.start(0)
    before = forkserver.process
    before.kill()
    second = forkserver.start(1)
    assert forkserver.process.pid != before.pid
    assert replies(first) and replies(second)
    for shard in (first, second):
        shard.end()


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "thermocline", "socket", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    for path in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [path, *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forkserver = Forkserver()
    shard = forkserver.start(0)
    assert replies(shard) and not (tmp_path / "ran").exists()
    shard.end()
    forkserver.close()


def fail_to_start(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EAGAIN, "no more processes")


def fail_to_open(*_: Any) -> Any:
    raise OSError(errno.EMFILE, "no more descriptors")


@pytest.mark.parametrize("what", ["process", "sockets", "descriptor"])
def test_a_failed_start_is_a_shard_that_is_down_and_the_next_may_succeed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forkserver, arrived = Forkserver(first=7), module.receive

    def receive_alone(source: Any) -> Any:
        reply, descriptors = arrived(source)
        for descriptor in descriptors:
            os.close(descriptor)
        return reply, []

    with monkeypatch.context() as now:
        if what == "process":
            forkserver.process.kill()
            now.setattr(module.subprocess, "Popen", fail_to_start)
        elif what == "sockets":
            now.setattr(module.socket, "socketpair", fail_to_open)
        else:
            now.setattr(module, "receive", receive_alone)
        with pytest.raises(ShardDown) as down:
            forkserver.start(2)
        assert down.value.shard == 9  # the number over all hosts
    shard = forkserver.start(2)
    assert replies(shard)
    shard.end()
    forkserver.close()
