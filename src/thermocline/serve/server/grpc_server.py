"""The protocol over gRPC, on grpc.aio: one coroutine for each method, all in the server's event loop.

Handlers take and return bytes: a deserializer given to gRPC would report a truncated message as INTERNAL. grpc.aio cancels a
coroutine when its client leaves or its deadline passes. The batcher also checks deadlines, because a busy loop cannot cancel.

Unary methods are registered as stream-unary, which is the same on the wire and takes the same time: the handler starts before
the message arrives, so that calls with a half-sent message are counted and timed (`in_flight.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from thermocline.errors import BadInput
from thermocline.serve.errors import UnknownModel
from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import parse, read_request, write_response, write_streamed
from thermocline.serve.protocol.shared_memory import REGION
from thermocline.serve.protocol.tensors import InferRequest, refuse_count
from thermocline.serve.protocol.wire import check_counts

from .config import Credentials, ServerLimits
from .fast_path import answer
from .grpc_standard import CHECK, HealthService, ReflectionService
from .inference_service import NO_DEADLINE, InferenceService, InferResult, is_token

Method = Callable[[Any], "dict[str, Any] | Awaitable[dict[str, Any]]"]
_PUBLIC = (f"/{schema.SERVICE}/ServerLive", f"/{schema.SERVICE}/ServerReady", CHECK)  # without a token, for health probes
_CONTROL = (f"/{schema.SERVICE}/RepositoryModelLoad", f"/{schema.SERVICE}/RepositoryModelUnload")
_HEALTH = ("ServerLive", "ServerReady", "ModelReady")
LOOP_VALUES, LOOP_BYTES = 1 << 12, 1 << 20  # typed values that are read, and tensors that are written, in the event loop
# Larger messages with texts, which are hashed one by one, leave the loop. Texts in shared memory may be many.
LOOP_TEXT, _HAS_TEXT, _IS_SHARED = 1 << 15, b"\x12\x05BYTES", REGION.encode()
_EOF = grpc.aio.EOF
MAX_CONTROL_BYTES = 1 << 16  # of a request that holds no tensors


class GrpcService:
    """Methods of the gRPC service `inference.GRPCInferenceService`."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._counts = service, service.limits.request
        self._worker = ThreadPoolExecutor(1, "messages")

    async def infer(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """ModelInfer."""
        model, service = "", self._service
        try:
            call = service.calls.begin(context)
            if (data := await context.read()) is _EOF:
                raise _no_message()
            received = perf_counter()
            call.execute(len(data))
            if (response := answer(service, data, received)) is not None:
                call.take(len(response))
                call.respond(len(response))
                return response
            request = await self._read(data)
            call.take(request.copied)
            model = request.model
            served = service.find(request)
            remaining = context.time_remaining()
            remaining = NO_DEADLINE if remaining is None else remaining
            result = await service.infer(request, served, received, call.take, remaining)
            response = await self._write(request, result)
            call.respond(len(response))
        except Exception as error:
            return await self._abort(model, error, context)
        service.record(model, result, received, perf_counter())
        return response

    async def _read(self, data: bytes) -> InferRequest:
        """The request in a message. Many typed values are converted in a worker thread: each becomes a Python object."""
        given = data, self._counts, self._service.regions
        texts = _HAS_TEXT in data and (len(data) > LOOP_TEXT or _IS_SHARED in data)
        if check_counts(data, self._counts) <= LOOP_VALUES and not texts:
            return read_request(*given)
        return await asyncio.get_running_loop().run_in_executor(self._worker, read_request, *given)

    async def _write(self, request: InferRequest, result: InferResult) -> bytes:
        """The response to a request. A large one is written in a worker thread."""
        written = (request.model, result.version, request.id, result.outputs, request.place)
        if sum([array.nbytes for array in result.outputs.values()]) <= LOOP_BYTES:
            return write_response(*written)
        return await asyncio.get_running_loop().run_in_executor(self._worker, write_response, *written)

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """ModelStreamInfer: responses in the order of requests. An invalid request does not end the stream."""
        service = self._service
        try:
            call = service.calls.begin(context)
        except Exception as error:
            await self._abort("", error, context)
        call.wait("idle", service.limits.idle)
        async for data in requests:
            received, model = perf_counter(), ""
            try:
                call.execute(len(data))
                request = await self._read(data)
                call.take(request.copied)
                model = request.model
                result = await service.infer(request, service.find(request), received, call.take)
                response = write_streamed(await self._write(request, result))
                call.respond(len(response))
            except Exception as error:
                status = service.fail(model, error)
                call.wait("read", service.limits.slow)
                yield schema.message("ModelStreamInferResponse")(error_message=status.message).SerializeToString()
                call.next_message()
                continue
            service.record(model, result, received, perf_counter())
            yield response
            call.next_message()

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
            "ModelConfig": lambda request: {"config": service.model_config(request.name, request.version)},
            "ModelStatistics": lambda request: service.report("statistics", request.name, request.version),
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "SystemSharedMemoryStatus": self._regions,
            "SystemSharedMemoryRegister": lambda request: self._report("register", *_region_of(request)),
            "SystemSharedMemoryUnregister": lambda request: self._report("unregister", request.name),
            "RepositoryModelUnload": self._unload,
        }
        methods = {name: grpc.stream_unary_rpc_method_handler(self._unary(name, method)) for name, method in unary.items()}
        methods["ModelInfer"] = grpc.stream_unary_rpc_method_handler(self.infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self.stream)
        return methods

    def _unary(self, name: str, method: Method) -> Callable[[AsyncIterator[bytes], Any], Awaitable[bytes]]:
        """A handler of a method that returns its response as a dictionary."""
        response, calls = schema.message(f"{name}Response"), self._service.calls

        async def handle(requests: AsyncIterator[bytes], context: Any) -> bytes:
            try:
                call = calls.begin(context, name in _HEALTH)
                if name in ("RepositoryModelLoad", "RepositoryModelUnload"):
                    self._service.check_control(_authorization(context.invocation_metadata()))
                if (data := await context.read()) is _EOF:
                    raise _no_message()
                call.until = math.inf
                refuse_count(f"bytes of a {name}Request", len(data), MAX_CONTROL_BYTES)
                returned = method(parse(f"{name}Request", data))
                fields = returned if isinstance(returned, dict) else await returned
                encoded: bytes = ParseDict(fields, response(), descriptor_pool=schema.POOL).SerializeToString()
                call.wait("read", self._service.limits.slow)
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

    async def _report(self, what: str, *given: Any) -> dict[str, Any]:
        await self._service.report(what, *given)
        return {}

    async def _regions(self, request: Any) -> dict[str, Any]:
        return {"regions": {each["name"]: each for each in await self._service.report("regions", request.name)}}

    async def _index(self, request: Any) -> dict[str, Any]:
        return {"models": await self._service.report("index", request.ready)}

    async def _unload(self, request: Any) -> dict[str, Any]:
        await self._service.unload(request.model_name)
        return {}


