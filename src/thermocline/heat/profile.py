"""Heat profiles: the lookup counts of a log, table by table.

Counts are exact while they fit into memory, and a table keeps every id with its count. A table that outgrew its memory keeps
its heavy hitters: each true count lies between the stored count and `slack` more, other ids had at most `slack` lookups, and
`distinct` is an estimate. A tail that falls from the coldest heavy hitter completes its curve, so that rows and lookups add
up.

Parts of a log can be counted separately and merged. Counts, samples, lengths and repeats add up; a table that is exact in all
parts is exact in the whole. Drift is measured within parts only, because the order of parts is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput

from .cardinality import ERROR, Registers, estimate, registers_of
from .curve import Curve

Ints = NDArray[np.int64]
HOT = (0.01, 0.05)  # hot sets, as shares of the ids of a slice
RECENT = 3 / 8  # the end of a log that predicts what follows


class BatchRepeats(NamedTuple):
    """Repeats in consecutive batches of `size` samples."""

    size: int
    lookups: int
    repeats: int  # lookups of an id that the same batch had looked up before


class LogSlice(NamedTuple):
    """A stretch of the log. Rows that tie for a place in a hot set share it, hence the fractions."""

    lookups: int
    kept_1: float  # lookups that went to the hottest 1% of the ids of the slice before
    kept_5: float
    first: bool = False  # no slice before it, so no hot sets are known
    samples: int = 0  # 0 in older files


@dataclass(frozen=True, eq=False)
class TableHeat:
    """The counts of one table, or column.

    Attributes:
        name: name of the table.
        samples: rows of the log, with or without ids; 0 from live training.
        lookups: ids of all samples.
        distinct: ids seen; within `error` unless exact.
        exact: whether every id was counted; else a sketch estimates.
        ids_H: ids, hottest first, ties by id: all ids where exact, else the heavy hitters.
        counts_H: lookups of these ids.
        lengths_L: ids per sample that occurred, rising.
        bags_L: samples of each length.
        missing: nulls.
        batches: repeats of ids within batches, by batch size.
        slices: stretches of the log, to measure drift.
        slack: true counts exceed `counts_H` by at most this.
        registers: registers of the cardinality sketch; None where exact.

    Example::

        table = HeatProfile.load("heat.tc")["item"]
        table.ids_H[:10], table.counts_H[:10]  # the ten hottest ids
    """

    name: str
    samples: int
    lookups: int
    distinct: int
    exact: bool
    ids_H: Ints
    counts_H: Ints
    lengths_L: Ints
    bags_L: Ints
    missing: int = 0
    batches: tuple[BatchRepeats, ...] = ()
    slices: tuple[LogSlice, ...] = ()
    slack: int = 0
    registers: Registers | None = None

    def __post_init__(self) -> None:
        assert self.ids_H.shape == self.counts_H.shape and self.lengths_L.shape == self.bags_L.shape
        assert self.exact == (self.registers is None)

    @property
    def error(self) -> float:
        """The relative error of `distinct`, at 95%."""
        return 0.0 if self.exact else ERROR

    @property
    def per_sample(self) -> float:
        """Lookups per sample; 1 where samples are not known."""
        return self.lookups / self.samples if self.samples else 1.0

    @property
    def recent(self) -> float:
        """Lookups per sample at the end of the log, if it is one ordered log, else of all samples. Lengths drift, and the
        future is more like the end of a log than like all of it.
        """
        if not self.samples or sum(each.first for each in self.slices) != 1:
            return self.per_sample
        samples = lookups = 0
        for each in reversed(self.slices):
            if samples < RECENT * self.samples:
                samples, lookups = samples + each.samples, lookups + each.lookups
        return lookups / samples if samples else self.per_sample

    @property
    def repeats(self) -> dict[int, float]:
        """Batch size -> share of lookups that repeat an id of the same batch, which deduplication would save."""
        return {batch.size: batch.repeats / max(batch.lookups, 1) for batch in self.batches}

    @property
    def kept(self) -> dict[float, float]:
        """Part of the ids -> share of a slice's lookups that the hottest such part of the slice before still takes."""
        later = [each for each in self.slices if not each.first]
        lookups = sum(each.lookups for each in later)
        if not lookups:
            return {}
        return dict(zip(HOT, (sum(e.kept_1 for e in later) / lookups, sum(e.kept_5 for e in later) / lookups), strict=True))

    def curve(self) -> Curve:
        """The heat curve of all rows, with an estimated tail for a sketched table."""
        return self._curve

    @cached_property
    def _curve(self) -> Curve:
        if self.exact:
            return Curve.of_counts(self.counts_H)
        return Curve.with_tail(self.counts_H, self.distinct, self.lookups)

    def hottest(self, part: float) -> float:
        """The share of lookups of the hottest `part` of the seen rows, at least one row."""
        curve = self.curve()
        rows = max(1.0, round(part * curve.rows))
        reach_K, taken_K = np.cumsum(curve.rows_K), np.cumsum(curve.lookups_K)
        taken = float(np.interp(rows, np.concatenate([[0.0], reach_K]), np.concatenate([[0.0], taken_K])))
        return taken / max(curve.lookups, 1.0)


