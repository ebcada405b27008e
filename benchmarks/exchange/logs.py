"""Logs of the exchange benchmark, as sequences of rows: heat from the first half, batches from the second.

    globo      at the end of each session, the articles that its user has clicked within 48 hours, at most the last 128
    retail     baskets, in their order
    gowalla    the places of a user, at most 128; users shuffled, because they have no order
    zipf-1.05  sequences of 128 out of 1,000,000 rows by Zipf's law, the rows in random order
    zipf-1.2   likewise

A sequence is a sample; a rank takes 256 of them in a step, the ranks one after the other. Steps are spread over the second
half, because the hours of a day differ. Histories are limited to 48 hours; otherwise they would grow with the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.heat.profile import HeatProfile
from thermocline.heat.profiler import profile_batches

Ints = NDArray[np.int64]

LONGEST, SEQUENCES = 128, 256
REACH = 48 * 3_600_000  # milliseconds that a history reaches back
ZIPF_ROWS, ZIPF_SEQUENCES = 1_000_000, 1 << 14  # of each half
FILES = {"globo": "globo_clicks_first80", "retail": "retail_baskets", "gowalla": "gowalla_bags"}
EXPONENTS = {"zipf-1.05": 1.05, "zipf-1.2": 1.2}
LOGS = (*FILES, *EXPONENTS)
TABLE = "item"


class Sequences(NamedTuple):
    """Rows of all samples, one after the other, and where each begins; the end included."""

    values_N: Ints
    offsets: Ints

    @property
    def samples(self) -> int:
        return len(self.offsets) - 1

    def part(self, first: int, end: int) -> Sequences:
        cut = self.offsets[first : end + 1]
        return Sequences(self.values_N[cut[0] : cut[-1]], cut - cut[0])


class SequenceLog(NamedTuple):
    """A log cut in half; `rows` of its table."""

    rows: int
    first: Sequences
    second: Sequences

    def heat(self, batch: int, cards: int) -> HeatProfile:
        """Heat of the first half."""
        return profile_batches([{TABLE: tuple(self.first)}], samples=self.first.samples, batch=batch, cards_per_node=cards)

    def save(self, folder: Path, name: str, batch: int, cards: int) -> None:
        """Write the heat of the first half, and the second half, for the ranks."""
        self.heat(batch, cards).save(folder / f"{name}.tc")
        np.savez(folder / f"{name}.npz", rows=self.rows, values_N=self.second.values_N, offsets=self.second.offsets)


def read(
    name: str, folder: Path | None, zipf_rows: int = ZIPF_ROWS, zipf_sequences: int = ZIPF_SEQUENCES
) -> SequenceLog | None:
    """A log by its name; None if its file is not in the folder."""
    if name in EXPONENTS:
        return _zipf(EXPONENTS[name], zipf_rows, zipf_sequences)
    path = None if folder is None else folder / f"{FILES[name]}.parquet"
    if path is None or not path.is_file():
        return None
    rows_of = _histories(path) if name == "globo" else _lists(path, shuffled=name == "gowalla")
    rows = int(rows_of.values_N.max()) + 1
    half = rows_of.samples // 2
    return SequenceLog(rows, rows_of.part(0, half), rows_of.part(half, rows_of.samples))


def _histories(path: Path) -> Sequences:
    """The clicks of a user up to the end of each session; the file is in the order of time."""
    from pyarrow import parquet

    table = parquet.read_table(path, columns=["user", "item", "session", "ts_ms"])
    user_N, item_N, session_N, time_N = (column.to_numpy().astype(np.int64) for column in table.columns)
    time_N -= time_N[0]
    last_S = np.zeros(int(session_N.max()) + 1, np.int64)
    np.maximum.at(last_S, session_N, np.arange(len(session_N)))
    ends_S = np.sort(last_S)  # clicks that end a session
    ends_S = ends_S[time_N[ends_S] >= REACH]  # histories of earlier ones are cut off by the beginning of the log
    order_N = np.argsort(user_N, kind="stable")  # clicks by user, then by time
    place_N = np.empty_like(order_N)
    place_N[order_N] = np.arange(len(order_N))
    span = int(time_N[-1]) + 1
    since_S = time_N[ends_S] - REACH
    begin_S = np.searchsorted(user_N[order_N] * span + time_N[order_N], user_N[ends_S] * span + since_S)
    end_S = place_N[ends_S] + 1
    return _slices(item_N[order_N], np.maximum(begin_S, end_S - LONGEST), end_S)


def _lists(path: Path, shuffled: bool) -> Sequences:
    from pyarrow import parquet

    lists = parquet.read_table(path, columns=["items"])["items"].combine_chunks()
    offsets, values_N = lists.offsets.to_numpy().astype(np.int64), lists.values.to_numpy().astype(np.int64)
    first_S, end_S = offsets[:-1], np.minimum(offsets[1:], offsets[:-1] + LONGEST)
    if shuffled:
        order = np.random.default_rng(0).permutation(len(first_S))
        first_S, end_S = first_S[order], end_S[order]
    return _slices(values_N, first_S, end_S)


def _slices(values_N: Ints, first_S: Ints, end_S: Ints) -> Sequences:
    """Stretches of values, one after the other."""
    lengths_S = end_S - first_S
    offsets = np.concatenate([[0], np.cumsum(lengths_S)])
    at = np.arange(offsets[-1]) + np.repeat(first_S - offsets[:-1], lengths_S)
    return Sequences(values_N[at], offsets)


def _zipf(exponent: float, rows: int, sequences: int) -> SequenceLog:
    random = np.random.default_rng(1)
    cdf_R = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    rank_N = np.searchsorted(cdf_R, random.random(2 * sequences * LONGEST) * cdf_R[-1])
    values_N = random.permutation(rows)[rank_N].astype(np.int64)
    whole = Sequences(values_N, np.arange(2 * sequences + 1) * LONGEST)
    return SequenceLog(rows, whole.part(0, sequences), whole.part(sequences, 2 * sequences))
