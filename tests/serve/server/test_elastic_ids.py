"""Tables whose ids come and go, served: ids born in training over real sockets, unknown ids, and newer saves."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.request
from contextlib import contextmanager
from http.client import HTTPConnection

import numpy as np
import pytest
import torch
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http

import thermocline as tc
from support import has
from thermocline import IdMap, RowConfig, Table
from thermocline.serve import ShardGroup
from thermocline.serve.fronts.fronts_server import FrontsServer
from thermocline.serve.server.config import ServerConfig, ServerLimits
from thermocline.serve.server.model_loader import ShardConfig, make_repository
from thermocline.serve.server.server import InferenceServer

FEATURES = ("hour", "seen", "bought", "shop")


def make_tables():
    tables = [
        Table("hour", 24, 8),
        Table("item", 300, 12, features=("seen", "bought"), ids=IdMap.elastic(300, admit_after=2, half_life=10)),
        Table("shop", 90, 8, ids=IdMap.elastic(90, shared=3, evict="lru", salt=5)),
    ]
    return tc.EmbeddingCollection(tables, rows=RowConfig("int8", cache=0.1))


def train(tables, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        items = torch.randint(5 * step, 5 * step + 300, (64, 3), generator=generator) * 7919_000_017 - (1 << 40)
        hours = torch.randint(0, 24, (64, 1), generator=generator)
        tables(torch.cat([hours, items], 1)).values().square().sum().backward()


def some_ids(tables, feature, seed=0):
    """Ids with rows, and as many without, in any order."""
    own, draw = tables.elastic(feature).ids(), torch.Generator().manual_seed(seed)
    ids = torch.cat([own, torch.randint(-(1 << 62), 1 << 62, (own.numel(),), generator=draw)])
    return ids[torch.randperm(ids.numel(), generator=draw)]


def expected(tables, feature, ids):
    """Rows of ids in a loaded module, unpooled."""
    tables.eval()
    with torch.no_grad():
        offsets = torch.arange(ids.numel() + 1)
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(ids.numel() + 1, dtype=torch.int64)
        return tables({name: (ids, offsets) if name == feature else none for name in FEATURES})[feature]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained model, as loading gives it, and its checkpoint."""
    tables, folder = make_tables(), tmp_path_factory.mktemp("elastic") / "checkpoint"
    train(tables, 0, 20)
    tables.flush()
    tc.save(tables, folder)
    return tc.load(folder), folder


@pytest.fixture(scope="module")
def server(saved):
    """Addresses of a server over three shards: HTTP and gRPC."""
    with serving(saved, InferenceServer) as server:
        yield f"127.0.0.1:{server.http_port}", f"127.0.0.1:{server.grpc_port}"


