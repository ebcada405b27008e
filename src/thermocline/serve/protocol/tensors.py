"""Tensors of the Open Inference Protocol: a datatype, a shape, and little-endian bytes in row-major order.

Arrays are read-only views of the request's bytes, copied only where the bytes are not aligned. BYTES are texts: each becomes
its id (`heat/text_ids.py`), an INT64, which hashed and pruned id maps take. BF16 is refused: no model here takes it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thermocline.errors import BadInput
from thermocline.heat.text_ids import id_of_text

Array = npt.NDArray[Any]

assert sys.byteorder == "little"  # the protocol's byte order

_INTEGERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{name: np.dtype(name.lower()) for name in _INTEGERS},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
TEXT = "BYTES"
PIECE = 1 << 13  # values that are converted at once
UNSUPPORTED = ("classification", "sequence_id")  # parameters of Triton's extensions


class RequestLimits(NamedTuple):
    """Counts of one request, checked before anything is built."""

    values: int = 1 << 18  # in all inputs
    tensors: int = 2048  # inputs, and as many outputs
    response: int = 32 << 20  # bytes of all outputs

    @property
    def fields(self) -> int:
        """Fields of all tensors: name, datatype, shape, parameters, contents."""
        return 8 * self.tensors


DEFAULT_LIMITS = RequestLimits()


Place = Callable[[str, Array], "dict[str, Any] | None"]


class InferRequest(NamedTuple):
    """An inference request of either protocol."""

    model: str
    version: str  # empty: the version in use
    id: str
    inputs: dict[str, Array]
    outputs: tuple[str, ...]  # empty: all
    timeout: float = math.inf  # seconds that it may wait in the queue
    place: Place | None = None  # puts an output into shared memory, and returns its parameters; None for other outputs
    copied: int = 0  # bytes of inputs that were in shared memory


def refuse_count(of: str, found: int, limit: int, way_out: str = "split it into several") -> None:
    """Raise `BadInput` for a count beyond its limit."""
    if found > limit:
        words = f"the request has {found:,} {of} or more, the limit is {limit:,}; {way_out}"
        raise BadInput(words, parameter=of, needed=found, available=limit)


def refuse_unsupported(parameters: Mapping[str, Any]) -> None:
    """Raise `BadInput` for a parameter of an extension that the server does not have; ignoring it would give wrong results."""
    for name in UNSUPPORTED:
        if name in parameters:
            words = f"parameter {name!r} is not supported by this server; send the tensors with the request"
            raise BadInput(words, parameter=name)


def read_timeout(parameters: Mapping[str, Any]) -> float:
    """Triton's parameter `timeout`, in microseconds, as seconds; 0 or nothing: none. A `priority` other than 0 is refused."""
    for name in ("timeout", "priority"):
        if name in parameters and (type(parameters[name]) is not int or parameters[name] < 0):
            raise BadInput(f"parameter {name!r} must be an integer of 0 or more", parameter=name)
    if parameters.get("priority"):
        words = "parameter 'priority' must be 0: requests are executed in the order of their arrival"
        raise BadInput(words, parameter="priority", value=parameters["priority"])
    return parameters["timeout"] / 1e6 if parameters.get("timeout") else math.inf


def dtype_of(name: str, datatype: str) -> np.dtype[Any]:
    """The numpy dtype of an input's datatype."""
    found = DTYPES.get(datatype)
    if found is None:
        raise BadInput(
            f"input {name!r} has datatype {datatype[:20]!r}; use one of {', '.join((*DTYPES, TEXT))}", parameter=name
        )
    return found


