"""A front process: the server's ports, queues and protocols over rows that the server holds.

It opens the ports beside the other fronts (SO_REUSEPORT), and the kernel gives each new connection to one of them. Loading,
statistics and metrics concern all fronts, so the front asks the server. It ends when the server does.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thermocline.errors import BadInput
from thermocline.serve.errors import DeadlineExceeded, NotAllowed, NotReady, Overloaded, UnknownModel
from thermocline.serve.protocol.shared_memory import SharedRegion
from thermocline.serve.served_model import ModelSignature
from thermocline.serve.server.config import ServerConfig
from thermocline.serve.server.inference_service import InferenceService, version_of_config
from thermocline.serve.server.json_log import log_fault, write_to_stderr
from thermocline.serve.server.metrics import ServerMetrics, subtract_counts
from thermocline.serve.server.model_loader import ShardConfig
from thermocline.serve.server.model_repository import ModelRepository
from thermocline.serve.server.server import InferenceServer, keep_freed_memory, make_event_loop
from thermocline.serve.tables.segments import SharedSegment
from thermocline.serve.tables.version import TableVersion

from .front_tables import FrontLookups, FrontTables
from .messages import receive_message, send_message, unpack

_ERRORS: dict[str, Callable[[str], Exception]] = {
    "NOT_FOUND": UnknownModel, "PERMISSION_DENIED": NotAllowed, "INVALID_ARGUMENT": BadInput,
    "RESOURCE_EXHAUSTED": Overloaded, "UNAVAILABLE": NotReady, "DEADLINE_EXCEEDED": DeadlineExceeded,
}  # fmt: skip


class FrontRepository(ModelRepository):
    """The models that the server shows to this front."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(Path(), ShardConfig(), config.limits, ServerMetrics())
        self.tables: dict[str, FrontTables] = {}
        self.lookups: dict[str, FrontLookups] = {}
        self.on_regions: Callable[[list[list[Any]]], None]
        self.state: dict[str, Any] = {"ready": False, "names": [], "loading": [], "shards": {}}

    def names(self) -> list[str]:
        names: list[str] = self.state["names"]
        return names

    def _is_loading(self, name: str) -> bool:
        return name in self.state["loading"]

    @property
    def ready(self) -> bool:
        return bool(self.state["ready"]) and not self.draining

    def prepare(
        self, name: str, changed: Mapping[str, Any], segments: Sequence[SharedSegment]
    ) -> tuple[FrontTables, TableVersion]:  # fmt: skip
        """The tables of a model and their next version, to show in the event loop."""
        tables = self.tables.get(name) or FrontTables(name, self.lookups.setdefault(name, FrontLookups()))
        version = tables.prepare(changed, segments)
        self.tables[name] = tables
        return tables, version

    def show(self, tables: FrontTables, version: TableVersion) -> None:
        """Serve a version of a model."""
        changed = tables.version == "" or tables.current.layout is not version.layout
        tables.show(version)
        name = tables.name
        if name not in self._served:
            self._served[name] = self._serve(tables)
        elif changed:
            self._served[name] = replace(self._served[name], signature=ModelSignature(tables))
        if changed:
            self._serve_companions(name, tables)

    def hide(self, name: str) -> None:
        """Stop serving a model and its companions."""
        if self.tables.pop(name, None) is not None:
            self._close_with_companions(name)

    def report(self, state: dict[str, Any]) -> None:
        """The state of all models, from the server."""
        self.state = state
        for name, tables in self.tables.items():
            tables.report(state["shards"].get(name, []))
        self.on_regions(state["regions"])

    def counts(self) -> dict[str, Any]:
        """Everything that this front has counted."""
        lookups = {name: each.counts() for name, each in list(self.lookups.items())}  # `prepare` adds to it in a thread
        return {"metrics": self.metrics.counts(), "lookups": lookups}


