"""The server: two ports, one event loop, startup and shutdown.

Ports open first: a taken port is reported before a long load. While the server shuts down they stay open, and requests are
refused: stopping gRPC cancels calls that it has read and not yet handled, and CANCELLED does not make a client retry.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
from collections.abc import Callable
from logging import WARNING
from time import monotonic
from typing import TYPE_CHECKING, Any

from thermocline.errors import BadInput

from .config import LOOPBACK, ServerConfig
from .grpc_server import bind, make_server
from .http_server import HttpServer
from .inference_service import InferenceService
from .json_log import log
from .model_repository import ModelRepository

if TYPE_CHECKING:
    from thermocline.serve.publishing.listener import PublishListener

QUIET_SECONDS, MAX_REFUSING_SECONDS = 0.2, 1.0  # at shutdown: no request for this long, and the maximum
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEPT_BYTES, _LARGE_BYTES = 256 << 20, 32 << 20


class InferenceServer:
    """Listens from `start` to `stop` on `http_port` and `grpc_port`."""

    def __init__(
        self, repository: ModelRepository, config: ServerConfig, service: InferenceService | None = None
    ) -> None:  # fmt: skip
        self.repository, self._config = repository, config
        self._service = service or InferenceService(repository, config)
        self._tasks: list[asyncio.Task[None]] = []
        self.http_port = self.grpc_port = 0
        self.publish_port: int | None = None
        self._grpc: Any = None
        self._http: HttpServer | None = None
        self._publishes: PublishListener | None = None

    async def start(self) -> None:
        """Open all ports."""
        config = self._config
        await self._open_ports()
        if config.publish_port is not None:
            self._publishes = _listen_for_publishes(self.repository, config.host, config.publish_port)
            self.publish_port = self._publishes.port
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._sample()))
        if config.follow:
            self._tasks.append(loop.create_task(self._follow()))
        tls = config.credentials.key is not None
        log("listening", host=config.host, http_port=self.http_port, grpc_port=self.grpc_port, tls=tls)
        if config.host != LOOPBACK and not config.credentials.identify_clients:
            log("any client may read rows; use --token-file or --tls-client-ca", WARNING, host=config.host)

    async def _open_ports(self) -> None:
        config = self._config
        self._http = HttpServer(self._service, config)
        self._grpc = make_server(self._service, config.limits, config.credentials, config.fronts > 1)
        self.grpc_port = bind(self._grpc, config.host, config.grpc_port, config.credentials)
        self.http_port = await self._http.start(config.host, config.http_port)
        await self._grpc.start()

    async def load_all(self) -> None:
        """Load every model of the folder."""
        await self.repository.load_all()
        # Loaded objects stay. Without `freeze` every full collection walks through torch's modules, 50 ms during requests.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # reference counts free what requests leave
        log("ready", models=[each.model.name for each in self.repository.all_served()])

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._service.history.sample()
            self._service.calls.sweep()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._config.follow)
            await self.repository.follow()

    async def stop(self) -> None:
        """Finish requests in flight, refuse new ones, close the models."""
        log("draining")
        self.repository.draining = True
        if self._publishes is not None:
            self._publishes.close()
        for task in self._tasks:
            task.cancel()
        await self._close_ports()
        await self.repository.close()
        log("stopped")

    async def _close_ports(self) -> None:
        """Finish requests."""
        await self._refuse_requests()
        stops = [self._grpc.stop(self._config.limits.drain)] if self._grpc is not None else []
        if self._http is not None:
            stops.append(self._http.stop())
        await asyncio.gather(*stops)

    async def _refuse_requests(self) -> None:
        """Keep refusing until no request arrives."""
        end, before = monotonic() + MAX_REFUSING_SECONDS, -1
        while (failed := self._service.failed) != before and monotonic() < end:
            before = failed
            await asyncio.sleep(QUIET_SECONDS)


def _listen_for_publishes(repository: ModelRepository, host: str, port: int) -> PublishListener:
    from thermocline.serve.publishing.listener import PublishListener  # deferred: imports torch
    from thermocline.serve.remote.rendezvous import read_secret, read_tls

    def find(name: str) -> Any:
        if (found := getattr(repository.served(name).model, "publishes", None)) is None:
            raise BadInput(f"model {name!r} takes no publishes", model=name)
        return found

    return PublishListener(find, host, port, read_secret(), read_tls())


def run(make: Callable[[], ModelRepository], config: ServerConfig, ready: Callable[[InferenceServer], None]) -> bool:
    """Serve until SIGTERM or Ctrl-C, in uvloop's loop where it is installed, which takes a tenth less processor time.

    Args:
        make: makes the repository, in the event loop
        config: addresses, credentials and limits
        ready: called when all models are loaded

    Returns:
        False if a thread still loads a model
    """
    keep_freed_memory()
    loop = make_event_loop()
    try:
        done: bool = loop.run_until_complete(_serve(make, config, ready))
        return done
    finally:
        loop.close()


def make_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, where it is installed."""
    try:
        from uvloop import new_event_loop  # optional dependency
    except ModuleNotFoundError:
        from asyncio import new_event_loop
    loop: asyncio.AbstractEventLoop = new_event_loop()
    return loop


def keep_freed_memory() -> None:
    """Have glibc's malloc keep freed blocks of up to 32 MiB, at most 256 MiB: 145 us instead of 673 for 2,048 rows."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _make_server(repository: ModelRepository, config: ServerConfig) -> InferenceServer:
    if config.fronts == 1:
        return InferenceServer(repository, config)
    from thermocline.serve.fronts.fronts_server import FrontsServer  # deferred: imports torch

    return FrontsServer(repository, config)


async def _serve(make: Callable[[], ModelRepository], config: ServerConfig, ready: Callable[[InferenceServer], None]) -> bool:
    server = _make_server(make(), config)
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    try:
        await server.start()
        loading = loop.create_task(server.load_all())
        stopping = loop.create_task(signalled.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.cancel():
            return False
        loading.result()
        ready(server)
        await stopping
    finally:
        await server.stop()
    return not server.repository.loading
