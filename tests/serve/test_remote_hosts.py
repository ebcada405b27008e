"""Shards on two hosts, each in a network namespace: the same results as on one host, and clear errors when a host is gone."""

from __future__ import annotations

import json
import os
import socket
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
from support import has
from thermocline import BadInput, FormatError
from thermocline.serve.remote.remote_hosts import RemoteHost
from thermocline.serve.remote.rendezvous import HostTls, Rendezvous
from thermocline.serve.remote.shard_host import ShardHost, run_shard_host
from thermocline.serve.tables.checkpoint_source import CheckpointSource
from thermocline.serve.tables.load_job import LoadJob
from thermocline.serve.tables.segments import make_layout

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=f"hosts are network namespaces: {why_not()}")

ENTER = "import sys; from benchmarks.exchange.network import Net; Net(*map(int, sys.argv[1:4])).enter(int(sys.argv[4]));"
HOLD = ENTER + "from thermocline.serve import run_shard_host; run_shard_host(sys.argv[5])"
# Executes lines of JSON, and replies with a line to each.
FRONT = (
    ENTER
    + """
import json
FIELDS = "feature", "rows", "id", "shard"
from thermocline import ThermoclineError
from thermocline.serve import ShardGroup
from thermocline.serve.errors import NotReady
def there():
    host, = group._hosts.remote
    host.heartbeat()
    return [len(pids) for pids, _ in host.shards.values()]
with ShardGroup(sys.argv[5], shards=4, split=sys.argv[6]) as group:
    for line in sys.stdin:
        told = json.loads(line)
        try:
            if told["do"] == "load":
                group.load(told["folder"])
                said = {}
            elif told["do"] == "follow":
                said = {"followed": group.follow()}
            elif told["do"] == "open another and close":
                another = ShardGroup(told["folder"], shards=4)
                group.close()
                group = another
                said = {"there": there()}
            elif told["do"] == "close while loading":
                load = group._hosts.load
                group._hosts.load = lambda *given: (group.close(), load(*given))[1]  # closed before hosts get the load
                try:
                    group.load(told["folder"])
                except NotReady as error:
                    said = {"refused": type(error).__name__, "there": there()}
            elif told["do"] == "open beside":
                beside, lost, tried = ShardGroup(told["folder"], shards=4), [], []
                lose, back = group.host_lost, beside.host_back
                group.host_lost = lambda: (lost.append(1), lose())
                beside.host_back = lambda: (tried.append(1), back())
                said = {}
            elif told["do"] == "beside":
                said = {"lost": len(lost), "tried": len(tried), "ready": [shard.ready for shard in beside.shards()]}
            elif told["do"] == "shards":
                said = {"shards": [[shard.ready, shard.pid] for shard in group.shards()]}
            else:
                of = beside if told["do"] == "look up beside" else group
                found = of.lookup({name: told["ids"] for name in of.current.features} | told["more"])
                said = {name: rows.tolist() for name, rows in found.items()}
                said = {"rows": said, "version": group.version, "bytes": [group._hosts.sent, group._hosts.received]}
        except ThermoclineError as error:
            said = {"error": type(error).__name__} | {name: value for name, value in vars(error).items() if name in FIELDS}
        print(json.dumps(said), flush=True)
"""
)


class Two:
    """A front end in one namespace, a shard host in another."""

    def __init__(self, net: Net, folder: Path, split: str, **environment: str) -> None:
        self._net, self._root = net, folder.parent
        (self._root / "secret").write_text("0123456789abcdef")
        self._environment = {
            **os.environ,
            **environment,
            "THERMOCLINE_SECRET_FILE": str(self._root / "secret"),
            **net.environment(),
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        self.front = self._start(0, FRONT, str(folder), split)
        self.host = self.start_host()

    def start_host(self) -> subprocess.Popen[str]:
        self.host = self._start(1, HOLD, str(self._root))
        return self.host

    def _start(self, rank: int, program: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, self._net), str(rank), *more]
        environment = {**self._environment, "RANK": str(rank)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)

    def ask(self, **told: Any) -> dict[str, Any]:
        assert self.front.stdin is not None and self.front.stdout is not None
        print(json.dumps(told), file=self.front.stdin, flush=True)
        line = self.front.stdout.readline()
        assert line, "the front end is gone"
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
def test_rows_and_new_versions_on_two_hosts_match_the_model(net, tmp_path):
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
        assert two.rows([63]) == {"error": "BadInput", "feature": "item", "rows": 63, "id": 63}
        assert two.front.stdin is not None
        two.front.stdin.close()
        assert two.front.wait(300) == 0 and two.host.wait(300) == 0


