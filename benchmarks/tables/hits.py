"""`python -m benchmarks hits`: hit rates of the cache on real logs, against an optimal cache.

Ids are looked up in the order of the log, in training steps of `LOOKUPS` lookups, by the real cache on tables of four columns
with a learning rate of 0. A hit is a lookup whose row is in the cache when its step begins. All columns share the slots; their
number is a share of the distinct ids of the log.

The optimal cache (Belady) knows the future: it keeps the rows whose next lookup is soonest, and admits a row only if that
pays. It may change after every lookup, ours only between steps, so it is an upper bound of every policy. Between two lookups
of one id is an interval that occupies a slot; a hit is an interval that is kept. If intervals exceed slots, the one that ends
last is dropped: a greedy choice that is exact, with a heap in n log n.

    globo_clicks/lfu/5%             ratio: hit rate against the optimum; `moves`: admissions per lookup
    globo_clicks/adaptive-held/5%   ratio: hit rate of the adaptive policy against the better of the others, less a point
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappush, heappushpop
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.runner import record
from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.rows.arena import Arena
from thermocline.rows.optimizers import SGD
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import Trainer, lookup

SHARES = (0.01, 0.05, 0.10)
LOOKUPS = 4096
OPTIMUM, POINT = "optimum", 0.01
_DIM = 4
_COLUMNS: tuple[tuple[str, ...], ...] = (tuple(f"C{i}" for i in range(1, 27)), ("item", "user"))


class Replayed(NamedTuple):
    """Hits and admissions of a cache on a log."""

    hits: int
    moves: int  # rows that came in


class Lookups(NamedTuple):
    """The lookups of a log: for every sample a row of each table, counted from 0 in every table."""

    name: str
    rows_BF: Tensor
    tables: tuple[int, ...]  # rows of each


def read(path: Path) -> Lookups:
    """Ids of a Parquet log with Criteo's columns, or an item and a user; a missing id counts as an id."""
    from pyarrow import parquet

    if not path.is_file():
        raise BadInput(f"no file '{path}'; use a Parquet file with the columns C1 to C26, or item and user", parameter="data")
    file = parquet.ParquetFile(path)
    names = set(file.schema_arrow.names)
    columns = next((columns for columns in _COLUMNS if names.issuperset(columns)), None)
    if columns is None:
        message = f"'{path}' has the columns {sorted(names)}; a log has C1 to C26, or item and user"
        raise FormatError(message, path=path, columns=sorted(names))
    table = file.read(list(columns))
    found = [np.unique(table[name].fill_null(0).to_numpy(), return_inverse=True) for name in columns]
    rows_BF = torch.from_numpy(np.stack([rows_B for _, rows_B in found], axis=1).astype(np.int64))
    return Lookups(path.stem, rows_BF, tuple(len(ids) for ids, _ in found))


def run(paths: Sequence[Path], progress: Callable[[int, int, str], None] = lambda done, total, what: None) -> dict[str, Any]:
    """Replay every log with every size and policy, and return the record."""
    recorder = record.Recorder("hits", lambda line: None)
    rounds = len(paths) * len(SHARES) * (1 + len(F.POLICIES[: F.FIXED]))
    done = 0
    for path in paths:
        log = read(path)
        next_N = next_use(flat(log))
        for share in SHARES:
            slots = int(share * sum(log.tables))
            progress(done, rounds, f"{log.name} optimum {share:.0%}")
            best = optimum(next_N, slots) / len(next_N)
            done += 1
            rates: dict[str, float] = {}
            for policy in F.POLICIES[: F.FIXED]:
                progress(done, rounds, f"{log.name} {policy} {share:.0%}")
                found = replay(log, share, policy)
                rate = rates[policy] = found.hits / len(next_N)
                recorder.add(
                    f"{log.name}/{policy}/{share:.0%}", rate, "hits a lookup", peer=OPTIMUM, peer_value=best,
                    ratio=rate / best if best else 1.0, slots=slots, lookups=len(next_N), moves=found.moves / len(next_N),
                )  # fmt: skip
                done += 1
            rate, held = rates.pop("adaptive"), max(rates.values()) - POINT
            recorder.add(
                f"{log.name}/adaptive-held/{share:.0%}", rate, "hits a lookup", peer="better of the others, less a point",
                peer_value=held, ratio=rate / held if held > 0 else 1.0,
            )  # fmt: skip
    progress(rounds, rounds, "")
    return recorder.record


def flat(log: Lookups) -> NDArray[np.int64]:
    """All lookups one after the other, as numbers that differ between tables."""
    first_F = torch.tensor([0, *log.tables[:-1]]).cumsum(0)
    rows_N: NDArray[np.int64] = (log.rows_BF + first_F).reshape(-1).numpy()
    return rows_N


def next_use(rows_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each lookup the position of the next lookup of the same row, or N."""
    order_N = np.argsort(rows_N, kind="stable")
    same = rows_N[order_N[:-1]] == rows_N[order_N[1:]]
    next_N = np.full(len(rows_N), len(rows_N))
    next_N[order_N[:-1][same]] = order_N[1:][same]
    return next_N


def optimum(next_N: NDArray[np.int64], slots: int) -> int:
    """Hits of the optimal cache, which need not admit rows."""
    count, hits, held = len(next_N), 0, 0
    if slots == 0:
        return 0
    kept = bytearray(count)  # by the end of the interval
    latest: list[int] = []  # negative ends; finished intervals sink, so the top is always a kept one
    for place, end in enumerate(next_N.tolist()):
        if kept[place]:
            hits, held = hits + 1, held - 1
        if end == count:
            continue
        kept[end] = 1
        if held < slots:
            heappush(latest, -end)
            held += 1
        else:
            kept[-heappushpop(latest, -end)] = 0
    return hits


def replay(log: Lookups, share: float, policy: str) -> Replayed:
    """The real cache on a log."""
    tables = [TableSpec(rows, _DIM, "int8", f"t{i}") for i, rows in enumerate(log.tables)]
    # Tables of one format share their slots, so the first table can bring all of them.
    slots = [int(share * sum(log.tables)), *[0] * (len(tables) - 1)]
    arena = Arena(tables, slots=slots, policy=policy)
    trainer = Trainer(arena, SGD(lr=0.0))
    words_F = torch.tensor([field[F.META] for field in arena.layout.tables.features])
    hits = 0
    for rows_BF in log.rows_BF.split(max(1, LOOKUPS // len(tables))):
        hits += int((arena.meta[words_F + rows_BF * F.META_WORDS[F.INT8]] < 0).sum())
        ids = rows_BF.t().reshape(-1)
        out = lookup(arena, ids, torch.arange(len(ids) + 1), trainer=trainer)
        out.backward(torch.zeros_like(out))
    return Replayed(hits, arena.stats()["admissions"])
