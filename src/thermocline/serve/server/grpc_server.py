"""The protocol over gRPC, on grpc.aio: one coroutine for each method, all in the server's event loop.

Handlers take and return bytes: a deserializer given to gRPC would report a truncated message as INTERNAL. grpc.aio cancels a
coroutine when its client leaves or its deadline passes. The batcher also checks deadlines, because a busy loop cannot cancel.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from thermocline.errors import BadInput
from thermocline.serve.errors import UnknownModel
from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import parse, read_request, write_response, write_streamed

from .config import Credentials, ServerLimits
from .fast_path import look_up_rows
from .inference_service import NO_DEADLINE, InferenceService

Method = Callable[[Any], "dict[str, Any] | Awaitable[dict[str, Any]]"]
_PUBLIC = ("ServerLive", "ServerReady")  # without a token, for health probes


class GrpcService:
    """Methods of the gRPC service `inference.GRPCInferenceService`."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def infer(self, data: bytes, context: Any) -> bytes:
        """ModelInfer."""
        received, model, service = perf_counter(), "", self._service
        try:
            request = read_request(data)
            model = request.model
            served = service.find(request)
            if (response := look_up_rows(served, request, received)) is not None:
                return response
            remaining = context.time_remaining()
            result = await service.infer(request, served, NO_DEADLINE if remaining is None else received + remaining)
            response = write_response(model, result.version, request.id, result.outputs)
        except Exception as error:
            return await self._abort(model, error, context)
        service.record(model, result, received, perf_counter())
        return response

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """ModelStreamInfer: responses in the order of requests. An invalid request does not end the stream."""
        service = self._service
        async for data in requests:
            received, model = perf_counter(), ""
            try:
                request = read_request(data)
                model = request.model
                result = await service.infer(request, service.find(request))
                response = write_streamed(write_response(model, result.version, request.id, result.outputs))
            except Exception as error:
                status = service.fail(model, error)
                yield schema.message("ModelStreamInferResponse")(error_message=status.message).SerializeToString()
                continue
            service.record(model, result, received, perf_counter())
            yield response

    async def _abort(self, model: str, error: Exception, context: Any) -> bytes:
        status = self._service.fail(model, error)
        await context.abort(getattr(grpc.StatusCode, status.code), status.message)
        raise AssertionError("abort raises")

    def methods(self) -> dict[str, Any]:
        """gRPC handlers by the name of their method."""
        service = self._service
        unary: dict[str, Method] = {
            "ServerLive": lambda request: {"live": True},
            "ServerReady": lambda request: {"ready": service.repository.ready},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda request: service.server_metadata(),
            "ModelMetadata": lambda request: service.model_metadata(request.name, request.version),
            "ModelStatistics": lambda request: service.statistics(request.name, request.version),
            "RepositoryIndex": lambda request: {"models": service.repository.index(request.ready)},
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        methods = {name: grpc.unary_unary_rpc_method_handler(self._unary(name, method)) for name, method in unary.items()}
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self.infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self.stream)
        return methods

    def _unary(self, name: str, method: Method) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """A handler of a method that returns its response as a dictionary."""
        response = schema.message(f"{name}Response")

        async def handle(data: bytes, context: Any) -> bytes:
            try:
                returned = method(parse(f"{name}Request", data))
                fields = returned if isinstance(returned, dict) else await returned
                encoded: bytes = ParseDict(fields, response(), descriptor_pool=schema.POOL).SerializeToString()
                return encoded
            except Exception as error:
                return await self._abort("", error, context)

        return handle

    def _model_ready(self, request: Any) -> dict[str, Any]:
        try:
            return {"ready": self._service.model_ready(request.name, request.version)}
        except UnknownModel:  # Triton answers false; its client takes NOT_FOUND for a fault
            return {"ready": False}

    async def _load(self, request: Any) -> dict[str, Any]:
        if unknown := [name for name in request.parameters if name != "config"]:
            words = f"parameter {unknown[0][:40]!r} is not supported: models are loaded from the server's own folder"
            raise BadInput(words, parameter=unknown[0])
        await self._service.load(request.model_name, request.parameters["config"].string_param if request.parameters else None)
        return {}

    def _unload(self, request: Any) -> dict[str, Any]:
        self._service.repository.unload(request.model_name)
        return {}


class _TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the bearer token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refusal = grpc.unary_unary_rpc_method_handler(self._refuse)

    @staticmethod
    async def _refuse(data: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the header 'authorization: Bearer TOKEN'")
        raise AssertionError("abort raises")

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        given = dict(call.invocation_metadata).get("authorization", "")
        given = given if isinstance(given, bytes) else given.encode()
        if call.method.rsplit("/", 1)[-1] in _PUBLIC or hmac.compare_digest(given, self._expected):
            return await continuation(call)
        return self._refusal


def make_server(service: InferenceService, limits: ServerLimits, credentials: Credentials) -> Any:
    """A gRPC server that is not bound to a port yet."""
    options = [
        ("grpc.max_receive_message_length", limits.message),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.http2.bdp_probe", 0),  # pings that measure the link, with every larger response
        ("grpc.enable_channelz", 0),
        ("grpc.so_reuseport", 0),  # else a second server on the same port silently takes half of the requests
    ]
    interceptors = [_TokenInterceptor(credentials.token)] if credentials.token else []
    # maximum_concurrent_rpcs costs a tenth of the server's throughput; the batcher bounds the queue instead.
    server = grpc.aio.server(interceptors=interceptors, options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(schema.SERVICE, GrpcService(service).methods()),))
    return server


def bind(server: Any, host: str, port: int, credentials: Credentials) -> int:
    """Open the port, and return its number."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials.certificate is not None and credentials.key is not None:
            pair = (credentials.key.read_bytes(), credentials.certificate.read_bytes())
            return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        words = f"cannot listen on {address} for gRPC: the port is taken or the address is not this machine's"
        raise BadInput(words, parameter="grpc_port", value=port) from error
