"""The supervisor: restarts shard processes, also when no process can be started for a while or a request was given up."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from thermocline.serve.errors import ShardDown
from thermocline.serve.tables import forkserver, supervisor
from thermocline.serve.tables.supervisor import Supervisor

PATIENCE_S = 120.0


@pytest.fixture
def shards() -> Iterator[Supervisor]:
    shards = Supervisor(3)
    yield shards
    shards.close()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Released whenever a shard process was replaced."""
    times, replace = threading.Semaphore(0), Supervisor._replace

    def and_release(self: Supervisor, number: int) -> None:
        replace(self, number)
        times.release()

    monkeypatch.setattr(Supervisor, "_replace", and_release)
    yield times


def test_a_shard_is_replaced_once_processes_can_be_started_again(
    shards: Supervisor, replaced: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, before = threading.Semaphore(0), shards.pids

    def fail(*_: Any, **__: Any) -> Any:
        tried.release()
        raise OSError(errno.EAGAIN, "no more processes")

    with monkeypatch.context() as now:
        now.setattr(forkserver.subprocess, "Popen", fail)
        shards._forkserver.process.kill()
        os.kill(before[1], signal.SIGKILL)
        for _ in range(7):  # of the third attempt
            assert tried.acquire(timeout=PATIENCE_S)
        assert shards.ready == [True, False, True]
    assert replaced.acquire(timeout=PATIENCE_S)
    assert shards.ready == [True] * 3
    assert [pid == old for pid, old in zip(shards.pids, before, strict=True)] == [True, False, True]


def test_the_log_has_the_end_of_a_shard_process_and_its_return(
    shards: Supervisor, replaced: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    before = shards.pids[1]
    with caplog.at_level(logging.INFO, "thermocline.serve"):
        os.kill(before, signal.SIGKILL)
        assert replaced.acquire(timeout=PATIENCE_S)
    said = [
        (line.levelname, line.getMessage(), vars(line)["fields"]["shard"], vars(line)["fields"]["pid"])
        for line in caplog.records
    ]
    assert said == [
        ("WARNING", "a shard process has ended and is restarted", 1, before),
        ("INFO", "a shard process is back", 1, shards.pids[1]),
    ]


def test_replies_to_a_failed_request_are_not_taken_for_the_next(shards: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create("not a job")
    os.write(file, b"?")
    hold = {"do": "hold", "version": "1"}
    assert all("error" in reply for reply in shards._request_all(hold, [file]))
    with monkeypatch.context() as now:
        now.setattr(supervisor, "ATTEMPTS", 0)
        with pytest.raises(ShardDown):
            shards._request_all(hold, [file])
    assert shards._request_all({"do": "drop", "version": "1"}) == [{}] * 3
    os.close(file)


def test_a_shard_that_died_very_often_is_still_replaced(
    shards: Supervisor, replaced: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_PAUSE_S", 0.0)
    before = shards.pids[0]
    shards._deaths[0] = 5000
    os.kill(before, signal.SIGKILL)
    assert replaced.acquire(timeout=PATIENCE_S)
    assert shards.pids[0] != before and shards.ready == [True] * 3


def test_a_hung_shard_process_is_shown_and_replaced(
    shards: Supervisor, replaced: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    before = shards.pids
    with caplog.at_level(logging.INFO, "thermocline.serve"):
        os.kill(before[1], signal.SIGSTOP)
        assert replaced.acquire(timeout=PATIENCE_S)
    said = [line.getMessage() for line in caplog.records]
    assert said[0] == "a shard process does not respond and is killed" and len(said) == 3
    assert [pid == old for pid, old in zip(shards.pids, before, strict=True)] == [True, False, True]
    assert shards.ready == [True] * 3 and forkserver.SILENT_S < 5


def test_a_request_to_a_hung_shard_process_is_repeated_by_another(shards: Supervisor, replaced: threading.Semaphore) -> None:
    os.kill(shards.pids[2], signal.SIGSTOP)
    assert shards._request_all({"do": "drop", "version": "1"}) == [{}] * 3


def test_a_hung_forkserver_is_replaced(
    shards: Supervisor, replaced: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards._forkserver._socket.settimeout(0.1)
    stopped = shards._forkserver.process
    stopped.send_signal(signal.SIGSTOP)
    os.kill(shards.pids[0], signal.SIGKILL)
    assert replaced.acquire(timeout=PATIENCE_S)
    assert shards.ready == [True] * 3 and shards._forkserver.process is not stopped
