"""Several jobs in one folder, a lost manifest, damaged saves with intact ones before them, and how many saves are kept."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import thermocline as tc
from support import has
from thermocline.checkpoint import Checkpoint, compact
from thermocline.checkpoint.format import folder as folders
from thermocline.checkpoint.format.manifest import Manifest


def bag_of(number: float) -> tc.EmbeddingBag:
    bag = tc.EmbeddingBag(100, 4, rows=tc.RowConfig("fp32"))
    set_to(bag, number)
    return bag


def set_to(bag: tc.EmbeddingBag, number: float, rows: int = 100) -> None:
    bag.set_rows(torch.arange(rows), torch.full((rows, 4), float(number)))


def first_value(module) -> float:
    return float(module.weight[0, 0])


def saves_in(path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.is_dir())


def damage(path, number: int) -> None:
    (subfolder,) = path.glob(f"save-{number:06d}-*")
    file = subfolder / "rows-0000-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


# -- two jobs ---------------------------------------------------------------------------------------------------------------


def test_a_save_is_refused_while_another_process_saves_and_not_after_its_death(tmp_path):
    tc.save(bag_of(1), tmp_path)
    (ready, say), (wait, go_on) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # a job that is killed in the middle of a save
        folders.begin_save_folder(tmp_path)
        os.write(say, b"1")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    (other,) = set(saves_in(tmp_path)) - {Manifest.read(tmp_path).saves[0].state.split("/")[0]}
    for _ in range(2):  # looking at the lock does not end it
        with pytest.raises(tc.BadInput, check=has(parameter="folder", path=tmp_path, save=other)):
            tc.save(bag_of(2), tmp_path)
    assert first_value(tc.load(tmp_path)) == 1 and (tmp_path / other).exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tc.save(bag_of(2), tmp_path)
    assert first_value(tc.load(tmp_path)) == 2 and other not in saves_in(tmp_path)
    for end in (ready, say, wait, go_on):
        os.close(end)


def test_a_worker_forked_during_a_save_does_not_keep_the_lock(tmp_path):
    subfolder, _ = folders.begin_save_folder(tmp_path)
    with pytest.raises(tc.BadInput, check=has(save=subfolder.name)):
        tc.save(bag_of(1), tmp_path)
    wait, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_on)
        os.read(wait, 1)
        os._exit(0)
    folders.discard(subfolder)
    tc.save(bag_of(2), tmp_path)
    assert first_value(tc.load(tmp_path)) == 2 and not folders._HELD
    os.close(go_on)
    os.close(wait)
    os.waitpid(child, 0)


def test_an_interrupted_save_unlocks_the_folder(tmp_path, monkeypatch):
    from thermocline.checkpoint.save_job import SaveJob

    def interrupted(self):
        raise KeyboardInterrupt

    for step in ("write", "publish", "_read_live"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(SaveJob, step, interrupted)
            tc.save(bag_of(1), tmp_path)
        assert saves_in(tmp_path) == [] and not folders._HELD
    tc.save(bag_of(2), tmp_path)
    assert first_value(tc.load(tmp_path)) == 2


def test_a_save_leaves_a_running_compaction_alone(tmp_path):
    tc.save(bag_of(1), tmp_path)
    compaction = folders.new_subfolder(tmp_path, 1, folders.COMPACTING)
    tc.save(bag_of(2), tmp_path)
    assert compaction.exists()
    folders.discard(compaction)
    assert len(saves_in(tmp_path)) == 1


def test_a_save_that_was_being_removed_is_no_save(tmp_path):
    subfolder, _ = folders.begin_save_folder(tmp_path)
    (subfolder / "state.safetensors").write_text("")
    folders._release(subfolder)
    subfolder.rename(tmp_path / f"removed-{subfolder.name}")  # and then the process was killed
    assert tc.resume(tmp_path, bag_of(1)) is None
    tc.save(bag_of(2), tmp_path)
    assert first_value(tc.load(tmp_path)) == 2 and len(list(tmp_path.iterdir())) == 2


# -- a lost manifest --------------------------------------------------------------------------------------------------------


def test_saves_without_their_manifest_are_neither_removed_nor_overlooked(tmp_path):
    tc.save(bag_of(1), tmp_path)
    (name,) = saves_in(tmp_path)
    (tmp_path / "manifest.json").unlink()
    for action in (lambda: tc.save(bag_of(2), tmp_path), lambda: tc.resume(tmp_path, bag_of(2))):
        with pytest.raises(tc.FormatError, check=has(path=tmp_path / "manifest.json", saves=[name])):
            action()
    (tmp_path / "manifest.json").write_bytes((tmp_path / name / "manifest.json").read_bytes())  # as the error says
    assert first_value(tc.load(tmp_path)) == 1


def test_a_save_of_an_older_version_without_its_manifest_is_not_removed(tmp_path):
    tc.save(bag_of(1), tmp_path)
    (name,) = saves_in(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / name / "manifest.json").unlink()
    with pytest.raises(tc.FormatError, check=has(saves=[name])):
        tc.save(bag_of(2), tmp_path)
    assert saves_in(tmp_path) == [name]


# -- damaged saves ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path):
    """A full save and two incremental ones, of 1, 2 and 3, with the number as progress."""
    bag, top = bag_of(1), torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(top.parameters(), lr=0.5)
    model = torch.nn.ModuleDict({"bag": bag, "top": top})
    for number in (1, 2, 3):
        set_to(bag, number, 100 if number == 1 else 9)
        top(torch.ones(2)).sum().backward()
        adam.step()
        tc.save(model, tmp_path, optimizers=adam, progress={"batch": number}, incremental=True)
    assert [save.kind for save in Manifest.read(tmp_path).saves] == ["full", "incremental", "incremental"]
    return tmp_path, model, adam


def fresh():
    model = torch.nn.ModuleDict({"bag": bag_of(0), "top": torch.nn.Linear(2, 2)})
    return model, torch.optim.Adam(model["top"].parameters(), lr=0.1)


def test_resume_goes_back_to_the_last_intact_save_and_says_so(chain):
    path, _, _ = chain
    damage(path, 3)
    model, adam = fresh()
    with pytest.warns(UserWarning, match=r"save-000003-.*from save 2 "):
        assert tc.resume(path, model, optimizers=adam) == {"batch": 2}
    assert first_value(model["bag"]) == 2 and adam.state_dict()["state"][0]["step"] == 2
    tc.save(model, path, optimizers=adam, progress={"batch": 9})
    assert tc.resume(path, model, optimizers=adam) == {"batch": 9} and len(saves_in(path)) == 1


def test_resume_raises_if_every_save_is_damaged(chain):
    path, _, _ = chain
    damage(path, 1)
    model, adam = fresh()
    with pytest.raises(tc.FormatError):
        tc.resume(path, model, optimizers=adam)
    assert first_value(model["bag"]) == 0


def test_load_refuses_a_damaged_save_and_opens_an_earlier_one_when_asked(chain):
    path, _, _ = chain
    damage(path, 3)
    model, adam = fresh()
    with pytest.raises(tc.FormatError, check=has(earlier=[2, 1])) as failed:
        tc.load_into(model, path, optimizers=adam)
    assert failed.value.path.name == "rows-0000-000.safetensors" and first_value(model["bag"]) == 0
    for number in (1, 2):
        tc.load_into(model, path, optimizers=adam, save=number)
        assert first_value(model["bag"]) == number
        assert Checkpoint.open(path, number).manifest.progress == {"batch": number}
    with pytest.raises(tc.FormatError, check=has(save=7, available=[1, 2, 3])):
        tc.load_into(model, path, save=7)


# -- how many are kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_full_saves_are_kept_and_open_by_number(tmp_path, asynchronous):
    for number in range(1, 6):
        if asynchronous:
            tc.save_async(bag_of(number), tmp_path, keep=3).wait()
        else:
            tc.save(bag_of(number), tmp_path, keep=3)
    assert [int(name.split("-")[1]) for name in saves_in(tmp_path)] == [3, 4, 5]
    assert [first_value(tc.load(tmp_path, save=number)) for number in (3, 4, 5)] == [3, 4, 5]
    assert first_value(tc.load(tmp_path)) == 5 and folders.leftovers(tmp_path, Manifest.read(tmp_path)) == []
    damage(tmp_path, 5)
    bag = bag_of(0)
    with pytest.warns(UserWarning, match="from save 4 "):
        tc.resume(tmp_path, bag)
    assert first_value(bag) == 4
    tc.save(bag, tmp_path)
    assert len(saves_in(tmp_path)) == 1


def test_a_kept_full_save_keeps_the_incremental_saves_after_it(tmp_path):
    bag = bag_of(0)
    for number, full in enumerate([True, False, True, False, True], start=1):
        if full:
            bag = bag_of(number)
        set_to(bag, number, 9)
        tc.save(bag, tmp_path, incremental=True, keep=2)
    assert [int(name.split("-")[1]) for name in saves_in(tmp_path)] == [3, 4, 5]
    assert [first_value(tc.load(tmp_path, save=number)) for number in (3, 4, 5)] == [3, 4, 5]
    set_to(bag, 6, 9)
    tc.save(bag, tmp_path, incremental=True, keep=2)
    compact(tmp_path)
    assert [int(name.split("-")[1]) for name in saves_in(tmp_path)] == [3, 4, 6], "compaction leaves other chains"
    assert [first_value(tc.load(tmp_path, save=number)) for number in (4, 6)] == [4, 6]
    with pytest.raises(tc.FormatError, check=has(available=[3, 4, 6])):
        tc.load(tmp_path, save=5)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_at_least_one_save_is_kept(tmp_path, keep):
    with pytest.raises(tc.BadInput, check=has(parameter="keep", value=keep)):
        tc.save(bag_of(1), tmp_path, keep=keep)
