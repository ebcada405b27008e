"""The model interface of the server. Any object with these members can be served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from thermocline.errors import BadInput

from .protocol.tensors import DATATYPES, DTYPES, Array, RequestLimits, refuse_count

_INT64, _ALSO_IDS = np.dtype(np.int64), tuple(map(np.dtype, (np.int32, np.uint32, np.uint64)))
MAX_NAMES = 8  # names that an error lists


class TensorMetadata(NamedTuple):
    """An input or output: its Open Inference Protocol datatype, and its shape with -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class ShardStatus(NamedTuple):
    """State and counters of one shard."""

    number: int
    ready: bool
    bytes: int
    lookups: int
    pid: int


class ElasticCounts(NamedTuple):
    """Lookups of a feature whose ids came and went in training, those without a row of their own, and the ids with one."""

    lookups: int
    unknown: int
    ids: int


class ServableModel(Protocol):
    """A loaded model.

    `infer` executes one batch of requests. An invalid request yields an exception in its place, and the other requests of the
    batch succeed. Input arrays are read-only. One thread at a time calls `infer`, not always the same thread.

    Optional members: `load(folder)` and `follow()` change the version in place (`server/model_repository.py`); `waits` is true
    if `infer` waits for other hosts (`server/dynamic_batcher.py`); `wire_lookup()` returns the kernels of the fast path
    (`server/fast_path.py`); `current.id_counts` has `ElasticCounts` by feature.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def inputs(self) -> Sequence[TensorMetadata]: ...

    @property
    def outputs(self) -> Sequence[TensorMetadata]: ...

    def infer(self, requests: Sequence[Mapping[str, Array]]) -> Sequence[Mapping[str, Array] | Exception]: ...

    def shards(self) -> Sequence[ShardStatus]: ...

    def close(self) -> None: ...


class ModelSignature:
    """Inputs and outputs of a model, for validation of requests."""

    def __init__(self, model: ServableModel) -> None:
        self._name = model.name
        self._inputs: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            each.name: (DTYPES[each.datatype], each.shape) for each in model.inputs
        }
        self._required = frozenset(each.name for each in model.inputs if not each.optional)
        self._outputs = frozenset(each.name for each in model.outputs)
        # Bytes of a row of each output that has a row for each id, or for each offset, of the input with its name.
        self._row_bytes = {
            each.name: DTYPES[each.datatype].itemsize * math.prod(each.shape[1:])
            for each in model.outputs
            if each.name in self._inputs and each.shape[:1] == (-1,) and -1 not in each.shape[1:]
        }

    def check(self, inputs: dict[str, Array], outputs: tuple[str, ...], limits: RequestLimits) -> tuple[int, int]:
        """The number of values in a request, and the bytes of its outputs, of those whose size follows from the inputs.

        Raises `BadInput` if the request does not fit the model, or exceeds the limits. Ids of other integer types become INT64;
        the hash of an id map takes UINT64 ids as the same 64 bits.
        """
        values, known = 0, self._inputs
        for name, array in inputs.items():
            expected = known.get(name)
            if expected is None:
                raise BadInput(f"model {self._name!r} has no input {name[:100]!r}; it has {list_names(known)}", parameter=name)
            dtype, shape = expected
            if array.dtype != dtype and dtype == _INT64 and array.dtype in _ALSO_IDS:
                array = inputs[name] = array.astype(_INT64)
            if array.dtype != dtype:
                raise BadInput(f"input {name!r} must be {DATATYPES[dtype]}, not {DATATYPES[array.dtype]}", parameter=name)
            if not _matches(array.shape, shape):
                words = f"input {name!r} must have shape {list(shape)} (-1: any size), not {list(array.shape)}"
                raise BadInput(words, parameter=name)
            values += array.size
        if not inputs:
            raise BadInput(f"the request has no inputs; model {self._name!r} takes {list_names(known)}", parameter="inputs")
        if not self._required <= inputs.keys():
            missing = min(self._required - inputs.keys())
            raise BadInput(f"input {missing!r} is missing", parameter=missing)
        refuse_count("values", values, limits.values)
        for name in outputs:
            if name not in self._outputs:
                there = list_names(self._outputs)
                raise BadInput(f"model {self._name!r} has no output {name[:100]!r}; it has {there}", parameter=name)
        size = 0
        for name, row_bytes in self._row_bytes.items():
            if name in inputs:
                size += row_bytes * len(inputs.get(f"{name}.offsets", inputs[name]))
        if size > limits.response:
            words = f"the response would have {size:,} bytes, the limit is {limits.response:,}; split the request into several"
            raise BadInput(words, parameter="outputs", needed=size, available=limits.response)
        return values, size


def _matches(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(wanted in (-1, size) for size, wanted in zip(shape, expected, strict=True))


def list_names(names: Mapping[str, object] | frozenset[str] | Sequence[str]) -> str:
    """Names for an error message, at most `MAX_NAMES` of them."""
    listed = list(names) if isinstance(names, Sequence) else sorted(names)
    more = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return ", ".join(map(repr, listed[:MAX_NAMES])) + more if listed else "none"
