"""Clients and faults of the chaos benchmark, all in one event loop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import grpc
import numpy as np
import torch

from benchmarks.chaos.fuzz import spoiled_grpc, spoiled_http
from benchmarks.serve.load_client import METHOD, OPTIONS
from thermocline import EmbeddingCollection, Table, save
from thermocline.nn.config import RowConfig
from thermocline.serve.protocol import schema

MODEL, TABLES, ROWS, DIM = "shop", ("a", "b"), 20_011, 16
CLIENTS, FUZZERS = 6, 3
BURST, LARGE = 150, 150_000
_ASK = build_opener(ProxyHandler({}))
_BUSY = {"UNAVAILABLE": "unavailable", "RESOURCE_EXHAUSTED": "overloaded"}
_TOLD = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", *_BUSY}
Rows = np.ndarray[Any, np.dtype[np.float32]]


class Chains:
    """Two versions of a model, each a chain of saves, with the expected rows of every save."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules = {}
        self.rows: dict[str, dict[str, Rows]] = {}
        self._saves = Counter[str]()
        self._draw = torch.Generator().manual_seed(3)
        for number in ("1", "2"):
            tables = [Table(name, ROWS, DIM) for name in TABLES]
            self._modules[number] = EmbeddingCollection(tables, rows=RowConfig("int8", cache=0.0))
            self.train(number)

    def train(self, number: str) -> None:
        """Change some rows and save them incrementally. Expected rows are recorded before the server can load them."""
        module = self._modules[number]
        ids = torch.randint(0, ROWS, (512, len(TABLES)), generator=self._draw)
        module(ids).values().square().sum().backward()
        self._saves[number] += 1
        self.rows[f"{number}.{self._saves[number]}"] = {name: module.get_rows(name).numpy().copy() for name in TABLES}
        save(module, self._folder / MODEL / number, incremental=True)
        for old in range(1, self._saves[number] - 60):
            self.rows.pop(f"{number}.{old}", None)  # no answer is as late


