"""Tensors as the protocol writes them: a datatype's name, a shape, and little-endian bytes in row order.

Bytes become arrays without a copy (which cannot be written to; models must not do so anyway), unless they are not aligned.
Strings (BYTES) and BF16 are refused: no model here takes them, and each would need a copy and a parser of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thermocline.errors import BadInput

Array = npt.NDArray[Any]

assert sys.byteorder == "little"  # the protocol's order; a swap on the way in and out is all that others would need

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}


class Asked(NamedTuple):
    """A request to infer, whichever way it came."""

    model: str
    version: str  # empty: the one in use
    id: str
    inputs: dict[str, Array]
    outputs: tuple[str, ...]  # empty: all


def dtype_of(name: str, datatype: str) -> np.dtype[Any]:
    found = DTYPES.get(datatype)
    if found is None:
        raise BadInput(f"input {name!r} has datatype {datatype[:20]!r}; this server knows {', '.join(DTYPES)}")
    return found


def from_bytes(name: str, datatype: str, shape: Sequence[int], raw: bytes | memoryview) -> Array:
    """An array over `raw`, which must be exactly as long as the shape says."""
    dtype = dtype_of(name, datatype)
    # One dimension is how nearly all requests come, and frombuffer's own shape is that already.
    elements = shape[0] if len(shape) == 1 else _elements(name, shape)
    if elements * dtype.itemsize != len(raw) or elements < 0:
        wanted = f"shape {list(shape)} of {datatype} takes {elements * dtype.itemsize} bytes"
        raise BadInput(f"input {name!r}: {wanted}, but {len(raw)} bytes came")
    array = np.frombuffer(raw, dtype) if elements else np.empty(0, dtype)
    if not array.flags.aligned:  # behind JSON of any length; kernels count on it
        array = array.copy()
    return array if len(shape) == 1 else array.reshape(tuple(shape))


def from_values(name: str, datatype: str, shape: Sequence[int], values: object) -> Array:
    """An array of numbers that came one by one: JSON, or the typed fields of gRPC. Nested lists are flattened by the shape."""
    dtype = dtype_of(name, datatype)
    try:
        array = np.asarray(values)
        wide = array.dtype
        if array.size == 0:
            array = np.empty(0, dtype)
        elif dtype.kind in "iu" and wide.kind in "iu":
            info = np.iinfo(dtype)
            if int(array.min()) < info.min or int(array.max()) > info.max:
                raise BadInput(f"input {name!r} has numbers outside of {datatype} ({info.min} to {info.max})")
        elif not (wide.kind == dtype.kind or (dtype.kind == "f" and wide.kind in "iu")):
            raise BadInput(f"input {name!r} is {datatype}, but its data is not (found {wide.name} values)")
        array = array.astype(dtype, copy=False).reshape(-1)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"input {name!r}: its data is not a list of {datatype} numbers") from error
    elements = _elements(name, shape)
    if elements != array.size:
        raise BadInput(f"input {name!r}: shape {list(shape)} has {elements} values, but {array.size} came")
    return array.reshape(tuple(shape))


def _elements(name: str, shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape) or len(shape) > 8:
        raise BadInput(f"input {name!r} has shape {list(shape)[:9]}; every size must be 0 or more, and there can be at most 8")
    return math.prod(shape)  # Python's integers: no product overflows into a small one


def contiguous(array: Array) -> Array:
    """The array as it is written: in row order, which most are already."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)