@dataclass(frozen=True, eq=False)
class HeatProfile:
    """The heat of the tables of a log.

    Attributes:
        tables: the counts of each table, by name.
        source: description of the log.
        created: time of the profile.

    Example::

        profile = HeatProfile.load("heat.tc")
        profile["item"].hottest(0.01)  # share of the lookups of the hottest 1% of the rows
    """

    tables: dict[str, TableHeat]
    source: str = ""
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        assert all(name == table.name for name, table in self.tables.items())

    def __getitem__(self, table: str) -> TableHeat:
        if table not in self.tables:
            message = f"this heat profile has no table {table!r}; it has {', '.join(self.tables)}"
            raise BadInput(message, table=table, available=list(self.tables))
        return self.tables[table]

    def curves(self) -> dict[str, Curve]:
        """The heat curve of each table."""
        return {name: table.curve() for name, table in self.tables.items()}

    def save(self, path: Path | str) -> None:
        """Write a heat file. It appears under its name when it is complete."""
        from .heat_file import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> HeatProfile:
        """Load a heat file.

        Raises:
            BadInput: The file does not exist.
            FormatError: The file is not a heat file of this version.
        """
        from .heat_file import load

        return load(Path(path))

    @cached_property
    def sha256(self) -> str:
        """The sha256 of the file that `save` writes, with an empty `created`: equal counts have equal hashes."""
        from .heat_file import sha256

        return sha256(replace(self, created=""))

    def is_named_by(self, sha256: str) -> bool:
        """Whether a plan that names its heat so was made with this profile. Plans of version 0.1 hashed `created`, too."""
        from .heat_file import sha256 as with_time

        return sha256 == self.sha256 or sha256 == with_time(self)


def merge(parts: Sequence[HeatProfile]) -> HeatProfile:
    """Merge the profiles of parts of a log, in their order.

    Args:
        parts: Profiles with the same tables.

    Returns:
        The profile of the whole log; exact for the tables that are exact in every part.

    Raises:
        BadInput: There are no parts, or parts have different tables.

    Example::

        merge([HeatProfile.load("monday.tc"), HeatProfile.load("tuesday.tc")]).save("week.tc")
    """
    if not parts:
        raise BadInput("there is nothing to merge; give at least one heat profile", parameter="parts")
    names = list(parts[0].tables)
    for part in parts[1:]:
        if set(part.tables) != set(names):
            message = f"one part has the tables {', '.join(names)}, another {', '.join(part.tables)}; profile the same columns"
            raise BadInput(message, parameter="parts")
    source = " + ".join(dict.fromkeys(part.source for part in parts if part.source))
    return HeatProfile({name: merge_tables([part.tables[name] for part in parts]) for name in names}, source)


