"""Logs as streams of ids: Parquet, CSV with a header, and Criteo's TSV, in chunks of bounded size.

A column holds one id per sample, or a list; `log_columns.py` says which values are ids. A null is no lookup and is counted as
missing. In Criteo's TSV a missing category is the id 0, as in training from such a file.

    ending                        format
    .parquet .pq                  Parquet: integers, text, or lists of them
    .csv .csv.gz                  text with a header, and commas, tabs or semicolons
    all others, also with .gz     the same if the first line has a header, else Criteo's TSV: label, I1 to I13, C1 to C26 in
                                  hexadecimal

A header begins with a letter, a quotation mark or an underscore. A column of CSV has text if more than a tenth of its first
values are not numbers; `""`, NULL, NaN, NA and the like are missing values. A Parquet file knows its number of samples;
text is counted first, because slices of equal length need the number. With `skip_bad`, that count also finds bad lines.
"""

from __future__ import annotations

import csv as plain_csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from thermocline.errors import BadInput, FormatError, did_you_mean

from .log_columns import LogIds, bags_of_ids, from_hexadecimal

TSV_NAMES = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
LARGEST_CHUNK = 1 << 16  # samples
VALUES = 1 << 20  # of a chunk, in all columns
BLOCK = 1 << 23  # bytes of text read at a time
HEAD, HEAD_LINES = 1 << 18, 1000  # bytes and lines that tell numbers from text
SHOWN, LETTERS = 12, 40  # of the names of columns in errors