class ServerAsks:
    """Questions to the server, which concern all fronts. Belongs to the event loop's thread."""

    def __init__(self, server: socket.socket, repository: FrontRepository) -> None:
        self._server, self._repository, self._sent = server, repository, dict[str, Any]()
        self._numbers, self._waiting = itertools.count(), dict[int, asyncio.Future[Any]]()
        server.setblocking(False)
        self.ended = asyncio.Event()  # the server is gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(server.fileno(), self._receive)

    async def ask(self, what: str, *given: Any) -> Any:
        """The server's answer. Raises what it raised."""
        number = next(self._numbers)
        self._waiting[number] = self._loop.create_future()
        self.tell({"ask": what, "given": given, "number": number})
        try:
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message, with what was counted since the last one."""
        counts, queued = (
            self._repository.counts(),
            {each.model.name: each.batcher.queued for each in self._repository.all_served()},
        )
        gauges = {"queued": queued, "in_flight": self._repository.metrics.in_flight()}
        try:
            send_message(self._server, {**message, "counts": subtract_counts(counts, self._sent), "gauges": gauges})
        except BlockingIOError as error:
            raise NotReady("the server is busy; try again") from error
        except OSError as error:
            self.ended.set()
            raise NotReady("the server is shutting down; try another") from error
        self._sent = counts

    def _receive(self) -> None:
        try:
            message, _ = receive_message(self._server)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._loop.remove_reader(self._server.fileno())
            self.ended.set()
            return
        if (waiting := self._waiting.get(message["number"])) is None or waiting.done():  # the client cancelled
            return
        if "error" in message:
            code, words = message["error"]
            waiting.set_exception(_ERRORS.get(code, RuntimeError)(words))
        else:
            waiting.set_result(message["value"])


class FrontService(InferenceService):
    """The inference service of a front."""

    def __init__(self, repository: FrontRepository, config: ServerConfig, asks: ServerAsks) -> None:
        super().__init__(repository, config)
        self._asks = asks
        repository.on_regions = self._show_regions

    def _show_regions(self, regions: list[list[Any]]) -> None:
        self.regions.regions = {each[0]: SharedRegion(*each) for each in regions}

    async def report(self, what: str, *given: Any) -> Any:
        return await self._asks.ask(what, *given)

    async def load(self, name: str, config: str | None) -> None:
        self._check_not_draining()
        await self._asks.ask("load", name, version_of_config(config))

    async def unload(self, name: str) -> None:
        await self._asks.ask("unload", name)


class OrderThread:
    """Carries out the orders of the server, one after another. Versions are made here, and shown in the event loop."""

    def __init__(
        self, server: socket.socket, front: InferenceServer, repository: FrontRepository, drain: asyncio.Event
    ) -> None:
        self._server, self._front, self._repository, self._drain = server, front, repository, drain
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="orders", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                message, descriptors = receive_message(self._server)
                send_message(self._server, self._obey(message, descriptors))
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._drain.set)
                return
            except Exception as error:  # the server replaces a front that does not answer
                log_fault("a front process cannot follow the server", error)
                os._exit(1)

    def _in_loop(self, work: Callable[..., None], *given: Any) -> None:
        async def do() -> None:
            work(*given)

        asyncio.run_coroutine_threadsafe(do(), self._loop).result()

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        action, name, repository = message["do"], message.get("model", ""), self._repository
        if action == "open":
            try:
                asyncio.run_coroutine_threadsafe(self._front.start(), self._loop).result()
            except BadInput as error:
                return {"error": str(error)}
        elif action == "show":
            pairs = zip(message["sizes"], descriptors[1:], strict=True)
            segments = [SharedSegment(size, descriptor=each) for size, each in pairs]
            self._in_loop(repository.show, *repository.prepare(name, unpack(descriptors[0]), segments))
        elif action == "settle":
            return {"settled": name not in repository.tables or repository.tables[name].settle(message["seconds"])}
        elif action == "hide":
            self._in_loop(repository.hide, name)
        elif action == "state":
            self._in_loop(repository.report, message)
        elif action == "drain":
            self._loop.call_soon_threadsafe(self._drain.set)
        return {}


async def _serve(config: ServerConfig, orders: socket.socket, asks: socket.socket) -> None:
    repository, drain, loop = FrontRepository(config), asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain.set)
    server_asks = ServerAsks(asks, repository)
    server = InferenceServer(repository, config, FrontService(repository, config, server_asks))
    send_message(orders, {})
    OrderThread(orders, server, repository, drain)
    ends = [loop.create_task(each.wait()) for each in (drain, server_asks.ended)]
    while not any(end.done() for end in ends):
        await asyncio.wait(ends, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        _tell(server_asks)
    stopping = loop.create_task(server.stop())
    while not stopping.done():  # a silent front would be killed with its requests
        await asyncio.wait((stopping,), timeout=1.0)
        _tell(server_asks)
    stopping.result()


def _tell(asks: ServerAsks) -> None:
    with suppress(NotReady):
        asks.tell({})


def main(orders: int, asks: int) -> None:
    """Serve until the server says so, or ends."""
    server = socket.socket(fileno=orders)
    message, _ = receive_message(server)
    config: ServerConfig = pickle.loads(base64.b64decode(message["config"]))
    write_to_stderr(quiet=True)  # the server says what concerns all fronts
    keep_freed_memory()
    loop = make_event_loop()
    try:
        loop.run_until_complete(_serve(config, server, socket.socket(fileno=asks)))
    finally:
        loop.close()
