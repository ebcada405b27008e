"""Precision tiers of a table, and the tiers that fit into a budget.

`{"fp32": 0.01, "int8": 0.05, "int2": 0.94}` stores the hottest 1% of rows in fp32, the next 5% in int8 and the others in int2.
All rows of the table are stored in the lowest format, the base. Rows that are hot at the moment also occupy fp32 or int8 slots,
so a share is a number of slots, and rows move between tiers one by one while training.

    base            tiers above it
    int8            fp32; {"fp32": a, "int8": 1 - a} is precision="int8", cache=a
    int4, int2      fp32, int8 or both

`precision="auto"` uses the first entry of LADDER whose tables fit into `budget` (without optimizer state), and spends the
remaining bytes on more slots in the same proportion. Only the entries of LADDER have a measured accuracy, so shares are not
searched freely.
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
_OVERHEAD = 256  # bytes a table at most, for alignment and the ledger of a pool


class Tiers(NamedTuple):
    """The format of all rows of a table, and the shares of fp32 slots (`full`) and int8 slots (`near`)."""

    base: str
    full: float = 0.0
    near: float = 0.0

    @property
    def precision(self) -> Precision:
        """The tiers as `RowConfig.precision` takes them."""
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
    """The tiers of a dict of shares."""
    shares: dict[str, Any] = dict(precision)
    base = next((name for name in (*(F.NAMES[format] for format in INT8_SLOT_FORMATS), _NEAR) if name in shares), "")
    way = ""
    if not all(isinstance(share, Real) and 0 <= float(share) <= 1 for share in shares.values()):
        way = "shares are numbers from 0 to 1"
    elif abs(sum(shares.values()) - 1) > 1e-6:
        way = f"shares add up to {sum(shares.values()):g}, not to 1"
    elif not base or set(shares) - {base, _FULL, _NEAR}:
        way = "use {'fp32': 0.05, 'int8': 0.95}, or 'int4' or 'int2' with 'fp32' or 'int8' above it"
    if way:
        raise BadInput(f"precision is {shares}; {way}", parameter="precision", value=shares)
    return Tiers(base, float(shares.get(_FULL, 0.0)), float(shares.get(_NEAR, 0.0)) if base != _NEAR else 0.0)


def divide(tables: Sequence[TableSpec], shares: Sequence[float]) -> tuple[int, ...]:
    """The slots of each table, for a share of its rows."""
    slots = [int(min(share, 1.0) * table.rows) for table, share in zip(tables, shares, strict=True)]
    # Tables of one kind share their slots: what rounding takes from small tables is given to the largest.
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
    """The best tiers with which tables of these (rows, dimension) fit into a budget, of which `taken` bytes are used."""
    smallest = 0
    for rung in LADDER:
        tables = [TableSpec(*shape, rung.base) for shape in shapes]
        smallest = taken + _bytes(tables, rung)
        if smallest <= budget:
            return _grown(tables, rung, budget - taken)
    message = f"budget is {budget:,} bytes; the smallest tables of precision='auto' ({LADDER[-1]}) need {smallest:,}"
    raise BadInput(message, parameter="budget", needed=smallest, available=budget)


def _bytes(tables: Sequence[TableSpec], tiers: Tiers) -> int:
    full, near = (divide(tables, [share] * len(tables)) for share in (tiers.full, tiers.near))
    return bytes_of(tables, full, near) + overhead(tables)


def overhead(tables: Sequence[TableSpec]) -> int:
    """An upper bound of the bytes of alignment."""
    return sum(_OVERHEAD + 4 * t.dim + 4 * F.int8_slot_words(t.dim) for t in tables)


def _grown(tables: Sequence[TableSpec], rung: Tiers, budget: int) -> Tiers:
    """An entry of LADDER with as many more slots as fit into the budget."""
    each = sum(t.rows * (rung.full * slot_bytes(t.dim) + rung.near * slot_bytes(t.dim, near=True)) for t in tables)
    if not each:
        return rung
    rows = sum(t.bytes for t in tables) + overhead(tables)
    factor = min((budget - rows) / each, 1 / (rung.full + rung.near))
    return Tiers(rung.base, rung.full * max(1.0, factor), rung.near * max(1.0, factor))
