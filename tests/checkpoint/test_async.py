"""Saves that are written while training continues: they hold the model at the moment of the call."""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref

import pytest
import torch
from test_save import CONFIGURATIONS, Model, assert_same_state, collection, steps, train

import thermocline as tc
from support import has
from thermocline.checkpoint import BackgroundSave, Checkpoint, background_save, copy_budget, snapshot
from thermocline.checkpoint.format import sections, write
from thermocline.checkpoint.save_job import begin_save
from thermocline.checkpoint.snapshot import Snapshot


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    monkeypatch.setattr(sections, "SECTION_BYTES", 1 << 13)
    monkeypatch.setattr(sections, "_MULTIPLE", 64)
    monkeypatch.setattr(snapshot, "_PIECE", 23)


@pytest.fixture
def slow_reading(monkeypatch):
    """The writer thread reads one section for each update of rows; `wait` lets it read the remaining ones."""
    read, copy_rows, wait = Snapshot.read, Snapshot.copy_before_write, BackgroundSave.wait
    permits = threading.Semaphore(0)

    def after_a_step(self, table, at):
        assert permits.acquire(timeout=120)
        return read(self, table, at)

    def step(self, rows):
        copy_rows(self, rows)
        permits.release()

    def release_and_wait(self):
        permits.release(1 << 20)
        wait(self)

    monkeypatch.setattr(Snapshot, "read", after_a_step)
    monkeypatch.setattr(Snapshot, "copy_before_write", step)
    monkeypatch.setattr(BackgroundSave, "wait", release_and_wait)


def assert_goes_on_alike(one, other, first):
    """The same rows now, after more steps, and rounded: stale codes of rows in slots alone may differ."""
    for table in one.tables:
        assert torch.equal(one.get_rows(table.name), other.get_rows(table.name)), table.name
    assert all(torch.equal(a, b) for a, b in zip(one.trainer.states, other.trainer.states, strict=True))
    assert steps(one, first, first + 5) == steps(other, first, first + 5)
    one.flush()
    other.flush()
    assert_same_state(one, other)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_background_save_holds_the_rows_at_the_moment_of_the_call(tmp_path, monkeypatch, name):
    torch.manual_seed(1)
    module = collection(**CONFIGURATIONS[name])
    steps(module, 0, 15)
    then = copy.deepcopy(module)
    read, at = Snapshot._read_piece, 15

    def between(
        self, section, first, here
    ):  # steps before and after every few rows that the thread reads: nothing is left to chance
        nonlocal at
        at += 1
        steps(module, at, at + 1)
        read(self, section, first, here)
        steps(module, at + 100, at + 101)

    monkeypatch.setattr(Snapshot, "_read_piece", between)
    tc.save_async(module, tmp_path).wait()
    monkeypatch.undo()
    assert at > 18 and module.arena.before_write_hook is None
    assert_goes_on_alike(tc.load(tmp_path), then, 15)


@pytest.mark.parametrize("budget", [1 << 28, 30_000])
def test_background_save_is_exact_when_steps_wait_for_the_copy_budget(tmp_path, monkeypatch, budget):
    monkeypatch.setattr(copy_budget, "MIN_BYTES", budget)
    monkeypatch.setattr(copy_budget, "SHARE", 0)
    most, full = 0, threading.Event()
    keep, fits, read = Snapshot.copy_before_write, copy_budget.CopyBudget.fits, Snapshot.read

    def measured(self, rows):
        nonlocal most
        keep(self, rows)
        most = max(most, self._budget.used)

    def told(self, size):
        if not fits(self, size):
            full.set()
        return fits(self, size)

    def after_that(self, table, at):  # until a step waits, or all of them are done, nothing is read
        assert full.wait(120)
        return read(self, table, at)

    monkeypatch.setattr(Snapshot, "copy_before_write", measured)
    monkeypatch.setattr(copy_budget.CopyBudget, "fits", told)
    monkeypatch.setattr(Snapshot, "read", after_that)
    torch.manual_seed(2)
    module = collection(precision={"fp32": 0.05, "int8": 0.1, "int4": 0.85})
    steps(module, 0, 10)
    then = copy.deepcopy(module)
    pending = tc.save_async(module, tmp_path, progress={"batch": 10})
    steps(module, 200, 230)
    assert full.is_set() == (budget < 1 << 20)
    full.set()
    pending.wait()
    assert pending.done and 0 < most <= budget
    assert Checkpoint.open(tmp_path).manifest.step == 10
    assert_goes_on_alike(tc.load(tmp_path), then, 10)


