"""The protocol over HTTP, on aiohttp, in the same event loop as gRPC; and the pages for people and Prometheus.

A client that sends slowly is cut off after `Limits.slow`: aiohttp closes a connection whose header does not come to an end in
that time, and reading a body is timed here. Bodies are read into memory, so their bytes are counted before they are read:
beyond `Limits.bodies` in all, a request is refused. Connections beyond `Limits.streams` are answered with one line and closed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from thermocline.errors import BadInput
from thermocline.serve.errors import Overloaded
from thermocline.serve.protocol.rest import HEADER_LENGTH, read_json, read_request, write_response

from .auth import Secrets
from .history import History
from .inference_service import Desk, now
from .limits import Limits
from .status_page import status_json, status_page

_OPEN = ("/v2/health/live", "/v2/health/ready")  # without a token: probes have none
# aiohttp logs every malformed request with its traceback, and what breaks in a route, which never reaches it here.
_SILENT = logging.getLogger("thermocline.serve.aiohttp")
_SILENT.disabled = True
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OverHttp:
    """The routes of the server."""

    def __init__(self, desk: Desk, limits: Limits, history: History) -> None:
        self._desk, self._limits, self._history = desk, limits, history
        self._reading = 0

    def routes(self) -> list[web.RouteDef]:
        desk = self._desk
        said = _said
        told: dict[str, Callable[[web.Request], web.Response]] = {
            "/v2/health/live": lambda request: web.Response(),
            "/v2/health/ready": lambda request: web.Response(status=200 if desk.server_ready() else 503),
            "/v2": lambda request: said(desk.server_metadata()),
            "/v2/models/stats": lambda request: said(desk.statistics("", "")),
            "/metrics": self._metrics,
            "/status.json": lambda request: said(status_json(desk, self._history)),
            "/": lambda request: web.Response(text=status_page(desk, self._history), content_type="text/html"),
        }
        of_model: dict[str, Callable[[web.Request], web.Response]] = {
            "": lambda request: said(desk.model_metadata(*_which(request))),
            "/ready": lambda request: web.Response(status=200 if desk.model_ready(*_which(request)) else 503),
            "/stats": lambda request: said(desk.statistics(*_which(request))),
        }
        for under in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            told |= {under + path: method for path, method in of_model.items()}
        routes = [web.get(path, _plain(method)) for path, method in told.items()]
        for under in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes.append(web.post(f"{under}/infer", self.infer))
        routes.append(web.post("/v2/repository/index", self._index))
        routes.append(web.post("/v2/repository/models/{model}/load", self._load))
        routes.append(web.post("/v2/repository/models/{model}/unload", self._unload))
        return routes

    async def infer(self, request: web.Request) -> web.Response:
        model, version = _which(request)
        body = await self._body(request)
        started = now()
        posted = read_request(model, version, body, request.headers.get(HEADER_LENGTH))
        answer = await self._desk.answer(posted.asked)
        written, length = write_response(model, answer.version, posted.asked.id, answer.outputs, posted.binary)
        self._desk.note(answer, started, answer.ticket.done, now())
        if length is None:
            return web.Response(body=written, content_type="application/json")
        return web.Response(body=written, content_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})

    async def _body(self, request: web.Request) -> bytes:
        """The whole body, if there is room for it and it comes in time."""
        if not request.body_exists:
            return b""
        length = request.content_length
        most = self._limits.message
        if length is not None and length > most:
            raise web.HTTPRequestEntityTooLarge(most, length)
        taken = most if length is None or "Content-Encoding" in request.headers else length
        if self._reading + taken > self._limits.bodies:
            raise Overloaded(
                f"{self._reading:,} bytes of requests are being read, the limit is {self._limits.bodies:,}; try later"
            )
        self._reading += taken
        try:
            return await asyncio.wait_for(request.read(), self._limits.slow)
        except asyncio.TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the body did not come within {self._limits.slow:g} s") from None
        finally:
            self._reading -= taken

    async def _json(self, request: web.Request) -> dict[str, Any]:
        body = await self._body(request)
        return read_json(body) if body.strip() else {}

    async def _index(self, request: web.Request) -> web.Response:
        return _said(self._desk.index((await self._json(request)).get("ready") is True))

    async def _load(self, request: web.Request) -> web.Response:
        parameters = (await self._json(request)).get("parameters") or {}
        if not isinstance(parameters, dict) or set(parameters) - {"config"}:
            raise BadInput("'parameters' may hold 'config' only: models are loaded from the server's own folder")
        config = parameters.get("config")
        await self._desk.load(request.match_info["model"], config if config is None else str(config))
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        await self._body(request)
        self._desk.repository.unload(request.match_info["model"])
        return web.Response()

    def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._desk.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    @web.middleware
    async def last(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        """Whoever asks a server that ends is told not to use the connection again: it is about to be closed."""
        said = await handler(request)
        if self._desk.repository.draining:
            said.force_close()
        return said

    @web.middleware
    async def errors(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        """Every error as {"error": words}; only a client's can say what it sent."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            text = error.text or error.reason
            said = web.json_response({"error": text}, status=error.status, headers=_kept(error))
            if error.status in (408, 413):
                said.force_close()  # what is left of the body is not worth reading
            return said
        except ConnectionError:
            raise  # nobody is there to be told
        except Exception as error:
            if isinstance(error, web.PayloadAccessError) or type(error).__module__.startswith("aiohttp"):
                error = BadInput(f"the body cannot be read: {error}")
            refused = self._desk.refuse(request.match_info.get("model", ""), error)
            return web.json_response({"error": refused.words}, status=refused.status)


def _kept(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def _plain(method: Callable[[web.Request], web.Response]) -> Answering:
    async def answer(request: web.Request) -> web.Response:
        return method(request)

    return answer


def _said(value: object) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")


def _which(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")


def _with_token(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Answering) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path in _OPEN or hmac.compare_digest(given, expected):
            return await handler(request)
        refused = {"error": "send the header 'Authorization: Bearer TOKEN'"}
        return web.json_response(refused, status=401, headers={"WWW-Authenticate": "Bearer"})

    return check


class _Full(asyncio.Protocol):
    """Answers a connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


class HttpServer:
    """An aiohttp server on one port."""

    def __init__(self, desk: Desk, limits: Limits, secrets: Secrets, history: History) -> None:
        over = OverHttp(desk, limits, history)
        guards = [_with_token(secrets.token)] if secrets.token else []
        app = web.Application(client_max_size=limits.message, middlewares=[over.last, *guards, over.errors])
        app.add_routes(over.routes())
        self._limits, self._tls = limits, _tls(secrets)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_SILENT,
            handler_cancellation=True,
            keepalive_timeout=limits.slow,
            lingering_time=min(limits.slow, 2.0),
            shutdown_timeout=limits.drain,
        )
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Open the port, or say that it is taken."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        room = self._limits.streams

        def connection() -> asyncio.Protocol:
            return server() if len(server.connections) < room else _Full()

        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(connection, host, port, ssl=self._tls, backlog=512)
        except OSError as error:
            raise BadInput(f"cannot listen on {host}:{port} for HTTP: {error.strerror}") from error
        return int(self._listening.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port, let requests in progress end, close connections."""
        if self._listening is not None:
            self._listening.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._runner.cleanup(), self._limits.drain + 1)


def _tls(secrets: Secrets) -> ssl.SSLContext | None:
    if secrets.certificate is None or secrets.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(secrets.certificate, secrets.key)
    except ssl.SSLError as error:
        raise BadInput(
            f"'{secrets.certificate}' and '{secrets.key}' are not a certificate and its key in PEM: {error}"
        ) from error
    return context
