"""gRPC's own services: health checking (`grpc.health.v1`) for probes, and server reflection for tools such as grpcurl.

Rejected: the packages grpcio-health-checking and grpcio-reflection. Their generated code demands a protobuf runtime that
tritonclient excludes, and their handlers neither count against the memory for requests nor end with a late client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pb2

from thermocline.errors import BadInput
from thermocline.serve.errors import Overloaded
from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import parse

from .inference_service import InferenceService

CHECK = f"/{schema.HEALTH}/Check"
MAX_BYTES, MAX_WATCHES, WATCH_SECONDS = 1 << 16, 64, 1.0
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
_NOT_FOUND, _INVALID = 5, 3  # gRPC codes, which reflection sends as numbers


class HealthService:
    """Serving is what ServerReady calls ready: all models are loaded, and the server does not shut down."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._watches = service, 0
        self._message = partial(schema.message, package=schema.HEALTH.rpartition(".")[0])

    def _status(self, data: bytes) -> int:
        if len(data) > MAX_BYTES:
            raise BadInput(f"the request has {len(data):,} bytes, the limit is {MAX_BYTES:,}", parameter="service")
        name = parse("HealthCheckRequest", data, self._message).service
        if name not in ("", schema.SERVICE):
            return SERVICE_UNKNOWN
        return SERVING if self._service.repository.ready else NOT_SERVING

    def _encode(self, status: int) -> bytes:
        encoded: bytes = self._message("HealthCheckResponse")(status=status).SerializeToString()
        return encoded

    async def check(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """The status of the server."""
        status, response = None, b""
        try:
            call = self._service.calls.begin(context, health=True)
            status = self._status(await context.read())
            call.wait("read", self._service.limits.slow)
            response = self._encode(status)
        except Exception as error:
            await _abort(self._service, error, context)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the server has the service {schema.SERVICE!r}")
        return response

    async def watch(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """The status of the server, now and whenever it changes."""
        try:
            call = self._service.calls.begin(context)
            if self._watches >= MAX_WATCHES:
                raise Overloaded(f"{MAX_WATCHES} clients watch the health of the server; use Check")
            data = await context.read()
            before, status = -1, self._status(data)
        except Exception as error:
            await _abort(self._service, error, context)
        self._watches += 1
        try:
            while True:
                if status != before:
                    call.wait("read", self._service.limits.slow)
                    yield self._encode(status)
                    call.wait("idle", float("inf"))
                before = status
                await asyncio.sleep(WATCH_SECONDS)
                status = self._status(data)
        finally:
            self._watches -= 1

    def handlers(self) -> Any:
        """The generic handler of the service."""
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self.check),
            "Watch": grpc.stream_stream_rpc_method_handler(self.watch),
        }
        return grpc.method_handlers_generic_handler(schema.HEALTH, methods)


class ReflectionService:
    """Descriptors of all services, for one version of the reflection protocol."""

    def __init__(self, service: InferenceService, name: str) -> None:
        self._service, self._name = service, name
        self._message = partial(schema.message, package=name.rpartition(".")[0])

    async def info(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Answers each query of the stream."""
        try:
            call = self._service.calls.begin(context)
            call.wait("idle", self._service.limits.idle)
            async for data in requests:
                call.execute(len(data))
                response = self._answer(data)
                call.take(len(response))
                call.respond(len(response))
                yield response
                call.next_message()
        except Exception as error:
            await _abort(self._service, error, context)

    def _answer(self, data: bytes) -> bytes:
        if len(data) > MAX_BYTES:
            raise BadInput(f"the request has {len(data):,} bytes, the limit is {MAX_BYTES:,}", parameter="message_request")
        request = parse("ServerReflectionRequest", data, self._message)
        response = self._message("ServerReflectionResponse")(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in (schema.SERVICE, schema.HEALTH, *schema.REFLECTION):
                response.list_services_response.service.add(name=name)
        elif kind is None:
            response.error_response.error_code = _INVALID
            response.error_response.error_message = "use list_services, file_by_filename or file_containing_symbol"
        else:
            try:
                response.file_descriptor_response.file_descriptor_proto.extend(_files(kind, getattr(request, kind)))
            except KeyError:
                response.error_response.error_code = _NOT_FOUND
                response.error_response.error_message = f"{getattr(request, kind)[:100]!r} is not known"
        encoded: bytes = response.SerializeToString()
        return encoded

    def handlers(self) -> Any:
        """The generic handler of the service."""
        methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self.info)}
        return grpc.method_handlers_generic_handler(self._name, methods)


def _files(kind: str, name: str) -> Iterator[bytes]:
    """The file that a query asks for; no file imports another. Raises KeyError if there is none."""
    found = schema.POOL.FindFileByName(name) if kind == "file_by_filename" else schema.POOL.FindFileContainingSymbol(name)
    proto = descriptor_pb2.FileDescriptorProto()
    found.CopyToProto(proto)
    yield proto.SerializeToString()


async def _abort(service: InferenceService, error: Exception, context: Any) -> None:
    status = service.fail("", error)
    await context.abort(getattr(grpc.StatusCode, status.code), status.message)