def merge_tables(parts: Sequence[TableHeat]) -> TableHeat:
    """One table of several parts of a log."""
    exact = all(part.exact for part in parts)
    ids_H, counts_H = add_up(np.concatenate([p.ids_H for p in parts]), np.concatenate([p.counts_H for p in parts]))
    slack = sum(part.slack for part in parts)
    registers = None
    distinct = len(ids_H)
    if not exact:
        # As many heavy hitters as the largest part kept; a dropped id may have had its count plus the slack of all parts.
        most = max(len(part.ids_H) for part in parts)
        slack += int(counts_H[most]) if len(counts_H) > most else 0
        ids_H, counts_H = ids_H[:most], counts_H[:most]
        sketches = [registers_of(p.ids_H) if p.registers is None else p.registers for p in parts]
        registers = np.maximum.reduce(sketches)
        distinct = max(estimate(registers), len(ids_H))
    lengths_L, bags_L = _add_up(np.concatenate([p.lengths_L for p in parts]), np.concatenate([p.bags_L for p in parts]))
    return replace(
        parts[0],
        samples=sum(part.samples for part in parts),
        lookups=sum(part.lookups for part in parts),
        distinct=distinct,
        exact=exact,
        ids_H=ids_H,
        counts_H=counts_H,
        lengths_L=lengths_L,
        bags_L=bags_L,
        missing=sum(part.missing for part in parts),
        batches=_batches([part.batches for part in parts]),
        slices=tuple(each for part in parts for each in part.slices),
        slack=slack,
        registers=registers,
    )


def add_up(ids_N: Ints, counts_N: Ints) -> tuple[Ints, Ints]:
    """Counts of equal ids summed; hottest first, ties by id."""
    return hottest_first(*_add_up(ids_N, counts_N))


def _add_up(keys_N: Ints, counts_N: Ints) -> tuple[Ints, Ints]:
    """Counts of equal keys summed; keys rise."""
    keys_H, at_N = np.unique(keys_N, return_inverse=True)
    counts_H = np.zeros(len(keys_H), np.int64)
    np.add.at(counts_H, at_N, counts_N)
    return keys_H, counts_H


def hottest_first(ids_H: Ints, counts_H: Ints) -> tuple[Ints, Ints]:
    """Ids by falling count, ties by id."""
    # Most counts are small, and numpy's radix sort of 16 bits is many times faster; the few large counts are sorted again.
    order = np.argsort(_MOST_16 - np.minimum(counts_H, _MOST_16).astype(np.uint16), kind="stable")
    large = int((counts_H >= _MOST_16).sum())
    order[:large] = order[:large][np.argsort(-counts_H[order[:large]])]
    ids_H, counts_H = ids_H[order], counts_H[order]
    # Ids of one count are sorted in place, which is faster than a sort of all ids by two keys.
    ends_G = np.append(np.flatnonzero(counts_H[1:] != counts_H[:-1]) + 1, len(ids_H))
    sizes_G = np.diff(ends_G, prepend=0)
    for end, size in zip(ends_G[sizes_G > 1].tolist(), sizes_G[sizes_G > 1].tolist(), strict=True):
        ids_H[end - size : end].sort()
    return ids_H, counts_H


_MOST_16 = np.uint16(0xFFFF)


def _batches(parts: Sequence[Sequence[BatchRepeats]]) -> tuple[BatchRepeats, ...]:
    """Sums over the batch sizes that every part measured."""
    known: list[Mapping[int, BatchRepeats]] = [{batch.size: batch for batch in part} for part in parts]
    sizes = [size for size in known[0] if all(size in each for each in known)]
    return tuple(
        BatchRepeats(size, sum(each[size].lookups for each in known), sum(each[size].repeats for each in known))
        for size in sizes
    )
