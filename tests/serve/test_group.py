"""A checkpoint over card processes: the module's own answers, through kills, new versions, deltas and bad requests."""

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
from thermocline import BadInput, FormatError, IdMap
from thermocline.kernels.quantize import quantize_rows
from thermocline.serve.errors import NotReady
from thermocline.serve.tables import huge_pages as pages
from thermocline.serve.tables import segments as store
from thermocline.serve.tables import shard_group as group_module
from thermocline.serve.tables.lookup import Answer
from thermocline.serve.tables.shard_group import CardGroup
from thermocline.serve.tables.version import Changed

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
def group(module: Any) -> Iterator[CardGroup]:
    with CardGroup(module.folder, cards=3) as group:
        yield group


def wait_until(what: Any) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_rows_are_those_of_the_module_bit_for_bit(module: Any, group: CardGroup) -> None:
    ids = torch.randint(-(1 << 40), 1 << 40, (999,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(group.lookup({"user": ids})["user"], module.get_rows("user", USER(ids)))
    rows = torch.arange(503)
    both = group.lookup({"bought": rows, "clicked": rows.flip(0)})
    assert torch.equal(both["bought"], module.get_rows("item")) and torch.equal(
        both["clicked"], module.get_rows("item").flip(0)
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_those_of_the_module_bit_for_bit(mode: str, module: Any, group: CardGroup, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths_FB = torch.randint(0, 9, (3, 50), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_FB.flatten().cumsum(0)])
    ids = torch.randint(0, 503, (int(offsets[-1]),), generator=generator)
    if mode == "mean":
        module = make_module("mean")
        thermocline.save(module, tmp_path / "mean")
        module.flush()
        group = CardGroup(tmp_path / "mean", cards=2, split="range")
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


def test_a_bad_request_is_answered_alone_and_the_others_as_ever(group: CardGroup) -> None:
    good, other = {"user": np.arange(7)}, {"clicked": np.arange(5), "bought": np.array([502])}
    alone = [group.infer([request])[0] for request in (good, other)]
    bad = [{"clicked": np.array([503])}, {"nobody": np.arange(2)}, {"user": np.zeros(2, np.float32)}, {}]
    answers = group.infer([bad[0], good, bad[1], other, bad[2], bad[3]])
    assert [isinstance(answer, BadInput) for answer in answers] == [True, False, True, False, True, True]
    for answer, was in zip((answers[1], answers[3]), alone, strict=True):
        assert isinstance(answer, Answer) and isinstance(was, Answer) and set(answer) == set(was)
        assert all(np.array_equal(answer[name], was[name]) for name in was)
    assert "'clicked' has ids 0 to 502, but the id at position 0 is 503" in str(answers[0])


def test_lookups_are_counted_for_the_cards_that_answered_them(group: CardGroup) -> None:
    before = sum(card.lookups for card in group.cards())
    group.lookup({"user": torch.arange(100), "clicked": torch.arange(200)})
    assert sum(card.lookups for card in group.cards()) == before + 300
    assert all(card.bytes > 1009 * 28 // 3 for card in group.cards())


def test_a_killed_card_is_replaced_and_no_answer_is_wrong(module: Any, group: CardGroup) -> None:
    rows, wrong, answered, ended = torch.arange(503), [], [0], threading.Event()

    def ask() -> None:
        while not ended.is_set():
            if not torch.equal(group.lookup({"bought": rows})["bought"], module.get_rows("item")):
                wrong.append(answered[0])
            answered[0] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    pids = [card.pid for card in group.cards()]
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(c.ready and c.pid != pid for c, pid in zip(group.cards()[:2], pids, strict=False)))
    seen = answered[0]
    wait_until(lambda: answered[0] > seen + 3)
    ended.set()
    thread.join()
    assert not wrong and group.cards()[2].pid == pids[2]


def test_a_card_that_dies_while_it_loads_is_replaced_and_its_share_done_again(module: Any, group: CardGroup) -> None:
    supervisor = group._supervisor
    ask_all = supervisor._ask_all

    def kill_first(message: Any, descriptors: Any = ()) -> Any:
        if message["do"] == "load":
            os.kill(supervisor.pids[1], signal.SIGKILL)
        return ask_all(message, descriptors)

    supervisor._ask_all = kill_first
    try:
        group.load(module.folder)
    finally:
        supervisor._ask_all = ask_all
    assert torch.equal(group.lookup({"bought": torch.arange(503)})["bought"], module.get_rows("item"))


def test_versions_follow_each_other_without_a_mixed_answer_and_memory_is_given_back(tmp_path: Path) -> None:
    folders = [constant(tmp_path / f"{value}", value) for value in (1.0, 2.0)]
    with CardGroup(folders[0], cards=2) as group:
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
        changed = Changed(np.arange(211), *changed_rows(torch.full((211, 8), 3.0)))
        group.apply("a delta", {"a": changed, "b": changed})
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


def test_deltas_add_up_and_old_versions_stay_as_they_were(tmp_path: Path) -> None:
    with CardGroup(constant(tmp_path / "1", 1.0), cards=2) as group:
        old = group.current
        group.apply("2", {"a": Changed(np.array([3, 5, 200]), *changed_rows(torch.full((3, 8), 2.0)))})
        group.apply("3", {"a": Changed(np.array([5, 6]), *changed_rows(torch.full((2, 8), 3.0)))})
        rows = torch.tensor([3, 4, 5, 6, 200])
        assert group.lookup({"a": rows})["a"][:, 0].tolist() == [2.0, 1.0, 3.0, 3.0, 2.0]
        assert group.lookup({"b": rows})["b"][:, 0].tolist() == [1.0] * 5
        group._current = old
        assert group.lookup({"a": rows})["a"][:, 0].tolist() == [1.0] * 5
        with pytest.raises(BadInput, match="rows 0 to 210, rising"):
            group.apply("4", {"a": Changed(np.array([5, 211]), *changed_rows(torch.zeros(2, 8)))})
        with pytest.raises(BadInput, match="changes table 'c'; there are a, b"):
            group.apply("4", {"c": Changed(np.array([5]), *changed_rows(torch.zeros(1, 8)))})


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
    with CardGroup(tmp_path / "chain", cards=3) as group:
        assert served() and not group.follow()
        for n in range(3):
            train(50 * n, 50 * n + 60)
            if n < 2:
                thermocline.save(module, tmp_path / "chain", incremental=True)
                assert group.follow() and group.current.overlay is not None and served()
        assert len(group.current.overlay.changed["a"].rows_K) < 301
        thermocline.save(module, tmp_path / "chain")  # a full one
        assert group.follow() and group.current.overlay is None and served() and group.version == "4"
        train(0, 9)
        before = {*(tmp_path / "chain").rglob("rows-*.safetensors")}
        thermocline.save(module, tmp_path / "chain", incremental=True)
        file = min({*(tmp_path / "chain").rglob("rows-*.safetensors")} - before)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(FormatError, match="is damaged"):
            group.follow()
        assert group.version == "4"


@pytest.mark.parametrize("at", ["arrange", "warm"])
def test_a_load_that_ends_after_its_group_was_closed_is_not_served_and_leaves_nothing(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "are_wanted", lambda: True)
    group = CardGroup(constant(tmp_path, 1.0), cards=2)
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
    pids, before = group._supervisor.pids, group._enlarging
    group.close()
    closed.set()
    loading.join()
    assert [type(error) for error in said] == [NotReady] and "closed" in str(said[0])
    assert group.closed and group._enlarging is before and group._supervisor.pids == pids  # no thread, no card anew
    with pytest.raises(NotReady, match="closed"):
        group.lookup({"a": [1]})
    with pytest.raises(NotReady, match="closed"):
        group.load(tmp_path)


def test_a_group_that_is_closed_does_not_wait_for_cards_that_load(tmp_path: Path) -> None:
    group, said = CardGroup(constant(tmp_path, 1.0), cards=2), []
    cards = group._supervisor

    def load() -> None:
        with pytest.raises(NotReady, match="closed") as caught:
            group.load(tmp_path)
        said.append(caught.value)

    def waits_for_cards() -> bool:
        if free := cards._lock.acquire(blocking=False):
            cards._lock.release()
        return not free

    pids = cards.pids
    os.kill(pids[1], signal.SIGSTOP)
    loading = threading.Thread(target=load, daemon=True)
    closing = threading.Thread(target=group.close, daemon=True)
    loading.start()
    wait_until(waits_for_cards)
    closing.start()
    closing.join(120)
    loading.join(120)
    ended = not closing.is_alive()
    if not ended:
        os.kill(pids[1], signal.SIGCONT)
    assert ended and len(said) == 1 and cards.pids == pids  # no card anew


def test_a_delta_that_ends_after_its_group_was_closed_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = CardGroup(constant(tmp_path, 1.0), cards=1)
    monkeypatch.setattr(group, "_check_changes", lambda *_: group.close())  # as if just then
    with pytest.raises(NotReady, match="closed"):
        group.apply("newer", {})
    assert group.closed


def test_what_does_not_fit_or_is_damaged_is_refused_and_the_old_version_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CardGroup(constant(tmp_path / "1", 1.0), cards=2) as group:
        other, before = constant(tmp_path / "2", 2.0), group.version
        monkeypatch.setattr(store, "free_bytes", lambda: 1234)
        with pytest.raises(BadInput, match=r"needs [0-9,]+ bytes, and 1,234 are free"):
            group.load(other)
        monkeypatch.undo()
        file = next(other.rglob("rows-*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with pytest.raises(FormatError, match="is damaged: its sha256"):
            group.load(other)
        with pytest.raises(FormatError, match="holds no checkpoint"):
            group.load(tmp_path)
        assert group.version == before and float(group.lookup({"a": [7]})["a"][0, 0]) == 1.0


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"cards": 0}, "cards is 0; use 1 to 128"),
        ({"split": "row"}, "split is 'row'; use one of hash, range, feature, plan"),
        ({"split": "plan"}, "needs a plan"),
    ],
)
def test_a_split_that_cannot_be_is_refused_before_anything_starts(module: Any, settings: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        CardGroup(module.folder, **settings)


def test_bags_that_are_pooled_by_max_are_those_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(2)
    bag = thermocline.EmbeddingBag(63, 7, mode="max", rows=thermocline.RowConfig("int8"))
    thermocline.save(torch.nn.ModuleDict({"item": bag}), tmp_path / "saved")
    ids, starts = torch.randint(0, 63, (29,)), torch.tensor([0, 0, 5, 5, 6, 29])
    with CardGroup(tmp_path / "saved", cards=3) as group:
        found = group.lookup({"item": ids, "item.offsets": starts})["item"]
        rows = group.lookup({"item": torch.arange(63)})["item"]
        assert torch.equal(found, torch.nn.functional.embedding_bag(ids, rows, starts, mode="max"))
        with pytest.raises(BadInput, match="pooled by max; weights work with sums"):
            group.lookup({"item": ids, "item.offsets": starts, "item.weights": torch.ones(29)})


def test_gpus_where_there_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thermocline.save(thermocline.EmbeddingCollection([thermocline.Table("user", 10, 4)]), tmp_path / "saved")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match="sees no GPU here; use 'cpu'"):
        CardGroup(tmp_path / "saved", cards=2, device="cuda")