@needs_namespaces
def test_a_lost_host_fails_fast_and_serves_again_when_it_is_back(net, tmp_path):
    model, ids = tables_of(1), list(range(63))
    thermocline.save(model, tmp_path / "saved")
    with Two(net, tmp_path / "saved", "range") as two:
        check(two.rows(ids), expected(model, ids))
        with two.host:
            two.host.kill()
        assert two.rows(ids) == {"error": "ShardDown", "shard": 2}
        check(two.rows(ids[:31]), expected(model, ids[:31]))  # rows of the front's own shards
        while [ready for ready, _ in two.ask(do="shards")["shards"]] != [True, True, False, False]:
            pass
        two.start_host()
        while "error" in (found := two.rows(ids)):
            assert found == {"error": "ShardDown", "shard": 2}
        check(found, expected(model, ids))


@needs_namespaces
def test_only_a_group_that_cannot_be_reloaded_stays_without_its_host(net, tmp_path):
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
        assert two.ask(do="look up beside", ids=ids, more={})["error"] == "ShardDown"
        (tmp_path / "away").rename(tmp_path / "beside")
        while "error" in (found := two.ask(do="look up beside", ids=ids, more={})):
            assert found["error"] == "ShardDown"
        check(found, expected(model, ids))


@needs_namespaces
def test_closing_a_group_ends_its_shards_only_and_a_late_load_starts_none(net, tmp_path):
    model, ids = tables_of(1), list(range(63))
    thermocline.save(model, tmp_path / "saved")
    with Two(net, tmp_path / "saved", "hash") as two:
        check(two.rows(ids), expected(model, ids))
        assert two.ask(do="open another and close", folder=str(tmp_path / "saved")) == {"there": [2]}
        check(two.rows(ids), expected(model, ids))
        said = two.ask(do="close while loading", folder=str(tmp_path / "saved"))
        assert said == {"refused": "NotReady", "there": []}


def message(group: str, version: int) -> dict[str, Any]:
    return {"do": "load", "group": group, "version": version, "shards": 1}


def test_a_host_refuses_loads_of_a_closed_group_and_frees_its_memory(tmp_path):
    thermocline.save(tables_of(1), tmp_path)
    source = CheckpointSource(tmp_path)
    job = source.load_job(make_layout(source.tables, source.splits(2, "hash", None, None), records=True))
    data = bytearray(LoadJob(job.layout, job.files, job.phases, job.checksums, 1).to_bytes())
    host = ShardHost(Rendezvous(1, 2, None, "127.0.0.1", b""), tmp_path)
    assert host.handle(message("1", 1), data) == {} and host.handle(message("2", 2), data) == {}
    try:
        assert host.handle({"do": "close", "group": "1"}, bytearray()) == {}
        assert "closed" in host.handle(message("1", 3), data)["error"]
        assert "closed" in host.handle({"do": "put", "version": 1, "table": 0, "rows": 0}, bytearray())["error"]
        assert host.handle({"do": "drop", "version": 1}, bytearray()) == {}  # as the front end does later
        assert list(host._versions) == [2]
        assert list(host.handle({"do": "status"}, bytearray())["shards"]) == ["2"]
    finally:
        host.handle({"do": "forget"}, bytearray())
    assert not host._versions and host.handle({"do": "status"}, bytearray()) == {"shards": {}}
    assert host.handle(message("2", 4), data) == {}  # a forgotten group may be loaded again
    host.handle({"do": "close", "group": "2"}, bytearray())


def test_the_status_of_a_host_tolerates_groups_that_come_and_go(tmp_path):
    host = ShardHost(Rendezvous(1, 2, None, "127.0.0.1", b""), tmp_path)

    class Processes:
        ready = (True,)

        @property
        def pids(self):
            host._supervisors["2"] = self  # from the thread of another connection
            return [7]

    host._supervisors["1"] = Processes()
    assert list(host.handle({"do": "status"}, bytearray())["shards"]) == ["1"]


