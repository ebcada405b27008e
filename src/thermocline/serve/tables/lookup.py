"""Batched lookups in one version: requests are joined into one kernel launch, and its output is split again.

Requests that are pooled by different modes need a launch for each. Maxima are taken here, over unpooled rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels.serve.fields import ServedBags
from thermocline.serve.errors import ShardDown

from .requests import KNOWN, FeatureRequest, ParsedRequest
from .version import TableVersion, id_without_row

_MAX_BYTES = 4 << 20  # of rows whose maxima are taken at once
Array = NDArray[Any]
Floats = NDArray[np.float32]


class LookupResult(dict[str, Array]):
    """Outputs by name, the version that all of them come from, and outputs that are computed if they are requested."""

    def __init__(
        self, outputs: Mapping[str, Array], version: str, on_request: Mapping[str, Callable[[], Array]] | None = None
    ) -> None:
        super().__init__(outputs)
        self.version, self.on_request = version, on_request or {}

    def only(self, names: Sequence[str]) -> dict[str, Array]:
        """The requested outputs. Raises `BadInput` for an output whose input is not there."""
        if missing := [name for name in names if name not in self and name not in self.on_request]:
            raise BadInput(f"output {missing[0]!r} is requested, but its input is not there", parameter=missing[0])
        return {name: self[name] if name in self else self.on_request[name]() for name in names}


class LookupBatch(NamedTuple):
    """Joined requests: kernel arguments, and the first output element of each feature."""

    bags: ServedBags
    size: int  # elements of the output
    begins: dict[int, int]  # by feature number


def look_up_batch(version: TableVersion, requests: Sequence[ParsedRequest]) -> list[LookupResult]:
    """Results of valid requests: one launch for each pooling mode.

    Raises:
        BadInput: an id of one of the requests has no row
        ShardDown: a shard is down
    """
    results = [LookupResult({}, version.name, _known(version, request)) for request in requests]
    modes = {_mode(version, n, each) for request in requests for n, each in request.items()}
    for mode in sorted(modes):
        own = requests
        if len(modes) > 1:
            own = [{n: each for n, each in request.items() if _mode(version, n, each) == mode} for request in requests]
        if mode == F.MAX:
            found = [{version.features[n]: _max_pooled(version, n, each) for n, each in request.items()} for request in own]
        else:
            batch = join_requests(version, own, mode)
            bags = batch.bags if version.device.type == "cpu" else batch.bags.to(version.device)
            out = torch.empty(batch.size, dtype=torch.float32, device=version.device)
            version.look_up(bags, out)
            found = split_output(version, batch, own, out.cpu().numpy())
        for result, outputs in zip(results, found, strict=True):
            result.update(outputs)
    if len(modes) > 1:  # in the order of the requests
        names = version.features
        ordered = [{names[n]: result[names[n]] for n in each} for result, each in zip(results, requests, strict=True)]
        results = [LookupResult(each, version.name, old.on_request) for each, old in zip(ordered, results, strict=True)]
    return results


def look_up_alone(version: TableVersion, request: ParsedRequest) -> LookupResult | Exception:
    """The result of one request, or its error."""
    try:
        return look_up_batch(version, [request])[0]
    except (BadInput, ShardDown) as error:
        return error.with_traceback(None)  # its frames hold the version, which a publish waits for


def _known(version: TableVersion, request: ParsedRequest) -> dict[str, Callable[[], Array]]:
    """Outputs that say which ids have rows of their own, of features with elastic ids."""
    asked = version.elastic & request.keys() if version.elastic else ()
    return {version.features[n] + KNOWN: partial(version.known, n, request[n].ids_N) for n in asked}


def _mode(version: TableVersion, number: int, request: FeatureRequest) -> int:
    """The pooling mode of a feature. Unpooled ids go with sums."""
    return F.SUM if request.starts_B is None else version.modes[version.features[number]]


def warm_up(version: TableVersion) -> None:
    """Compile the kernels and launch them once, so that a ready model answers its first request fast."""
    if version.device.type == "cpu":
        from thermocline.kernels.cpu.compile import prepare  # deferred: imports numba, which a GPU server does not need

        prepare("ids", "serve")
    request = {0: FeatureRequest(np.zeros(1, np.int64), np.zeros(1, np.int64), None)}
    with suppress(BadInput):  # an id map without id 0
        look_up_batch(replace(version, tally_S=np.zeros_like(version.tally_S)), [request])


def join_requests(version: TableVersion, requests: Sequence[ParsedRequest], mode: int) -> LookupBatch:
    """All lookups of requests whose features are pooled by `mode`, or not pooled, feature by feature."""
    by_feature: dict[int, list[FeatureRequest]] = {}
    for request in requests:
        for number, each in request.items():
            by_feature.setdefault(number, []).append(each)
    joined: list[FeatureRequest] = []
    begins: dict[int, int] = {}
    ends, targets, size = [0], [], 0
    for number, dim in enumerate(version.dims):
        bags = 0
        if number in by_feature:
            joined += by_feature[number]
            bags = sum([each.bags for each in by_feature[number]])
            begins[number] = size
        ends.append(ends[-1] + bags)
        targets += [size, dim]
        size += bags * dim
    pooled = any([each.starts_B is not None for each in joined])
    weighted = any([each.weights_N is not None for each in joined])
    ids_N = _concatenate([each.ids_N for each in joined], np.int64)
    offsets = torch.from_numpy(_offsets(joined, len(ids_N))) if pooled else None
    weights = torch.from_numpy(_concatenate([_weights(each) for each in joined], np.float32)) if weighted else None
    ends_F1, target_F2 = (torch.from_numpy(np.array(each)) for each in (ends, targets))
    counts = {after - before for before, after in pairwise(ends)}
    each_count = counts.pop() if len(counts) == 1 else 0
    tensors = (torch.from_numpy(ids_N), ends_F1, offsets, weights, mode, target_F2.view(-1, 2))
    return LookupBatch(ServedBags(*tensors, ends[-1], each_count, math.gcd(16, *targets)), size, begins)


def _concatenate(arrays: Sequence[Array], kind: type) -> Array:
    """One array of a dtype, without a copy if there is only one and it fits."""
    if len(arrays) == 1 and arrays[0].dtype == kind and arrays[0].flags.carray:
        return arrays[0]
    return np.concatenate(arrays).astype(kind, copy=False)


def _offsets(joined: Sequence[FeatureRequest], count: int) -> NDArray[np.int64]:
    parts, begin = [], 0
    for each in joined:
        starts = np.arange(len(each.ids_N)) if each.starts_B is None else each.starts_B
        parts.append(starts + begin)
        begin += len(each.ids_N)
    offsets_B1: NDArray[np.int64] = np.concatenate([*parts, [count]]).astype(np.int64, copy=False)
    return offsets_B1


def _weights(request: FeatureRequest) -> Array:
    return np.ones(len(request.ids_N), np.float32) if request.weights_N is None else request.weights_N


def split_output(
    version: TableVersion, batch: LookupBatch, requests: Sequence[ParsedRequest], out: Floats
) -> list[dict[str, Floats]]:
    """The outputs of each request: views of the launch's output."""
    begins, dims = dict(batch.begins), version.dims
    results = []
    for request in requests:
        outputs = {}
        for number, each in request.items():
            size, at = each.bags * dims[number], begins[number]
            outputs[version.features[number]] = out[at : at + size].reshape(each.bags, dims[number])
            begins[number] += size
        results.append(outputs)
    return results