@contextmanager
def serving(saved, kind, **config):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    repository = make_repository(saved[1], ShardConfig(3), ServerLimits(drain=3))

    def do(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    async def start():
        server = kind(repository, ServerConfig(http_port=0, grpc_port=0, limits=repository.limits, **config))
        await server.start()
        await server.load_all()
        return server

    server = do(start())
    yield server
    do(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(120)


@pytest.mark.parametrize("protocol, binary", [("grpc", True), ("http", True), ("http", False)])
@pytest.mark.parametrize("feature", ["seen", "shop"])
def test_ids_born_in_training_are_answered_over_the_network(saved, server, protocol, binary, feature):
    ids, api = some_ids(saved[0], feature), over_grpc if protocol == "grpc" else over_http
    tensor = api.InferInput(feature, [ids.numel()], "INT64")
    tensor.set_data_from_numpy(ids.numpy(), **({} if protocol == "grpc" else {"binary_data": binary}))
    kind = {} if protocol == "grpc" else {"binary_data": binary}
    names = (feature, f"{feature}.known")
    with api.InferenceServerClient(server[protocol == "grpc"]) as client:
        asked = client.infer("tables", [tensor], outputs=[api.InferRequestedOutput(name, **kind) for name in names])
        plain = client.infer("tables", [tensor])
        listed = client.get_model_metadata("tables", **({"as_json": True} if protocol == "grpc" else {}))
    np.testing.assert_array_equal(asked.as_numpy(feature), expected(saved[0], feature, ids).numpy())
    np.testing.assert_array_equal(asked.as_numpy(names[1]), (saved[0].elastic(feature).rows_of(ids) >= 0).numpy())
    assert 0 < asked.as_numpy(names[1]).sum() < ids.numel()
    np.testing.assert_array_equal(plain.as_numpy(feature), asked.as_numpy(feature))
    assert plain.as_numpy(names[1]) is None and {"seen.known", "bought.known"} < {each["name"] for each in listed["outputs"]}


def counted(text):
    names = ("elastic_lookups_total", "unknown_ids_total", "elastic_ids")
    return [float(re.search(rf'thermocline_{name}{{feature="shop",model="tables"}} (\S+)', text)[1]) for name in names]


def test_metrics_count_the_ids_that_fronts_looked_up(saved):
    ids = some_ids(saved[0], "shop", 4)
    inputs = [{"name": "shop", "shape": [ids.numel()], "datatype": "INT64", "data": ids.tolist()}]
    with serving(saved, FrontsServer, fronts=2) as server:
        front = HTTPConnection("127.0.0.1", server.http_port)
        front.request("POST", "/v2/models/tables/infer", json.dumps({"inputs": inputs}))
        rows = json.loads(front.getresponse().read())["outputs"][0]["data"]
        front.request("GET", "/metrics")  # of the same front, which says first what it counted
        lookups, unknown, known = counted(front.getresponse().read().decode())
        front.close()
    assert np.array_equal(np.array(rows, np.float32).reshape(-1, 8), expected(saved[0], "shop", ids).numpy())
    assert lookups == ids.numel() and known == saved[0].elastic("shop").state()["used"]
    assert unknown == int((saved[0].elastic("shop").rows_of(ids) < 0).sum()) > 0


def test_metrics_count_the_ids_without_a_row(saved, server):
    def read():
        with urllib.request.urlopen(f"http://{server[0]}/metrics") as answer:
            return counted(answer.read().decode())

    ids, before = some_ids(saved[0], "shop", 4), read()
    tensor = over_http.InferInput("shop", [ids.numel()], "INT64")
    tensor.set_data_from_numpy(ids.numpy())
    with over_http.InferenceServerClient(server[0]) as client:
        client.infer("tables", [tensor], outputs=[over_http.InferRequestedOutput("shop")])
    lookups, unknown, known = read()
    assert lookups - before[0] == ids.numel() and known == saved[0].elastic("shop").state()["used"]
    assert unknown - before[1] == int((saved[0].elastic("shop").rows_of(ids) < 0).sum()) > 0


def test_served_bags_and_reads_of_several_features_agree_with_the_module(saved):
    seen, bought = some_ids(saved[0], "seen", 1), some_ids(saved[0], "bought", 2)
    offsets = torch.tensor([0, 0, 13, 200])
    with ShardGroup(saved[1], shards=2) as group:
        found = group.lookup({"seen": seen, "bought": bought, "seen.offsets": offsets, "hour": [3, 23]})
        rows = expected(saved[0], "seen", seen).double()
        bags = [rows[first:last].sum(0) for first, last in zip(offsets, [*offsets[1:], seen.numel()], strict=True)]
        torch.testing.assert_close(found["seen"].double(), torch.stack(bags))
        assert torch.equal(found["bought"], expected(saved[0], "bought", bought))
        alone = group.lookup({"bought": bought}, outputs=["bought.known"])
        assert list(alone) == ["bought.known"] and alone["bought.known"].dtype == torch.bool
        with pytest.raises(tc.BadInput, check=has(parameter="seen.known")):
            group.lookup({"bought": bought}, outputs=["seen.known"])


def test_newer_saves_bring_their_ids_and_rows_at_once(tmp_path):
    tables = make_tables()
    train(tables, 0, 20)
    tables.flush()
    tc.save(tables, tmp_path / "a", incremental=True)
    with ShardGroup(tmp_path / "a", shards=2) as group:
        before = group.current
        train(tables, 60, 70)
        tables.flush()
        tc.save(tables, tmp_path / "a", incremental=True)
        assert group.follow() and group.current.overlay is not None
        loaded = tc.load(tmp_path / "a")
        for feature in ("seen", "shop"):
            born = loaded.elastic(feature).ids()
            assert torch.equal(group.lookup({feature: born})[feature], expected(loaded, feature, born))
            known = before.known(before.numbers[feature], born.numpy())
            assert not known.all(), "no id was born between the saves"