def test_a_loading_host_ends_with_the_front_end(monkeypatch, tmp_path):
    said: dict[str, bytes] = {}
    listens, loads, never, ended = (threading.Event() for _ in range(4))
    store = SimpleNamespace(set=lambda key, value: (said.update({key: value.encode()}), listens.set()), get=said.get)
    host = ShardHost(Rendezvous(1, 2, store, "127.0.0.1", b"token"), tmp_path)

    def load(data: bytes) -> None:
        loads.set()
        never.wait()
        raise BadInput("it is over")

    def tell() -> None:
        with suppress(FormatError, OSError, EOFError):
            front.request(message("1", 1), b"job")

    monkeypatch.setattr(LoadJob, "from_bytes", load)
    threading.Thread(target=lambda: (host.listen(), ended.set()), daemon=True).start()
    assert listens.wait(120)
    front = RemoteHost(Rendezvous(0, 2, store, "127.0.0.1", b"token"), 1)
    front.connect()
    telling = threading.Thread(target=tell)
    telling.start()
    assert loads.wait(120)
    front.end()
    assert ended.wait(120) and host.dismissed
    never.set()
    telling.join()
    front.close()


@pytest.fixture
def listening(tmp_path):
    """A shard host that knows a secret, and a function that opens front ends with a secret."""
    said: dict[str, bytes] = {}
    listens = threading.Event()
    store = SimpleNamespace(set=lambda key, value: (said.update({key: value.encode()}), listens.set()), get=said.get)
    hosts, fronts = [], []

    def listen(tls=None):
        hosts.append(ShardHost(Rendezvous(1, 2, store, "127.0.0.1", b"the secret", tls), tmp_path / "served"))
        threading.Thread(target=hosts[-1].listen, daemon=True).start()
        assert listens.wait(120)

    def connect(secret, tls=None):
        fronts.append(RemoteHost(Rendezvous(0, 2, store, "127.0.0.1", secret, tls), 1))
        fronts[-1].connect()
        return fronts[-1]

    yield SimpleNamespace(listen=listen, connect=connect, said=said, hosts=hosts)
    for each in fronts:
        each.close()
    for each in hosts:
        each.ended.set()


def test_a_host_and_a_front_end_need_the_same_secret_which_the_store_lacks(listening):
    listening.listen()
    with pytest.raises((EOFError, OSError)):
        listening.connect(b"another secret")
    listening.connect(b"the secret").heartbeat()
    assert list(listening.said) == ["thermocline/1"]
    assert not listening.hosts[0]._versions


def test_a_host_answers_a_stranger_with_nothing_but_a_random_number(listening):
    listening.listen()
    host, _, port = listening.said["thermocline/1"].decode().rpartition(":")
    numbers = set()
    for _ in range(2):
        with socket.create_connection((host, int(port)), 60) as stranger:
            numbers.add(stranger.recv(100))
            stranger.sendall(bytes(64) + b"C" + bytes(100))
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    assert {len(number) for number in numbers} == {32} and len(numbers) == 2


@pytest.mark.parametrize("name", ["/etc/hosts", "served/../outside", "outside"])
def test_a_host_loads_nothing_outside_of_its_folder(tmp_path, name):
    thermocline.save(tables_of(1), tmp_path / "served")
    (tmp_path / "outside").write_bytes(b"rows")
    source = CheckpointSource(tmp_path / "served")
    job = source.load_job(make_layout(source.tables, source.splits(2, "hash", None, None), records=True))
    host = ShardHost(Rendezvous(1, 2, None, "127.0.0.1", b""), tmp_path / "served")
    files = (str(tmp_path / name), *job.files[1:])
    data = bytearray(LoadJob(job.layout, files, job.phases, job.checksums, 1).to_bytes())
    assert "which this host serves" in host.handle(message("1", 1), data)["error"]
    data = bytearray(LoadJob(job.layout, job.files, job.phases, job.checksums[1:], 1).to_bytes())
    assert "without a checksum" in host.handle(message("1", 1), data)["error"]
    assert not host._versions and not host._supervisors


def test_hosts_without_a_secret_are_refused(monkeypatch, tmp_path):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "THERMOCLINE_SECRET_FILE": ""}.items():
        monkeypatch.setenv(name, value)
    for content in (None, b"short"):
        if content is not None:
            (tmp_path / "secret").write_bytes(content)
            monkeypatch.setenv("THERMOCLINE_SECRET_FILE", str(tmp_path / "secret"))
        with pytest.raises(BadInput, check=has(parameter="--secret-file")):
            run_shard_host(tmp_path)


def test_hosts_with_tls_need_certificates_of_one_ca(listening, tmp_path, make_certificates):
    ours, theirs = (HostTls(*map(str, make_certificates(tmp_path / name))) for name in ("ours", "theirs"))
    listening.listen(ours)
    for tls in (theirs, None):
        with pytest.raises((EOFError, OSError)):
            listening.connect(b"the secret", tls)
    listening.connect(b"the secret", ours).heartbeat()
