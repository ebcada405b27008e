"""The family of workloads that the sweep draws from: what embedding tables of production models look like.

Workload `number` of a seed depends on the family, the seed and its number alone, not on the device or on how many are drawn.

    tables      1 to 800, log-uniform
    rows        100 to 10M in each table, log-uniform; scaled down together where all tables exceed the memory limit
    widths      multiples of 4 from 4 to 512, log-uniform: one for all tables, or 2 to 8 of them mixed
    batch       1 to 65,536, log-uniform; smaller where lookups or output exceed their limits
    bags        fixed, geometric or heavy-tailed (Pareto, exponent 1.5) length with a mean of 1 to 64, log-uniform; half of the
                workloads have empty bags (5% to 50%), a third has tables of uneven mean length (a quarter to four times)
    pooling     sum, mean, none, or a sum with weights
    ids         uniform, or Zipf with an exponent of 0.8 to 1.3; int64 or int32; in half of the workloads 10% to 50% of the
                lookups share the few hot ids of their batch and table
    output      fp32, fp16 or bf16

`GPU` has these bounds; `CPU` has smaller ones that fit two cores and a few GiB; `TINY` is for tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUM, MEAN, NONE, WEIGHTED = "sum", "mean", "none", "weighted"
FIXED, GEOMETRIC, HEAVY = "fixed", "geometric", "heavy"
OUTPUT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
PARETO = 1.5
SMALLEST, WIDTH_STEP = 100, 4  # rows of a table; widths are multiples
_SHORT = {FIXED: "fix", GEOMETRIC: "geo", HEAVY: "tail"}


@dataclass(frozen=True)
class Family:
    """Upper bounds of a family. `table_bytes`: all rows in fp32; `output_bytes`: the output of a batch in fp32."""

    tables: int
    rows: int
    width: int
    batch: int
    length: int
    lookups: int
    table_bytes: int
    output_bytes: int
    smallest: int = SMALLEST


GPU = Family(800, 10_000_000, 512, 65_536, 64, 4_000_000, 12 << 30, 1 << 30)
CPU = Family(100, 1_000_000, 512, 8_192, 64, 100_000, 256 << 20, 64 << 20)
QUICK = Family(6, 3_000, 128, 64, 8, 1_000, 4 << 20, 1 << 20)
TINY = Family(5, 60, 64, 9, 6, 60, 1 << 20, 1 << 20, smallest=1)


@dataclass(frozen=True)
class SweepWorkload:
    """One drawn workload; `rows` and `dims` have a number for each table. `zipf` 0 means uniform ids."""

    seed: int
    number: int
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    batch: int
    lengths: str
    mean_length: float
    uneven: bool
    empty: float
    mode: str
    zipf: float
    shared: float
    output: str
    id_dtype: str
    most_lookups: int

    @property
    def tables(self) -> int:
        return len(self.rows)

    @property
    def bags(self) -> int:
        return self.tables * self.batch

    @property
    def name(self) -> str:
        """Short and unique: `1.07-26t-d16..256-b4096-geo5-mean-z1.05-fp16-i32`."""
        low, high = min(self.dims), max(self.dims)
        width = f"d{low}" if low == high else f"d{low}..{high}"
        ids = f"z{self.zipf:g}" if self.zipf else "uni"
        length = f"{_SHORT[self.lengths]}{self.mean_length:.3g}"
        parts = [f"{self.seed}.{self.number:02}", f"{self.tables}t", width, f"b{self.batch}", length, self.mode, ids]
        return "-".join([*parts, self.output, f"i{self.id_dtype.removeprefix('int')}"])

    def to_json(self) -> dict[str, Any]:
        """Fields for a record; lists as text, so that a record stays readable."""
        return asdict(self) | {"rows": " ".join(map(str, self.rows)), "dims": " ".join(map(str, self.dims))}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SweepWorkload:
        rows, dims = (tuple(map(int, value[name].split())) for name in ("rows", "dims"))
        return cls(**{**value, "rows": rows, "dims": dims})

    def bag_lengths(self, pattern: int) -> NDArray[np.int64]:
        """Length of each bag, feature after feature, for one of the patterns that batches rotate over."""
        rng = np.random.default_rng([self.seed, self.number, 1, pattern])
        factor_T1 = 4.0 ** rng.uniform(-1, 1, (self.tables, 1)) if self.uneven else np.ones((self.tables, 1))
        mean_T1, shape = np.maximum(1.0, self.mean_length * factor_T1), (self.tables, self.batch)
        if self.lengths == FIXED:
            drawn_TB = np.broadcast_to(np.round(mean_T1), shape).copy()
        elif self.lengths == GEOMETRIC:
            drawn_TB = rng.geometric(np.broadcast_to(1.0 / mean_T1, shape)).astype(np.float64)
        else:
            drawn_TB = np.ceil(rng.pareto(PARETO, shape) * (PARETO - 1) * mean_T1)
        if self.empty:
            drawn_TB[rng.random(shape) < self.empty] = 0
        total = drawn_TB.sum()
        if total > self.most_lookups:
            drawn_TB = np.floor(drawn_TB * (self.most_lookups / total))
        lengths: NDArray[np.int64] = drawn_TB.astype(np.int64).reshape(-1)
        return lengths


def draw(family: Family, seed: int, number: int) -> SweepWorkload:
    """Draw one workload."""
    rng = np.random.default_rng([seed, number])
    tables = _log_integer(rng, 1, family.tables)
    dims = _widths(rng, tables, family.width)
    rows = _bounded_rows(rng, dims, family)
    mode = str(rng.choice([SUM, MEAN, NONE, WEIGHTED], p=[0.4, 0.2, 0.2, 0.2]))
    length = round(math.exp(rng.uniform(0.0, math.log(family.length))), 1)
    batch = _log_integer(rng, 1, family.batch)
    # Bounds are met at a drawn share, so that large workloads do not all have the same size.
    bound = rng.uniform(0.3, 1.0)
    length = min(length, max(1.0, round(bound * family.lookups / tables, 1)))
    width = sum(dims) if mode != NONE else length * tables * max(dims)
    batch = max(1, min(batch, int(bound * family.lookups / tables / length), int(bound * family.output_bytes / 4 / width)))
    return SweepWorkload(
        seed=seed,
        number=number,
        rows=rows,
        dims=dims,
        batch=batch,
        lengths=str(rng.choice([FIXED, GEOMETRIC, HEAVY])),
        mean_length=length,
        uneven=bool(rng.random() < 1 / 3),
        empty=round(rng.uniform(0.05, 0.5), 2) if rng.random() < 0.5 else 0.0,
        mode=mode,
        zipf=round(rng.uniform(0.8, 1.3), 2) if rng.random() < 0.6 else 0.0,
        shared=round(rng.uniform(0.1, 0.5), 2) if rng.random() < 0.5 else 0.0,
        output=str(rng.choice(list(OUTPUT_BYTES), p=[0.5, 0.25, 0.25])),
        id_dtype=str(rng.choice(["int64", "int32"], p=[0.6, 0.4])),
        most_lookups=_most_lookups(family, mode, dims),
    )


def _log_integer(rng: np.random.Generator, low: int, high: int) -> int:
    """A log-uniform integer in [low, high]."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _widths(rng: np.random.Generator, tables: int, most: int) -> tuple[int, ...]:
    kinds = 1 if rng.random() < 0.5 else int(rng.integers(2, 9))
    choice = [WIDTH_STEP * _log_integer(rng, 1, most // WIDTH_STEP) for _ in range(kinds)]
    return tuple(int(width) for width in rng.choice(choice, tables))


def _bounded_rows(rng: np.random.Generator, dims: Sequence[int], family: Family) -> tuple[int, ...]:
    rows = [_log_integer(rng, family.smallest, family.rows) for _ in dims]
    taken = sum(count * 4 * dim for count, dim in zip(rows, dims, strict=True))
    scale = min(1.0, family.table_bytes / taken)
    return tuple(max(family.smallest, int(count * scale)) for count in rows)


def _most_lookups(family: Family, mode: str, dims: Sequence[int]) -> int:
    """Unpooled, each lookup is a row of output."""
    return family.lookups if mode != NONE else min(family.lookups, family.output_bytes // 4 // max(dims))
