"""The protocol over HTTP, on aiohttp, in the same event loop as gRPC; and the status page and Prometheus metrics.

aiohttp closes a connection whose header is not complete after `ServerLimits.slow`. Reading a body and sending a large response
are timed here. Large JSON is read and written in one worker thread. Beyond the limit of connections, a few more are accepted
that get an answer to a health probe, and 503 for anything else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from ipaddress import ip_address
from time import perf_counter
from typing import Any, TypeVar, cast

from aiohttp import web

from thermocline.errors import BadInput
from thermocline.serve.protocol.rest import (
    HEADER_LENGTH,
    NUMBER_BYTES,
    json_length,
    json_numbers,
    read_json,
    read_request,
    write_response,
)
from thermocline.serve.protocol.shared_memory import REGION
from thermocline.serve.protocol.tensors import RequestLimits

from .config import Credentials, ServerConfig
from .inference_service import InferenceService, is_token

_PUBLIC = ("/v2/health/live", "/v2/health/ready")  # without a token, for health probes
# aiohttp would log a traceback for every malformed request.
_SILENT = logging.getLogger("thermocline.serve.aiohttp")
_SILENT.disabled = True
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_ANSWER = "HTTP/1.1 {} {}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
PROBES, PROBE_SECONDS = 32, 2.0  # connections beyond the limit, and how long each may take to send its request
LOOP_BYTES = 1 << 15  # JSON that is read in the event loop, and responses that are sent without a time limit
LOOP_NUMBERS, LOOP_RESPONSE = 1 << 12, 1 << 20  # of JSON, and bytes of tensors, that are written in the event loop
_T = TypeVar("_T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """An aiohttp server on one port, and its routes."""

    def __init__(self, service: InferenceService, config: ServerConfig) -> None:
        limits, credentials = config.limits, config.credentials
        self._service, self._limits, self._tls, self._shared = service, limits, _tls(credentials), config.fronts > 1
        self.over = 0  # connections beyond the limit
        self._worker = ThreadPoolExecutor(1, "json")
        guards = [_token_middleware(credentials.token, credentials.control_token)] if credentials.token else []
        middlewares = [self._close_when_draining, _browser_middleware(config), *guards, self._errors]
        app = web.Application(client_max_size=limits.max_message, middlewares=middlewares)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app, access_log=None, logger=_SILENT, handler_cancellation=True, keepalive_timeout=limits.slow,
            lingering_time=min(limits.slow, 2.0), shutdown_timeout=limits.drain,
        )  # fmt: skip
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Open the port, and return its number."""
        await self._runner.setup()
        server, most = self._runner.server, self._limits.max_connections()
        assert server is not None

        def connection() -> asyncio.Protocol:
            return server() if len(server.connections) < most else _OverLimit(self)

        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                connection, host, port, ssl=self._tls, backlog=512, reuse_port=self._shared or None
            )
        except OSError as error:
            words = f"cannot listen on {host}:{port} for HTTP: {error.strerror}"
            raise BadInput(words, parameter="http_port", value=port) from error
        listening = self._listening.sockets[0]
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: the kernel ends those whose peer stopped reading
            unread = min(int(1000 * self._limits.read_seconds(0)), 2**31 - 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread)
        return int(listening.getsockname()[1])

    def probe(self, path: bytes) -> int:
        """The status for a connection beyond the limit."""
        if path == b"/v2/health/live" or (path == b"/v2/health/ready" and self._service.repository.ready):
            return 200
        self._service.metrics.dropped["limit"] += 1
        return 503

    async def stop(self) -> None:
        """Close the port, finish requests in flight, close connections."""
        if self._listening is not None:
            self._listening.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._runner.cleanup(), self._limits.drain + 1)
        self._worker.shutdown(wait=False)

    def _routes(self) -> list[web.RouteDef]:
        service, model = self._service, _model_and_version
        get: dict[str, Callable[[web.Request], web.Response]] = {
            "/v2/health/live": lambda request: web.Response(),
            "/v2/health/ready": lambda request: web.Response(status=200 if service.repository.ready else 503),
            "/v2": lambda request: _json_response(service.server_metadata()),
        }
        reports: dict[str, Handler] = {
            "/v2/models/stats": self._statistics, "/metrics": self._metrics, "/status.json": self._status, "/": self._page,
        }  # fmt: skip
        post: dict[str, Handler] = {
            "/v2/repository/index": self._index,
            "/v2/repository/models/{model}/load": self._load,
            "/v2/repository/models/{model}/unload": self._unload,
        }
        for under in ("", "/region/{region}"):
            reports[f"/v2/systemsharedmemory{under}/status"] = self._regions
            post[f"/v2/systemsharedmemory{under}/unregister"] = self._unregister
        post["/v2/systemsharedmemory/region/{region}/register"] = self._register
        for under in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            get[under] = lambda request: _json_response(service.model_metadata(*model(request)))
            get[f"{under}/config"] = lambda request: _json_response(service.model_config(*model(request)))
            get[f"{under}/ready"] = lambda request: web.Response(status=200 if service.model_ready(*model(request)) else 503)
            reports[f"{under}/stats"] = self._statistics
            post[f"{under}/infer"] = self._infer
        routes = [web.get(path, _as_coroutine(method)) for path, method in get.items()]
        routes += [web.get(path, method) for path, method in reports.items()]
        return routes + [web.post(path, method) for path, method in post.items()]

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        """POST /v2/models/MODEL/infer."""
        model, version = _model_and_version(request)
        service, counts = self._service, self._limits.request
        with self._holding() as take:
            body = await self._body(request, take)
            received = perf_counter()
            length = json_length(body, request.headers.get(HEADER_LENGTH))
            texts = b'"BYTES"' in body[:length] and (len(body) > LOOP_BYTES or REGION.encode() in body[:length])
            large = length > LOOP_BYTES or texts
            parsed, binary = await self._run(large, read_request, model, version, body, length, counts, service.regions)
            take(parsed.copied)
            result = await service.infer(parsed, service.find(parsed), received, take)
            size = sum([array.nbytes for array in result.outputs.values()])
            numbers = json_numbers(result.outputs, binary, counts.values)
            take(NUMBER_BYTES * numbers)
            written = (model, result.version, parsed.id, result.outputs, binary, parsed.place)
            encoded, json_bytes = await self._run(numbers > LOOP_NUMBERS or size > LOOP_RESPONSE, write_response, *written)
            service.record(model, result, received, perf_counter())
            kind = "application/json" if json_bytes is None else "application/octet-stream"
            headers = {} if json_bytes is None else {HEADER_LENGTH: str(json_bytes)}
            del result, written, body, parsed
            return await self._send(request, web.Response(body=encoded, content_type=kind, headers=headers), len(encoded))

    async def _run(self, in_worker: bool, work: Callable[..., _T], *given: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *given) if in_worker else work(*given)

    @contextmanager
    def _holding(self) -> Iterator[Callable[[int], None]]:
        """A function that takes bytes of the budget until the end of the block."""
        budget, held = self._service.budget, 0

        def take(size: int) -> None:
            nonlocal held
            budget.take(size, held)
            held += size

        try:
            yield take
        finally:
            budget.give(held)

    async def _send(self, request: web.Request, response: web.Response, size: int) -> web.StreamResponse:
        """Send a large response here, where its bytes count and its client has a time limit; aiohttp sends a small one."""
        if size <= LOOP_BYTES:
            return response

        async def send() -> None:
            await response.prepare(request)
            await response.write_eof()

        if self._service.repository.draining:
            response.force_close()
        try:
            await asyncio.wait_for(send(), self._limits.read_seconds(size))
        except asyncio.TimeoutError:
            self._service.metrics.dropped["read"] += 1
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client did not read its response") from None
        return response

    async def _body(self, request: web.Request, take: Callable[[int], None]) -> bytes:
        """The body, if there is memory for it and it arrives in time."""
        if not request.body_exists:
            return b""
        length, limits = request.content_length, self._limits
        if length is not None and length > limits.max_message:
            raise web.HTTPRequestEntityTooLarge(limits.max_message, length)
        take(limits.max_message if length is None or "Content-Encoding" in request.headers else length)
        try:
            return await asyncio.wait_for(request.read(), limits.slow)
        except asyncio.TimeoutError:
            self._service.metrics.dropped["body"] += 1
            raise web.HTTPRequestTimeout(text=f"the body did not arrive within {limits.slow:g} s") from None

    async def _json(self, request: web.Request) -> dict[str, Any]:
        with self._holding() as take:
            body = await self._body(request, take)
            return read_json(body, RequestLimits(0)) if body.strip() else {}

    async def _index(self, request: web.Request) -> web.Response:
        return _json_response(await self._service.report("index", (await self._json(request)).get("ready") is True))

    async def _regions(self, request: web.Request) -> web.Response:
        return _json_response(await self._service.report("regions", request.match_info.get("region", "")))

    async def _register(self, request: web.Request) -> web.Response:
        given = await self._json(request)
        region = request.match_info["region"], given.get("key"), given.get("offset", 0), given.get("byte_size")
        await self._service.report("register", *region)
        return web.Response()

    async def _unregister(self, request: web.Request) -> web.Response:
        with self._holding() as take:
            await self._body(request, take)
        await self._service.report("unregister", request.match_info.get("region", ""))
        return web.Response()

    async def _statistics(self, request: web.Request) -> web.Response:
        name, version = request.match_info.get("model", ""), request.match_info.get("version", "")
        return _json_response(await self._service.report("statistics", name, version))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=(await self._service.report("metrics")).encode(), headers={"Content-Type": _PROMETHEUS})

    async def _status(self, request: web.Request) -> web.Response:
        return _json_response(await self._service.report("status"))

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._service.report("page"), content_type="text/html")

    async def _load(self, request: web.Request) -> web.Response:
        self._service.check_control(request.headers.get("Authorization", ""))
        parameters = (await self._json(request)).get("parameters") or {}
        if not isinstance(parameters, dict) or set(parameters) - {"config"}:
            words = "'parameters' may hold 'config' only: models are loaded from the server's own folder"
            raise BadInput(words, parameter="parameters")
        config = parameters.get("config")
        await self._service.load(request.match_info["model"], config if config is None else str(config))
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        self._service.check_control(request.headers.get("Authorization", ""))
        with self._holding() as take:
            await self._body(request, take)
        await self._service.unload(request.match_info["model"])
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


