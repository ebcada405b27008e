"""How many rows the ids of a log need: batches are replayed through real key tables, which choose rows as training would.

The first half of the log fills a table, and the second half is judged: of the lookups whose id occurred before, the share that
finds a row of its own. The rule is chosen in three steps: how counts decay, at rows for an eighth of the ids; then the fewest
rows that keep what is wanted; then the lookups after which an id is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline.errors import BadInput
from thermocline.heat.log_reader import LogFile, open_logs
from thermocline.heat.profile import Ints
from thermocline.heat.turnover import IdTurnover, KeptRows, count_periods
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.ids.keyed_map import new_keys

from .sequence_files import times_of

PERIODS = 100  # of a log without times
MOST_PERIODS = 100_000
_CHUNK = 1 << 16
_DECAYS = (3, 10, 30, 100, 300, 1000)
_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.25)  # of the ids
_LEAST = 80  # rows
Report = Callable[[int, int, str], None]


class _Column(NamedTuple):
    """The ids of a column, and the sample of each."""

    ids_N: Ints
    sample_N: Ints


def measure_turnover(
    paths: Sequence[Path], columns: Sequence[str], time: str | None, batch: int, keep: float, most: int,
    report: Report = lambda done, total, what: None,
) -> list[IdTurnover]:  # fmt: skip
    """The turnover of columns of a log, of its last `most` samples.

    Raises:
        BadInput: a column is missing, or the log has fewer than 4 batches.
    """
    files, names = open_logs(paths, columns)
    if time is not None:
        open_logs(paths, [time])
    samples = sum(file.samples for file in files)
    if samples < 4 * batch:
        message = f"the log has {samples:,} samples, and a batch {batch:,}; at least 4 batches are needed: --batch"
        raise BadInput(message, parameter="batch", value=batch, available=samples)
    found, times_S = _read(files, names, time, max(0, samples - most))
    period_S, width = _periods(times_S, time is not None)
    total, results = 4 + len(_DECAYS) + len(_SHARES), []
    for at, (name, column) in enumerate(found.items()):
        if not len(column.ids_N):
            raise BadInput(f"column {name!r} has no ids", parameter="columns", value=name)
        replay = _Replay(column, batch, lambda n, at=at, name=name: report(at * total + n, total * len(found), name))  # type: ignore[misc]
        results.append(replay.turnover(name, period_S[column.sample_N], width, keep, time is not None))
    return results


def _read(files: Sequence[LogFile], names: list[str], time: str | None, first: int) -> tuple[dict[str, _Column], NDArray[Any]]:
    ids: dict[str, list[Ints]] = {name: [] for name in names}
    at: dict[str, list[Ints]] = {name: [] for name in names}
    times: list[NDArray[Any]] = []
    done = 0
    for file in files:
        begin, first = min(first, file.samples), max(0, first - file.samples)
        for chunk in file.batches([*names, *([time] if time else [])], begin, _CHUNK):
            for name in names:
                bags = file.ids_of(name, chunk.column(name))
                lengths = np.ones(bags.samples, np.int64) if bags.offsets is None else np.diff(bags.offsets)
                ids[name].append(bags.ids_N)
                at[name].append(done + np.repeat(np.arange(bags.samples), lengths))
            times.append(times_of(file, time, chunk.column(time)) if time else np.arange(done, done + chunk.num_rows))
            done += chunk.num_rows
    return {name: _Column(np.concatenate(ids[name]), np.concatenate(at[name])) for name in names}, np.concatenate(times)


def _periods(times_S: NDArray[Any], timed: bool) -> tuple[Ints, float]:
    """The period of each sample, and its width: hours, or 1 without times.

    Times of 12 digits or more are milliseconds, of 15 microseconds, and of 18 nanoseconds; shorter ones are seconds.
    """
    times_S = np.maximum.accumulate(times_S.astype(np.float64))
    since_S = times_S - times_S[0]
    if not timed or since_S[-1] == 0:
        return (since_S * PERIODS / (since_S[-1] + 1)).astype(np.int64), 1.0
    digits = math.log10(max(1.0, abs(float(times_S[-1]))))
    hours_S = since_S / (3600 * (1e9 if digits > 17 else 1e6 if digits > 14 else 1e3 if digits > 11 else 1))
    width = max(1.0, hours_S[-1] / MOST_PERIODS) if hours_S[-1] >= 10 else hours_S[-1] / PERIODS
    return (hours_S / width).astype(np.int64), float(width)


class _Replay:
    """The batches of a column, replayed as often as needed."""

    def __init__(self, column: _Column, batch: int, report: Callable[[int], None]) -> None:
        self.ids_N, self._report, self._runs = column.ids_N, report, 0
        batch_N = column.sample_N // batch
        ends = np.searchsorted(batch_N, np.arange(1, int(batch_N[-1]) + 2))
        self.batches = [torch.from_numpy(part) for part in np.split(self.ids_N, ends[:-1])]
        _, first_U, at_N = np.unique(self.ids_N, return_index=True, return_inverse=True)
        self.distinct, self.half = len(first_U), len(self.batches) // 2
        later_N = batch_N >= self.half
        self.again = float((batch_N[first_U[at_N]] < batch_N)[later_N].mean()) if later_N.any() else 0.0

    def turnover(self, name: str, period_N: Ints, width: float, keep: float, hourly: bool) -> IdTurnover:
        """The result for one column."""
        decays = [each for each in _DECAYS if each <= 2 * len(self.batches)]
        middle = self._rows(1 / 8)
        rules: list[dict[str, int | str]] = [{"evict": "lru"}]
        rules += [{"half_life": each} for each in decays]
        rule = max(rules, key=lambda rule: self.kept(middle, rule))
        tables = [KeptRows(rows, self.kept(rows, rule)) for rows in sorted({self._rows(share) for share in _SHARES})]
        rows = _rows_for(tables, keep)
        chances = {k: self.kept(rows, rule | {"admit_after": k}) for k in (1, 2, 3)}
        best = max(chances, key=lambda k: (chances[k], -k))
        rule = {"rows": rows, **({"admit_after": best} if best > 1 else {}), **rule}
        periods = count_periods(self.ids_N, period_N, width)
        return IdTurnover(
            name, len(self.ids_N), self.distinct, self.again, hourly, width, periods, tuple(tables), chances[best], rule
        )

    def _rows(self, share: float) -> int:
        return max(_LEAST, round(share * self.distinct))

    def kept(self, rows: int, rule: dict[str, Any]) -> float:
        """Share of the lookups of ids seen before that find a row of their own, in the second half of the log."""
        keys, found, lookups = new_keys(ElasticRows(rows, **rule)), 0, 0
        for number, ids_N in enumerate(self.batches):
            if number >= self.half:
                found += ids_N.numel() - keys.find(ids_N)[1].numel()
                lookups += ids_N.numel()
            keys.step(ids_N, protect=False)
        self._runs += 1
        self._report(self._runs)
        return found / lookups / self.again if lookups and self.again else 1.0


def _rows_for(tables: Sequence[KeptRows], keep: float) -> int:
    """The rows that keep a share, between those that were tried; the most that were tried if none does."""
    for before, after in pairwise(tables):
        if before.kept >= keep:
            return before.rows
        if after.kept >= keep:
            part = (keep - before.kept) / (after.kept - before.kept)
            rows: int = math.ceil(before.rows * (after.rows / before.rows) ** part)
            return rows
    return tables[-1].rows