@pytest.mark.parametrize("budget", [1 << 28, 5000])
def test_copies_count_against_the_budget_and_large_ones_go_to_a_file(tmp_path, monkeypatch, budget):
    monkeypatch.setattr(copy_budget, "MIN_BYTES", budget)
    monkeypatch.setattr(copy_budget, "SHARE", 0)
    made, filed = [], []
    budgets = copy_budget.CopyBudget
    begin, to_file = budgets.__init__, budgets._copy_to_file
    monkeypatch.setattr(budgets, "_copy_to_file", lambda self, each: [to_file(self, each), filed.append(each.nbytes)][0])
    monkeypatch.setattr(budgets, "__init__", lambda self, *given: [begin(self, *given), made.append(self)][0])
    torch.manual_seed(7)
    model = Model()
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, dense, 0, 5)
    pending = tc.save_async(model, tmp_path, optimizers=dense)
    train(model, dense, 5, 7)
    pending.wait()
    (one,) = made  # of all modules together
    copied = [value for state in dense.state.values() for value in state.values()] + list(model.top.parameters())
    for module in (model.rows, model.bag):
        copied += [array for name, array in module.state_dict().items() if name.startswith(("cache_", "hyper", "clock"))]
    size = sum(each.numel() * each.element_size() for each in copied)
    rows = model.rows.arena.rows + model.bag.arena.rows  # a mark each
    if budget == 1 << 28:
        assert one.peak >= size + rows and not filed
    else:
        assert 0 <= size - sum(filed) <= one.bytes // 2 < size
    other = Model()
    its = torch.optim.Adam(other.parameters(), lr=0.01)
    tc.load_into(other, tmp_path, optimizers=its)
    train(other, its, 5, 7)
    for module in (model.rows, model.bag, other.rows, other.bag):
        module.flush()
    assert_same_state(model, other)
    assert (
        sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors")
        == ["manifest.json"] * 2
    )


def test_incremental_background_save_and_the_next_one_have_all_changes(tmp_path, slow_reading):
    torch.manual_seed(3)
    module = collection(precision="int8", cache=0.1)
    for first in (0, 10):
        steps(module, first, first + 1)
        then = copy.deepcopy(module)
        pending = tc.save_async(module, tmp_path, incremental=True)
        steps(module, first + 1, first + 3)
        pending.wait()
        assert_goes_on_alike(tc.load(tmp_path), then, first + 1)
    tc.save(module, tmp_path, incremental=True)
    assert [save.kind for save in Checkpoint.open(tmp_path).manifest.saves] == ["full"] + 2 * ["incremental"]
    assert_goes_on_alike(tc.load(tmp_path), module, 40)


def test_background_save_holds_dense_parameters_at_the_moment_of_the_call(tmp_path, slow_reading):
    torch.manual_seed(4)
    model = Model()
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, dense, 0, 5)
    pending = tc.save_async(model, tmp_path, optimizers=dense)
    train(model, dense, 5, 9)
    pending.wait()
    other = Model()
    its = torch.optim.Adam(other.parameters(), lr=0.01)
    tc.load_into(other, tmp_path, optimizers=its)
    train(other, its, 5, 9)
    for module in (model, other):
        module.rows.flush()
        module.bag.flush()
    assert_same_state(model, other)


def test_wait_raises_the_error_and_the_next_save_has_all_changes(tmp_path, monkeypatch):
    torch.manual_seed(5)
    bag = tc.EmbeddingBag(300, 8)
    tc.save(bag, tmp_path, incremental=True)
    bag(torch.arange(20).view(10, 2)).sum().backward()

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(write, "write_file", fail)
        pending = tc.save_async(bag, tmp_path, incremental=True)
        with pytest.raises(OSError, check=has(errno=28)):
            pending.wait()
    assert bag.arena.before_write_hook is None
    bag(torch.arange(40, 60).view(10, 2)).sum().backward()
    tc.save(bag, tmp_path, incremental=True)
    assert len(Checkpoint.open(tmp_path).manifest.saves) == 2
    assert_same_state(bag, tc.load(tmp_path))


