"""In which precision each table is kept: the best that fits, as little below int8 as memory allows.

Time alone would choose the fewest bits, for they travel fastest; what they cost in accuracy no formula here knows. So precision
is a ladder, best first, as `bench accuracy` measured it. Every table starts on the first rung. Only where row-wise sharding of
all tables does not fit does one go down, the one that frees most bytes for the lookups it touches; then the next. A precision
that the tables file names is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from thermocline.plan.cost.memory import FLOATS, Store, read_store, row_bytes, slot_bytes
from thermocline.plan.tables import TableFile

LADDER = (
    Store("int8", 0.05),
    Store("int4", 0.01, 0.05),
    Store("int4", 0.01),
    Store("int2", 0.01, 0.05),
    Store("int2", 0.0, 0.02),
)
DEFAULT_CACHE = {"int8": 0.05, "fp8": 0.05}  # of a precision that is named without a cache
_OTHER_CACHE = 0.01


def given_store(table: TableFile) -> Store | None:
    """What the tables file says, or None if the plan is to choose."""
    if table.precision is None:
        return None
    if not isinstance(table.precision, str):
        return read_store(table.precision)
    default = 0.0 if table.precision in FLOATS else DEFAULT_CACHE.get(table.precision, _OTHER_CACHE)
    return read_store(table.precision, default if table.cache is None else table.cache)


def ladder_of(table: TableFile) -> tuple[Store, ...]:
    """The stores a table may have, best first."""
    given = given_store(table)
    if given is not None:
        return (given,)
    if table.cache is not None:
        return tuple(store._replace(full=table.cache) for store in LADDER)
    return LADDER


def stored_bytes(rows: float, dim: int, store: Store, state: int) -> float:
    """Bytes of one copy of a table."""
    slots = store.full * slot_bytes(dim) + store.near * slot_bytes(dim, near=True)
    return rows * (row_bytes(dim, store.base) + slots + state)


def choose(
    ladders: Sequence[tuple[Store, ...]], sizes: Sequence[Sequence[float]], lookups: Sequence[float], room: float
) -> list[int]:
    """The rung of each table: the highest at which all `sizes` [table][rung] together fit into `room`, or the lowest."""
    rung = [0] * len(ladders)
    total = sum(size[0] for size in sizes)
    steps = [
        ((size[r] - size[r + 1]) / max(lookups[t], 1e-9), t, r + 1)
        for t, size in enumerate(sizes)
        for r in range(len(size) - 1)
    ]
    # A table's second step may be worth more than its first, which it comes after all the same.
    for _, t, r in sorted(steps, key=lambda step: -step[0]):
        if total <= room:
            break
        if r > rung[t]:
            total -= sizes[t][rung[t]] - sizes[t][r]
            rung[t] = r
    return rung
