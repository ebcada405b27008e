"""The errors that Thermocline raises on purpose.

    ThermoclineError
    └── BadInput              an argument that cannot be right (also a ValueError)
        ├── IdOutOfRange      an id that its table has no row for
        ├── BadGradient       a gradient that would turn a row into NaN or Inf
        └── FormatError       a file or buffer that is not what it claims to be

Whoever catches `ValueError` catches every mistake of a caller. Broken promises of our own code are `assert`s instead.
A message names the numbers that disagree and the way out.
"""

from __future__ import annotations


class ThermoclineError(Exception):
    """Base of every error that Thermocline raises on purpose."""


class BadInput(ThermoclineError, ValueError):
    """An argument that cannot be right: wrong dtype, device, shape or value."""


class IdOutOfRange(BadInput):
    """An id that its table has no row for. The numbers are attributes too, so that a layer above can name the table."""

    def __init__(self, feature: int, position: int, id: int, rows: int, table: str | None = None) -> None:
        name = f"Table {table!r}" if table else f"The table of feature {feature}"
        super().__init__(
            f"{name} has {rows} rows (0 to {rows - 1}), but the id at position {position} is {id}. "
            "Map raw ids to rows first, or give the table more rows."
        )
        self.feature, self.position, self.id, self.rows, self.table = feature, position, id, rows, table

    def __reduce__(self) -> tuple[type[IdOutOfRange], tuple[int, int, int, int, str | None]]:
        return type(self), (self.feature, self.position, self.id, self.rows, self.table)  # errors of workers are pickled

    def of_table(self, table: str) -> IdOutOfRange:
        """The same error with the table named."""
        return IdOutOfRange(self.feature, self.position, self.id, self.rows, table)


class BadGradient(BadInput):
    """A gradient that would turn a row into NaN or Inf."""

    def __init__(self, row: int, step: int, table: str | None = None, first: int = 0) -> None:
        where = f" (row {row - first} of table {table!r})" if table else ""
        super().__init__(
            f"The gradient of arena row {row} at step {step}{where} makes the row or its optimizer state NaN, Inf or larger "
            "than 2^126; that row was left as it was. Look for NaN in the loss, or lower the learning rate."
        )
        self.row, self.step, self.table, self.first = row, step, table, first

    def __reduce__(self) -> tuple[type[BadGradient], tuple[int, int, str | None, int]]:
        return type(self), (self.row, self.step, self.table, self.first)


class FormatError(BadInput):
    """A file or buffer that is not what it claims to be."""
