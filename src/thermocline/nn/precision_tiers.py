"""Precision by heat inside one table: what users write, what it means in rows and slots, and what a budget buys.

`{"fp32": 0.01, "int8": 0.05, "int2": 0.94}` reads: the hottest 1% of rows in fp32, the next 5% in int8, the others in int2.
All rows of the table have the coldest of the formats, its *base*; the hot ones live in slots as long as they are hot. So rows
can be promoted and demoted one by one while training, and a share is a number of slots, not a list of rows.

    base    int8    {"fp32": a, "int8": 1 - a}, which is precision="int8", cache=a
            int4    "fp32" and "int8" above it, either or both
            int2    the same

`precision="auto"` takes the first rung of LADDER whose tables fit into `budget`, everything counted but optimizer state, and
gives the bytes that are left to slots, in the rung's proportion. A ladder, because what costs accuracy is known rung by rung
from `bench accuracy`; a search over all shares would choose between configurations that nobody has measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.rows.cache import INT8_SLOT_FORMATS, slot_bytes
from thermocline.rows.table_spec import TableSpec

Precision = str | Mapping[str, float]

_FULL, _NEAR = "fp32", "int8"
_POSSIBLE = (
    "{'fp32': 0.05, 'int8': 0.95}, or 'int4' or 'int2' with 'fp32', 'int8' or both above it, "
    "as in {'fp32': 0.01, 'int8': 0.05, 'int2': 0.94}"
)
_OVERHEAD = 256  # bytes a table at most: alignment, and the numbers that are kept for a pool


class Tiers(NamedTuple):
    """The format of all rows of a table, and which shares of them have a place in an fp32 slot or in an int8 one."""

    base: str
    full: float = 0.0
    near: float = 0.0

    @property
    def precision(self) -> Precision:
        """The same as a user would write it."""
        if self.base == _FULL:
            return _FULL
        return {_FULL: self.full, _NEAR: self.near} | {self.base: 1 - self.full - self.near}

    def __str__(self) -> str:
        shares = [f"{share:.3g} {kind}" for share, kind in ((self.full, _FULL), (self.near, _NEAR)) if share]
        return " + ".join([self.base, *shares])


# Best first; at D=64 a row takes 256, 82, 44, 39, 28 and 22 bytes.
LADDER = (
    Tiers("fp32"),
    Tiers("int8", full=0.05),
    Tiers("int4", full=0.01, near=0.05),
    Tiers("int4", full=0.01),
    Tiers("int2", full=0.01, near=0.05),
    Tiers("int2", near=0.02),
)


def read_tiers(precision: Mapping[str, float]) -> Tiers:
    """A dict of shares, understood or refused."""
    shares = dict(precision)
    given = f"precision is {shares}"
    if not all(isinstance(share, Real) and 0 <= float(share) <= 1 for share in dict[str, Any](shares).values()):
        raise BadInput(f"{given}; shares must be numbers from 0 to 1")
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise BadInput(f"{given}, which adds up to {sum(shares.values()):g}; shares must add up to 1")
    bases = [name for name in (*(F.NAMES[format] for format in INT8_SLOT_FORMATS), _NEAR) if name in shares]
    if not bases or set(shares) - {bases[0], _FULL, _NEAR}:
        raise BadInput(f"{given}; possible are {_POSSIBLE}")
    base = bases[0]
    return Tiers(base, float(shares.get(_FULL, 0.0)), float(shares.get(_NEAR, 0.0)) if base != _NEAR else 0.0)


def divide(tables: Sequence[TableSpec], shares: Sequence[float]) -> tuple[int, ...]:
    """Slots of each table, from a share of its rows."""
    slots = [int(min(share, 1.0) * table.rows) for table, share in zip(tables, shares, strict=True)]
    # Tables of one kind share their slots: what small ones lose to rounding, the largest of the kind brings.
    kinds = [(table.dim, table.precision, share) for table, share in zip(tables, shares, strict=True)]
    for kind in set(kinds):
        same = [n for n, other in enumerate(kinds) if other == kind]
        largest = max(same, key=lambda n: tables[n].rows)
        slots[largest] += int(min(kind[2], 1.0) * sum(tables[n].rows for n in same)) - sum(slots[n] for n in same)
    return tuple(slots)


def bytes_of(tables: Sequence[TableSpec], slots: Sequence[int], near: Sequence[int]) -> int:
    """Bytes of rows and slots."""
    counts = zip(tables, slots, near, strict=True)
    return sum(t.bytes + full * slot_bytes(t.dim) + close * slot_bytes(t.dim, near=True) for t, full, close in counts)


def fit(shapes: Sequence[tuple[int, int]], budget: int, taken: int = 0) -> Tiers:
    """The tiers that tables of these (rows, dimension) get from so many bytes, of which some are taken already."""
    smallest = 0
    for rung in LADDER:
        tables = [TableSpec(*shape, rung.base) for shape in shapes]
        smallest = taken + _bytes(tables, rung)
        if smallest <= budget:
            return _grown(tables, rung, budget - taken)
    raise BadInput(
        f"budget is {budget:,} bytes; {LADDER[-1]}, the smallest tables that precision='auto' makes, take {smallest:,}: "
        "raise the budget, or use fewer rows or a smaller dimension"
    )


def _bytes(tables: Sequence[TableSpec], tiers: Tiers) -> int:
    full, near = (divide(tables, [share] * len(tables)) for share in (tiers.full, tiers.near))
    return bytes_of(tables, full, near) + overhead(tables)


def overhead(tables: Sequence[TableSpec]) -> int:
    """More than alignment takes: of the codes of a table, and of where slots of another dimension begin."""
    return sum(_OVERHEAD + 4 * t.dim + 4 * F.int8_slot_words(t.dim) for t in tables)


def _grown(tables: Sequence[TableSpec], rung: Tiers, budget: int) -> Tiers:
    """A rung with more slots, as many as the budget has bytes for."""
    each = sum(t.rows * (rung.full * slot_bytes(t.dim) + rung.near * slot_bytes(t.dim, near=True)) for t in tables)
    if not each:
        return rung
    rows = sum(t.bytes for t in tables) + overhead(tables)
    factor = min((budget - rows) / each, 1 / (rung.full + rung.near))
    return Tiers(rung.base, rung.full * max(1.0, factor), rung.near * max(1.0, factor))
