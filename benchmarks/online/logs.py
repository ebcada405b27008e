"""Logs of the online benchmark, in the order of time and cut into periods: predict a period, then train on it.

    globo       clicks on news, hour by hour. A sample is a click, or an item that its reader did not click: user, item, the
                last five items of the session, and six context columns
    diginetica  sessions of a shop, without times: 200 periods of equally many clicks. Item, and the last five of the session
    criteo      display ads: 13 numbers and 26 categories; a period is a block of the file

Items that were not clicked are drawn from the distinct items of the last 24 periods and the present one, so that an item is
not known by its novelty alone. They differ by seed, and are the same for all arms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.data.click_files import transform_dense

Ints = NDArray[np.int64]

FILES = {
    "globo": "globo_clicks_first80.parquet",
    "diginetica": "diginetica_sessions.parquet",
    "criteo": "criteo_kaggle_uniform_0p3pct.parquet",
}
HOUR, HISTORY, ACTIVE, PERIODS = 3_600_000, 5, 24, 200
LARGE = 1000  # distinct ids from which a table is bounded
_CONTEXT = ("environment", "device", "os", "country", "region", "referrer")


class Batch(NamedTuple):
    """Samples in the order of time."""

    ids: Mapping[str, tuple[Tensor, Tensor]]  # feature -> (values, offsets)
    dense_BJ: Tensor
    label_B: Tensor


@dataclass(frozen=True)
class OnlineLog:
    """A log: what an arm needs to know of its tables, and its samples."""

    tables: Mapping[str, tuple[str, ...]]  # table -> its features
    distinct: Mapping[str, Ints]  # table -> all its ids, rising: only the ceiling may know them
    periods: Ints  # first click of each period, and the end
    columns: Mapping[str, Ints]  # feature -> ids, [clicks] or, with -1 where there is none, [clicks, HISTORY]
    dense_NJ: Tensor
    label_N: Tensor | None  # or None, if samples are clicks, each followed by an item that was not clicked

    @property
    def large(self) -> list[str]:
        """Tables that arms bound."""
        return [name for name, ids in self.distinct.items() if len(ids) >= LARGE]

    def vocabulary(self, table: str, clicks: int, most: int) -> Ints:
        """The `most` ids that occur most often among the first clicks."""
        found, count = np.unique(
            np.concatenate([self.columns[feature][:clicks].reshape(-1) for feature in self.tables[table]]), return_counts=True
        )
        found, count = found[found >= 0], count[found >= 0]
        return np.sort(found[np.argsort(-count, kind="stable")[:most]])

    def batches(self, period: int, size: int, seed: int) -> Iterator[Batch]:
        """The samples of a period in batches of at most `size`."""
        begin, end = int(self.periods[period]), int(self.periods[period + 1])
        others_N = None if self.label_N is not None else self._not_clicked(period, seed)
        clicks = size if others_N is None else size // 2
        for first in range(begin, end, clicks):
            last = min(first + clicks, end)
            yield self._batch(first, last, None if others_N is None else others_N[first - begin : last - begin])

    def _not_clicked(self, period: int, seed: int) -> Ints:
        first = self.periods[max(0, period - ACTIVE)]
        active = np.unique(self.columns["item"][first : self.periods[period + 1]])
        count = int(self.periods[period + 1] - self.periods[period])
        return active[np.random.default_rng([seed, period]).integers(len(active), size=count)]

    def _batch(self, first: int, end: int, others_N: Ints | None) -> Batch:
        ids, repeats = {}, 1 if others_N is None else 2
        for feature, column in self.columns.items():
            part = np.repeat(column[first:end], repeats, axis=0)
            if feature == "item" and others_N is not None:
                part[1::2] = others_N
            counts = (part >= 0).sum(axis=1) if part.ndim == 2 else np.ones(len(part), np.int64)
            flat = part[part >= 0] if part.ndim == 2 else part
            ids[feature] = torch.from_numpy(flat.astype(np.int64)), torch.from_numpy(np.concatenate([[0], counts.cumsum()]))
        if self.label_N is not None:
            return Batch(ids, self.dense_NJ[first:end], self.label_N[first:end])
        label_B = torch.tensor([1.0, 0.0]).repeat(end - first)
        return Batch(ids, torch.zeros(len(label_B), 0), label_B)


@cache
def read(name: str, folder: Path, share: float = 1.0) -> OnlineLog | None:
    """A log by its name, or the first `share` of it; None if its file is not in the folder."""
    path = folder / FILES[name]
    if not path.is_file():
        return None
    from pyarrow import parquet

    table = parquet.read_table(path)
    table = table.slice(0, max(1, int(share * table.num_rows)))
    return {"globo": _globo, "diginetica": _diginetica, "criteo": _criteo}[name](table)


def _globo(table) -> OnlineLog:  # type: ignore[no-untyped-def]
    column = {name: table[name].to_numpy().astype(np.int64) for name in table.column_names}
    hours = (column["ts_ms"] - column["ts_ms"][0]) // HOUR
    periods = np.concatenate([np.flatnonzero(np.diff(hours, prepend=-1)), [len(hours)]])
    columns = {name: column[name] for name in ("user", "item", *_CONTEXT)}
    columns |= {"history": _histories(column["item"], column["session"])}
    tables = {name: (name,) for name in ("user", *_CONTEXT)} | {"item": ("item", "history")}
    return _clicks(tables, columns, periods)


def _diginetica(table) -> OnlineLog:  # type: ignore[no-untyped-def]
    lists = table["items"].combine_chunks()
    sizes = np.diff(lists.offsets.to_numpy())
    item_N = lists.flatten().to_numpy().astype(np.int64)
    columns = {"item": item_N, "history": _histories(item_N, np.repeat(np.arange(len(sizes)), sizes))}
    periods = np.linspace(0, len(item_N), PERIODS + 1).astype(np.int64)
    return _clicks({"item": ("item", "history")}, columns, periods)


def _clicks(tables: Mapping[str, tuple[str, ...]], columns: Mapping[str, Ints], periods: Ints) -> OnlineLog:
    distinct = {table: np.unique(columns[features[0]]) for table, features in tables.items()}
    return OnlineLog(tables, distinct, periods, columns, torch.zeros(0, 0), None)


def _criteo(table) -> OnlineLog:  # type: ignore[no-untyped-def]
    names = [f"C{n}" for n in range(1, 27)]
    columns = {name: table[name].to_numpy().astype(np.int64) for name in names}
    raw = np.stack([table[f"I{n}"].cast("float32").fill_null(0.0).to_numpy() for n in range(1, 14)], axis=1)
    periods = np.concatenate([np.flatnonzero(np.diff(table["block"].to_numpy().astype(int), prepend=-1)), [len(raw)]])
    label_N = torch.from_numpy(table["label"].to_numpy().astype(np.float32))
    distinct = {name: np.unique(column) for name, column in columns.items()}
    tables = {name: (name,) for name in names}
    return OnlineLog(tables, distinct, periods, columns, transform_dense(torch.from_numpy(raw)), label_N)


def _histories(item_N: Ints, session_N: Ints) -> Ints:
    """The last items of the same session before each click, newest first; -1 where there are fewer."""
    order = np.argsort(session_N, kind="stable")
    found = np.full((len(item_N), HISTORY), -1, np.int64)
    for back in range(1, HISTORY + 1):
        here, before = order[back:], order[:-back]
        same = session_N[here] == session_N[before]
        found[here[same], back - 1] = item_N[before[same]]
    return found
