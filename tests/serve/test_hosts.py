"""Cards on two hosts, each a network namespace of its own: the same answers as on one, and clear words when a host is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import thermocline
from benchmarks.exchange.network import Net, cluster, why_not
from thermocline import BadInput, FormatError
from thermocline.serve.remote.remote_hosts import OtherHost
from thermocline.serve.remote.rendezvous import Meeting
from thermocline.serve.remote.shard_host import Host
from thermocline.serve.tables.checkpoint_source import Source
from thermocline.serve.tables.load_job import Job
from thermocline.serve.tables.segments import arrange

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=f"hosts are network namespaces: {why_not()}")

ENTER = "import sys; from benchmarks.exchange.network import Net; Net(*map(int, sys.argv[1:4])).enter(int(sys.argv[4]));"
HOLD = ENTER + "from thermocline.serve import hold_cards; hold_cards()"
# Does what it is told by lines of JSON, and answers with a line each.
FRONT = (
    ENTER
    + """
import json
from thermocline import ThermoclineError
from thermocline.serve import CardGroup
from thermocline.serve.errors import NotReady
def there():
    other, = group._hosts.others
    other.beat()
    return [len(pids) for pids, _ in other.cards.values()]
with CardGroup(sys.argv[5], cards=4, split=sys.argv[6]) as group:
    for line in sys.stdin:
        told = json.loads(line)
        try:
            if told["do"] == "load":
                group.load(told["folder"])
                said = {}
            elif told["do"] == "follow":
                said = {"followed": group.follow()}
            elif told["do"] == "open another and close":
                another = CardGroup(told["folder"], cards=4)
                group.close()
                group = another
                said = {"there": there()}
            elif told["do"] == "close while loading":
                load = group._hosts.load
                group._hosts.load = lambda *given: (group.close(), load(*given))[1]  # closed before hosts hear of the load
                try:
                    group.load(told["folder"])
                except NotReady as error:
                    said = {"refused": str(error), "there": there()}
            elif told["do"] == "open beside":
                beside, lost, tried = CardGroup(told["folder"], cards=4), [], []
                lose, back = group.lost, beside.back
                group.lost = lambda host: (lost.append(host), lose(host))
                beside.back = lambda host: (tried.append(host), back(host))
                said = {}
            elif told["do"] == "beside":
                said = {"lost": len(lost), "tried": len(tried), "ready": [card.ready for card in beside.cards()]}
            elif told["do"] == "cards":
                said = {"cards": [[card.ready, card.pid] for card in group.cards()]}
            else:
                of = beside if told["do"] == "look up beside" else group
                found = of.lookup({name: told["ids"] for name in of.current.features} | told["more"])
                said = {name: rows.tolist() for name, rows in found.items()}
                said = {"rows": said, "version": group.version, "bytes": [group._hosts.sent, group._hosts.received]}
        except ThermoclineError as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
