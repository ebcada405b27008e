"""Saves that are written while training goes on: what they hold is the model at the moment of the call."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
import weakref

import pytest
import torch
from test_save import CONFIGURATIONS, Model, assert_same_state, collection, steps, train

import thermocline as tc
from thermocline.checkpoint import copy_budget as rooms
from thermocline.checkpoint import save_async as background
from thermocline.checkpoint import snapshot
from thermocline.checkpoint.format import sections, write
from thermocline.checkpoint.reader import Checkpoint
from thermocline.checkpoint.save import begin_save
from thermocline.checkpoint.snapshot import Snapshot


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    monkeypatch.setattr(sections, "SECTION_BYTES", 1 << 13)
    monkeypatch.setattr(sections, "_WHOLE", 64)
    monkeypatch.setattr(snapshot, "_PIECE", 23)


@pytest.fixture
def slow_reading(monkeypatch):
    """The thread that writes takes its time, so that many steps come between."""
    read = Snapshot.read

    def slowly(self, table, at):
        time.sleep(0.01)
        return read(self, table, at)

    monkeypatch.setattr(Snapshot, "read", slowly)


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
def test_what_is_saved_is_the_moment_of_the_call_whatever_changes_meanwhile(tmp_path, monkeypatch, name):
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


@pytest.mark.parametrize("room", [1 << 28, 30_000])
def test_threads_agree_also_where_steps_have_to_wait_for_room(tmp_path, monkeypatch, room):
    monkeypatch.setattr(rooms, "ROOM", room)
    monkeypatch.setattr(rooms, "SHARE", 0)
    most, full = 0, threading.Event()
    keep, fits, read = Snapshot.keep, rooms.Room.fits, Snapshot.read

    def measured(self, rows):
        nonlocal most
        keep(self, rows)
        most = max(most, self._room.used)

    def told(self, size):
        if not fits(self, size):
            full.set()
        return fits(self, size)

    def after_that(self, table, at):  # until a step waits, or all of them are done, nothing is read
        assert full.wait(120)
        return read(self, table, at)

    monkeypatch.setattr(Snapshot, "keep", measured)
    monkeypatch.setattr(rooms.Room, "fits", told)
    monkeypatch.setattr(Snapshot, "read", after_that)
    torch.manual_seed(2)
    module = collection(precision={"fp32": 0.05, "int8": 0.1, "int4": 0.85})
    steps(module, 0, 10)
    then = copy.deepcopy(module)
    under_way = tc.save_async(module, tmp_path, progress={"batch": 10})
    steps(module, 200, 230)
    assert full.is_set() == (room < 1 << 20)
    full.set()
    under_way.wait()
    assert under_way.done and 0 < most <= room
    assert Checkpoint.open(tmp_path).manifest.step == 10
    assert_goes_on_alike(tc.load(tmp_path), then, 10)


@pytest.mark.parametrize("room", [1 << 28, 5000])
def test_copies_of_the_cache_and_the_dense_part_count_and_what_is_too_large_for_memory_lies_in_a_file(
    tmp_path, monkeypatch, room
):
    monkeypatch.setattr(rooms, "ROOM", room)
    monkeypatch.setattr(rooms, "SHARE", 0)
    made, filed = [], []
    begin, to_file = rooms.Room.__init__, rooms.Room._copy_to_file
    monkeypatch.setattr(rooms.Room, "_copy_to_file", lambda self, each: [to_file(self, each), filed.append(each.nbytes)][0])
    monkeypatch.setattr(rooms.Room, "__init__", lambda self, *given: [begin(self, *given), made.append(self)][0])
    torch.manual_seed(7)
    model = Model()
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, dense, 0, 5)
    under_way = tc.save_async(model, tmp_path, optimizers=dense)
    train(model, dense, 5, 7)
    under_way.wait()
    (one,) = made  # of all modules together
    copied = [value for state in dense.state.values() for value in state.values()] + list(model.top.parameters())
    for module in (model.rows, model.bag):
        copied += [array for name, array in module.state_dict().items() if name.startswith(("cache_", "hyper", "clock"))]
    size = sum(each.numel() * each.element_size() for each in copied)
    rows = model.rows.arena.rows + model.bag.arena.rows  # a mark each
    if room == 1 << 28:
        assert one.most >= size + rows and not filed
    else:
        assert 0 <= size - sum(filed) <= one.bytes // 2 < size
    other = Model()
    its = torch.optim.Adam(other.parameters(), lr=0.01)
    tc.load(tmp_path, into=other, optimizers=its)
    train(other, its, 5, 7)
    for module in (model.rows, model.bag, other.rows, other.bag):
        module.flush()
    assert_same_state(model, other)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors") == [
        "manifest.json"
    ]


def test_an_incremental_save_in_the_background_and_the_one_after_it_miss_nothing(tmp_path, slow_reading):
    torch.manual_seed(3)
    module = collection(precision="int8", cache=0.1)
    for first in (0, 10):
        steps(module, first, first + 1)
        then = copy.deepcopy(module)
        under_way = tc.save_async(module, tmp_path, incremental=True)
        steps(module, first + 1, first + 3)
        under_way.wait()
        assert_goes_on_alike(tc.load(tmp_path), then, first + 1)
    tc.save(module, tmp_path, incremental=True)
    assert [save.kind for save in Checkpoint.open(tmp_path).manifest.saves] == ["full"] + 2 * ["incremental"]
    assert_goes_on_alike(tc.load(tmp_path), module, 40)


def test_the_dense_part_and_its_optimizer_are_of_that_moment_too(tmp_path, slow_reading):
    torch.manual_seed(4)
    model = Model()
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, dense, 0, 5)
    under_way = tc.save_async(model, tmp_path, optimizers=dense)
    train(model, dense, 5, 9)
    under_way.wait()
    other = Model()
    its = torch.optim.Adam(other.parameters(), lr=0.01)
    tc.load(tmp_path, into=other, optimizers=its)
    train(other, its, 5, 9)
    for module in (model, other):
        module.rows.flush()
        module.bag.flush()
    assert_same_state(model, other)


def test_what_goes_wrong_is_raised_by_wait_and_the_next_save_has_all_changes(tmp_path, monkeypatch):
    torch.manual_seed(5)
    bag = tc.EmbeddingBag(300, 8)
    tc.save(bag, tmp_path, incremental=True)
    bag(torch.arange(20).view(10, 2)).sum().backward()

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(write, "write_file", fail)
        under_way = tc.save_async(bag, tmp_path, incremental=True)
        with pytest.raises(OSError, match="No space"):
            under_way.wait()
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


def test_the_next_save_has_the_memory_of_the_copies_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "_PIECE", 1)
    torch.manual_seed(8)
    module = collection(precision="int8", cache=0.1)
    places = []
    for first in (0, 5):
        steps(module, first, first + 3)
        then = copy.deepcopy(module)
        under_way = tc.save_async(module, tmp_path)
        steps(module, first + 3, first + 5)
        under_way.wait()
        places.append({each.ctypes.data for each in rooms._SPARE})
        assert_goes_on_alike(tc.load(tmp_path), then, first + 3)
    assert places[0] == places[1] and len(places[0]) > 5


def test_sections_are_put_together_in_the_memory_of_the_one_before(tmp_path, monkeypatch):
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


def test_modules_are_written_in_the_same_memory_one_after_another_and_what_was_copied_goes_with_the_save(tmp_path, monkeypatch):
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
    room = saving._room
    saving.write(gently=True)
    saving.publish()
    assert len(places) >= 5 and len(set.union(*places)) <= 2 * len(places[0])
    assert room.memory.bytes == 0 and not any(source() for source in sources)
    other = torch.nn.ModuleList([tc.EmbeddingBag(301, 8, rows=tc.RowConfig("int8", cache=0.1)) for _ in range(5)])
    tc.load(tmp_path, into=other)
    assert_same_state(model, other)


def test_a_step_that_is_interrupted_while_it_waits_for_its_turn_asks_no_more(tmp_path):
    class Interrupted:
        def acquire(self):
            raise KeyboardInterrupt

        __enter__ = acquire

        def __exit__(self, *_):
            raise AssertionError("it was never entered")

    room = rooms.Room(0, tmp_path, 0)
    turn, room.turn = room.turn, Interrupted()
    with pytest.raises(KeyboardInterrupt), room.turn_of_step():
        pass
    room.turn = turn
    assert not room._asking, "for which the thread that writes would wait"
    with room.turn_of_step(), room.turn_of_writer():
        pass


def test_a_rank_without_room_can_still_tell_the_others_that_it_has_failed(tmp_path):
    for name in ("rows-0001-000.safetensors", "rows-0001-001.safetensors", "rows-0000-000.safetensors"):
        (tmp_path / name).touch()
    write.leave_failure(tmp_path, 1, "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0001.json", "rows-0000-000.safetensors"]
    with pytest.raises(tc.ThermoclineError, match="rank 1 stopped: No space left"):
        write.notes(tmp_path, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
def test_the_thread_that_writes_gives_up_real_time_priority():
    """Which it has from a program that was started with `chrt`: steps would wait for its turns of 100 ms."""
    seen = []

    def look():
        here = threading.get_native_id()
        try:
            os.sched_setscheduler(here, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            seen.append(None)
            return
        background._step_back()
        seen.append(os.sched_getscheduler(here))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if seen == [None]:
        pytest.skip("no permission for real-time priority here")
    assert seen == [os.SCHED_OTHER]
