"""Processes that are killed while they save, disks that are full, files that are damaged."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch

import thermocline as tc
from support import has
from thermocline import checkpoint
from thermocline.checkpoint import Checkpoint, compact
from thermocline.checkpoint.format import folder
from thermocline.checkpoint.format.manifest import Manifest

PACKAGE = str(Path(checkpoint.__file__).parent)


def bag_of(number: float) -> tc.EmbeddingBag:
    bag = tc.EmbeddingBag(100, 4, rows=tc.RowConfig("fp32"))
    bag.set_rows(torch.arange(100), torch.full((100, 4), float(number)))
    return bag


def number_in(path) -> float:
    """What was saved, if it is whole."""
    weight = tc.load(path).weight
    assert bool((weight == weight[0, 0]).all()), "a mixture of two saves"
    return float(weight[0, 0])


def in_a_fork(work) -> int:
    """Run something in a copy of this process; how it ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def lines_of(work, die_at: int) -> int:
    """Run something, counting lines of the checkpoint code; at line `die_at` the process kills itself as kill -9 would."""
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith((PACKAGE, os.path.dirname(os.__file__) + "/shutil.py")):
            return None
        lines += event == "line"
        if lines == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines


def test_a_kill_at_any_line_of_a_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    old, new = bag_of(1), bag_of(2)
    tc.save(old, tmp_path / "count")
    total = lines_of(lambda: tc.save(new, tmp_path / "count"), -1)
    assert number_in(tmp_path / "count") == 2 and total > 200
    tc.save(old, tmp_path / "it")
    seen = []
    for die_at in [*range(1, total, 37), *range(total - 40, total, 3)]:  # the last lines are those that make it visible
        status = in_a_fork(lambda die_at=die_at: lines_of(lambda: tc.save(new, tmp_path / "it"), die_at))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        Checkpoint.open(tmp_path / "it").verify()
        seen.append(number_in(tmp_path / "it"))
        tc.save(old, tmp_path / "it")
        assert folder.leftovers(tmp_path / "it", Manifest.read(tmp_path / "it")) == [], "the next save cleans up"
        assert number_in(tmp_path / "it") == 1
    assert set(seen) == {1, 2}


def test_a_kill_while_saving_what_changed_or_while_compacting_loses_nothing(tmp_path):
    bag = bag_of(1)
    tc.save(bag, tmp_path, incremental=True)
    bag.set_rows(torch.arange(0, 100, 2), torch.full((50, 4), 2.0))
    expected = [bag_of(1).weight, bag.weight]
    work = {"save": lambda: tc.save(bag, tmp_path, incremental=True), "compact": lambda: compact(tmp_path)}
    for what, run in work.items():
        for die_at in range(60, 420, 90):
            assert os.WIFSIGNALED(in_a_fork(lambda run=run, die_at=die_at: lines_of(run, die_at)))
            assert any(torch.equal(tc.load(tmp_path).weight, each) for each in expected), what
            if what == "compact":
                assert torch.equal(tc.load(tmp_path).weight, expected[1])
        run()
        assert torch.equal(tc.load(tmp_path).weight, expected[1])
    tc.save(bag, tmp_path, incremental=True)
    assert folder.leftovers(tmp_path, Manifest.read(tmp_path)) == []


def test_killed_first_save_leaves_no_checkpoint_and_the_next_one_works(tmp_path):
    status = in_a_fork(lambda: lines_of(lambda: tc.save(bag_of(1), tmp_path), 200))
    assert os.WIFSIGNALED(status) and any(tmp_path.iterdir())
    with pytest.raises(tc.FormatError, check=has(path=tmp_path / "manifest.json")):
        tc.load(tmp_path)
    tc.save(bag_of(3), tmp_path)
    assert number_in(tmp_path) == 3 and len(list(tmp_path.iterdir())) == 2


