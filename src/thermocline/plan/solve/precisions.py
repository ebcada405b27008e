"""The precision of each table: the best that fits, with as few bits below int8 as memory allows.

Time alone would choose the fewest bits, because they travel fastest; no formula here knows their cost in accuracy. Precisions
are therefore ordered, best first, as `benchmarks accuracy` measured them. Every table starts with the best. While row-wise
sharding of all tables does not fit, the table that frees most bytes per lookup goes one precision down. A precision in the
tables file is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from thermocline.plan.cost.memory import FLOATS, RowPrecision, parse_precision, row_bytes, slot_bytes
from thermocline.plan.tables import TableConfig

PRECISION_ORDER = (
    RowPrecision("int8", 0.05),
    RowPrecision("int4", 0.01, 0.05),
    RowPrecision("int4", 0.01),
    RowPrecision("int2", 0.01, 0.05),
    RowPrecision("int2", 0.0, 0.02),
)
DEFAULT_CACHE = {"int8": 0.05, "fp8": 0.05}  # for a precision without a cache in the tables file
_OTHER_CACHE = 0.01


def given_precision(table: TableConfig) -> RowPrecision | None:
    """The precision in the tables file, or None if the plan chooses."""
    if table.precision is None:
        return None
    if not isinstance(table.precision, str):
        return parse_precision(table.precision)
    default = 0.0 if table.precision in FLOATS else DEFAULT_CACHE.get(table.precision, _OTHER_CACHE)
    return parse_precision(table.precision, default if table.cache is None else table.cache)


def precisions_of(table: TableConfig) -> tuple[RowPrecision, ...]:
    """The precisions that a table may have, best first."""
    given = given_precision(table)
    if given is not None:
        return (given,)
    if table.cache is not None:
        return tuple(precision._replace(fp32=table.cache) for precision in PRECISION_ORDER)
    return PRECISION_ORDER


def stored_bytes(rows: float, dim: int, precision: RowPrecision, state: int) -> float:
    """Bytes of one copy of a table."""
    slots = precision.fp32 * slot_bytes(dim) + precision.int8 * slot_bytes(dim, near=True)
    return rows * (row_bytes(dim, precision.base) + slots + state)


def choose_precisions(sizes: Sequence[Sequence[float]], lookups: Sequence[float], room: float) -> list[int]:
    """The index of the precision of each table.

    Args:
        sizes: Bytes of each table in each of its precisions, best first.
        lookups: Lookups of each table.
        room: Bytes for all tables. If even the last precisions do not fit, they are chosen.
    """
    chosen = [0] * len(sizes)
    total = sum(size[0] for size in sizes)
    steps = [
        ((size[n] - size[n + 1]) / max(lookups[t], 1e-9), t, n + 1)
        for t, size in enumerate(sizes)
        for n in range(len(size) - 1)
    ]
    # The second step of a table may free more per lookup than its first; taking it takes both.
    for _, t, n in sorted(steps, key=lambda step: -step[0]):
        if total <= room:
            break
        if n > chosen[t]:
            total -= sizes[t][chosen[t]] - sizes[t][n]
            chosen[t] = n
    return chosen
