"""The thread pool: several callers at once, forked children, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from thermocline.kernels.cpu import threads


@pytest.fixture(autouse=True)
def _three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_every_task_runs_once() -> None:
    for count in (0, 1, 2, 1000):
        seen: list[int] = []
        threads.run(seen.append, count)
        assert sorted(seen) == list(range(count))


def test_helpers_take_part() -> None:
    names = set()
    three = threading.Barrier(3)

    def task(number: int) -> None:
        names.add(threading.current_thread().name)
        three.wait(60)  # passes when three threads have a task each

    threads.run(task, 30)
    assert len(names) == 3


def test_one_thread_means_the_caller_alone() -> None:
    torch.set_num_threads(1)
    names = set()
    threads.run(lambda _: names.add(threading.current_thread().name), 20)
    assert names == {threading.current_thread().name}


def test_an_error_in_a_task_reaches_the_caller_and_the_pool_lives_on() -> None:
    failure = ValueError("task five")

    def task(number: int) -> None:
        if number == 5:
            raise failure

    for _ in range(3):
        with pytest.raises(ValueError, check=lambda error: error is failure):
            threads.run(task, 50)
    seen: list[int] = []
    threads.run(seen.append, 50)
    assert len(seen) == 50


def test_many_callers_at_once_and_jobs_inside_tasks_do_not_block_each_other() -> None:
    totals: list[int] = []

    def caller() -> None:
        for _ in range(20):
            seen: list[int] = []
            threads.run(lambda _, seen=seen: threads.run(seen.append, 5), 20)
            totals.append(len(seen))

    callers = [threading.Thread(target=caller, daemon=True) for _ in range(8)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(timeout=120)
    assert totals == [100] * 160


_CHILD = """
import os, threading, time, torch
from thermocline import formats as F
from thermocline.kernels import LookupCall
from thermocline.kernels.cpu import threads
from thermocline.kernels.gather import cpu
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

torch.set_num_threads(3)
arena = Arena([TableSpec(500, 16, "int8")])
arena.randomize_(1.0, torch.Generator().manual_seed(0))
ids, offsets = torch.arange(3000) % 500, torch.arange(0, 3001, 3)
look = lambda: cpu.gather_pool(arena.arrays, LookupCall(ids, offsets, None, F.SUM))[0]
wanted = look()
stop = False
def busy():
    while not stop:
        assert torch.equal(look(), wanted)
others = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
[t.start() for t in others]
failed = 0
for _ in range(5):  # fork while other threads are in the middle of jobs
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(120)
        right = all(torch.equal(look(), wanted) for _ in range(20))
        names, three = set(), threading.Barrier(3)
        threads.run(lambda _: (names.add(threading.current_thread().name), three.wait(60)), 12)
        os._exit(0 if right and len(names) == 3 else 1)  # helpers of its own
    failed += os.waitpid(child, 0)[1] != 0
stop = True
[t.join() for t in others]
os._exit(failed)  # how a process that forked under load shuts Python down is not what is tested here
"""


def test_kernels_work_in_forked_children_while_other_threads_use_them(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(_CHILD)
    done = subprocess.run([sys.executable, str(script)], timeout=600, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_helpers_end_when_the_pool_is_closed() -> None:
    pool = threads._ThreadPool()
    seen: list[int] = []
    job = threads._TaskSet(seen.append, 9)
    pool.call(job, 3)
    job.work()
    job.done.acquire()
    pool.close()
    assert len(seen) == 9 and not any(thread.is_alive() for thread in pool.threads)


def _environment() -> dict[str, str]:
    source = str(Path(threads.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