def test_full_disk_raises_and_keeps_the_old_checkpoint(tmp_path):
    tc.save(bag_of(1), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = tc.EmbeddingBag(10_000, 16, rows=tc.RowConfig("fp32"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(tc.ThermoclineError) as failed:
            tc.save(large, tmp_path)
        assert "rows-0000-000.safetensors" in str(failed.value) and isinstance(failed.value.__cause__, OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert number_in(tmp_path) == 1 and len(list(tmp_path.iterdir())) == 2, "and what was written is removed"


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    with pytest.raises(tc.ThermoclineError) as failed:
        tc.save(bag_of(1), "/proc/nothing")
    assert failed.value.__cause__.filename == "/proc/nothing"
    (tmp_path / "file").write_text("")
    with pytest.raises(tc.BadInput, check=has(parameter="folder", path=tmp_path / "file")):
        tc.save(bag_of(1), tmp_path / "file")
    with pytest.raises(tc.BadInput, check=has(parameter="folder", files=["file"])):
        tc.save(bag_of(1), tmp_path)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(5)
    bag = tc.EmbeddingBag(100, 5, rows=tc.RowConfig("int8", cache=0.2))
    bag(torch.arange(100).view(50, 2)).sum().backward()
    tc.save(bag, tmp_path)
    return tmp_path


def files(path):
    return sorted(path.rglob("*.safetensors"))


def test_a_bit_that_flips_anywhere_is_found_and_its_file_named(saved):
    for file in [*files(saved), saved / "manifest.json"]:
        good = file.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 23)):
            file.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            with pytest.raises(tc.FormatError) as error:
                tc.load(saved)
            assert file.name in str(error.value) and "checkpoint" in str(error.value)
        file.write_bytes(good)
    tc.load(saved)


def test_a_file_that_is_cut_or_missing_is_found_and_named(saved):
    for file in files(saved):
        good = file.read_bytes()
        for size in (0, 5, 100, len(good) - 1):
            file.write_bytes(good[:size])
            with pytest.raises(tc.FormatError, check=has(path=file)):
                tc.load(saved)
        file.unlink()
        with pytest.raises(tc.FormatError, check=has(path=file)):
            Checkpoint.open(saved)
        file.write_bytes(good)
    tc.load(saved)


def test_a_failed_load_leaves_the_model_as_it_was(saved):
    file = files(saved)[0]
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    torch.manual_seed(6)
    bag = tc.EmbeddingBag(100, 5, rows=tc.RowConfig("int8", cache=0.2))
    before = bag.weight
    with pytest.raises(tc.FormatError, check=has(path=file)):
        tc.load_into(bag, saved)
    assert torch.equal(bag.weight, before)


def test_a_newer_version_is_refused_with_the_package_that_reads_it(saved):
    path = saved / "manifest.json"
    text = path.read_text().replace('"version": 2', '"version": 7').replace('"package": "', '"package": "9.')
    path.write_text(text)
    with pytest.raises(tc.FormatError, check=has(version=7, supported=2, package=f"9.{tc.__version__}")):
        tc.load(saved)


def test_what_does_not_fit_a_model_is_named_before_anything_is_read(saved):
    with pytest.raises(tc.BadInput, check=has(model=(101, 5), saved=(100, 5))):
        tc.load_into(tc.EmbeddingBag(101, 5), saved)
    with pytest.raises(tc.BadInput, check=has(feature="table", saved=tc.IdMap.identity(100))):
        tc.load_into(tc.EmbeddingBag(100, 5, ids=tc.IdMap.hashed(100)), saved)
    with pytest.raises(tc.BadInput, check=has(saved=[""], model=["a"])):
        tc.load_into(torch.nn.ModuleDict({"a": tc.EmbeddingBag(100, 5)}), saved)
    with pytest.raises(tc.FormatError, check=has(path=saved / "other")):
        tc.load(saved / "other")
    with pytest.warns(UserWarning, match="adagrad.*adam"):
        tc.load_into(tc.EmbeddingBag(100, 5, rows=tc.RowConfig(optimizer=tc.Adam(lr=0.1))), saved)