class Actors:
    """The clients, the faults, and counts of what the clients received."""

    def __init__(self, http: str, address: str, chains: Chains) -> None:
        self._http, self._address, self._chains = http, address, chains
        self._draw = random.Random(5)
        self.counts: Counter[str] = Counter({"answered": 0, "wrong": 0, "mixed": 0})
        self.unexpected: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.malformed = self.kills = self.recovered = self.switches = self.deltas = self.crashes = 0
        self.slowest = 0.0
        self.memory: list[int] = []
        self.descriptors: list[int] = []

    def all(self) -> list[Coroutine[Any, Any, None]]:
        clients = [self._client(random.Random(number)) for number in range(CLIENTS)]
        fuzzers = [fuzz(random.Random(number)) for number in range(FUZZERS) for fuzz in (self._fuzz_grpc, self._fuzz_http)]
        return [*clients, *fuzzers, self._kill(), self._switch(), self._save(), self._overload()]

    # -- good requests --

    async def _client(self, draw: random.Random) -> None:
        while True:  # a channel for a while, as clients come and go
            async with grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel:
                for _ in range(draw.choice((3, 50, 500))):
                    await self._ask(channel, draw.choice((1, 7, 64, 1000)), draw)

    async def _ask(self, channel: Any, count: int, draw: random.Random) -> None:
        ids = {name: np.array(draw.choices(range(ROWS), k=count), np.int64) for name in TABLES}
        try:
            data = await channel.unary_unary(METHOD)(_request(ids), timeout=30)
        except grpc.RpcError as error:
            self._count_error(error, "a good request")
            return
        response = schema.ModelInferResponse.FromString(data)
        found = {
            output.name: np.frombuffer(raw, np.float32).reshape(list(output.shape))
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        self.counts[self._judge(response.model_version, ids, found)] += 1
        self.seen.add(response.model_version)

    def _judge(self, version: str, ids: dict[str, np.ndarray[Any, np.dtype[np.int64]]], found: dict[str, Rows]) -> str:
        expected = self._chains.rows.get(version)
        if expected is None or set(found) != set(ids):
            return "wrong"
        right = [np.array_equal(found[name], expected[name][ids_N]) for name, ids_N in ids.items()]
        if all(right):
            return "answered"
        others = [rows for rows in self._chains.rows.values() if rows is not expected]
        parts = [any(np.array_equal(found[name], rows[name][ids[name]]) for rows in [expected, *others]) for name in ids]
        return "mixed" if all(parts) else "wrong"

    def _count_error(self, error: Any, what: str) -> None:
        code = error.code().name
        if code in _BUSY:
            self.counts[_BUSY[code]] += 1
        else:
            self.unexpected[f"{what}: {code}: {error.details()[:200]}"] += 1

    async def _overload(self) -> None:
        """Send bursts that exceed the queue."""
        draw = random.Random(77)
        while True:
            await asyncio.sleep(3)
            async with grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel:
                large = [self._large(channel) for _ in range(3)]
                await asyncio.gather(*large, *(self._ask(channel, 5, draw) for _ in range(BURST)))

    async def _large(self, channel: Any) -> None:
        ids = {"a": np.arange(LARGE) % ROWS}
        try:
            await channel.unary_unary(METHOD)(_request(ids), timeout=30)
            self.counts["large"] += 1
        except grpc.RpcError as error:
            self._count_error(error, "a large request")

    # -- bad ones --

    async def _fuzz_grpc(self, draw: random.Random) -> None:
        good = _request({"a": np.arange(9)})
        async with grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel:
            ask = channel.unary_unary(METHOD)
            while True:
                spoiled = [spoiled_grpc(draw, good) for _ in range(16)]
                for data, answer in zip(spoiled, await asyncio.gather(*map(ask, spoiled), return_exceptions=True), strict=True):
                    self.malformed += 1
                    code = answer.code().name if isinstance(answer, grpc.RpcError) else "OK"
                    if code not in _TOLD:
                        self.unexpected[f"malformed: {code} for {data[:60]!r}"] += 1
                await asyncio.sleep(0.02)

    async def _fuzz_http(self, draw: random.Random) -> None:
        host, port = self._http.split(":")
        while True:
            with suppress(ConnectionError, asyncio.TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(spoiled_http(draw, MODEL, "a"))
                got = await asyncio.wait_for(reader.read(1 << 16), 1)
                writer.close()
                if got.split(b" ")[1:2] == [b"500"]:
                    self.unexpected[f"malformed: {got[-200:]!r}"] += 1
            self.malformed += 1
            await asyncio.sleep(0.01)

    # -- what happens to the server --

    def _cards(self) -> list[dict[str, Any]]:
        return shard_cards(self._http)

    async def _kill(self) -> None:
        """Kill a shard, and wait until another process replaces it."""
        while True:
            await asyncio.sleep(self._draw.uniform(1, 4))
            card = self._draw.choice(await asyncio.to_thread(self._cards))
            if not card["ready"]:
                continue
            with suppress(ProcessLookupError):
                os.kill(card["pid"], signal.SIGKILL)
            self.kills += 1
            begin = time.monotonic()
            while time.monotonic() - begin < 60:
                now = (await asyncio.to_thread(self._cards))[card["number"]]
                if now["ready"] and now["pid"] != card["pid"]:
                    self.recovered += 1
                    self.slowest = max(self.slowest, time.monotonic() - begin)
                    break
                await asyncio.sleep(0.1)

    async def _switch(self) -> None:
        load = f"/{schema.SERVICE}/RepositoryModelLoad"
        async with grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel:
            while True:
                await asyncio.sleep(self._draw.uniform(1, 5))
                request = schema.message("RepositoryModelLoadRequest")(model_name=MODEL)
                version = {"specific": {"versions": [self._draw.choice((1, 2))]}}
                request.parameters["config"].string_param = json.dumps({"version_policy": version})
                try:
                    await channel.unary_unary(load)(request.SerializeToString(), timeout=60)
                    self.switches += 1
                except grpc.RpcError as error:
                    self._count_error(error, "a switch")

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(self._draw.uniform(0.5, 3))
            await asyncio.to_thread(self._chains.train, self._draw.choice(("1", "2")))
            self.deltas += 1

    async def settle(self) -> None:
        """Wait until all shards are up and the server answers correctly."""
        end = time.monotonic() + 60
        while self.recovered < self.kills and time.monotonic() < end:
            if all(card["ready"] for card in await asyncio.to_thread(self._cards)):
                self.recovered += 1  # the last killed shard: `_kill` did not wait for it
                break
            await asyncio.sleep(0.1)
        async with grpc.aio.insecure_channel(self._address, options=OPTIONS) as channel:
            before = self.counts["answered"]
            await self._ask(channel, 1000, random.Random(1))
            if self.counts["answered"] != before + 1:
                self.unexpected["the last request was not answered"] += 1


def shard_cards(http: str) -> list[dict[str, Any]]:
    """State and process of each shard of the first model."""
    with _ASK.open(f"http://{http}/status.json", timeout=20) as answer:
        models: list[dict[str, Any]] = json.load(answer)["models"]
    cards: list[dict[str, Any]] = models[0]["cards"]
    return cards


def _request(ids: dict[str, np.ndarray[Any, np.dtype[np.int64]]]) -> bytes:
    message = schema.ModelInferRequest(model_name=MODEL)
    for name, ids_N in ids.items():
        message.inputs.add(name=name, datatype="INT64", shape=[len(ids_N)])
        message.raw_input_contents.append(ids_N.tobytes())
    data: bytes = message.SerializeToString()
    return data