def test_a_save_waits_for_the_one_before_it(tmp_path, slow_reading):
    torch.manual_seed(6)
    module = collection(precision="int8", cache=0.1)
    first = tc.save_async(module, tmp_path)
    tc.save(module, tmp_path)
    assert first.done and Checkpoint.open(tmp_path).number == 2


def test_next_save_reuses_the_memory_of_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(copy_budget, "_PIECE", 1)
    torch.manual_seed(8)
    module = collection(precision="int8", cache=0.1)
    places = []
    for first in (0, 5):
        steps(module, first, first + 3)
        then = copy.deepcopy(module)
        pending = tc.save_async(module, tmp_path)
        steps(module, first + 3, first + 5)
        pending.wait()
        places.append({each.ctypes.data for each in copy_budget._SPARE})
        assert_goes_on_alike(tc.load(tmp_path), then, first + 3)
    assert places[0] == places[1] and len(places[0]) > 5


def test_sections_share_buffers(tmp_path, monkeypatch):
    torch.manual_seed(9)
    module = collection(precision="int8", cache=0.1)
    steps(module, 0, 3)
    then, places, read = copy.deepcopy(module), [], Snapshot.read

    def told(self, table, at):
        found = read(self, table, at)
        places.append({each.data_ptr() for each in found})
        return found

    monkeypatch.setattr(Snapshot, "read", told)
    tc.save_async(module, tmp_path).wait()
    assert len(places) > 4 and len(set.union(*places)) <= 2 * len(places[0]), "the sections of two dimensions have some each"
    assert_goes_on_alike(tc.load(tmp_path), then, 3)


def test_modules_share_buffers_and_copies_are_freed_with_the_save(tmp_path, monkeypatch):
    torch.manual_seed(10)
    model = torch.nn.ModuleList([tc.EmbeddingBag(301, 8, rows=tc.RowConfig("int8", cache=0.1)) for _ in range(5)])
    places, sources, read = [], [], Snapshot.read

    def told(self, table, at):
        found = read(self, table, at)
        places.append({each.data_ptr() for each in found})
        sources.append(weakref.ref(self))
        return found

    monkeypatch.setattr(Snapshot, "read", told)
    saving = begin_save(model, tmp_path, None, None, False, background=True)
    budget = saving._budget
    saving.write(background=True)
    saving.publish()
    assert len(places) >= 5 and len(set.union(*places)) <= 2 * len(places[0])
    assert budget.buffers.bytes == 0 and not any(source() for source in sources)
    other = torch.nn.ModuleList([tc.EmbeddingBag(301, 8, rows=tc.RowConfig("int8", cache=0.1)) for _ in range(5)])
    tc.load_into(other, tmp_path)
    assert_same_state(model, other)


def test_interrupted_step_no_longer_blocks_the_writer(tmp_path):
    class InterruptedLock:
        def acquire(self):
            raise KeyboardInterrupt

        __enter__ = acquire

        def __exit__(self, *_):
            raise AssertionError("it was never entered")

    budget = copy_budget.CopyBudget(0, tmp_path, 0)
    lock, budget.lock = budget.lock, InterruptedLock()
    with pytest.raises(KeyboardInterrupt), budget.step_lock():
        pass
    budget.lock = lock
    assert not budget._waiting_steps, "the writer thread would wait for it"
    with budget.step_lock(), budget.writer_lock():
        pass


def test_rank_with_a_full_disk_can_still_report_its_failure(tmp_path):
    for name in ("rows-0001-000.safetensors", "rows-0001-001.safetensors", "rows-0000-000.safetensors"):
        (tmp_path / name).touch()
    write.report_failure(tmp_path, 1, "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0001.json", "rows-0000-000.safetensors"]
    with pytest.raises(tc.ThermoclineError) as failed:
        write.read_reports(tmp_path, 2)
    assert "rank 1" in str(failed.value) and "No space left on device" in str(failed.value)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
def test_writer_thread_gives_up_real_time_priority():
    """A program started with `chrt` has it; steps would wait for its time slices of 100 ms."""
    seen = []

    def look():
        here = threading.get_native_id()
        try:
            os.sched_setscheduler(here, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            seen.append(None)
            return
        background_save._lower_priority()
        seen.append(os.sched_getscheduler(here))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if seen == [None]:
        pytest.skip("no permission for real-time priority here")
    assert seen == [os.SCHED_OTHER]