def _no_message() -> BadInput:
    return BadInput("the request ended before its message", parameter="message")


def _region_of(request: Any) -> tuple[str, str, int, int]:
    return request.name, request.key, request.offset, request.byte_size


def _authorization(metadata: Any) -> Any:
    return dict(metadata or ()).get("authorization", "")


class _TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the bearer token."""

    def __init__(self, token: str, elsewhere: tuple[str, ...]) -> None:
        self._elsewhere = elsewhere  # methods with another token
        self._token = token
        self._refusal = grpc.stream_unary_rpc_method_handler(self._refuse)  # does not wait for the message

    @staticmethod
    async def _refuse(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the header 'authorization: Bearer TOKEN'")
        raise AssertionError("abort raises")

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        if (
            call.method in _PUBLIC
            or call.method in self._elsewhere
            or is_token(_authorization(call.invocation_metadata), self._token)
        ):
            return await continuation(call)
        return self._refusal


def _milliseconds(seconds: float) -> int:
    return min(int(1000 * seconds), 2**31 - 1)


def make_server(service: InferenceService, limits: ServerLimits, credentials: Credentials, shared: bool) -> Any:
    """A gRPC server that is not bound to a port yet. `shared`: other front processes listen on the same port."""
    options = [
        ("grpc.max_receive_message_length", limits.max_message),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_allowed_incoming_connections", limits.max_connections()),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.slow)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle)),
        ("grpc.keepalive_time_ms", _milliseconds(limits.idle)),  # ends connections to machines that are gone
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.slow)),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.http2.bdp_probe", 0),  # pings that measure the link, with every larger response
        ("grpc.enable_channelz", 0),
        ("grpc.so_reuseport", int(shared)),  # else a second server on the same port silently takes half of the requests
    ]
    elsewhere = _CONTROL if credentials.control_token else ()
    interceptors = [_TokenInterceptor(credentials.token, elsewhere)] if credentials.token else []
    # maximum_concurrent_rpcs costs a tenth of the server's throughput; the batcher bounds the queue instead.
    server = grpc.aio.server(interceptors=interceptors, options=options)
    own = grpc.method_handlers_generic_handler(schema.SERVICE, GrpcService(service).methods())
    reflection = [ReflectionService(service, name).handlers() for name in schema.REFLECTION]
    server.add_generic_rpc_handlers((own, HealthService(service).handlers(), *reflection))
    return server


def bind(server: Any, host: str, port: int, credentials: Credentials) -> int:
    """Open the port, and return its number."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials.certificate is not None and credentials.key is not None:
            pair = (credentials.key.read_bytes(), credentials.certificate.read_bytes())
            ca = None if credentials.client_ca is None else credentials.client_ca.read_bytes()
            return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair], ca, ca is not None)))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        words = f"cannot listen on {address} for gRPC: the port is taken or the address is not this machine's"
        raise BadInput(words, parameter="grpc_port", value=port) from error