@dataclass(frozen=True)
class LogFile:
    """One file of a log."""

    path: Path
    skip_bad: bool = False  # leave out bad lines of a file with a header
    wanted: tuple[str, ...] = ()  # columns whose bad values make a line bad
    numbers: tuple[str, ...] = ()  # those of them that are numbers instead of ids

    def __post_init__(self) -> None:
        if not self.path.is_file():
            what = f"'{self.path}' is a folder; name its files" if self.path.is_dir() else f"there is no file '{self.path}'"
            raise BadInput(f"{what}; give Parquet, CSV with a header, or Criteo's TSV", path=str(self.path))
        if self.path.stat().st_size == 0:
            raise FormatError(f"'{self.path}' is empty", path=str(self.path), size=0)

    @cached_property
    def kind(self) -> str:
        name = self.path.name.lower().removesuffix(".gz")
        if name.endswith((".parquet", ".pq")):
            return "parquet"
        first = self._head[:1]
        if "\0" in self._head:
            message = f"'{self.path}' is not text in UTF-8; give Parquet, CSV with a header, or Criteo's TSV"
            raise FormatError(message, path=str(self.path), expected="UTF-8")
        if first in ("{", "["):
            message = f"'{self.path}' has JSON; convert it to Parquet, as with pyarrow.json.read_json"
            raise FormatError(message, path=str(self.path), expected="csv")
        return "csv" if name.endswith(".csv") or first.isalpha() or first in ('"', "_") else "tsv"

    @cached_property
    def _head(self) -> str:
        """The beginning of a text file, up to the end of a line."""
        with _stream(self.path) as stream:
            raw: bytes = stream.read(HEAD)
        head = raw.decode("utf-8-sig", errors="replace").lstrip("\r\n")  # some programs write a byte-order mark
        return head if len(head) < HEAD // 4 else head.rpartition("\n")[0] or head

    @cached_property
    def delimiter(self) -> str:
        first = self._head.partition("\n")[0]
        return max(",\t;", key=first.count)

    @cached_property
    def text_columns(self) -> frozenset[str]:
        """The columns of a CSV file that have text."""
        known = self._first_values.items()
        return frozenset(name for name, of in known if sum(not _is_number(value) for value in of) > len(of) / 10)

    @cached_property
    def float_columns(self) -> frozenset[str]:
        """The columns of a CSV file that have numbers with a decimal point, as pandas writes integers beside missing ones."""
        known = self._first_values.items()
        return frozenset(name for name, of in known if name not in self.text_columns and any("." in value for value in of))

    @cached_property
    def _first_values(self) -> dict[str, list[str]]:
        from pyarrow import csv

        absent = frozenset(csv.ConvertOptions().null_values)
        rows = list(plain_csv.reader(self._head.splitlines()[: HEAD_LINES + 1], delimiter=self.delimiter))[1:]
        return {
            name: [row[at] for row in rows if at < len(row) and row[at] not in absent] for at, name in enumerate(self.names)
        }

    @cached_property
    def _unsigned_columns(self) -> list[str]:
        """The columns of a CSV file whose numbers need 64 bits without a sign."""
        known = self._first_values.items()
        return [
            name
            for name, of in known
            if name not in self.text_columns and any(_integer(value) is False and _unsigned(value) for value in of)
        ]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns of the file."""
        if self.kind == "parquet":
            return tuple(parquet_file(self.path).schema_arrow.names)
        if self.kind == "tsv":
            return TSV_NAMES
        return tuple(next(plain_csv.reader(self._head.splitlines(), delimiter=self.delimiter), ()))

    @property
    def listed(self) -> str:
        """The columns in words."""
        names = [name if len(name) <= LETTERS else f"{name[:LETTERS]}..." for name in self.names[:SHOWN]]
        return ", ".join(names) + (f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else "")

    def lacks(self, missing: Sequence[str]) -> str:
        """The message that these columns are not in the file."""
        names = ", ".join(f"{name}{did_you_mean(name, self.names)}" for name in missing)
        return f"'{self.path}' has no column {names}; it has {self.listed}"

    @cached_property
    def samples(self) -> int:
        """The samples of the file, without bad lines that are skipped."""
        if self.kind == "parquet":
            return int(parquet_file(self.path).metadata.num_rows)
        if self.skips:
            return sum(batch.num_rows for batch in self._text(self.wanted, self.numbers))
        return self._lines

    @property
    def skips(self) -> bool:
        return self.skip_bad and self.kind != "parquet"

    @property
    def skipped(self) -> int:
        """Bad lines that are left out."""
        return self._lines - self.samples if self.skips else 0

    @cached_property
    def _lines(self) -> int:
        """The lines of a text file that are neither empty nor a header."""
        lines, last = 0, b"\n"
        with _stream(self.path) as stream:
            while block := stream.read(1 << 20):
                lines += block.count(b"\n")
                if b"\n\n" in (joined := last + block) or b"\n\r\n" in joined:
                    lines -= len(_EMPTY_LINE.findall(joined))
                last = block[-2:] if block.endswith(b"\n\r") else block[-1:]
        return lines + (last != b"\n") - (self.kind == "csv")

    def chunks(self, columns: Sequence[str], first: int = 0) -> Iterator[dict[str, LogIds]]:
        """The ids of these columns from sample `first` on."""
        rows = max(1 << 8, min(LARGEST_CHUNK, int(VALUES / self._values_per_sample(columns))))
        for batch in self.batches(columns, first, rows):
            yield {name: self.ids_of(name, batch.column(name)) for name in columns}

    def ids_of(self, name: str, array: Any) -> LogIds:
        """The ids of a column of a batch."""
        if self.kind == "tsv":
            return LogIds(from_hexadecimal(self.path, name, array))
        return bags_of_ids(self.path, name, array)

    def batches(self, columns: Sequence[str], first: int, rows: int, numbers: Sequence[str] = ()) -> Iterator[Any]:
        """Record batches of at most `rows` samples from sample `first` on. The columns `numbers` of text are read as floats."""
        read = self._parquet_from(columns, first, rows) if self.kind == "parquet" else (self._text(columns, numbers), first)
        batches, skip = read
        for batch in batches:
            yield from (batch.slice(start, rows) for start in range(skip, batch.num_rows, rows))
            skip = max(skip - batch.num_rows, 0)

    def _values_per_sample(self, columns: Sequence[str]) -> float:
        """Ids per sample in these columns, from the metadata of a Parquet file."""
        if self.kind != "parquet" or self.samples == 0:
            return len(columns)
        groups, values = parquet_file(self.path).metadata, 0
        for group in (groups.row_group(i) for i in range(groups.num_row_groups)):
            leaves = [group.column(i) for i in range(group.num_columns)]
            values += sum(leaf.num_values for leaf in leaves if leaf.path_in_schema.split(".")[0] in columns)
        return max(1.0, values / self.samples)

    def _parquet_from(self, columns: Sequence[str], first: int, rows: int) -> tuple[Iterator[Any], int]:
        """The row groups from that of sample `first` on, and the number of their samples before it."""
        file, group = parquet_file(self.path), 0
        while group < file.num_row_groups and first >= file.metadata.row_group(group).num_rows:
            first -= file.metadata.row_group(group).num_rows
            group += 1
        return file.iter_batches(rows, row_groups=list(range(group, file.num_row_groups)), columns=list(columns)), first

    def _text(self, columns: Sequence[str], numbers: Sequence[str] = (), parallel: bool = True) -> Iterator[Any]:
        import pyarrow
        from pyarrow import csv

        tsv = self.kind == "tsv"
        by_line = self.skips and not tsv  # texts first, so that bad lines are found one by one
        text = [name for name in columns if by_line or (name not in numbers and (tsv or name in self.text_columns))]
        types = dict.fromkeys(columns, pyarrow.int64()) | dict.fromkeys(self.float_columns, pyarrow.float64())
        types |= dict.fromkeys(self._unsigned_columns, pyarrow.uint64())
        types |= dict.fromkeys(numbers, pyarrow.float64()) | dict.fromkeys(text, pyarrow.string())
        skip = (lambda row: "skip") if self.skips else None
        parse = csv.ParseOptions(
            delimiter="\t" if tsv else self.delimiter, quote_char=not tsv and '"', invalid_row_handler=skip
        )
        try:
            with _stream(self.path) as stream:
                batches = csv.open_csv(
                    stream,
                    read_options=csv.ReadOptions(
                        column_names=TSV_NAMES if tsv else None, block_size=BLOCK, use_threads=parallel
                    ),
                    parse_options=parse,
                    convert_options=csv.ConvertOptions(
                        column_types=types, include_columns=list(columns),
                        null_values=[""] if tsv else None, strings_can_be_null=bool(text),
                    ),
                )  # fmt: skip
                yield from (self._without_bad(each, numbers) for each in batches) if by_line else batches
        except pyarrow.ArrowInvalid as error:
            found = self._unreadable(str(error))
            if parallel:  # only one thread knows the number of the line
                try:
                    for _ in self._text(columns, numbers, parallel=False):
                        pass
                except FormatError as numbered:
                    found = numbered if "Row #" in str(numbered) else found
            raise found from None

    def _unreadable(self, reason: str) -> FormatError:
        """The error for text that pyarrow cannot read for this reason."""
        way_out = "" if self.skips else "; --skip-bad N leaves out up to N bad lines"
        if "straddl" in reason:
            message = f"'{self.path}' has a line of more than {BLOCK >> 20} MiB"
        elif "invalid UTF8" in reason:
            message = f"'{self.path}' is not text in UTF-8 ({reason})"
        elif self.kind == "tsv":
            message = f"'{self.path}' is not Criteo's TSV (label, 13 numbers, 26 categories): {reason}{way_out}"
        else:
            message = f"'{self.path}' is not CSV with numbers in these columns: {reason}{way_out}"
        return FormatError(message, path=str(self.path), expected=self.kind)

    def _without_bad(self, batch: Any, numbers: Sequence[str]) -> Any:
        """A batch of text without the lines that have no number in a column of numbers."""
        import pyarrow

        made, good_N = [], np.ones(batch.num_rows, bool)
        for name in batch.schema.names:
            column = batch.column(name)
            if name in numbers or name not in self.text_columns:
                unsigned = name in self._unsigned_columns
                integers = (pyarrow.uint64(), _unsigned) if unsigned else (pyarrow.int64(), _integer)
                kind, read = (pyarrow.float64(), _number) if name in numbers else integers
                try:
                    column = column.cast(kind)
                except pyarrow.ArrowInvalid:
                    values = [None if text is None else read(text) for text in column.to_pylist()]
                    good_N &= np.array([value is not False for value in values])
                    column = pyarrow.array([None if value is False else value for value in values], kind)
            made.append(column)
        return pyarrow.RecordBatch.from_arrays(made, batch.schema.names).filter(pyarrow.array(good_N))


def open_logs(paths: Sequence[Path | str], columns: Sequence[str], skip_bad: int = 0) -> tuple[list[LogFile], list[str]]:
    """The files of a log, and its columns: those given, or C1, C2, ... by default. Up to `skip_bad` lines may be bad."""
    files = [LogFile(Path(path)) for path in paths]
    if not files:
        raise BadInput("there is no log to profile; give at least one file", parameter="paths")
    there = files[0].names
    wanted = list(columns) or [name for i in range(1, len(there) + 1) if (name := f"C{i}") in there]
    if not wanted:
        message = f"'{files[0].path}' has the columns {files[0].listed}; name the columns of ids (--columns)"
        raise BadInput(message, parameter="columns", available=there)
    if len(set(wanted)) < len(wanted):
        twice = sorted({name for name in wanted if wanted.count(name) > 1})
        raise BadInput(f"columns are named twice: {', '.join(twice)}; name each once", parameter="columns", value=twice)
    for file in files:
        if twice := [name for name in wanted if file.names.count(name) > 1]:
            message = f"'{file.path}' has several columns {', '.join(twice)}; give each its own name"
            raise BadInput(message, path=str(file.path), value=twice)
        if missing := [name for name in wanted if name not in file.names]:
            raise BadInput(file.lacks(missing), parameter="columns", path=str(file.path), value=missing, available=file.names)
    with_header = [file for file in files if file.kind == "csv"]
    for name in wanted:
        if len({name in file.text_columns for file in with_header}) > 1:
            paths_with_text = [str(file.path) for file in with_header if name in file.text_columns]
            message = (
                f"column '{name}' has text in {', '.join(paths_with_text)} and numbers in other files; ids would not agree"
            )
            raise FormatError(message, path=paths_with_text[0], column=name)
    return without_bad_lines(files, wanted, (), skip_bad), wanted


def without_bad_lines(files: Sequence[LogFile], ids: Sequence[str], numbers: Sequence[str], skip_bad: int) -> list[LogFile]:
    """The files without the lines that are bad in these columns; more than `skip_bad` raise."""
    if not skip_bad:
        return list(files)
    found = [replace(file, skip_bad=True, wanted=(*ids, *numbers), numbers=tuple(numbers)) for file in files]
    if (bad := sum(file.skipped for file in found)) > skip_bad:
        message = f"{bad:,} lines are bad, and skip_bad is {skip_bad:,}; repair them, or skip {bad:,}"
        raise FormatError(message, parameter="skip_bad", value=skip_bad, needed=bad)
    return found


_EMPTY_LINE = re.compile(rb"(?<=\n)\r?\n")


def _is_number(text: str) -> bool:
    return _number(text) is not False


def _number(text: str) -> float | Literal[False]:
    try:
        return float(text)
    except ValueError:
        return False


def _integer(text: str, low: int = -(1 << 63), high: int = 1 << 63) -> int | Literal[False]:
    """A number of 64 bits, or False; 12.0 is 12."""
    whole = re.fullmatch(r"\s*([+-]?[0-9]{1,20})(\.0*)?\s*", text)
    value = int(whole[1]) if whole else high
    return low <= value < high and value


def _unsigned(text: str) -> int | Literal[False]:
    return _integer(text, 0, 1 << 64)


def parquet_file(path: Path) -> Any:
    """Open a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        # Without pre-buffering, pyarrow reads row groups of any size piece by piece and keeps no earlier ones.
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16)
    except pyarrow.ArrowInvalid as error:
        raise FormatError(f"'{path}' is not a Parquet file: {error}", path=str(path), expected="parquet") from None


@contextmanager
def _stream(path: Path) -> Iterator[Any]:
    import pyarrow

    try:
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            yield stream
    except OSError as error:  # also what a broken .gz raises
        raise FormatError(f"'{path}' cannot be read: {error}", path=str(path)) from None
