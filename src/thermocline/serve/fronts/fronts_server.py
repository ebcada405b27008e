"""A server with several front processes over one copy of the rows.

This process holds the model repository and the shards, loads, takes publishes, and opens no port for clients. Its front
processes answer them, each with an interpreter of its own. The process adds up what they count: `/metrics` and the status page
are the same at each front. Rejected: a front that passes requests on, which costs a copy and a thread hop for each.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from logging import WARNING
from typing import Any

from thermocline.serve.errors import NotReady
from thermocline.serve.server.config import ServerConfig
from thermocline.serve.server.inference_service import error_status
from thermocline.serve.server.json_log import log
from thermocline.serve.server.model_repository import ModelRepository
from thermocline.serve.server.server import InferenceServer

from .front_processes import FrontProcess, FrontProcesses, reserve_port
from .messages import send_message


class FrontsServer(InferenceServer):
    """An `InferenceServer` whose ports are opened by front processes."""

    def __init__(self, repository: ModelRepository, config: ServerConfig) -> None:
        super().__init__(repository, config)
        self._ports: Sequence[socket.socket] = ()
        self._fronts: FrontProcesses | None = None
        self._loop, self._showing = asyncio.get_running_loop(), asyncio.Lock()
        repository.metrics.in_flight = lambda: sum(self._gauges("in_flight"))

    async def _open_ports(self) -> None:
        config = self._config
        self._ports = (
            reserve_port(config.host, config.http_port, "http_port"),
            reserve_port(config.host, config.grpc_port, "grpc_port"),
        )
        self.http_port, self.grpc_port = (port.getsockname()[1] for port in self._ports)
        limits = replace(config.limits, in_flight=max(1, config.limits.in_flight // config.fronts))
        own = replace(config, http_port=self.http_port, grpc_port=self.grpc_port, limits=limits, publish_port=None, follow=0.0)
        self._fronts = fronts = FrontProcesses(own, self._heard)
        await self._loop.run_in_executor(None, fronts.start)
        self.repository.on_load = lambda model: model.share(fronts)

    async def load_all(self) -> None:
        await self._show_state()
        await super().load_all()
        await self._show_state()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._service.history.sample()
            try:
                await self._show_state()
            except (OSError, NotReady) as error:  # the folder cannot be read now, or a model is being closed
                log("fronts were not told the state of the server", WARNING, error=str(error)[:400])

    async def _show_state(self) -> None:
        assert self._fronts is not None
        async with self._showing:  # an earlier state must not replace a later one
            await self._loop.run_in_executor(None, self._fronts.show_state, self._state())

    def _state(self) -> dict[str, Any]:
        """What fronts say of all models."""
        names, repository = self.repository.names(), self.repository
        served = {each.model.name: [list(shard) for shard in each.model.shards()] for each in repository.all_served()}
        loading = [each["name"] for each in repository.index() if each["state"] == "LOADING"]
        regions = [list(each) for each in self._service.regions.regions.values()]
        return {"ready": repository.ready, "names": names, "loading": loading, "shards": served, "regions": regions}

    async def _close_ports(self) -> None:
        if self._fronts is not None:
            await self._loop.run_in_executor(None, self._fronts.stop)
        for port in self._ports:
            port.close()

    # -- what fronts say ----------------------------------------------------------------------------------------------------

    def _gauges(self, name: str) -> list[Any]:
        return [front.gauges[name] for front in self._fronts.running.values() if name in front.gauges] if self._fronts else []

    def _heard(self, front: FrontProcess, message: dict[str, Any]) -> None:
        """Called in the thread of a front."""
        self._loop.call_soon_threadsafe(self._take, front, message)

    def _take(self, front: FrontProcess, message: dict[str, Any]) -> None:
        """Add up counts, and answer what the front asks."""
        front.gauges = message["gauges"]
        metrics, counts = self.repository.metrics, message["counts"]
        metrics.add(counts["metrics"])
        for name in metrics.models:
            metrics.of(name).queued_in_fronts = sum(queued.get(name, 0) for queued in self._gauges("queued"))
        for name, lookups in counts["lookups"].items():
            if (served := self.repository.in_use(name)) is not None and len(lookups["shards"]) == len(
                served.model.shards()
            ) + 1:
                served.model.count_lookups(**lookups)  # type: ignore[attr-defined]
        if "ask" in message:
            task = self._loop.create_task(self._answer(front, message))
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    async def _answer(self, front: FrontProcess, message: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"number": message["number"]}
        try:
            reply["value"] = await self._do(message["ask"], message["given"])
        except Exception as error:
            status = error_status(error)
            reply["error"] = status.code, status.message
        await self._loop.run_in_executor(None, _send, front, reply)

    async def _do(self, what: str, given: Sequence[Any]) -> Any:
        if what not in ("load", "unload"):
            found = await self._service.report(what, *given)
            if what in ("register", "unregister"):
                await self._show_state()
            return found
        if self.repository.draining:
            raise NotReady("the server is shutting down; ask another, or try again")
        if what == "load":
            await self.repository.load(*given)
        else:
            await self._service.unload(*given)
            await self.repository.closed()  # which hides it at all fronts
        await self._show_state()
        return None


def _send(front: FrontProcess, reply: dict[str, Any]) -> None:
    with suppress(OSError):  # the front is gone
        send_message(front.asks, reply)
