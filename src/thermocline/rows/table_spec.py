"""`TableSpec`, and where the rows of tables lie in the arrays of an arena (`arena.py` draws them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from thermocline import formats as F
from thermocline.errors import FormatError

from .precision import bytes_per_row, format_of

_ALIGN = 128


@dataclass(frozen=True)
class TableSpec:
    """A table of an arena.

    Args:
        rows: number of rows.
        dim: columns of a row.
        precision: a format of `thermocline.PRECISIONS`.
        name: name of the table in errors.
        group: tables of different groups share no cache slots.

    Raises:
        FormatError: a size or the precision is unknown.

    Example::

        arena = thermocline.Arena([thermocline.TableSpec(1000, 64, "int8", "user")])
    """

    rows: int
    dim: int
    precision: str = "fp32"
    name: str = "table"
    group: int = 0

    def __post_init__(self) -> None:
        format_of(self.precision)
        check_sizes(self.name, self.rows, self.dim)

    @property
    def bytes(self) -> int:
        return self.rows * bytes_per_row(self.precision, self.dim)


def check_sizes(name: str, rows: int, dim: int) -> tuple[int, int]:
    """Check the sizes of a table. Returns plain ints: a manifest cannot hold those of numpy."""
    for what, number in (("rows", rows), ("columns", dim)):
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise FormatError(f"table {name!r} has {number!r} {what}; use an int", table=name, parameter=what, value=number)
    if not 1 <= dim <= F.MAX_DIM:
        message = f"table {name!r} has dimension {dim}; rows hold 1 to {F.MAX_DIM} columns"
        raise FormatError(message, table=name, parameter="dim", value=dim, available=F.MAX_DIM)
    if rows < 1:
        message = f"table {name!r} has {rows} rows; it needs at least one"
        raise FormatError(message, table=name, parameter="rows", value=rows, needed=1)
    return int(rows), int(dim)


def place(tables: Sequence[TableSpec]) -> tuple[list[tuple[int, ...]], int, int, int]:
    """Fields (but COLUMN) of each table, and the sizes of codes, meta and element-wise state."""
    fields: list[tuple[int, ...]] = [()] * len(tables)
    codes = meta = row = element = 0
    previous: tuple[int, int] | None = None
    kinds = [(table.group, table.dim, format_of(table.precision)) for table in tables]
    for index in sorted(range(len(tables)), key=lambda i: kinds[i]):
        table, format = tables[index], format_of(tables[index].precision)
        if previous != (table.dim, format):
            codes = -(-codes // _ALIGN) * _ALIGN
        previous = (table.dim, format)
        fields[index] = (codes, meta, row, element, table.rows, table.dim, format)
        codes += table.rows * F.row_bytes(format, table.dim)
        meta += table.rows * F.META_WORDS[format]
        row += table.rows
        element += table.rows * table.dim
    return fields, codes, meta, element