def from_bytes(
    name: str, datatype: str, shape: Sequence[int], raw: bytes | memoryview, limits: RequestLimits = DEFAULT_LIMITS
) -> Array:  # fmt: skip
    """An array over `raw`, whose length must match the shape."""
    if datatype == TEXT:
        refuse_count("values", count := _element_count(name, shape), limits.values)
        return _ids_in(name, count, raw).reshape(tuple(shape))
    dtype = dtype_of(name, datatype)
    elements = shape[0] if len(shape) == 1 else _element_count(name, shape)
    if elements * dtype.itemsize != len(raw) or elements < 0:
        wanted = f"shape {list(shape)} of {datatype} takes {elements * dtype.itemsize} bytes"
        raise BadInput(f"input {name!r}: {wanted}, not {len(raw)}", parameter=name)
    array = np.frombuffer(raw, dtype) if elements else np.empty(0, dtype)
    if not array.flags.aligned:  # kernels need aligned input; JSON in front of the bytes has any length
        array = array.copy()
    return array if len(shape) == 1 else array.reshape(tuple(shape))


def _ids_in(name: str, count: int, raw: bytes | memoryview) -> Array:
    """The ids of `count` texts, each with its length in four bytes before it."""
    _check_text(name)
    data, at, ids_N = memoryview(raw), 0, np.empty(min(count, len(raw) // 4), np.int64)
    for n in range(count):
        begin = at + 4
        at = begin + int.from_bytes(data[at:begin], "little")
        if at > len(data):
            raise BadInput(f"input {name!r}: text {n} ends at byte {at}, and there are {len(data)}", parameter=name)
        ids_N[n] = id_of_text(data[begin:at])  # no list of texts, which would take thirty times as much memory
    if at != len(data):
        raise BadInput(f"input {name!r}: {count} texts take {at} bytes, not {len(data)}", parameter=name)
    return ids_N


def _check_text(name: str) -> None:
    if name.endswith(".offsets"):
        raise BadInput(f"input {name!r} must be INT64, not {TEXT}: only ids may be text", parameter=name)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Array:
    """An array of JSON numbers or of a typed gRPC field. Nested lists are flattened."""
    if datatype == TEXT and isinstance(values, Sequence) and all([isinstance(each, (str, bytes)) for each in values]):
        _check_text(name)
        values, datatype = list(map(id_of_text, values)), "INT64"
    dtype = dtype_of(name, datatype)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise BadInput(f"input {name!r}: its data is not a list of {datatype} numbers", parameter=name)
    try:
        # In pieces, between which other threads get the interpreter lock.
        pieces = [_piece(name, dtype, values[at : at + PIECE]) for at in range(0, max(1, len(values)), PIECE)]
        array = np.concatenate(pieces) if len(pieces) != 1 else pieces[0]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"input {name!r}: its data is not a list of {datatype} numbers", parameter=name) from error
    elements = _element_count(name, shape)
    if elements != array.size:
        raise BadInput(f"input {name!r}: shape {list(shape)} has {elements} values, but data has {array.size}", parameter=name)
    return array.reshape(tuple(shape))


def _piece(name: str, dtype: np.dtype[Any], values: Any) -> Array:
    array = np.asarray(values)
    found = array.dtype
    if array.size == 0:
        return np.empty(0, dtype)
    if dtype.kind in "iu" and found.kind in "iu":
        info = np.iinfo(dtype)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            words = f"input {name!r} has numbers outside of {DATATYPES[dtype]} ({info.min} to {info.max})"
            raise BadInput(words, parameter=name)
    elif not (found.kind == dtype.kind or (dtype.kind == "f" and found.kind in "iu")):
        raise BadInput(f"input {name!r} is {DATATYPES[dtype]}, but its data has {found.name} values", parameter=name)
    return array.astype(dtype, copy=False).reshape(-1)


def _element_count(name: str, shape: Sequence[int]) -> int:
    if len(shape) > 8 or any(size < 0 for size in shape):
        words = f"input {name!r} has shape {list(shape[:9])}; sizes must be 0 or more, and at most 8 of them"
        raise BadInput(words, parameter=name)
    return math.prod(shape)  # Python integers cannot overflow
