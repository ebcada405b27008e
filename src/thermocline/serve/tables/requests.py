"""What clients ask the tables for: read, refused where it cannot be right, put together for one launch, and taken apart again.

    <feature>            int64 [n]      ids; each answered with its own row, [n, dim]
    <feature>.offsets    int64 [bags]   where bags begin, as `nn.EmbeddingBag` takes them; answered with [bags, dim]
    <feature>.weights    fp32 [n]       of the ids of bags that are summed

Any of the features may be asked for. A micro-batch is all ids of all its requests, feature by feature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels.serve.fields import Bags

from .version import Version

Array = NDArray[Any]
OFFSETS, WEIGHTS = ".offsets", ".weights"


class Asked(NamedTuple):
    """One feature of one request. `starts_B`: where bags begin; None where ids are not pooled."""

    ids_N: Array
    starts_B: Array | None
    weights_N: Array | None

    @property
    def bags(self) -> int:
        return len(self.ids_N) if self.starts_B is None else len(self.starts_B)


def read_request(version: Version, request: Mapping[str, Array]) -> dict[int, Asked]:
    """What a request asks, by the number of the feature."""
    numbers, asked = version.numbers, {}
    for name in request:
        if name in numbers:
            asked[numbers[name]] = _read_feature(version, numbers[name], request)
        elif not _belongs(name, OFFSETS, numbers, request) and not _belongs(name, WEIGHTS, numbers, request):
            raise BadInput(_unknown(name, version.features))
    if not asked:
        raise BadInput(f"the request asks for no feature; there are {_some(version.features)}")
    return asked


def _belongs(name: str, kind: str, numbers: Mapping[str, int], request: Mapping[str, Array]) -> bool:
    """Whether an input says something of a feature that is asked for."""
    feature = name.removesuffix(kind)
    return feature != name and feature in numbers and feature in request


def _unknown(name: str, features: Sequence[str]) -> str:
    for feature in features:
        if name in (feature + OFFSETS, feature + WEIGHTS):
            return f"input {name!r} is there, but {feature!r} is not"
    return f"input {name!r} is not known; the features are {_some(features)}, each with its '.offsets' and '.weights'"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_feature(version: Version, number: int, request: Mapping[str, Array]) -> Asked:
    name = version.features[number]
    ids_N, starts_B, weights_N = request[name], request.get(name + OFFSETS), request.get(name + WEIGHTS)
    _check_flat(name, ids_N, (np.int64, np.int32), "int64")
    if weights_N is not None:
        _check_weights(version, number, ids_N, starts_B, weights_N)
    if starts_B is None:
        return Asked(ids_N, None, None)
    _check_flat(name + OFFSETS, starts_B, (np.int64, np.int32), "int64")
    _check_offsets(name + OFFSETS, starts_B, len(ids_N))
    return Asked(ids_N, starts_B, weights_N)


def _check_flat(name: str, array: Array, types: Sequence[type], asked: str) -> None:
    if array.dtype not in types:
        raise BadInput(f"input {name!r} is {array.dtype}; it must be {asked}")
    if array.ndim != 1:
        raise BadInput(f"input {name!r} has the shape {list(array.shape)}; it must have one dimension")


def _check_offsets(name: str, starts_B: Array, count: int) -> None:
    if len(starts_B) == 0:
        if count:
            raise BadInput(f"input {name!r} is empty, but there are {count} ids; give where their bags begin")
        return
    if starts_B[0] != 0:
        raise BadInput(f"input {name!r} begins with {starts_B[0]}; the first bag begins at 0")
    falls_B = starts_B[1:] < starts_B[:-1]
    if falls_B.any():
        at = int(falls_B.argmax())
        raise BadInput(f"input {name!r} falls from {starts_B[at]} to {starts_B[at + 1]} at position {at + 1}; it must rise")
    if starts_B[-1] > count:
        raise BadInput(f"input {name!r} ends with {starts_B[-1]}, but there are {count} ids; bags begin at {count} at most")


def _check_weights(version: Version, number: int, ids_N: Array, starts_B: Array | None, weights_N: Array) -> None:
    name = version.features[number]
    _check_flat(name + WEIGHTS, weights_N, (np.float32,), "float32")
    if len(weights_N) != len(ids_N):
        raise BadInput(f"input {name + WEIGHTS!r} has {len(weights_N)} weights for {len(ids_N)} ids; give one for each")
    if starts_B is None:
        raise BadInput(f"input {name + WEIGHTS!r} needs {name + OFFSETS!r}: weights are of ids in bags")
    if version.modes[name] != F.SUM:
        raise BadInput(f"feature {name!r} is pooled by {F.MODES[version.modes[name]]}; weights work with sums")
    finite_N = np.isfinite(weights_N)
    if not finite_N.all():
        at = int((~finite_N).argmax())
        raise BadInput(f"input {name + WEIGHTS!r} has {weights_N[at]} at position {at}; weights must be finite")


class Batch(NamedTuple):
    """Requests put together: what a launch takes, and where the answers of each feature begin."""

    bags: Bags
    size: int  # elements of the output
    begins: dict[int, int]  # by feature, of those that were asked for


def join(version: Version, requests: Sequence[Mapping[int, Asked]], mode: int) -> Batch:
    """All lookups of some requests whose features are pooled by `mode`, or not pooled."""
    parts: dict[int, list[Asked]] = {}
    for request in requests:
        for number, asked in request.items():
            parts.setdefault(number, []).append(asked)
    everything: list[Asked] = []
    begins: dict[int, int] = {}
    ends, targets, size = [0], [], 0
    for number, dim in enumerate(version.dims):
        bags = 0
        if number in parts:
            everything += parts[number]
            bags = sum([asked.bags for asked in parts[number]])
            begins[number] = size
        ends.append(ends[-1] + bags)
        targets += [size, dim]
        size += bags * dim
    pooled = any([asked.starts_B is not None for asked in everything])
    weighted = any([asked.weights_N is not None for asked in everything])
    ids_N = _concatenate([asked.ids_N for asked in everything], np.int64)
    offsets = torch.from_numpy(_offsets(everything, len(ids_N))) if pooled else None
    weights = torch.from_numpy(_concatenate([_weights(asked) for asked in everything], np.float32)) if weighted else None
    ends_F1, target_F2 = (torch.from_numpy(np.array(each)) for each in (ends, targets))
    counts = {after - before for before, after in pairwise(ends)}
    each = counts.pop() if len(counts) == 1 else 0
    together = (torch.from_numpy(ids_N), ends_F1, offsets, weights, mode, target_F2.view(-1, 2))
    return Batch(Bags(*together, ends[-1], each, math.gcd(16, *targets)), size, begins)


def _concatenate(arrays: Sequence[Array], kind: type) -> Array:
    """One array that may be handed to torch: of its own, unless there is but one that is right as it is."""
    if len(arrays) == 1 and arrays[0].dtype == kind and arrays[0].flags.carray:
        return arrays[0]
    return np.concatenate(arrays).astype(kind, copy=False)


def _offsets(everything: Sequence[Asked], count: int) -> NDArray[np.int64]:
    parts, begin = [], 0
    for asked in everything:
        starts = np.arange(len(asked.ids_N)) if asked.starts_B is None else asked.starts_B
        parts.append(starts + begin)
        begin += len(asked.ids_N)
    offsets_B1: NDArray[np.int64] = np.concatenate([*parts, [count]]).astype(np.int64, copy=False)
    return offsets_B1


def _weights(asked: Asked) -> Array:
    return np.ones(len(asked.ids_N), np.float32) if asked.weights_N is None else asked.weights_N


def take_apart(
    version: Version, batch: Batch, requests: Sequence[Mapping[int, Asked]], out: NDArray[np.float32]
) -> list[dict[str, NDArray[np.float32]]]:
    """The answers to each request: views of the output."""
    begins, dims = dict(batch.begins), version.dims
    answers = []
    for request in requests:
        answer = {}
        for number, asked in request.items():
            size, at = asked.bags * dims[number], begins[number]
            answer[version.features[number]] = out[at : at + size].reshape(asked.bags, dims[number])
            begins[number] += size
        answers.append(answer)
    return answers


def largest(
    version: Version, request: Mapping[int, Asked], rows: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:  # fmt: skip
    """The largest of each column over the rows of every bag, from the rows; zeros where a bag is empty."""
    pooled = {}
    for number, asked in request.items():
        name, starts_B = version.features[number], asked.starts_B
        assert starts_B is not None
        some_B = np.diff(starts_B, append=len(asked.ids_N)) > 0
        pooled[name] = np.zeros((len(starts_B), version.dims[number]), np.float32)
        if some_B.any():  # without empty bags, one ends where the next begins
            pooled[name][some_B] = np.maximum.reduceat(rows[name], starts_B[some_B], axis=0)
    return pooled


def as_array(name: str, value: Array | torch.Tensor | Sequence[int]) -> Array:
    """An input that came from Python."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    kind = np.float32 if name.endswith(WEIGHTS) and not isinstance(value, np.ndarray) else None
    return np.asarray(value, kind) if len(value) else np.asarray(value, kind or np.int64)
