"""Answers of one version: a micro-batch goes in, and for each of its requests outputs or what is wrong with it come out.

One launch answers a whole micro-batch: all that is pooled alike, which most often is all. If a request of the batch cannot be
answered, each is answered alone, so that a mistake of one client is an answer to that client and nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import BadInput, ThermoclineError
from thermocline.kernels.serve.fields import FEW
from thermocline.serve.errors import CardDown

from .requests import Asked, join, largest, read_request, take_apart
from .version import Version

Array = NDArray[Any]
Tally = NDArray[np.int64]


class Answer(dict[str, Array]):
    """Outputs by name, and the version that all of them come from."""

    def __init__(self, outputs: Mapping[str, Array], version: str) -> None:
        super().__init__(outputs)
        self.version = version


def answer(version: Version, requests: Sequence[Mapping[str, Array]], tally_C: Tally) -> list[Answer | Exception]:
    """For each request its outputs, or what is wrong with it; lookups are counted in `tally_C`, by card."""
    if len(requests) == 1 and (short := _short(version, requests[0], tally_C)) is not None:
        return [short]
    answers: list[Answer | Exception] = [ThermoclineError("not answered")] * len(requests)
    asked: dict[int, dict[int, Asked]] = {}
    for number, request in enumerate(requests):
        try:
            asked[number] = read_request(version, request)
        except BadInput as error:
            answers[number] = error
    try:
        found: Sequence[Answer | Exception] = _answer(version, list(asked.values()), tally_C)
    except (BadInput, CardDown):
        found = [_alone(version, each, tally_C) for each in asked.values()]
    for number, one in zip(asked, found, strict=True):
        answers[number] = one
    return answers


def _short(version: Version, request: Mapping[str, Array], tally_C: Tally) -> Answer | None:
    """Rows of one feature, without what other requests need; None where that is not all that is asked, or not right."""
    if len(request) != 1:
        return None
    ((name, ids_N),) = request.items()
    rows = version.plain.get(name)
    if rows is None or ids_N.dtype != np.int64 or ids_N.ndim != 1 or not ids_N.flags.c_contiguous or len(ids_N) > FEW:
        return None
    found_ND = rows.look_up(ids_N, tally_C)
    return None if found_ND is None else Answer({name: found_ND}, version.name)


def _alone(version: Version, asked: dict[int, Asked], tally_C: Tally) -> Answer | Exception:
    try:
        return _answer(version, [asked], tally_C)[0]
    except (BadInput, CardDown) as error:
        return error


def _answer(version: Version, asked: Sequence[dict[int, Asked]], tally_C: Tally) -> list[Answer]:
    """One launch for all that is pooled alike: most often one."""
    modes = {_mode(version, n, each) for request in asked for n, each in request.items()}
    if len(modes) == 1:
        return _launch(version, asked, modes.pop(), tally_C)
    found = [Answer({}, version.name) for _ in asked]
    for mode in sorted(modes):
        mine = [{n: each for n, each in request.items() if _mode(version, n, each) == mode} for request in asked]
        for one, more in zip(found, _launch(version, mine, mode, tally_C), strict=True):
            one.update(more)
    return found


def _launch(version: Version, asked: Sequence[dict[int, Asked]], mode: int, tally_C: Tally) -> list[Answer]:
    if mode == F.MAX:
        each = [{n: one._replace(starts_B=None) for n, one in request.items()} for request in asked]
        found = zip(asked, _launch(version, each, F.SUM, tally_C), strict=True)
        return [Answer(largest(version, request, rows), version.name) for request, rows in found]
    batch = join(version, asked, mode)
    if version.device.type == "cpu":
        out = torch.empty(batch.size)
        tally_C += version.look_up(batch.bags.rows_N, batch.bags, out).numpy()
    else:
        from .gpu_shards import look_up

        out = look_up(version, batch.bags, batch.size)
    return [Answer(outputs, version.name) for outputs in take_apart(version, batch, asked, out.numpy())]


def _mode(version: Version, number: int, asked: Asked) -> int:
    """How a feature is pooled; rows that are not pooled go with sums."""
    return F.SUM if asked.starts_B is None else version.modes[version.features[number]]


def warm(version: Version) -> None:
    """Have kernels compiled and their first launch behind us: ready means ready."""
    batch = join(version, [{0: Asked(np.zeros(1, np.int64), np.zeros(1, np.int64), None)}], F.SUM)
    with suppress(BadInput):  # of a map that does not know id 0
        if version.device.type == "cpu":
            version.look_up(batch.bags.rows_N, batch.bags, torch.empty(batch.size))
        else:
            from .gpu_shards import look_up

            look_up(version, batch.bags, batch.size)
