"""The server as a whole: two ports, one event loop, a beginning and an end.

It begins by opening its ports, so that a port that is taken is known before an hour of loading, and is live but not ready
until the models are. It ends, on SIGTERM or Ctrl-C, by not being ready, refusing until nobody asks, answering what it has, and
closing the models. Ports stay open for that moment: when gRPC stops, it cancels calls that it has read and nobody has looked
at, a handful under load, and CANCELLED tells a client that the call was given up, not to try elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from .auth import Secrets
from .cpu_affinity import Together
from .grpc_server import bind, make_server
from .history import History
from .http_server import HttpServer
from .inference_service import Desk
from .json_log import log
from .limits import Limits
from .model_repository import Repository

LOOPBACK = "127.0.0.1"
QUIET, LONGEST = 0.2, 1.0  # seconds: nobody was refused for so long; so long at most until ports close


@dataclass(frozen=True)
class Settings:
    """Where to listen, and to whom. Port 0 takes a free one."""

    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    secrets: Secrets = field(default_factory=Secrets)
    limits: Limits = field(default_factory=Limits)
    follow: float = 0.0  # seconds between two looks for what was saved since; 0: never


class Server:
    """Listens from `start` to `stop`. `http_port` and `grpc_port` are what it listens on."""

    def __init__(self, repository: Repository, settings: Settings) -> None:
        self.repository, self._settings = repository, settings
        self._desk = Desk(repository, settings.limits, repository.metrics)
        self._history = History(repository.metrics)
        self._tasks: list[asyncio.Task[None]] = []
        self.http_port = self.grpc_port = 0
        self._grpc: Any = None
        self._http: HttpServer | None = None
        self._together: Together | None = None

    async def start(self) -> None:
        """Open both ports."""
        settings = self._settings
        self._http = HttpServer(self._desk, settings.limits, settings.secrets, self._history)
        before = set(threading.enumerate())
        self._grpc = make_server(self._desk, settings.limits, settings.secrets)
        self.grpc_port = bind(self._grpc, settings.host, settings.grpc_port, settings.secrets)
        self.http_port = await self._http.start(settings.host, settings.http_port)
        await self._grpc.start()
        polls = [thread.native_id for thread in threading.enumerate() if thread not in before and thread.native_id]
        self._together = Together(polls, self._done)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(initializer=self._together.release))
        self._tasks.append(loop.create_task(self._sample()))
        if settings.follow:
            self._tasks.append(loop.create_task(self._follow()))
        log(
            "listening",
            host=settings.host,
            http_port=self.http_port,
            grpc_port=self.grpc_port,
            tls=settings.secrets.key is not None,
        )
        if settings.host != LOOPBACK and settings.secrets.token is None:
            log("whoever reaches this address may load and unload models; give a token", 30, host=settings.host)

    def _done(self) -> tuple[int, int]:
        models = self.repository.metrics.models.values()
        return sum(model.answered for model in models), sum(model.handed for model in models)

    async def load_all(self) -> None:
        """Load every model of the folder."""
        await self.repository.load_all()
        # What was loaded stays: without this, every full collection walks through torch's modules, 50 ms in the middle of
        # requests.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # what requests leave goes by itself; a request in 20 would be stopped for nothing
        log("ready", models=[one.model.name for one in self.repository.all_served()])

    async def _sample(self) -> None:
        assert self._together is not None
        while True:
            await asyncio.sleep(1)
            self._history.sample()
            self._together.look()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._settings.follow)
            await self.repository.follow()

    async def stop(self) -> None:
        """Answer what has come, take no more, close the models."""
        log("draining")
        self.repository.draining = True
        for task in self._tasks:
            task.cancel()
        if self._together is not None:
            self._together.let_go()
        await self._refuse()
        drain = self._settings.limits.drain
        stops = [self._grpc.stop(drain)] if self._grpc is not None else []
        if self._http is not None:
            stops.append(self._http.stop())
        await asyncio.gather(*stops)
        await self.repository.close()
        log("stopped")

    async def _refuse(self) -> None:
        """Until nobody asks."""
        end, before = monotonic() + LONGEST, -1
        while (refused := self._desk.refused) != before and monotonic() < end:
            before = refused
            await asyncio.sleep(QUIET)


def run(make: Callable[[], Repository], settings: Settings, ready: Callable[[Server], None]) -> bool:
    """Serve until SIGTERM or Ctrl-C. `make` is called in the event loop, which is uvloop's where that is installed: it takes a
    tenth less of the processor for a small request than asyncio's own. False: a model was being loaded, by a thread that may go
    on."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        from asyncio import new_event_loop
    loop = new_event_loop()
    try:
        done: bool = loop.run_until_complete(_serve(make, settings, ready))
        return done
    finally:
        loop.close()


async def _serve(make: Callable[[], Repository], settings: Settings, ready: Callable[[Server], None]) -> bool:
    server = Server(make(), settings)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    try:
        await server.start()
        loading = loop.create_task(server.load_all())
        stopping = loop.create_task(told.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.cancel():
            return False
        loading.result()
        ready(server)
        await stopping
    finally:
        await server.stop()
    return not server.repository.loading
