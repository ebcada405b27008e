"""The protocol over HTTP, on aiohttp, in the same event loop as gRPC; and the status page and Prometheus metrics.

aiohttp closes a connection whose header is not complete after `ServerLimits.slow`; reading a body is timed here.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

from aiohttp import web

from thermocline.errors import BadInput
from thermocline.serve.errors import Overloaded
from thermocline.serve.protocol.rest import HEADER_LENGTH, read_json, read_request, write_response

from .config import Credentials, ServerLimits
from .inference_service import InferenceService
from .metrics import MetricsHistory
from .status_page import status_json, status_page

_PUBLIC = ("/v2/health/live", "/v2/health/ready")  # without a token, for health probes
# aiohttp would log a traceback for every malformed request.
_SILENT = logging.getLogger("thermocline.serve.aiohttp")
_SILENT.disabled = True
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """An aiohttp server on one port, and its routes."""

    def __init__(
        self, service: InferenceService, limits: ServerLimits, credentials: Credentials, history: MetricsHistory
    ) -> None:
        self._service, self._limits, self._history, self._tls = service, limits, history, _tls(credentials)
        self._reading = 0  # bytes of bodies
        guards = [_token_middleware(credentials.token)] if credentials.token else []
        app = web.Application(client_max_size=limits.message, middlewares=[self._close_when_draining, *guards, self._errors])
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app, access_log=None, logger=_SILENT, handler_cancellation=True, keepalive_timeout=limits.slow,
            lingering_time=min(limits.slow, 2.0), shutdown_timeout=limits.drain,
        )  # fmt: skip
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Open the port, and return its number."""
        await self._runner.setup()
        server, most = self._runner.server, self._limits.streams
        assert server is not None

        def connection() -> asyncio.Protocol:
            return server() if len(server.connections) < most else _ConnectionLimit()

        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(connection, host, port, ssl=self._tls, backlog=512)
        except OSError as error:
            words = f"cannot listen on {host}:{port} for HTTP: {error.strerror}"
            raise BadInput(words, parameter="http_port", value=port) from error
        return int(self._listening.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port, finish requests in flight, close connections."""
        if self._listening is not None:
            self._listening.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._runner.cleanup(), self._limits.drain + 1)

    def _routes(self) -> list[web.RouteDef]:
        service, model = self._service, _model_and_version
        get: dict[str, Callable[[web.Request], web.Response]] = {
            "/v2/health/live": lambda request: web.Response(),
            "/v2/health/ready": lambda request: web.Response(status=200 if service.repository.ready else 503),
            "/v2": lambda request: _json_response(service.server_metadata()),
            "/v2/models/stats": lambda request: _json_response(service.statistics("", "")),
            "/metrics": lambda request: web.Response(body=service.metrics.text(), headers={"Content-Type": _PROMETHEUS}),
            "/status.json": lambda request: _json_response(status_json(service, self._history)),
            "/": lambda request: web.Response(text=status_page(service, self._history), content_type="text/html"),
        }
        post: dict[str, Handler] = {
            "/v2/repository/index": self._index,
            "/v2/repository/models/{model}/load": self._load,
            "/v2/repository/models/{model}/unload": self._unload,
        }
        for under in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            get[under] = lambda request: _json_response(service.model_metadata(*model(request)))
            get[f"{under}/ready"] = lambda request: web.Response(status=200 if service.model_ready(*model(request)) else 503)
            get[f"{under}/stats"] = lambda request: _json_response(service.statistics(*model(request)))
            post[f"{under}/infer"] = self._infer
        routes = [web.get(path, _as_coroutine(method)) for path, method in get.items()]
        return routes + [web.post(path, method) for path, method in post.items()]

    async def _infer(self, request: web.Request) -> web.Response:
        """POST /v2/models/MODEL/infer."""
        model, version = _model_and_version(request)
        body = await self._body(request)
        received, service = perf_counter(), self._service
        parsed, binary = read_request(model, version, body, request.headers.get(HEADER_LENGTH))
        result = await service.infer(parsed, service.find(parsed))
        encoded, length = write_response(model, result.version, parsed.id, result.outputs, binary)
        service.record(model, result, received, perf_counter())
        if length is None:
            return web.Response(body=encoded, content_type="application/json")
        return web.Response(body=encoded, content_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})

    async def _body(self, request: web.Request) -> bytes:
        """The body, if there is memory for it and it arrives in time."""
        if not request.body_exists:
            return b""
        length, limits = request.content_length, self._limits
        if length is not None and length > limits.message:
            raise web.HTTPRequestEntityTooLarge(limits.message, length)
        taken = limits.message if length is None or "Content-Encoding" in request.headers else length
        if self._reading + taken > limits.bodies:
            raise Overloaded(f"{self._reading:,} bytes of requests are in memory, the limit is {limits.bodies:,}; try later")
        self._reading += taken
        try:
            return await asyncio.wait_for(request.read(), limits.slow)
        except asyncio.TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the body did not arrive within {limits.slow:g} s") from None
        finally:
            self._reading -= taken

    async def _json(self, request: web.Request) -> dict[str, Any]:
        body = await self._body(request)
        return read_json(body) if body.strip() else {}

    async def _index(self, request: web.Request) -> web.Response:
        return _json_response(self._service.repository.index((await self._json(request)).get("ready") is True))

    async def _load(self, request: web.Request) -> web.Response:
        parameters = (await self._json(request)).get("parameters") or {}
        if not isinstance(parameters, dict) or set(parameters) - {"config"}:
            words = "'parameters' may hold 'config' only: models are loaded from the server's own folder"
            raise BadInput(words, parameter="parameters")
        config = parameters.get("config")
        await self._service.load(request.match_info["model"], config if config is None else str(config))
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        await self._body(request)
        self._service.repository.unload(request.match_info["model"])
        return web.Response()

    @web.middleware
    async def _close_when_draining(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Close connections after their response while the server shuts down."""
        response = await handler(request)
        if self._service.repository.draining:
            response.force_close()
        return response

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Report every error as {"error": message}."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            response = web.json_response({"error": error.text or error.reason}, status=error.status, headers=allowed)
            if error.status in (408, 413):
                response.force_close()  # the rest of the body is not read
            return response
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:
            if isinstance(error, web.PayloadAccessError) or type(error).__module__.startswith("aiohttp"):
                error = BadInput(f"the body cannot be read: {error}", parameter="body")
            status = self._service.fail(request.match_info.get("model", ""), error)
            return web.json_response({"error": status.message}, status=status.http)


def _as_coroutine(method: Callable[[web.Request], web.Response]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return method(request)

    return handle


def _json_response(value: object) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")


def _model_and_version(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")


def _token_middleware(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path in _PUBLIC or hmac.compare_digest(given, expected):
            return await handler(request)
        error = {"error": "send the header 'Authorization: Bearer TOKEN'"}
        return web.json_response(error, status=401, headers={"WWW-Authenticate": "Bearer"})

    return check


class _ConnectionLimit(asyncio.Protocol):
    """Refuses a connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


def _tls(credentials: Credentials) -> ssl.SSLContext | None:
    if credentials.certificate is None or credentials.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(credentials.certificate, credentials.key)
    except ssl.SSLError as error:
        files = f"'{credentials.certificate}' and '{credentials.key}'"
        raise BadInput(f"{files} are not a certificate and its key in PEM: {error}", parameter="tls_cert") from error
    return context