def _token_middleware(token: str, control_token: str | None) -> Any:
    """Refuses requests without the token. Load and unload check their own, if they have one."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        elsewhere = control_token is not None and request.path.startswith("/v2/repository/models/")
        if request.path in _PUBLIC or elsewhere or is_token(request.headers.get("Authorization", ""), token):
            return await handler(request)
        error = {"error": "send the header 'Authorization: Bearer TOKEN'"}
        return web.json_response(error, status=401, headers={"WWW-Authenticate": "Bearer"})

    return check


def _browser_middleware(config: ServerConfig) -> Any:
    """Refuses what a page of another site can have a browser send: requests with its Origin, and, by a name that it lets lead
    here, any request. Such a name in Host matters only where the server does not identify its clients."""
    names = {"localhost", config.host, *config.allow_hosts}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            return web.json_response({"error": f"requests of {origin[:100]!r} are refused"}, status=403)
        host = _host_name(request.host)
        if not (config.credentials.identify_clients or request.path in _PUBLIC or host in names or _is_address(host)):
            words = f"the server is not known as {host[:100]!r}: use its address, or start it with --allow-host {host[:100]}"
            return web.json_response({"error": words}, status=421)
        return await handler(request)

    return check


def _host_name(host: str) -> str:
    """A Host header without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class _OverLimit(asyncio.Protocol):
    """A connection beyond the limit: health probes are answered, other requests refused."""

    def __init__(self, server: HttpServer) -> None:
        self._server, self._head = server, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports derive from nothing
        self._server.over += 1
        self._timer = asyncio.get_running_loop().call_later(PROBE_SECONDS, self._transport.abort)
        if self._server.over > PROBES:
            self._close(b"")

    def data_received(self, data: bytes) -> None:
        self._head += data
        if not self._transport.is_closing() and (b"\r\n\r\n" in self._head or len(self._head) > 1 << 13):
            self._close((*self._head.split(b" ", 2), b"")[1])

    def _close(self, path: bytes) -> None:
        status = self._server.probe(path)
        self._transport.write(_ANSWER.format(status, HTTPStatus(status).phrase).encode())
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.over -= 1
        self._timer.cancel()


def _tls(credentials: Credentials) -> ssl.SSLContext | None:
    if credentials.certificate is None or credentials.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(credentials.certificate, credentials.key)
    except ssl.SSLError as error:
        files = f"'{credentials.certificate}' and '{credentials.key}'"
        raise BadInput(f"{files} are not a certificate and its key in PEM: {error}", parameter="tls_cert") from error
    if credentials.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(credentials.client_ca)
    return context
