"""The errors that Thermocline raises on purpose.

    ThermoclineError
    └── BadInput              an invalid argument (also a ValueError)
        ├── IdOutOfRange      an id that its table has no row for (also an IndexError and a RuntimeError)
        ├── BadOffsets        offsets that do not fit their ids (also a RuntimeError)
        ├── BadPadding        a padding_idx that is no row (also an AssertionError)
        ├── BadMode           per_sample_weights with a mode that takes none (also a NotImplementedError)
        ├── BadGradient       a gradient that would turn a row into NaN or Inf
        ├── BadPublish        rows that a server refuses
        └── FormatError       a file or buffer that is not what it claims to be

Every mistake of a caller is a `ValueError`; those that `torch.nn` knows are also of torch's type, for existing handlers.
Internal invariants are `assert`s.
A message names the numbers that disagree and the way out.
"""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any


class ThermoclineError(Exception):
    """Base of every error that Thermocline raises on purpose.

    Example::

        try:
            thermocline.load("checkpoint")
        except thermocline.ThermoclineError as error:
            sys.exit(str(error))
    """


class BadInput(ThermoclineError, ValueError):
    """An invalid argument: wrong dtype, device, shape or value.

    Further attributes differ by error: `value`, `table`, `feature`, `path`, `line`, `needed`, `available`.

    Attributes:
        parameter: the argument or the field of a file; None where the error names none.

    Example::

        try:
            thermocline.RowConfig(cache=2.0)
        except thermocline.BadInput as error:
            print(error.parameter, error.value)  # cache 2.0
    """

    parameter: str | None = None

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:  # declared for type checkers: fields differ by error
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {', '.join(self.__dict__) or 'none'}")

    def __reduce__(self) -> tuple[Any, ...]:  # errors of worker processes are pickled
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[BadInput], args: tuple[Any, ...], fields: dict[str, Any]) -> BadInput:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


@contextmanager
def explain_failed_write(path: Path | str, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError of writing `needed` bytes to `path`, which may name no file, into a `BadInput` with file and bytes."""
    try:
        yield
    except OSError as error:
        folder = next(each for each in Path(path).resolve().parents if each.is_dir())
        free = shutil.disk_usage(folder).free
        wanted = "" if needed is None else f"{needed:,} bytes are needed, and "
        message = (
            f"'{path}' could not be written: {error.strerror or error}; {wanted}{free:,} bytes are free in '{folder}'. "
            "Free some space or give another path"
        )
        raise BadInput(message, path=str(path), needed=needed, available=free, errno=error.errno) from error


@contextmanager
def written_aside(path: Path | str, size: int | None = None) -> Iterator[Path]:
    """A temporary name to write `size` bytes to; the file takes the place of `path` when it is complete.

    Devices and pipes are written directly, and a link keeps its place: its target is replaced.
    """
    target = Path(path).resolve()
    direct = target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK))
    aside = target if direct else target.with_name(target.name + ".part")
    with explain_failed_write(path, size):
        try:
            yield aside
            if not direct:
                aside.replace(target)
        finally:
            if not direct:
                aside.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file, which appears when it is complete; a full disk raises `BadInput` with file and bytes."""
    data = text.encode()
    with written_aside(path, len(data)) as aside:
        aside.write_bytes(data)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name, or ""."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def open_regular(path: Path | str) -> FileIO:
    """Open a file to read without a buffer. A pipe, on which opening would wait, a device or a folder raises `FormatError`."""

    def open_without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    try:
        file = open(path, "rb", buffering=0, opener=open_without_waiting)  # noqa: SIM115
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise
        raise FormatError(f"'{path}' cannot be read: {error.strerror}", path=path) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FormatError(f"'{path}' is not a regular file", path=path)
    return file


def read_bytes(path: Path | str, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes, else `FormatError`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise FormatError(f"'{path}' has {size:,} bytes, the limit is {limit:,}", path=path, needed=size, available=limit)
        return file.readall()


class IdOutOfRange(BadInput, IndexError, RuntimeError):
    """An id that its table has no row for.

    Attributes:
        feature: number of the feature.
        position: position of the id among the ids of all features, one feature after another.
        id: the id.
        rows: rows of the table, or ids of the feature's map.
        table: name of the table, if known.
        name: name of the feature, if known.
        first: position of the feature's first id; None from a GPU, which reports when its batch may be gone.

    Example::

        try:
            bag(ids)
        except thermocline.IdOutOfRange as error:
            print(error.id, error.rows)
    """

    def __init__(
        self, feature: int, position: int, id: int, rows: int,
        table: str | None = None, name: str | None = None, first: int | None = None,
    ) -> None:  # fmt: skip
        has, where = f"{rows} rows (0 to {rows - 1})", f"position {position}"
        if name is not None:
            who, has = f"Feature {name!r}", f"ids 0 to {rows - 1}"
            who += "" if table in (None, name) else f" of table {table!r}"
            where = f"{where} of the ids of all features" if first is None else f"position {position - first}"
        else:
            who = f"Table {table!r}" if table else f"The table of feature {feature}"
        super().__init__(
            f"{who} has {has}, but the id at {where} is {id}. Map raw ids to rows first, or give the table more rows."
        )
        self.feature, self.position, self.id, self.rows = feature, position, id, rows
        self.table, self.name, self.first = table, name, first

    def named(self, table: str, name: str) -> IdOutOfRange:
        """The same error with the table and the feature named."""
        return IdOutOfRange(self.feature, self.position, self.id, self.rows, table, name, self.first)

    def at(self, position: int) -> IdOutOfRange:
        """The same error at another position."""
        return IdOutOfRange(self.feature, position, self.id, self.rows, self.table, self.name, self.first)


class BadOffsets(BadInput, RuntimeError):
    """Offsets that do not begin at 0, rise, and end at the number of ids."""


class BadPadding(BadInput, AssertionError):
    """A `padding_idx` that is no row of its table."""


class BadMode(BadInput, NotImplementedError):
    """`per_sample_weights` with a mode that takes none."""


class BadGradient(BadInput):
    """A gradient that would turn a row into NaN or Inf. The row is left as it was.

    Attributes:
        row: row of the arena.
        step: number of the step.
        table: name of the table, if known.
        first: arena row where the table begins.

    Example::

        try:
            loss.backward()
        except thermocline.BadGradient as error:
            print(error.table, error.row - error.first)
    """

    def __init__(self, row: int, step: int, table: str | None = None, first: int = 0) -> None:
        where = f" (row {row - first} of table {table!r})" if table else ""
        super().__init__(
            f"The gradient of arena row {row} at step {step}{where} makes the row or its optimizer state NaN, Inf or larger "
            "than 2^126; that row was left as it was. Look for NaN in the loss, or lower the learning rate."
        )
        self.row, self.step, self.table, self.first = row, step, table, first


class FormatError(BadInput):
    """A file or buffer that is not what it claims to be.

    Example::

        try:
            thermocline.heat.HeatProfile.load("heat.tc")
        except thermocline.FormatError as error:
            print(error)
    """


class BadPublish(BadInput):
    """A publish that a server refuses, or a trainer does not send.

    Attributes:
        reason: "values" (NaN or Inf), "model" (other tables), "run" (of another training run), "order" (publishes between are
            missing), "replay" (an earlier publish again), "damaged", or "held" (the server was rolled back).

    Example::

        try:
            publisher.step()
        except thermocline.BadPublish as error:
            print(error.reason)
    """

    def __init__(self, message: str, reason: str, **fields: Any) -> None:
        super().__init__(message, reason=reason, **fields)
