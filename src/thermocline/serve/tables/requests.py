"""Requests to served tables, validated.

    <feature>            int64 [n]      ids; the result has a row for each, [n, dim]
    <feature>.offsets    int64 [bags]   first id of each bag, as `nn.EmbeddingBag` takes them; the result is [bags, dim]
    <feature>.weights    fp32 [n]       of the ids of summed bags

A request may have any of the features. A feature with elastic ids has one more output, which must be requested by name:

    <feature>.known      bool [n]       whether the id has a row of its own; other ids read a shared row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.serve.served_model import list_names

from .version import TableVersion

Array = NDArray[Any]
OFFSETS, WEIGHTS = ".offsets", ".weights"
KNOWN = ".known"  # an output


class FeatureRequest(NamedTuple):
    """One feature of one request. `starts_B`: the first id of each bag; None if ids are not pooled."""

    ids_N: Array
    starts_B: Array | None
    weights_N: Array | None

    @property
    def bags(self) -> int:
        return len(self.ids_N) if self.starts_B is None else len(self.starts_B)


ParsedRequest = dict[int, FeatureRequest]  # by feature number


def parse_request(version: TableVersion, request: Mapping[str, Array]) -> ParsedRequest:
    """Validate a request. Raises `BadInput`, whose `parameter` is the name of the invalid input."""
    numbers, parsed = version.numbers, {}
    for name in request:
        if name in numbers:
            parsed[numbers[name]] = _parse_feature(version, numbers[name], request)
            continue
        feature = name.removesuffix(OFFSETS).removesuffix(WEIGHTS)
        if feature == name or feature not in numbers:
            features = f"the features are {list_names(version.features)}, each with its '.offsets' and '.weights'"
            raise BadInput(f"input {name!r} is not known; {features}", parameter=name)
        if feature not in request:
            raise BadInput(f"input {name!r} is there, but {feature!r} is not", parameter=feature)
    if not parsed:
        raise BadInput(f"the request has no feature; there are {list_names(version.features)}", parameter="inputs")
    return parsed


def _parse_feature(version: TableVersion, number: int, request: Mapping[str, Array]) -> FeatureRequest:
    name = version.features[number]
    ids_N, starts_B, weights_N = request[name], request.get(name + OFFSETS), request.get(name + WEIGHTS)
    _check_vector(name, ids_N, (np.int64, np.int32), "int64")
    if weights_N is not None:
        _check_weights(version, number, ids_N, starts_B, weights_N)
    if starts_B is None:
        return FeatureRequest(ids_N, None, None)
    _check_vector(name + OFFSETS, starts_B, (np.int64, np.int32), "int64")
    _check_offsets(name + OFFSETS, starts_B, len(ids_N))
    return FeatureRequest(ids_N, starts_B, weights_N)


def _check_vector(name: str, array: Array, types: Sequence[type], wanted: str) -> None:
    if array.dtype not in types:
        raise BadInput(f"input {name!r} is {array.dtype}; it must be {wanted}", parameter=name, value=array.dtype)
    if array.ndim != 1:
        words = f"input {name!r} has the shape {list(array.shape)}; it must have one dimension"
        raise BadInput(words, parameter=name, value=array.shape)


def _check_offsets(name: str, starts_B: Array, count: int) -> None:
    if len(starts_B) == 0 and count:
        raise BadInput(f"input {name!r} is empty, but there are {count} ids; give the first id of each bag", parameter=name)
    if len(starts_B) == 0:
        return
    if starts_B[0] != 0:
        raise BadInput(f"input {name!r} begins with {starts_B[0]}; the first bag begins at 0", parameter=name)
    falls_B = starts_B[1:] < starts_B[:-1]
    if falls_B.any():
        at = int(falls_B.argmax()) + 1
        falls = f"falls from {starts_B[at - 1]} to {starts_B[at]} at position {at}"
        raise BadInput(f"input {name!r} {falls}; it must not decrease", parameter=name, position=at)
    if starts_B[-1] > count:
        raise BadInput(f"input {name!r} ends with {starts_B[-1]}, but there are {count} ids", parameter=name)


def _check_weights(version: TableVersion, number: int, ids_N: Array, starts_B: Array | None, weights_N: Array) -> None:
    feature = version.features[number]
    name = feature + WEIGHTS
    _check_vector(name, weights_N, (np.float32,), "float32")
    if len(weights_N) != len(ids_N):
        raise BadInput(f"input {name!r} has {len(weights_N)} weights for {len(ids_N)} ids; give one for each", parameter=name)
    if starts_B is None:
        offsets = feature + OFFSETS
        raise BadInput(f"input {name!r} needs {offsets!r}: only ids in bags have weights", parameter=offsets)
    if (mode := version.modes[feature]) != F.SUM:
        raise BadInput(f"feature {feature!r} is pooled by {F.MODES[mode]}; only sums take weights", parameter=name)
    finite_N = np.isfinite(weights_N)
    if not finite_N.all():
        at = int((~finite_N).argmax())
        words = f"input {name!r} has {weights_N[at]} at position {at}; weights must be finite"
        raise BadInput(words, parameter=name, position=at)


def as_array(name: str, value: Array | torch.Tensor | Sequence[int]) -> Array:
    """An input of `ShardGroup.lookup` as an array."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    kind = np.float32 if name.endswith(WEIGHTS) and not isinstance(value, np.ndarray) else None
    return np.asarray(value, kind) if len(value) else np.asarray(value, kind or np.int64)
