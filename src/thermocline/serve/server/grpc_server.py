"""The protocol over gRPC, on grpc.aio: one coroutine a method, all in the server's event loop.

Requests arrive as bytes and are parsed here: a deserializer given to gRPC would turn a truncated message into INTERNAL, which
says that the server broke. Responses leave as bytes for speed (`protocol.grpc_messages`).

grpc.aio cancels a coroutine when its client leaves or its deadline passes; a request that still waits is then dropped before
work. The deadline is also looked at when a batch leaves, for while the loop was busy nobody could cancel anything.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from thermocline.errors import BadInput
from thermocline.serve.errors import UnknownModel
from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import parse, read_request, write_response, write_streamed

from .auth import Secrets
from .fast_path import Shortcuts
from .inference_service import NEVER, Desk, now
from .limits import Limits

Method = Callable[[Any], "dict[str, Any] | Awaitable[dict[str, Any]]"]
_OPEN = ("ServerLive", "ServerReady")  # without a token: probes have none


class OverGrpc:
    """The methods of the service."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._shortcuts = desk, Shortcuts(desk.repository)

    async def infer(self, data: bytes, context: Any) -> bytes:
        if (short := self._shortcuts.answer(data)) is not None:
            return short
        started = now()
        model = ""
        try:
            asked = read_request(data)
            model = asked.model
            remaining = context.time_remaining()
            answer = await self._desk.answer(asked, NEVER if remaining is None else started + remaining)
            written = write_response(model, answer.version, asked.id, answer.outputs)
        except Exception as error:
            return await self._refuse(model, error, context)
        self._desk.note(answer, started, answer.ticket.done, now())
        self._shortcuts.learn(data, answer)
        return written

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Requests of one stream, answered in their order. A bad one is answered with words; the stream goes on."""
        async for data in requests:
            started, model = now(), ""
            try:
                asked = read_request(data)
                model = asked.model
                answer = await self._desk.answer(asked)
                written = write_streamed(write_response(model, answer.version, asked.id, answer.outputs))
            except Exception as error:
                said = self._desk.refuse(model, error)
                yield schema.message("ModelStreamInferResponse")(error_message=said.words).SerializeToString()
                continue
            self._desk.note(answer, started, answer.ticket.done, now())
            yield written

    async def _refuse(self, model: str, error: Exception, context: Any) -> bytes:
        said = self._desk.refuse(model, error)
        await context.abort(getattr(grpc.StatusCode, said.code), said.words)
        raise AssertionError("abort raises")

    def methods(self) -> dict[str, Any]:
        """Everything that gRPC is told of the service."""
        desk = self._desk
        told: dict[str, Method] = {
            "ServerLive": lambda asked: {"live": True},
            "ServerReady": lambda asked: {"ready": desk.server_ready()},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda asked: desk.server_metadata(),
            "ModelMetadata": lambda asked: desk.model_metadata(asked.name, asked.version),
            "ModelStatistics": lambda asked: desk.statistics(asked.name, asked.version),
            "RepositoryIndex": lambda asked: {"models": desk.index(asked.ready)},
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        methods = {name: grpc.unary_unary_rpc_method_handler(self._unary(name, method)) for name, method in told.items()}
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self.infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self.stream)
        return methods

    def _unary(self, name: str, method: Method) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """A method whose response is given as plain values."""
        response = schema.message(f"{name}Response")

        async def answer(data: bytes, context: Any) -> bytes:
            try:
                told = method(parse(f"{name}Request", data))
                said = told if isinstance(told, dict) else await told
                written: bytes = ParseDict(said, response(), descriptor_pool=schema.POOL).SerializeToString()
                return written
            except Exception as error:
                return await self._refuse("", error, context)

        return answer

    def _model_ready(self, asked: Any) -> dict[str, Any]:
        try:
            return {"ready": self._desk.model_ready(asked.name, asked.version)}
        except UnknownModel:  # the question has an answer, as Triton gives it; its client takes NOT_FOUND for a fault
            return {"ready": False}

    async def _load(self, asked: Any) -> dict[str, Any]:
        for name in asked.parameters:
            if name != "config":
                raise BadInput(f"parameter {name[:40]!r} is not supported: models are loaded from the server's own folder")
        await self._desk.load(asked.model_name, asked.parameters["config"].string_param if asked.parameters else None)
        return {}

    def _unload(self, asked: Any) -> dict[str, Any]:
        self._desk.repository.unload(asked.model_name)
        return {}


class _Token(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the bearer token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        refuse = grpc.unary_unary_rpc_method_handler(self._refuse)
        self._refusal = refuse

    @staticmethod
    async def _refuse(data: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the header 'authorization: Bearer TOKEN'")
        raise AssertionError("abort raises")

    async def intercept_service(self, go_on: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        given = dict(call.invocation_metadata).get("authorization", "")
        given = given if isinstance(given, bytes) else given.encode()
        if call.method.rsplit("/", 1)[-1] in _OPEN or hmac.compare_digest(given, self._expected):
            return await go_on(call)
        return self._refusal


def make_server(desk: Desk, limits: Limits, secrets: Secrets) -> Any:
    """A gRPC server that is not bound to a port yet."""
    options = [
        ("grpc.max_receive_message_length", limits.message),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.http2.bdp_probe", 0),  # pings that measure the link, with every larger answer
        ("grpc.enable_channelz", 0),
        ("grpc.so_reuseport", 0),  # else a second server on the same port gets half of the requests, and nobody is told
    ]
    interceptors = [_Token(secrets.token)] if secrets.token else []
    # No maximum_concurrent_rpcs: it costs a tenth of all the server does for a small request; the queue is bounded by the lane.
    server = grpc.aio.server(interceptors=interceptors, options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(schema.SERVICE, OverGrpc(desk).methods()),))
    return server


def bind(server: Any, host: str, port: int, secrets: Secrets) -> int:
    """Open the port, or say that it is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if secrets.certificate is not None and secrets.key is not None:
            pair = (secrets.key.read_bytes(), secrets.certificate.read_bytes())
            return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise BadInput(
            f"cannot listen on {address} for gRPC: the port is taken or the address is not this machine's"
        ) from error
