"""A checkpoint over shard processes: results of the module through kills, new versions, deltas and invalid requests."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline
from support import has
from thermocline import BadInput, FormatError, IdMap
from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.kernels import quantize_rows
from thermocline.serve.errors import NotReady
from thermocline.serve.tables import huge_pages as pages
from thermocline.serve.tables import lookup
from thermocline.serve.tables import memory_limits as store
from thermocline.serve.tables import shard_group as group_module
from thermocline.serve.tables.lookup import LookupResult
from thermocline.serve.tables.shard_group import ShardGroup

USER = IdMap.hashed(1009, salt=3)


def make_module(mode: str = "sum") -> thermocline.EmbeddingCollection:
    tables = [
        thermocline.Table("user", 1009, 24, ids=USER),
        thermocline.Table("item", 503, 16, features=("clicked", "bought"), row_config=thermocline.RowConfig("int4")),
    ]
    module = thermocline.EmbeddingCollection(tables, mode=mode, rows=thermocline.RowConfig("int8", cache=0.1, seed=1))
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        module(torch.randint(500, (64, 3), generator=generator)).values().square().mean().backward()
    return module


def constant(folder: Path, value: float, rows: int = 211) -> Path:
    """A checkpoint in which all rows of both tables have one value."""
    module = thermocline.EmbeddingCollection(
        [thermocline.Table(n, rows, 8) for n in "ab"], rows=thermocline.RowConfig("fp32", cache=0.0)
    )
    for name in "ab":
        module.set_rows(name, torch.arange(rows), torch.full((rows, 8), value))
    thermocline.save(module, folder)
    return folder


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = make_module()
    module.folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    thermocline.save(module, module.folder)
    module.flush()  # rows of the cache are served rounded
    return module


@pytest.fixture(scope="module")
def group(module: Any) -> Iterator[ShardGroup]:
    with ShardGroup(module.folder, shards=3) as group:
        yield group


def wait_until(what: Any) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.01)


def test_rows_equal_those_of_the_module_in_every_bit(module: Any, group: ShardGroup) -> None:
    ids = torch.randint(-(1 << 40), 1 << 40, (999,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(group.lookup({"user": ids})["user"], module.get_rows("user", USER(ids)))
    rows = torch.arange(503)
    both = group.lookup({"bought": rows, "clicked": rows.flip(0)})
    assert torch.equal(both["bought"], module.get_rows("item")) and torch.equal(
        both["clicked"], module.get_rows("item").flip(0)
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_equal_those_of_the_module_in_every_bit(mode: str, module: Any, group: ShardGroup, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths_FB = torch.randint(0, 9, (3, 50), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_FB.flatten().cumsum(0)])
    ids = torch.randint(0, 503, (int(offsets[-1]),), generator=generator)
    if mode == "mean":
        module = make_module("mean")
        thermocline.save(module, tmp_path / "mean")
        module.flush()
        group = ShardGroup(tmp_path / "mean", shards=2, split="range")
    inputs, asked = {}, {}
    for f, name in enumerate(("user", "clicked", "bought")):
        begins = offsets[50 * f : 50 * f + 51]
        asked[name] = (ids[begins[0] : begins[-1]], begins - begins[0])
        inputs |= {name: asked[name][0], f"{name}.offsets": asked[name][1][:-1]}
    with torch.no_grad():
        out = module(asked)
    found = group.lookup(inputs)
    for name in ("user", "clicked", "bought"):
        assert torch.equal(found[name], out[name])
    if mode == "mean":
        group.close()


def test_an_invalid_request_fails_alone(group: ShardGroup) -> None:
    good, other = {"user": np.arange(7)}, {"clicked": np.arange(5), "bought": np.array([502])}
    alone = [group.infer([request])[0] for request in (good, other)]
    bad = [{"clicked": np.array([503])}, {"unknown": np.arange(2)}, {"user": np.zeros(2, np.float32)}, {}]
    answers = group.infer([bad[0], good, bad[1], other, bad[2], bad[3]])
    assert [isinstance(answer, BadInput) for answer in answers] == [True, False, True, False, True, True]
    for answer, was in zip((answers[1], answers[3]), alone, strict=True):
        assert isinstance(answer, LookupResult) and isinstance(was, LookupResult) and set(answer) == set(was)
        assert all(np.array_equal(answer[name], was[name]) for name in was)
    assert has(feature="clicked", rows=503, position=0, id=503)(answers[0])


def test_lookups_are_counted_by_shard(group: ShardGroup) -> None:
    before = sum(shard.lookups for shard in group.shards())
    group.lookup({"user": torch.arange(100), "clicked": torch.arange(200)})
    assert sum(shard.lookups for shard in group.shards()) == before + 300
    assert all(shard.bytes > 1009 * 28 // 3 for shard in group.shards())


def test_a_killed_shard_is_replaced_and_no_result_is_wrong(module: Any, group: ShardGroup) -> None:
    rows, wrong, answered, ended = torch.arange(503), [], [0], threading.Event()

    def ask() -> None:
        while not ended.is_set():
            if not torch.equal(group.lookup({"bought": rows})["bought"], module.get_rows("item")):
                wrong.append(answered[0])
            answered[0] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    pids = [shard.pid for shard in group.shards()]
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(c.ready and c.pid != pid for c, pid in zip(group.shards()[:2], pids, strict=False)))
    seen = answered[0]
    wait_until(lambda: answered[0] > seen + 3)
    ended.set()
    thread.join()
    assert not wrong and group.shards()[2].pid == pids[2]


def test_a_shard_that_dies_while_it_loads_is_replaced(module: Any, group: ShardGroup) -> None:
    supervisor = group._supervisor
    ask_all = supervisor._request_all

    def kill_first(message: Any, descriptors: Any = ()) -> Any:
        if message["do"] == "load":
            os.kill(supervisor.pids[1], signal.SIGKILL)
        return ask_all(message, descriptors)

    supervisor._request_all = kill_first
    try:
        group.load(module.folder)
    finally:
        supervisor._request_all = ask_all
    assert torch.equal(group.lookup({"bought": torch.arange(503)})["bought"], module.get_rows("item"))


def test_versions_are_never_mixed_and_their_memory_is_freed(tmp_path: Path) -> None:
    folders = [constant(tmp_path / f"{value}", value) for value in (1.0, 2.0)]
    with ShardGroup(folders[0], shards=2) as group:
        seen: set[float] = set()
        mixed: list[Any] = []
        ended = threading.Event()

        def ask() -> None:
            requests = [{"a": np.arange(211)}, {"b": np.arange(211), "a": np.arange(3)}]
            while not ended.is_set():
                values = {float(v) for answer in group.infer(requests) for each in answer.values() for v in np.unique(each)}
                seen.update(values)
                if len(values) != 1:
                    mixed.append(values)

        first = weakref.ref(group.current.segments[0])
        thread = threading.Thread(target=ask)
        thread.start()
        for folder in (folders[1], folders[0], folders[1]):
            group.load(folder)
        changed = RowDelta(np.arange(211), *changed_rows(torch.full((211, 8), 3.0)))
        group.apply_deltas("a delta", {"a": changed, "b": changed})
        wait_until(lambda: 3.0 in seen)
        ended.set()
        thread.join()
        assert not mixed and seen <= {1.0, 2.0, 3.0}
        assert group.infer([{"a": np.arange(1)}])[0].version == "a delta"
        gc.collect()
        assert first() is None


def changed_rows(values: torch.Tensor) -> tuple[Any, Any]:
    codes, meta = quantize_rows(values, 0, None, None)
    return codes.numpy(), meta.numpy()


def test_deltas_accumulate_and_old_versions_stay_unchanged(tmp_path: Path) -> None:
    with ShardGroup(constant(tmp_path / "1", 1.0), shards=2) as group:
        old = group.current
        group.apply_deltas("2", {"a": RowDelta(np.array([3, 5, 200]), *changed_rows(torch.full((3, 8), 2.0)))})
        group.apply_deltas("3", {"a": RowDelta(np.array([5, 6]), *changed_rows(torch.full((2, 8), 3.0)))})
        rows = torch.tensor([3, 4, 5, 6, 200])
        assert group.lookup({"a": rows})["a"][:, 0].tolist() == [2.0, 1.0, 3.0, 3.0, 2.0]
        assert group.lookup({"b": rows})["b"][:, 0].tolist() == [1.0] * 5
        group._current = old
        assert group.lookup({"a": rows})["a"][:, 0].tolist() == [1.0] * 5
        with pytest.raises(BadInput, check=has(table="a", rows=211)):
            group.apply_deltas("4", {"a": RowDelta(np.array([5, 211]), *changed_rows(torch.zeros(2, 8)))})
        with pytest.raises(BadInput, check=has(table="c")):
            group.apply_deltas("4", {"c": RowDelta(np.array([5]), *changed_rows(torch.zeros(1, 8)))})


def test_incremental_saves_are_followed_row_by_row(tmp_path: Path) -> None:
    module = thermocline.EmbeddingCollection(
        [thermocline.Table(n, 301, 8) for n in "ab"], rows=thermocline.RowConfig("int8", cache=0.05)
    )
    generator = torch.Generator().manual_seed(4)

    def train(low: int, high: int) -> None:
        module(torch.randint(low, high, (64, 2), generator=generator)).values().square().mean().backward()

    def served() -> bool:
        again = thermocline.load(tmp_path / "chain")
        again.flush()
        found = group.lookup({"a": torch.arange(301), "b": torch.arange(301)})
        return all(torch.equal(found[name], again.get_rows(name)) for name in "ab")

    train(0, 301)
    thermocline.save(module, tmp_path / "chain", incremental=True)
    with ShardGroup(tmp_path / "chain", shards=3) as group:
        assert served() and not group.follow()
        segments = group.current.segments
        for n in range(3):
            train(50 * n, 50 * n + 60)
            if n < 2:
                thermocline.save(module, tmp_path / "chain", incremental=True)
                assert group.follow() and group.current.segments is segments and served()
        assert group.current.overlay is None  # rows are in place
        thermocline.save(module, tmp_path / "chain")  # a full one
        assert group.follow() and group.current.segments is not segments and served() and group.version == "4"
        train(0, 9)
        before = {*(tmp_path / "chain").rglob("rows-*.safetensors")}
        thermocline.save(module, tmp_path / "chain", incremental=True)
        file = min({*(tmp_path / "chain").rglob("rows-*.safetensors")} - before)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(FormatError):
            group.follow()
        assert group.version == "4"


@pytest.mark.parametrize("at", ["make_layout", "warm_up"])
def test_a_load_that_ends_after_close_is_not_served(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "are_enabled", lambda: True)
    group = ShardGroup(constant(tmp_path, 1.0), shards=2)
    there, closed, said = threading.Event(), threading.Event(), []
    goes_on = getattr(group_module, at)

    def held(*given: Any, **more: Any) -> Any:
        there.set()
        closed.wait()
        return goes_on(*given, **more)

    def load() -> None:
        try:
            group.load(tmp_path)
        except Exception as error:
            said.append(error)

    monkeypatch.setattr(group_module, at, held)
    loading = threading.Thread(target=load)
    loading.start()
    there.wait()
    pids, before = group._supervisor.pids, group._huge_pages
    group.close()
    closed.set()
    loading.join()
    assert [type(error) for error in said] == [NotReady]
    assert group.closed and group._huge_pages is before and group._supervisor.pids == pids  # no new thread, no new process
    with pytest.raises(NotReady):
        group.lookup({"a": [1]})
    with pytest.raises(NotReady):
        group.load(tmp_path)


def test_close_does_not_wait_for_a_load(tmp_path: Path) -> None:
    group, said = ShardGroup(constant(tmp_path, 1.0), shards=2), []
    shards = group._supervisor

    def load() -> None:
        with pytest.raises(NotReady) as caught:
            group.load(tmp_path)
        said.append(caught.value)

    def is_loading() -> bool:
        if free := shards._lock.acquire(blocking=False):
            shards._lock.release()
        return not free

    pids = shards.pids
    os.kill(pids[1], signal.SIGSTOP)
    loading = threading.Thread(target=load, daemon=True)
    closing = threading.Thread(target=group.close, daemon=True)
    loading.start()
    wait_until(is_loading)
    closing.start()
    closing.join(120)
    loading.join(120)
    ended = not closing.is_alive()
    if not ended:
        os.kill(pids[1], signal.SIGCONT)
    assert ended and len(said) == 1 and shards.pids == pids  # no new process


def test_a_delta_that_ends_after_close_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = ShardGroup(constant(tmp_path, 1.0), shards=1)
    monkeypatch.setattr(group_module, "check_deltas", lambda *_: group.close())  # as if just then
    with pytest.raises(NotReady):
        group.apply_deltas("newer", {})
    assert group.closed


def test_a_version_that_does_not_fit_or_is_damaged_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardGroup(constant(tmp_path / "1", 1.0), shards=2) as group:
        other, before = constant(tmp_path / "2", 2.0), group.version
        monkeypatch.setattr(store, "free_bytes", lambda: 1234)
        with pytest.raises(BadInput, check=has(available=1234)):
            group.load(other)
        monkeypatch.undo()
        file = next(other.rglob("rows-*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with pytest.raises(FormatError):
            group.load(other)
        with pytest.raises(FormatError):
            group.load(tmp_path)
        assert group.version == before and float(group.lookup({"a": [7]})["a"][0, 0]) == 1.0


@pytest.mark.parametrize(
    "settings, parameter",
    [
        ({"shards": 0}, "shards"),
        ({"split": "row"}, "split"),
        ({"split": "plan"}, "plan"),
    ],
)
def test_an_invalid_split_is_refused_before_anything_starts(module: Any, settings: Any, parameter: str) -> None:
    with pytest.raises(BadInput, check=has(parameter=parameter)):
        ShardGroup(module.folder, **settings)


def test_bags_pooled_by_max_equal_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_MAX_BYTES", 5 * 4 * 7)  # rows are looked up five at a time
    torch.manual_seed(2)
    bag = thermocline.EmbeddingBag(63, 7, mode="max", rows=thermocline.RowConfig("int8"))
    thermocline.save(torch.nn.ModuleDict({"item": bag}), tmp_path / "saved")
    ids = torch.randint(0, 63, (29,))
    with ShardGroup(tmp_path / "saved", shards=3) as group:
        rows = group.lookup({"item": torch.arange(63)})["item"]
        for starts in map(torch.tensor, ([0, 0, 5, 5, 6, 29], [0], [0, 3, 4, 4, 11, 12, 25, 26, 29, 29])):
            found = group.lookup({"item": ids, "item.offsets": starts})["item"]
            assert torch.equal(found, torch.nn.functional.embedding_bag(ids, rows, starts, mode="max"))
        assert group.lookup({"item": [], "item.offsets": [0, 0]})["item"].tolist() == [[0.0] * 7] * 2
        with pytest.raises(BadInput, check=has(position=17, id=63)):
            group.lookup({"item": torch.where(torch.arange(29) == 17, 63, ids), "item.offsets": [0]})
        with pytest.raises(BadInput, check=has(parameter="item.weights")):
            group.lookup({"item": ids, "item.offsets": starts, "item.weights": torch.ones(29)})


def test_gpus_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thermocline.save(thermocline.EmbeddingCollection([thermocline.Table("user", 10, 4)]), tmp_path / "saved")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, check=has(parameter="device", value="cuda")):
        ShardGroup(tmp_path / "saved", shards=2, device="cuda")
