"""Random tables, logs and clusters: everything of a case follows from its number.

Tables differ in number, rows, columns, skew and bag length; clusters in shape, link rates and backend. Ids are drawn by Zipf's
law over a random order of the rows; bags are equal or of geometric lengths. TorchRec's Python reads this file without
thermocline; `inputs.py` makes the inputs of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bags = Mapping[str, tuple[Ints, Ints]]  # by table: rows, and batch + 1 offsets

SHAPES = ((2, 2), (2, 2), (1, 4), (4, 1))
DIMS = (8, 16, 32, 64, 128, 256)
NARROW, WIDE = 1e6, 8e6  # bytes of all vectors that a rank looks up in a step: two cores drive all ranks
PROFILED = 24  # batches of all ranks
FRAMES = 1  # that may pass a link at once
INSIDE = (9.0, 3.0)  # times faster inside of a node


class RandomTable(NamedTuple):
    """One table and its ids."""

    rows: int
    dim: int
    length: float  # of a bag, as a mean
    even: bool  # all bags have this length
    exponent: float

    def ids(self, random: np.random.Generator, batch: int, seed: int) -> tuple[Ints, Ints]:
        """Rows and offsets of a batch."""
        even = np.full(batch, round(self.length))
        lengths = even if self.even else random.geometric(1 / self.length, batch)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        weight_R, order_R = _popularity(self.rows, self.exponent, seed)
        return order_R[np.searchsorted(weight_R, random.random(offsets[-1]) * weight_R[-1])], offsets


@lru_cache(maxsize=32)
def _popularity(rows: int, exponent: float, seed: int) -> tuple[NDArray[np.float64], Ints]:
    """Summed weights of the rows, hottest first, and the rows in this order."""
    weight_R = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return weight_R, np.random.default_rng(seed).permutation(rows).astype(np.int64)


def _width(tables: Sequence[RandomTable]) -> float:
    """Bytes of the vectors of a sample."""
    return sum(4 * table.dim * table.length for table in tables)


class RandomCase(NamedTuple):
    """Tables, batch and cluster of one run."""

    seed: int
    nodes: int
    cards: int
    batch: int
    pooling: str
    precision: str
    gradients: str
    inside: float  # rate inside of a node over the rate between nodes
    overlap: bool
    dense: float  # seconds
    room: float  # budget over the bytes of row-wise sharding; 0 for all memory
    tables: tuple[RandomTable, ...]

    @classmethod
    def draw(cls, seed: int) -> RandomCase:
        """The case with this number."""
        random = np.random.default_rng(seed)
        count = round(float(np.exp(random.uniform(0, np.log(24)))))
        nodes, cards = SHAPES[random.integers(len(SHAPES))]
        pooling = str(random.choice(["sum", "sum", "none"]))
        dims = [int(random.choice(DIMS)) for _ in range(1 if random.random() < 0.5 else count)]
        tables = tuple(
            RandomTable(
                round(float(np.exp(random.uniform(np.log(40), np.log(200_000))))), dims[n % len(dims)],
                float(random.choice([1.0, random.uniform(2, 30)])), bool(random.random() < 0.5), random.uniform(0.5, 1.4),
            )
            for n in range(count)
        )  # fmt: skip
        batch = int(2 ** random.uniform(7, 11))
        while len(tables) > 1 and batch * _width(tables) > WIDE:
            tables = tables[1:]
        batch = max(batch, min(4096, int(NARROW / _width(tables))))
        return cls(
            seed, nodes, cards, batch, pooling, str(random.choice(["fp32", "int8"])), str(random.choice(["fp32", "bf16"])),
            float(random.choice(INSIDE)), bool(random.random() < 0.5), float(random.choice([0.02, 0.2])),
            float(random.choice([0.0, 0.0, 0.0, 1.3])), tables,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.nodes * self.cards

    @property
    def names(self) -> list[str]:
        return [f"t{n}" for n in range(len(self.tables))]

    def bags(self, step: int, rank: int) -> Bags:
        """The batch of a rank; steps below zero are those of the heat."""
        random = np.random.default_rng([self.seed, step + PROFILED, rank])
        each = enumerate(zip(self.names, self.tables, strict=True))
        return {name: table.ids(random, self.batch, self.seed * 1000 + n) for n, (name, table) in each}

    def describe(self) -> str:
        """A line for people."""
        rows = sum(table.rows for table in self.tables)
        widths = "/".join(map(str, sorted({table.dim for table in self.tables})))
        return (
            f"{self.nodes}x{self.cards}, {len(self.tables)} tables of {rows:,} rows x {widths}, {self.pooling}, "
            f"batch {self.batch}, {self.precision} rows, {self.gradients} gradients"
        )