def _max_pooled(version: TableVersion, number: int, request: FeatureRequest) -> Floats:
    """The maximum of each column over the rows of every bag; zeros for an empty bag. Takes `_MAX_BYTES` of rows at a time."""
    name, dim, starts_B, count = version.features[number], version.dims[number], request.starts_B, len(request.ids_N)
    assert starts_B is not None
    filled_K = np.flatnonzero(np.diff(starts_B, append=count) > 0)
    starts_K, each = starts_B[filled_K], max(1, _MAX_BYTES // (4 * dim))  # without empty bags, each ends where the next begins
    pooled_KD = np.full((len(filled_K), dim), -np.inf, np.float32)
    for first in range(0, count if len(filled_K) else 0, each):
        ids_N = request.ids_N[first : first + each]
        try:
            (rows,) = look_up_batch(version, [{number: FeatureRequest(ids_N, None, None)}])
        except BadInput as error:
            found: Any = error
            raise id_without_row(name, found.rows, found.position + first, found.id) from None
        begin, end = np.searchsorted(starts_K, (first, first + len(ids_N)))
        begin -= begin == len(starts_K) or starts_K[begin] > first  # a bag goes on
        found_KD = np.maximum.reduceat(rows[name], np.maximum(starts_K[begin:end] - first, 0), axis=0)
        np.maximum(pooled_KD[begin:end], found_KD, out=pooled_KD[begin:end])
    pooled_BD = np.zeros((len(starts_B), dim), np.float32)
    pooled_BD[filled_K] = pooled_KD
    return pooled_BD
