"""Bytes of a table by part, without making one: the arithmetic of `module.memory()`, with which tests compare it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError

Precision = str | Mapping[str, float]

CODES, METADATA, CACHE, MAPS, STATE = PARTS = ("codes", "metadata", "cache", "maps", "optimizer state")

SLOT_MAPS = 32  # bytes per slot beside its values
POOL_MAPS = 8 * F.LEDGER_FIELDS + 8 * F.CLOCK_FIELDS + 8  # bytes of counters and clocks per cached table
INT8_SLOTS_OVER = ("int4", "int2")  # precisions whose rows may have int8 slots
FLOATS = ("fp32", "fp16", "bf16")  # precisions without slots: an fp32 copy gains nothing
ID_BYTES = 4  # of an id on the wire, in collections of at most SMALL rows
SMALL = 1 << 28  # an id in 32 bits with three to spare, which carry lookup counts for caches

_STATES = {"sgd": (0, 0), "rowwise_adagrad": (1, 0), "adagrad": (0, 1), "adam": (0, 2)}  # numbers a row, and a column


class RowPrecision(NamedTuple):
    """The stored precision of a table, and the shares of its rows with an fp32 slot and with an int8 slot."""

    base: str
    fp32: float = 0.0
    int8: float = 0.0


def parse_precision(precision: Precision, cache: float = 0.0, near: float = 0.0) -> RowPrecision:
    """Parse a precision with its cache share ("int8", 0.05), or shares such as {"fp32": 0.01, "int8": 0.05, "int2": 0.94}."""
    if isinstance(precision, str):
        _format(precision)
        _check_share("cache", cache)
        _check_share("near", near)
        if near and precision not in INT8_SLOTS_OVER:
            message = f"near is {near} and precision {precision!r}; int8 slots are for {' and '.join(INT8_SLOTS_OVER)} rows"
            raise BadInput(message, parameter="near", value=near)
        return RowPrecision(precision) if precision in FLOATS else RowPrecision(precision, cache, near)
    shares = dict(precision)
    if cache or near:
        message = f"cache is {cache or near}, but precision {shares} already says what is cached; drop the cache"
        raise BadInput(message, parameter="cache")
    for name, share in shares.items():
        _check_share(f"precision {name!r}", share)
    bases = [name for name in (*INT8_SLOTS_OVER, "int8") if name in shares]
    if not bases or set(shares) - {bases[0], "fp32", "int8"} or abs(sum(shares.values()) - 1) > 1e-6:
        message = (
            f"precision is {shares}, with the sum {sum(shares.values()):g}; shares have the sum 1 and name 'int8' with 'fp32', "
            "or 'int4' or 'int2' with 'fp32', 'int8' or both"
        )
        raise BadInput(message, parameter="precision", value=shares)
    return RowPrecision(bases[0], float(shares.get("fp32", 0.0)), 0.0 if bases[0] == "int8" else float(shares.get("int8", 0.0)))


def row_bytes(dim: int, precision: str) -> int:
    """Bytes of one stored row, also on the wire: codes and metadata."""
    format = _format(precision)
    return F.row_bytes(format, dim) + 4 * F.META_WORDS[format]


def code_bytes(rows: float, dim: int, precision: RowPrecision) -> float:
    """Bytes of the codes of a table, which may lie in host memory."""
    return F.row_bytes(F.NAMES.index(precision.base), dim) * rows


def slot_bytes(dim: int, near: bool = False) -> int:
    """Bytes of one cache slot, fp32 or int8 (`near`), with its maps."""
    return SLOT_MAPS + (4 * F.int8_slot_words(dim) if near else 4 * dim)


def state_bytes(dim: int, optimizer: str | None) -> int:
    """Bytes of optimizer state of one row; 0 for serving (`None`)."""
    if optimizer is None:
        return 0
    if optimizer not in _STATES:
        message = f"optimizer is {optimizer!r}; use one of {', '.join(F.OPTIMIZERS)}"
        raise BadInput(message, parameter="optimizer", value=optimizer, available=tuple(F.OPTIMIZERS))
    per_row, per_column = _STATES[optimizer]
    return 4 * (per_row + per_column * dim)


def bytes_per_row(
    dim: int, precision: Precision, cache: float = 0.0, near: float = 0.0, optimizer: str | None = "rowwise_adagrad"
) -> dict[str, float]:
    """Bytes of one row by part, with its share of the cache slots.

    Args:
        dim: Columns of a row.
        precision: A name such as "int8", or shares such as {"fp32": 0.01, "int8": 0.05, "int2": 0.94}.
        cache: Share of the rows with an fp32 slot.
        near: Share of the rows with an int8 slot.
        optimizer: Name of the optimizer, or None for serving.

    Returns:
        The bytes by part.

    Raises:
        BadInput: The precision or the optimizer is unknown.

    Example::

        sum(bytes_per_row(128, "int8", cache=0.05).values())  # 163.2
    """
    base, full, near = parse_precision(precision, cache, near)
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
    rows: int, dim: int, precision: Precision, cache: float = 0.0, near: float = 0.0, optimizer: str | None = "rowwise_adagrad"
) -> dict[str, int]:
    """Bytes of a table by part, equal to `memory()` of a module with this table alone."""
    base, full, near = parse_precision(precision, cache, near)
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
    """Bytes of an id on the wire, in a collection with this many rows."""
    return ID_BYTES if rows <= SMALL else 8


def tier_map_bytes(rows: int) -> int:
    """Bytes of a rank bitmap: one bit per row, and a running count per 512 rows."""
    return -(-rows // 8) + 4 * -(-rows // 512)


def exchange_bytes(
    requested: float, served: float, dim: int, precision: str, gradient: str | None = "fp32", batches: int = 2
) -> dict[str, float]:
    """Bytes of the exchange buffers of one rank for one table: ids, rows and gradients of the distinct rows that the rank
    requests and serves in a step. Buffers hold ids and rows of `batches` batches, because the next one is prefetched.
    `gradient` is None for serving.
    """
    moved = requested + served
    return {
        "ids": batches * moved * ID_BYTES,
        "rows": batches * moved * row_bytes(dim, precision),
        "gradients": moved * row_bytes(dim, gradient) if gradient else 0.0,
    }


def _format(precision: str) -> int:
    if precision not in F.NAMES:
        message = f"precision {precision!r} is not known; use one of {', '.join(F.NAMES)}"
        raise FormatError(message, parameter="precision", value=precision)
    return F.NAMES.index(precision)


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise BadInput(f"{name} is {share}; a share of the rows is from 0 to 1", parameter=name, value=share)
