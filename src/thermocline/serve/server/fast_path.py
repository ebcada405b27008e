"""The fast path: rows and bags of any features from an idle model over gRPC, without a Python object for each input.

One kernel reads the message, and another looks up and writes the response after a header that depends on the model alone
(`kernels.serve.wire_cpu.WireLookup`). That skips Protobuf, batching, arrays of inputs and outputs, and one copy of the rows: 26
features of one id took 3.3 times the processor time of an echo. Any other request, and any error, takes the general path.

Rejected: recognising repeated requests by their leading bytes instead of parsing them. It saved 7 us in the handler, 2% of a
small request's processor time (docs/decisions/removed.md).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from time import perf_counter

from thermocline.serve.protocol.grpc_messages import response_head
from thermocline.serve.protocol.new_bytes import address_of, allocate

from .inference_service import InferenceService
from .model_repository import is_version

MAX_VALUES = 1 << 12  # of a request: the limit of `kernels.serve.wire_cpu.WireLookup`
MAX_BYTES = 2 << 20  # of a response: it is written in the event loop
_head = lru_cache(maxsize=256)(response_head)


def answer(service: InferenceService, data: bytes, received: float) -> bytes | None:
    """The ModelInferResponse to a message, or None if it needs the general path. `received`: when its bytes arrived."""
    if len(data) < 4 or data[0] != 0x0A or data[1] > 0x7F:
        return None
    model = data[2 : 2 + data[1]].decode("latin1")
    served = service.in_use(model)
    wire_lookup = getattr(served.model, "wire_lookup", None) if served is not None else None
    if served is None or wire_lookup is None:
        return None
    version, kernels = wire_lookup()
    if kernels is None:
        return None
    at, limits, batcher = address_of(data), service.limits, served.batcher
    values, size, first, last, id_first, id_last = kernels.read(at, len(data))
    if not 0 < values <= MAX_VALUES or values > limits.ids or size > MAX_BYTES or size > limits.response:
        return None
    if not batcher.is_idle(values) or not is_version(version, data[first:last].decode("ascii")):
        return None
    head = _head(model, version, data[id_first:id_last].decode("ascii"))
    response: bytes = allocate(None, len(head) + size)
    out = address_of(response)
    ctypes.memmove(out, head, len(head))
    started = perf_counter()
    if not kernels.answer(values, out + len(head)):
        return None
    done = perf_counter()
    batcher.record(1, values, done - started)
    batcher.metrics.record(started - received, 0.0, done - started, 0.0, values)
    return response
