"""What a table takes, in bytes, everything counted, without making one: the arithmetic of `module.memory()`.

    part              a row                         a slot of the cache, full / near
    codes             ceil(bits * dim / 8)          -
    metadata          0, 4 or 8                     -
    cache             -                             4 * dim  /  4 + dim, to whole words
    maps              -                             32: row, score, displaced word, sketch
    optimizer state   0, 4, 4 * dim or 8 * dim      -

Slots are shares of the rows, so all parts grow with the rows alone: `bytes_per_row` gives them for one row (what one row more
costs, times any number or array of rows), `table_bytes` for a whole table, in whole slots. Alignment and counters, which are
at most a few hundred bytes a table, are left out of the former. Tests hold both against the real modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError

Precision = str | Mapping[str, float]

CODES, METADATA, CACHE, MAPS, STATE = PARTS = ("codes", "metadata", "cache", "maps", "optimizer state")

SLOT_MAPS = 32  # bytes beside the values of a slot
POOL_MAPS = 8 * F.LEDGER_FIELDS + 8 * F.CLOCK_FIELDS + 8  # bytes of counters and clocks beside the slots of a table
NEAR_OVER = ("int4", "int2")  # precisions whose rows may have near slots
FLOATS = ("fp32", "fp16", "bf16")  # and which have no slots: a full-precision copy gains nothing
ID_BYTES = 4  # of an id on the wire, in collections of up to SMALL rows
SMALL = 1 << 28  # as a number of 32 bits with three to spare, which tell caches how often a row was looked up

_STATES = {"sgd": (0, 0), "rowwise_adagrad": (1, 0), "adagrad": (0, 1), "adam": (0, 2)}  # numbers a row, and a column


class Store(NamedTuple):
    """The precision of all rows of a table, and which shares of them have a place in an fp32 slot or in an int8 one."""

    base: str
    full: float = 0.0
    near: float = 0.0


def read_store(precision: Precision, cache: float = 0.0, near: float = 0.0) -> Store:
    """A precision and its cache: "int8" and 0.05, or shares such as {"fp32": 0.01, "int8": 0.05, "int2": 0.94}."""
    if isinstance(precision, str):
        _format(precision)
        _check_share("cache", cache)
        _check_share("near", near)
        if near and precision not in NEAR_OVER:
            raise BadInput(f"near is {near} and precision {precision!r}; int8 slots are for {' and '.join(NEAR_OVER)} rows")
        return Store(precision) if precision in FLOATS else Store(precision, cache, near)
    shares = dict(precision)
    if cache or near:
        raise BadInput(f"cache is {cache or near} and precision {shares}, which says what is cached; drop the cache")
    for name, share in shares.items():
        _check_share(f"precision {name!r}", share)
    bases = [name for name in (*NEAR_OVER, "int8") if name in shares]
    if not bases or set(shares) - {bases[0], "fp32", "int8"} or abs(sum(shares.values()) - 1) > 1e-6:
        raise BadInput(
            f"precision is {shares}, adding up to {sum(shares.values()):g}; shares add up to 1 and are of 'int8' with 'fp32' "
            "above it, or of 'int4' or 'int2' with 'fp32', 'int8' or both above it"
        )
    return Store(bases[0], float(shares.get("fp32", 0.0)), 0.0 if bases[0] == "int8" else float(shares.get("int8", 0.0)))


def row_bytes(dim: int, precision: str) -> int:
    """One row as it is stored and as it travels: codes and metadata."""
    format = _format(precision)
    return F.row_bytes(format, dim) + 4 * F.META_WORDS[format]


def slot_bytes(dim: int, near: bool = False) -> int:
    """One slot of the cache, fp32 or int8, with what is kept beside it."""
    return SLOT_MAPS + (4 * F.int8_slot_words(dim) if near else 4 * dim)


def state_bytes(dim: int, optimizer: str | None) -> int:
    """Optimizer state of one row; none where the tables only serve (`None`)."""
    if optimizer is None:
        return 0
    if optimizer not in _STATES:
        raise BadInput(f"optimizer is {optimizer!r}; use one of {', '.join(F.OPTIMIZERS)}")
    per_row, per_column = _STATES[optimizer]
    return 4 * (per_row + per_column * dim)


def bytes_per_row(
    dim: int, precision: Precision, cache: float = 0.0, near: float = 0.0, optimizer: str | None = "rowwise_adagrad"
) -> dict[str, float]:
    """Each part's bytes for one row, its share of the slots included."""
    base, full, near = read_store(precision, cache, near)
    format = _format(base)
    near = min(near, 1 - full)
    return {
        CODES: float(F.row_bytes(format, dim)),
        METADATA: 4.0 * F.META_WORDS[format],
        CACHE: full * 4 * dim + near * 4 * F.int8_slot_words(dim),
        MAPS: (full + near) * SLOT_MAPS,
        STATE: float(state_bytes(dim, optimizer)),
    }


def table_bytes(
    rows: int,
    dim: int,
    precision: Precision,
    cache: float = 0.0,
    near: float = 0.0,
    optimizer: str | None = "rowwise_adagrad",
) -> dict[str, int]:
    """Each part's bytes of a table in a module of its own: what its `memory()` says, to the byte."""
    base, full, near = read_store(precision, cache, near)
    format = _format(base)
    slots = int(full * rows)
    near_slots = min(int(near * rows), rows - slots)
    cached = slots + near_slots > 0
    return {
        CODES: rows * F.row_bytes(format, dim),
        METADATA: rows * 4 * F.META_WORDS[format],
        CACHE: max(1, slots * dim) * 4 * cached + near_slots * 4 * F.int8_slot_words(dim),
        MAPS: (slots + near_slots) * SLOT_MAPS + POOL_MAPS * cached,
        STATE: rows * state_bytes(dim, optimizer),
    }


def id_bytes(rows: int) -> int:
    """Of an id on the wire, in a collection of so many rows."""
    return ID_BYTES if rows <= SMALL else 8


def tier_map_bytes(rows: int) -> int:
    """A bitmap with ranks: one bit a row, and a running count for every 512 of them."""
    return -(-rows // 8) + 4 * -(-rows // 512)


def exchange_bytes(
    asked: float, served: float, dim: int, precision: str, gradient: str | None = "fp32", ahead: int = 2
) -> dict[str, float]:
    """Buffers of one card for one table: ids, rows and gradients of the distinct rows that it asks others for in a step and
    that it serves to others. `ahead` batches are under way at a time: the next one's rows come while this one computes. A
    cluster that only serves has no gradients (`None`).
    """
    moved = asked + served
    return {
        "ids": ahead * moved * ID_BYTES,
        "rows": ahead * moved * row_bytes(dim, precision),
        "gradients": moved * row_bytes(dim, gradient) if gradient else 0.0,
    }


def _format(precision: str) -> int:
    if precision not in F.NAMES:
        raise FormatError(f"precision {precision!r} is not known; use one of {', '.join(F.NAMES)}")
    return F.NAMES.index(precision)


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise BadInput(f"{name} is {share}; it is a share of the rows, from 0 to 1")