"""
)


class Two:
    """A front in one namespace, a host in another."""

    def __init__(self, net: Net, folder: Path, split: str) -> None:
        self._net = net
        self._environment = {
            **os.environ,
            **net.environment(),
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        self.front = self._start(0, FRONT, str(folder), split)
        self.host = self.start_host()

    def start_host(self) -> subprocess.Popen[str]:
        self.host = self._start(1, HOLD)
        return self.host

    def _start(self, rank: int, program: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, self._net), str(rank), *more]
        environment = {**self._environment, "RANK": str(rank)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)

    def ask(self, **told: Any) -> dict[str, Any]:
        assert self.front.stdin is not None and self.front.stdout is not None
        print(json.dumps(told), file=self.front.stdin, flush=True)
        line = self.front.stdout.readline()
        assert line, "the front ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def rows(self, ids: list[int], **more: Any) -> dict[str, Any]:
        return self.ask(do="look up", ids=ids, more=more)

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.front, self.host):
            with each:
                each.kill()


@pytest.fixture
def net() -> Iterator[Net]:
    with cluster(2, 2) as found:
        yield found


def tables_of(seed: int) -> thermocline.EmbeddingCollection:
    torch.manual_seed(seed)
    tables = [thermocline.Table("user", 1009, 7), thermocline.Table("item", 63, 16, row_config=thermocline.RowConfig("fp32"))]
    made = thermocline.EmbeddingCollection(tables, mode="sum", rows=thermocline.RowConfig("int8", cache=0.05))
    made(torch.arange(63)[:, None].expand(-1, 2)).values().square().sum().backward()  # some rows are cached
    return made


def expected(tables: thermocline.EmbeddingCollection, ids: list[int]) -> dict[str, np.ndarray]:
    tables.flush()
    return {name: tables.get_rows(name, torch.tensor(ids)).numpy() for name in ("user", "item")}


def check(found: dict[str, Any], asked: dict[str, np.ndarray]) -> None:
    assert "rows" in found, found
    for name, rows_ND in asked.items():
        np.testing.assert_array_equal(np.array(found["rows"][name], np.float32), rows_ND)


@needs_namespaces
def test_rows_of_two_hosts_are_those_of_the_model_and_new_versions_reach_both(net, tmp_path):
    ids = np.random.default_rng(1).integers(0, 63, 77).tolist()
    models = [tables_of(1), tables_of(2)]
    for n, model in enumerate(models):
        thermocline.save(model, tmp_path / str(n), incremental=True)
    with Two(net, tmp_path / "0", "hash") as two:
        check(two.rows(ids), expected(models[0], ids))
        pooled = two.rows(ids, **{"user.offsets": [0, 13, 13], "item.offsets": [0, 50]})["rows"]
        assert len(pooled["user"]) == 3 and pooled["user"][1] == [0] * 7
        np.testing.assert_allclose(pooled["item"][1], expected(models[0], ids[50:])["item"].sum(0), rtol=1e-5, atol=1e-5)
        assert two.ask(do="load", folder=str(tmp_path / "1")) == {}
        check(two.rows(ids), expected(models[1], ids))
        models[1](torch.tensor([[3, 3]])).values().sum().backward()
        thermocline.save(models[1], tmp_path / "1", incremental=True)
        assert two.ask(do="follow") == {"followed": True}
        found = two.rows(ids)
        check(found, expected(models[1], ids))
        assert 0 < found["bytes"][0] < found["bytes"][1]
        wrong = two.rows([63])["error"]
        assert wrong == "BadInput: feature 'item' has ids 0 to 62, but the id at position 0 is 63"
        assert two.front.stdin is not None
        two.front.stdin.close()
        assert two.front.wait(300) == 0 and two.host.wait(300) == 0


@needs_namespaces
def test_a_host_that_dies_is_named_at_once_and_serves_again_when_it_is_back(net, tmp_path):
    model, ids = tables_of(1), list(range(63))
    thermocline.save(model, tmp_path / "saved")
    with Two(net, tmp_path / "saved", "range") as two:
        check(two.rows(ids), expected(model, ids))
        with two.host:
            two.host.kill()
        assert two.rows(ids)["error"].startswith("CardDown: card 2 is down")
        check(two.rows(ids[:31]), expected(model, ids[:31]))  # rows of the front's own cards
        while [ready for ready, _ in two.ask(do="cards")["cards"]] != [True, True, False, False]:
            pass
        two.start_host()
        while "error" in (found := two.rows(ids)):
            assert found["error"].startswith("CardDown: card 2 is down")
        check(found, expected(model, ids))


@needs_namespaces
def test_a_group_that_cannot_come_back_is_without_its_host_alone_until_it_can(net, tmp_path):
    model, ids = tables_of(1), list(range(63))
    for name in ("saved", "beside"):
        thermocline.save(model, tmp_path / name)
    with Two(net, tmp_path / "saved", "range") as two:
        assert two.ask(do="open beside", folder=str(tmp_path / "beside")) == {}
        with two.host:
            two.host.kill()
        while two.ask(do="beside")["lost"] == 0:
            pass
        (tmp_path / "beside").rename(tmp_path / "away")
        two.start_host()
        while "error" in (found := two.rows(ids)):
            pass
        check(found, expected(model, ids))
        before = two.ask(do="beside")["tried"]
        while (said := two.ask(do="beside"))["tried"] < before + 3:
            check(two.rows(ids), expected(model, ids))
        assert said["lost"] == 1 and said["ready"] == [True, True, False, False]
        assert two.ask(do="look up beside", ids=ids, more={})["error"].startswith("CardDown: card ")
        (tmp_path / "away").rename(tmp_path / "beside")
        while "error" in (found := two.ask(do="look up beside", ids=ids, more={})):
            assert found["error"].startswith("CardDown: card ")
        check(found, expected(model, ids))


@needs_namespaces
def test_a_group_that_is_closed_takes_its_cards_and_nobody_elses_and_a_load_that_comes_later_starts_none(net, tmp_path):
    model, ids = tables_of(1), list(range(63))
    thermocline.save(model, tmp_path / "saved")
    with Two(net, tmp_path / "saved", "hash") as two:
        check(two.rows(ids), expected(model, ids))
        assert two.ask(do="open another and close", folder=str(tmp_path / "saved")) == {"there": [2]}
        check(two.rows(ids), expected(model, ids))
        said = two.ask(do="close while loading", folder=str(tmp_path / "saved"))
        assert "were closed" in said["refused"] and said["there"] == []


def message(group: str, held: int) -> dict[str, Any]:
    return {"do": "load", "group": group, "held": held, "cards": 1}


def test_a_host_refuses_what_comes_for_a_closed_group_and_keeps_none_of_its_memory(tmp_path):
    thermocline.save(tables_of(1), tmp_path)
    source = Source(tmp_path)
    job = source.job(arrange(source.tables, source.splits(2, "hash", None, None), records=True))
    data = bytearray(Job(job.arrangement, job.files, job.phases, job.checksums, 1).to_bytes())
    host = Host(Meeting(1, 2, None, "127.0.0.1", b""))
    assert host._take(message("1", 1), data) == {} and host._take(message("2", 2), data) == {}
    try:
        assert host._take({"do": "close", "group": "1"}, bytearray()) == {}
        assert "closed" in host._take(message("1", 3), data)["error"]
        assert "closed" in host._take({"do": "put", "held": 1, "table": 0, "rows": 0}, bytearray())["error"]
        assert host._take({"do": "drop", "held": 1}, bytearray()) == {}  # as the front does a while after
        assert list(host._held) == list(host._views) == [2]
        assert list(host._take({"do": "status"}, bytearray())["cards"]) == ["2"]
    finally:
        host._take({"do": "forget"}, bytearray())
    assert not host._held and host._take({"do": "status"}, bytearray()) == {"cards": {}}
    assert host._take(message("2", 4), data) == {}  # what is only forgotten may be loaded again
    host._take({"do": "close", "group": "2"}, bytearray())


def test_groups_that_come_and_go_while_a_host_says_what_it_has_are_no_fault():
    host = Host(Meeting(1, 2, None, "127.0.0.1", b""))

    class Cards:
        ready = (True,)

        @property
        def pids(self):
            host._supervisors["2"] = self  # by the thread of another connection
            return [7]

    host._supervisors["1"] = Cards()
    assert list(host._take({"do": "status"}, bytearray())["cards"]) == ["1"]


def test_a_host_that_loads_hears_that_the_front_ends(monkeypatch):
    said: dict[str, bytes] = {}
    listens, loads, never, ended = (threading.Event() for _ in range(4))
    store = SimpleNamespace(set=lambda key, value: (said.update({key: value.encode()}), listens.set()), get=said.get)
    host = Host(Meeting(1, 2, store, "127.0.0.1", b"token"))

    def load(data: bytes) -> None:
        loads.set()
        never.wait()
        raise BadInput("it is over")

    def tell() -> None:
        with suppress(FormatError, OSError, EOFError):
            front.tell(message("1", 1), b"job")

    monkeypatch.setattr(Job, "from_bytes", load)
    threading.Thread(target=lambda: (host.listen(), ended.set()), daemon=True).start()
    assert listens.wait(120)
    front = OtherHost(Meeting(0, 2, store, "127.0.0.1", b"token"), 1)
    front.connect()
    telling = threading.Thread(target=tell)
    telling.start()
    assert loads.wait(120)
    front.say_goodbye()
    assert ended.wait(120) and host.told
    never.set()
    telling.join()
    front.close()
