"""The precision of each table: the best that fits, because time alone would choose the fewest bits (docs/planner.md)."""

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


def precisions_of(table: TableConfig) -> tuple[RowPrecision, ...]:
    """The precisions that a table may have, best first: that of the tables file, or all."""
    if isinstance(table.precision, str):
        default = 0.0 if table.precision in FLOATS else 0.05 if table.precision in ("int8", "fp8") else 0.01
        return (parse_precision(table.precision, default if table.cache is None else table.cache),)
    if table.precision is not None:
        return (parse_precision(table.precision),)
    return tuple(each if table.cache is None else each._replace(fp32=table.cache) for each in PRECISION_ORDER)


def stored_bytes(rows: float, dim: int, precision: RowPrecision, state: int) -> float:
    """Bytes of one copy of a table."""
    slots = precision.fp32 * slot_bytes(dim) + precision.int8 * slot_bytes(dim, near=True)
    return rows * (row_bytes(dim, precision.base) + slots + state)


def choose_precisions(sizes: Sequence[Sequence[float]], lookups: Sequence[float], room: float) -> list[int]:
    """The index of the precision of each table, from bytes of each in each precision (best first), lookups, and bytes of room.

    While all tables do not fit, the table that frees most bytes per lookup goes down, to the last precision if need be.
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
