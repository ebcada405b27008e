"""Incremental saves: what changed, no more, and nothing less; compacted and followed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from test_save import CONFIGURATIONS, assert_same_state, collection, steps

import thermocline as tc
from support import has
from thermocline.checkpoint import Checkpoint, compact
from thermocline.checkpoint.format import sections
from thermocline.checkpoint.format.state_files import AT, TO, StateFiles
from thermocline.checkpoint.format.tensor_files import TensorFile, TensorGroup, TensorInfo, write_file
from thermocline.errors import FormatError
from thermocline.kernels import quantize_rows
from thermocline.rows.change_bitmap import Changes, marked
from thermocline.rows.precision import format_of


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    monkeypatch.setattr(sections, "SECTION_BYTES", 1 << 13)
    monkeypatch.setattr(sections, "_MULTIPLE", 64)


def kinds(folder):
    return [save.kind for save in Checkpoint.open(folder).manifest.saves]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_chain_of_incremental_saves_is_the_module_bit_for_bit(tmp_path, name):
    torch.manual_seed(1)
    module = collection(**CONFIGURATIONS[name])
    steps(module, 0, 15)
    for at in range(4):
        tc.save(module, tmp_path, incremental=True)
        assert_same_state(module, tc.load(tmp_path))
        steps(module, 15 + at, 16 + at)
    assert kinds(tmp_path) == ["full", "incremental", "incremental", "incremental"]
    tc.save(module, tmp_path, incremental=True)
    compact(tmp_path)
    assert kinds(tmp_path) == ["full"] and len(list(tmp_path.iterdir())) == 2
    loaded = tc.load(tmp_path)
    assert_same_state(module, loaded)
    assert steps(module, 30, 35) == steps(loaded, 30, 35)
    tc.save(module, tmp_path, incremental=True)
    assert kinds(tmp_path) == ["full", "incremental"], "a compacted folder is continued"
    assert_same_state(module, tc.load(tmp_path))


def test_rows_that_leave_the_cache_or_are_set_by_hand_are_changes_too(tmp_path):
    torch.manual_seed(2)
    module = tc.EmbeddingCollection([tc.Table("a", 500, 8)], rows=tc.RowConfig(cache=0.2))
    module(torch.arange(100)[:, None]).values().sum().backward()
    tc.save(module, tmp_path, incremental=True)
    module.flush()  # nothing is looked up, and 100 rows are rounded
    module.set_rows("a", torch.tensor([499]), torch.ones(1, 8))
    tc.save(module, tmp_path, incremental=True)
    assert sum(section.count for section in Checkpoint.open(tmp_path).manifest.saves[1].sections) == 101
    assert_same_state(module, tc.load(tmp_path))


def test_touching_a_hundredth_of_the_rows_writes_at_most_a_fiftieth_of_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "SECTION_BYTES", 1 << 25)
    torch.manual_seed(3)
    module = tc.EmbeddingCollection([tc.Table("a", 40_000, 64)], rows=tc.RowConfig(cache=0.05))
    for _ in range(20):  # then the cache knows what to keep
        module(torch.randint(40_000, (4000, 1))).values().square().sum().backward()
    tc.save(module, tmp_path, incremental=True)
    module(torch.randperm(40_000)[:400, None]).values().square().sum().backward()
    tc.save(module, tmp_path, incremental=True)
    full, delta = (save.bytes for save in Checkpoint.open(tmp_path).manifest.saves)
    assert delta <= 0.02 * full, (delta, full)
    assert_same_state(module, tc.load(tmp_path))


def test_save_is_incremental_only_after_the_save_that_changes_count_from(tmp_path):
    torch.manual_seed(4)
    bag, other = tc.EmbeddingBag(300, 8), tc.EmbeddingBag(300, 8)
    ids = torch.arange(6).view(3, 2)
    tc.save(bag, tmp_path / "a", incremental=True)
    bag(ids).sum().backward()
    tc.save(bag, tmp_path / "b", incremental=True)
    assert kinds(tmp_path / "b") == ["full"]
    tc.save(bag, tmp_path / "a", incremental=True)
    assert kinds(tmp_path / "a") == ["full"], "changes are counted from the other folder now"
    tc.save(other, tmp_path / "a", incremental=True)
    bag(ids).sum().backward()
    tc.save(bag, tmp_path / "a", incremental=True)
    assert kinds(tmp_path / "a") == ["full"], "somebody else has saved there"
    tc.load_into(bag, tmp_path / "a")
    tc.save(bag, tmp_path / "a", incremental=True)
    assert kinds(tmp_path / "a") == ["full"], "what was loaded is not what was counted"
    bag(ids).sum().backward()
    tc.save(bag, tmp_path / "elsewhere")  # a plain save takes no account of it
    tc.save(bag, tmp_path / "a", incremental=True)
    assert kinds(tmp_path / "a") == ["full", "incremental"]
    assert_same_state(bag, tc.load(tmp_path / "a"))


def test_changes_of_a_save_that_failed_are_in_the_next(tmp_path, monkeypatch):
    from thermocline.checkpoint import save_job as saving

    torch.manual_seed(5)
    bag = tc.EmbeddingBag(300, 8)
    tc.save(bag, tmp_path, incremental=True)
    bag(torch.arange(20).view(10, 2)).sum().backward()
    with monkeypatch.context() as patched:

        def fail(*_):
            raise OSError(28, "No space left on device")

        patched.setattr(saving, "publish", fail)
        with pytest.raises(OSError, check=has(errno=28)):
            tc.save(bag, tmp_path, incremental=True)
    bag(torch.arange(40, 60).view(10, 2)).sum().backward()
    tc.save(bag, tmp_path, incremental=True)
    assert kinds(tmp_path) == ["full", "incremental"]
    assert_same_state(bag, tc.load(tmp_path))


@pytest.mark.parametrize("where", ["reading the save before", "looking at rows"])
def test_next_save_has_all_changes_after_a_save_failed_early(tmp_path, monkeypatch, where):
    from thermocline.checkpoint import save_job as saving

    def step():
        ids = torch.arange(0, 90, 3).view(-1, 1)
        (model["a"](ids).square().sum() + model["b"](ids).square().sum()).backward()

    torch.manual_seed(9)
    model = torch.nn.ModuleDict(
        {"a": tc.EmbeddingBag(301, 8, rows=tc.RowConfig(cache=0.0)), "b": tc.EmbeddingBag(301, 5, rows=tc.RowConfig(cache=0.2))}
    )
    step()
    tc.save(model, tmp_path, incremental=True)
    step()
    with monkeypatch.context() as patched:
        live = saving.LiveRows

        def fail(*given):
            if given == (model["a"],):
                return live(*given)
            raise OSError(5, "Input/output error")

        if where == "looking at rows":
            patched.setattr(saving, "LiveRows", fail)
        else:
            patched.setattr(saving.Checkpoint, "state", property(fail))
        with pytest.raises(OSError, check=has(errno=5)):
            tc.save(model, tmp_path, incremental=True)
    assert len(list(tmp_path.iterdir())) == 2, "what was begun is gone"
    tc.save(model, tmp_path, incremental=True)
    assert kinds(tmp_path) == ["full", "incremental"]
    other = torch.nn.ModuleDict(
        {"a": tc.EmbeddingBag(301, 8, rows=tc.RowConfig(cache=0.0)), "b": tc.EmbeddingBag(301, 5, rows=tc.RowConfig(cache=0.2))}
    )
    tc.load_into(other, tmp_path)
    assert_same_state(model, other)


def test_a_chain_that_outgrows_a_full_save_begins_anew(tmp_path):
    torch.manual_seed(6)
    bag = tc.EmbeddingBag(300, 8, rows=tc.RowConfig(cache=0.0))
    seen = []
    for _ in range(4):
        tc.save(bag, tmp_path, incremental=True)
        seen.append(len(kinds(tmp_path)))
        bag(torch.arange(300).view(100, 3)).sum().backward()
    assert seen == [1, 2, 1, 2]


def test_a_server_can_follow_deltas(tmp_path):
    torch.manual_seed(7)
    module = collection(precision={"fp32": 0.05, "int8": 0.1, "int4": 0.85})
    steps(module, 0, 10)
    tc.save(module, tmp_path, incremental=True)
    follower = Checkpoint.open(tmp_path)
    assert follower.newer() is None and follower.deltas(follower.number) == []
    served = {table.name: served_rows(follower, table.name) for table in module.tables}
    for at in range(3):
        steps(module, 10 + 2 * at, 12 + 2 * at)
        tc.save(module, tmp_path, incremental=True)
        if at == 1:
            continue  # and misses one
        newer = follower.newer()
        for delta in newer.deltas(follower.number):
            for name, (codes, meta) in served.items():
                for rows, new_codes, new_meta in delta.rows(name):
                    codes[rows], meta[rows] = new_codes, new_meta
        follower = newer
        flushed = copy.deepcopy(module)
        flushed.flush()
        for index, (name, (codes, meta)) in enumerate(served.items()):
            assert torch.equal(codes, flushed.arena.views(index)[0]) and torch.equal(meta, flushed.arena.views(index)[1]), name
    tc.save(module, tmp_path)
    assert follower.newer().deltas(follower.number) is None, "a full save is read whole"


def served_rows(checkpoint, name):
    """A table as a server without a cache has it."""
    blocks = list(checkpoint.blocks(name))
    codes, meta = torch.cat([b.codes_RB for b in blocks]), torch.cat([b.meta_RW for b in blocks])
    rows, values = checkpoint.cached(name)
    codes[rows], meta[rows] = quantize_rows(values, format_of(checkpoint.manifest.table(name).precision))
    return codes, meta


@pytest.mark.parametrize("way", ["cpu", "card"])
def test_marks_are_set_whatever_is_repeated_and_taken_once(way, monkeypatch):
    changes = Changes(1000, torch.device("cpu"), "")
    if way == "card":  # the same steps on the CPU
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    rows = torch.tensor([0, 31, 31, 32, 63, 64, 999, 500, 0])
    changes.mark(rows)
    changes.mark(torch.tensor([500, 501]))
    assert marked(changes.bits, 0, 1000).tolist() == [0, 31, 32, 63, 64, 500, 501, 999]
    assert marked(changes.bits, 33, 502).tolist() == [30, 31, 467, 468]
    taken = changes.take()
    assert marked(changes.bits, 0, 1000).tolist() == []
    changes.mark(torch.tensor([7]))
    changes.give_back(taken)
    assert marked(changes.bits, 0, 1000).tolist() == [0, 7, 31, 32, 63, 64, 500, 501, 999]


@pytest.mark.parametrize("offsets", [(0, 8), (16, 24), (8, 20)])
def test_tensors_of_a_file_neither_overlap_nor_leave_gaps(offsets, tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, [TensorGroup([TensorInfo(name, torch.int64, (1,)) for name in "ab"], lambda: [torch.ones(1).long()] * 2)])
    assert TensorFile(path).read("b").tolist() == [1]
    data = path.read_bytes().replace(b'"data_offsets":[8,16]', b'"data_offsets":[%d,%d]' % offsets)
    data = data[8:].rstrip(b" ")
    length = data.index(b"}}") + 2
    path.write_bytes(length.to_bytes(8, "little") + data[:length] + data[-16:])
    with pytest.raises(FormatError):
        TensorFile(path)


@pytest.mark.parametrize("left", [AT, TO])
def test_half_of_the_changes_of_an_array_is_damage(left, tmp_path):
    names = ["a", "b"], ["a" + left, "b@at", "b@to"]
    first, second = (SimpleNamespace(names=lambda own=each: own, path=tmp_path) for each in names)
    with pytest.raises(FormatError):
        StateFiles([[first], [second]])
