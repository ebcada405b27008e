"""The way of nearly all requests: rows of one feature, from a model that is idle, over gRPC.

A client asks for so many ids again and again, and all that differs between its requests is the ids: what comes before them, the
*head*, names the same model, input and shape. So when a request was answered on the way that all can take, its head is kept
with all that followed from it: that it is right, which rows are meant, what the answer begins with. The next request with this
head and of this length needs none of that done again. Its rows are written right behind the beginning of the answer.

Nothing is guessed: a message is its head and values behind it, byte for byte (`grpc_messages.head_of`), and whatever is not as
it was (another version, a queue, an id that the table does not have, a card that is down) goes the other way, which has the
words for it.
"""

from __future__ import annotations

import ctypes
import weakref
from time import perf_counter
from typing import Any

import numpy as np

from thermocline.serve.protocol.grpc_messages import head_of, head_of_response

from .inference_service import Answer
from .model_repository import Repository, Served, is_version

LONGEST = 512  # bytes of a head that is kept
LENGTHS, OF_LENGTH = 256, 64  # lengths of requests, and heads of each

_FLOAT32 = np.dtype(np.float32)
# Python's own way to make bytes that are filled in before anybody else has seen them, and to know where bytes lie.
_blank = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


class Route:
    """What is known of requests with one head and length. It keeps nothing in memory that is not served any more."""

    __slots__ = ("begin", "bytes", "fill", "head", "ids", "is_served", "model", "served", "values")

    def __init__(self, head: bytes, served: Served, model: str, begin: bytes, filler: Any) -> None:
        self.head, self.served, self.model, self.begin = head, weakref.ref(served), model, begin
        self.fill, self.is_served = filler.fill, filler.is_served
        self.values, (self.ids, dim) = len(head), filler.shape
        self.bytes = len(begin) + self.ids * dim * _FLOAT32.itemsize


class Shortcuts:
    """Routes of requests that came before."""

    def __init__(self, repository: Repository) -> None:
        self._repository, self._in_use = repository, repository.in_use
        self._routes: dict[int, list[Route]] = {}  # by the length of requests

    def answer(self, data: bytes) -> bytes | None:
        """The answer to a request that is as one before, if it can be given at once."""
        for route in self._routes.get(len(data), ()):
            if data.startswith(route.head):
                break
        else:
            return None
        started, served = perf_counter(), route.served()
        if served is None or self._in_use.get(route.model) is not served or self._repository.draining:
            return None
        lane = served.lane
        if not lane.is_free(route.ids):
            return None
        values = data[route.values :]  # bytes of their own: kernels count on numbers that do not lie across words
        answer: bytes = _blank(None, route.bytes)
        out = _address(answer)
        ctypes.memmove(out, route.begin, len(route.begin))
        left = perf_counter()
        if not route.fill(_address(values), out + len(route.begin)):
            return None
        done = perf_counter()
        lane.note(route.ids, done - left)
        lane.metrics.note_answer(left - started, 0.0, done - left, 0.0, route.ids)
        return answer

    def learn(self, data: bytes, answer: Answer) -> None:
        """Keep the head of a request that was answered, if others may follow."""
        asked, served = answer.asked, answer.served
        make = getattr(served.model, "filler", None)
        if make is None or asked.id or len(asked.inputs) != 1 or served.lane.limits.wait:
            return
        ((name, ids_N),) = asked.inputs.items()
        if asked.outputs not in ((), (name,)) or len(data) - ids_N.nbytes > LONGEST or ids_N.nbytes == 0:
            return
        routes = self._routes.get(len(data), ())
        if any(data.startswith(route.head) and route.served() is served and route.is_served() for route in routes):
            return  # it is known, and the model was not idle
        filler = make(name, len(ids_N))
        # Another version may have come since the request was answered, and since it was found to ask for the one in use.
        if filler is None or filler.version != answer.version or not is_version(filler.version, asked.version):
            return
        head = head_of(data)
        if head is None:
            return
        begin = head_of_response(asked.model, filler.version, name, _FLOAT32, filler.shape)
        if len(self._routes) >= LENGTHS and len(data) not in self._routes:
            self._routes.clear()
        kept = [route for route in routes if route.head != head and route.is_served()]
        self._routes[len(data)] = [Route(head, served, asked.model, begin, filler), *kept][:OF_LENGTH]
