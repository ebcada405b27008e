"""Balance of shards on real logs: maximum over mean lookups, in the worst window of 10,240 lookups per shard.

    balance/globo_clicks_first80/8/plan     split by the heat of the whole log; copies of the hottest rows
                                            add at most a tenth to the bytes
    balance/globo_clicks_first80/8/later    the second half of the log, split by the heat of the first
    balance/globo_clicks_first80/8/hash     also `range` and `feature`: splits without heat

A lookup counts for the shard whose memory it reads; repeated reads count repeatedly. A log is a
model: each of its columns is a table. Copies are read in turn, by the position of a lookup in its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.plan.balance import LookupLog, Rows, logs
from benchmarks.plan.replay import copies_within
from benchmarks.runner.record import Recorder
from thermocline import formats as F
from thermocline.serve.tables.partition import RowHeat, balanced_split, split_tables
from thermocline.serve.tables.row_split import TableSplit
from thermocline.serve.tables.segments import ServedTable

CARDS, EXTRA, WINDOW = 8, 0.10, 10_240
LIMIT = 1.05


def run(
    recorder: Recorder, data: Path, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]
) -> None:
    """Replay every log of a folder."""
    found = list(logs(data))
    for n, log in enumerate(found):
        progress(n, len(found), log.name)
        if quick and len(log.tables[0]) > 200_000:
            continue
        half = [len(rows) // 2 for rows in log.tables]
        tests = {"plan": log.tables, "later": [rows[at:] for rows, at in zip(log.tables, half, strict=True)]}
        for name in ("plan", "later", "hash", "range", "feature"):
            case = f"balance/{log.name}/{CARDS}/{name}"
            if not wanted(case):
                continue
            if name in tests:
                seen = log.tables if name == "plan" else [rows[:at] for rows, at in zip(log.tables, half, strict=True)]
                splits, extra = by_heat(log, seen)
            else:
                splits, extra = split_tables(_shapes(log), CARDS, name), 0.0
            worst = max(windows(splits, tests.get(name, log.tables)), default=math.nan)
            if not math.isnan(worst):
                recorder.add(case, worst, "max/mean", "asked at most", LIMIT, LIMIT / worst, extra_bytes=extra)


def _shapes(log: LookupLog) -> list[ServedTable]:
    return [ServedTable(f"t{n}", int(rows.max()) + 1, 1, F.INT8, ()) for n, rows in enumerate(log.tables)]


def by_heat(log: LookupLog, seen: Sequence[Rows]) -> tuple[list[TableSplit], float]:
    """The split of a plan, with copies that take most lookups off their owners, and the share of bytes of the copies."""
    shapes, heats = _shapes(log), []
    for rows in seen:
        counts_R = np.bincount(rows)
        rows_H = np.lexsort((np.arange(len(counts_R)), -counts_R))
        rows_H = rows_H[: int((counts_R > 0).sum())]
        heats.append(RowHeat(rows_H, counts_R[rows_H]))
    tables = {s.name: (s.rows, heat.counts_H.astype(float), 1.0) for s, heat in zip(shapes, heats, strict=True)}
    copies = copies_within(tables, CARDS + 1, EXTRA)  # a copy on every card, beside the row itself
    load_C = np.zeros(CARDS)
    made: dict[str, TableSplit] = {}
    pairs = list(zip(shapes, heats, strict=True))
    for shape, heat in sorted(pairs, key=lambda pair: -int(pair[1].counts_H[copies[pair[0].name] :][:1].sum())):
        made[shape.name] = balanced_split(shape, CARDS, heat, copies[shape.name], load_C)
    extra = CARDS * sum(copies.values()) / sum(shape.rows for shape in shapes)
    return [made[shape.name] for shape in shapes], extra


def windows(splits: Sequence[TableSplit], tables: Sequence[Rows]) -> list[float]:
    """Maximum over mean of the lookups of shards, in each window, all tables together."""
    total = sum(map(len, tables))
    count = total // (WINDOW * CARDS)
    found = []
    for n in range(count):
        load_C = np.zeros(CARDS)
        for split, rows in zip(splits, tables, strict=True):
            load_C += served(split, rows[len(rows) * n // count : len(rows) * (n + 1) // count])
        found.append(float(load_C.max() / load_C.mean()))
    return found


def served(split: TableSplit, rows_N: Rows) -> NDArray[np.float64]:
    """Lookups of each shard."""
    card_N, _ = split.owner_and_place(rows_N)
    copied_N = np.isin(rows_N, split.copied_H)
    card_N = np.where(copied_N, np.arange(len(rows_N)) % CARDS, card_N)
    return np.bincount(card_N, minlength=CARDS).astype(np.float64)
