"""Logs as streams of ids: Parquet, CSV with a header, and Criteo's TSV, in chunks of bounded size.

A column holds one id per sample, or a list. Ids are raw 64 bits; uint64 beyond 2^63 reads as negative. Text becomes an id by a
hash (`id_of_text`). A null is no lookup and is counted as missing. In Criteo's TSV a missing category is the id 0, as in
training from such a file.

    ending                        format
    .parquet .pq                  Parquet: integers, text, or lists of them
    .csv .csv.gz                  text with a header, and commas, tabs or semicolons
    all others, also with .gz     the same if the first line begins with a letter, else Criteo's TSV: label, I1 to I13, C1 to
                                  C26 in hexadecimal

A column of CSV has text if more than a tenth of its first values are not numbers. A Parquet file knows its number of samples;
text is counted first, because slices of equal length need the number. With `skip_bad`, that count also finds bad lines.
"""

from __future__ import annotations

import csv as plain_csv
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput, FormatError

from .profile import Ints

TSV_NAMES = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
LARGEST_CHUNK = 1 << 16  # samples
VALUES = 1 << 20  # of a chunk, in all columns
BLOCK = 1 << 23  # bytes of text read at a time
HEAD, HEAD_LINES = 1 << 18, 1000  # bytes and lines that tell numbers from text


def id_of_text(text: str) -> int:
    """The id of a text: BLAKE2b of its UTF-8 bytes with a digest of 8 bytes, as a little-endian signed integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class LogIds(NamedTuple):
    """The ids of some samples: one each, or those between two offsets."""

    ids_N: Ints
    offsets: Ints | None = None  # samples + 1
    missing: int = 0

    @property
    def samples(self) -> int:
        return len(self.ids_N) if self.offsets is None else len(self.offsets) - 1

    def part(self, first: int, last: int) -> LogIds:
        """Samples `first` to `last`. Missing ids belong to the first part."""
        missing = self.missing if first == 0 else 0
        if self.offsets is None:
            return LogIds(self.ids_N[first:last], None, missing)
        begin, end = self.offsets[first], self.offsets[last]
        return LogIds(self.ids_N[begin:end], self.offsets[first : last + 1] - begin, missing)


@dataclass(frozen=True)
class LogFile:
    """One file of a log."""

    path: Path
    skip_bad: bool = False  # leave out bad lines of a file with a header
    wanted: tuple[str, ...] = ()  # columns whose bad values make a line bad

    def __post_init__(self) -> None:
        if not self.path.is_file():
            message = f"there is no file '{self.path}'; give Parquet, CSV with a header, or Criteo's TSV"
            raise BadInput(message, path=str(self.path))
        if self.path.stat().st_size == 0:
            raise FormatError(f"'{self.path}' is empty", path=str(self.path), size=0)

    @cached_property
    def kind(self) -> str:
        name = self.path.name.lower().removesuffix(".gz")
        if name.endswith((".parquet", ".pq")):
            return "parquet"
        return "csv" if name.endswith(".csv") or self._head[:1].isalpha() else "tsv"

    @cached_property
    def _head(self) -> str:
        """The beginning of a text file, up to the end of a line."""
        with _stream(self.path) as stream:
            head: str = stream.read(HEAD).decode("utf-8-sig", errors="replace")  # some programs write a byte-order mark
        return head if len(head) < HEAD // 4 else head.rpartition("\n")[0] or head

    @cached_property
    def delimiter(self) -> str:
        first = self._head.partition("\n")[0]
        return max(",\t;", key=first.count)

    @cached_property
    def text_columns(self) -> frozenset[str]:
        """The columns of a CSV file that have text."""
        rows = list(plain_csv.reader(self._head.splitlines()[: HEAD_LINES + 1], delimiter=self.delimiter))[1:]
        found = set()
        for at, name in enumerate(self.names):
            values = [row[at] for row in rows if at < len(row) and row[at]]
            if sum(not _is_number(value) for value in values) > len(values) / 10:
                found.add(name)
        return frozenset(found)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns of the file."""
        if self.kind == "parquet":
            return tuple(parquet_file(self.path).schema_arrow.names)
        if self.kind == "tsv":
            return TSV_NAMES
        return tuple(next(plain_csv.reader(self._head.splitlines(), delimiter=self.delimiter), ()))

    @cached_property
    def samples(self) -> int:
        """The samples of the file, without bad lines that are skipped."""
        if self.kind == "parquet":
            return int(parquet_file(self.path).metadata.num_rows)
        if self.skips:
            return sum(batch.num_rows for batch in self._text(self.wanted))
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
        lines, last = 0, b"\n"
        with _stream(self.path) as stream:
            while block := stream.read(1 << 20):
                lines, last = lines + block.count(b"\n"), block[-1:]
        return lines + (last != b"\n") - (self.kind == "csv")

    def chunks(self, columns: Sequence[str], first: int = 0) -> Iterator[dict[str, LogIds]]:
        """The ids of these columns from sample `first` on."""
        rows = max(1 << 8, min(LARGEST_CHUNK, int(VALUES / self._values_per_sample(columns))))
        hexadecimal = self.kind == "tsv"
        for batch in self.batches(columns, first, rows):
            yield {name: self._bags(name, batch.column(name), hexadecimal) for name in columns}

    def batches(self, columns: Sequence[str], first: int, rows: int, numbers: Sequence[str] = ()) -> Iterator[Any]:
        """Record batches of at most `rows` samples from sample `first` on. Text is read as fp32 in the columns `numbers`."""
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

    def _text(self, columns: Sequence[str], numbers: Sequence[str] = ()) -> Iterator[Any]:
        import pyarrow
        from pyarrow import csv

        tsv = self.kind == "tsv"
        text = [name for name in columns if tsv or self.skips or name in self.text_columns]
        types = {name: pyarrow.string() if name in text else pyarrow.int64() for name in columns}
        types |= dict.fromkeys(numbers, pyarrow.float32())
        skip = (lambda row: "skip") if self.skips else None
        parse = csv.ParseOptions(
            delimiter="\t" if tsv else self.delimiter, quote_char=not tsv and '"', invalid_row_handler=skip
        )
        try:
            with _stream(self.path) as stream:
                batches = csv.open_csv(
                    stream,
                    read_options=csv.ReadOptions(column_names=TSV_NAMES if tsv else None, block_size=BLOCK),
                    parse_options=parse,
                    convert_options=csv.ConvertOptions(
                        column_types=types, include_columns=list(columns),
                        null_values=[""] if tsv else None, strings_can_be_null=bool(text),
                    ),
                )  # fmt: skip
                yield from map(self._without_bad, batches) if self.skips and not tsv else batches
        except pyarrow.ArrowInvalid as error:
            form = "Criteo's TSV (label, 13 numbers, 26 categories)" if tsv else "CSV with integers in these columns"
            way_out = "" if self.skips or numbers else "; --skip-bad N leaves out up to N bad lines"
            message = f"'{self.path}' is not {form}: {error}{way_out}"
            raise FormatError(message, path=str(self.path), expected=self.kind) from None

    def _without_bad(self, batch: Any) -> Any:
        """A batch of text without the lines that have no integer in a column of integers."""
        import pyarrow

        made, good_N = [], np.ones(batch.num_rows, bool)
        for name in batch.schema.names:
            column = batch.column(name)
            if name not in self.text_columns:
                try:
                    column = column.cast(pyarrow.int64())
                except pyarrow.ArrowInvalid:
                    read = [None if value is None else _integer(value) for value in column.to_pylist()]
                    good_N &= np.array([value is not False for value in read])
                    column = pyarrow.array([None if value is False else value for value in read], pyarrow.int64())
            made.append(column)
        return pyarrow.RecordBatch.from_arrays(made, batch.schema.names).filter(pyarrow.array(good_N))

    def _bags(self, name: str, array: Any, hexadecimal: bool) -> LogIds:
        import pyarrow

        if hexadecimal:
            return LogIds(self.from_hexadecimal(name, array))
        if pyarrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        is_list = pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type)
        values, offsets, missing = array, None, array.null_count
        if is_list or pyarrow.types.is_fixed_size_list(array.type):
            offsets = _running(_numpy(array.value_lengths().fill_null(0)).astype(np.int64))
            values = array.flatten()
        if pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type):
            values = _hashed(values)
        if not pyarrow.types.is_integer(values.type):
            message = f"column '{name}' of '{self.path}' is {array.type}; ids are integers, text, or lists of them"
            raise FormatError(message, path=str(self.path), column=name, value=str(array.type))
        if values.null_count:
            before_N = _running(_numpy(values.is_valid()).astype(np.int64))
            missing = missing if offsets is None else missing + values.null_count
            offsets = before_N if offsets is None else before_N[offsets]
            values = values.drop_null()
        return LogIds(_numpy(values).astype(np.int64), offsets, missing)

    def from_hexadecimal(self, name: str, array: Any) -> Ints:
        """Hexadecimal text as numbers; missing values are 0."""
        from pyarrow import compute

        text = compute.utf8_lpad(array.fill_null(""), 8, padding="0")
        fits = compute.all(compute.equal(compute.binary_length(text), 8)).as_py()
        if fits is not False:
            begin, letters = 8 * text.offset, np.frombuffer(text.buffers()[2] or b"", np.uint8)
            digits_N8 = _DIGIT[letters[begin : begin + 8 * len(text)]].reshape(-1, 8)
            if (digits_N8 >= 0).all():
                return np.asarray((digits_N8 << np.arange(28, -1, -4)).sum(1), np.int64)
        message = f"column '{name}' of '{self.path}' has a category that is not a hexadecimal number of at most 8 digits"
        raise FormatError(message, path=str(self.path), column=name, expected="hexadecimal")


def open_logs(paths: Sequence[Path | str], columns: Sequence[str], skip_bad: int = 0) -> tuple[list[LogFile], list[str]]:
    """The files of a log, and its columns: those given, or C1, C2, ... by default. Up to `skip_bad` lines may be bad."""
    files = [LogFile(Path(path)) for path in paths]
    if not files:
        raise BadInput("there is no log to profile; give at least one file", parameter="paths")
    there = files[0].names
    wanted = list(columns) or [name for i in range(1, len(there) + 1) if (name := f"C{i}") in there]
    if not wanted:
        message = f"'{files[0].path}' has the columns {', '.join(there)}; name the columns of ids (--columns)"
        raise BadInput(message, parameter="columns", available=there)
    if len(set(wanted)) < len(wanted):
        twice = sorted({name for name in wanted if wanted.count(name) > 1})
        raise BadInput(f"columns are named twice: {', '.join(twice)}; name each once", parameter="columns", value=twice)
    for file in files:
        if twice := [name for name in wanted if file.names.count(name) > 1]:
            message = f"'{file.path}' has several columns {', '.join(twice)}; give each its own name"
            raise BadInput(message, path=str(file.path), value=twice)
        if missing := [name for name in wanted if name not in file.names]:
            message = f"'{file.path}' has no column {', '.join(missing)}; it has {', '.join(file.names)}"
            raise BadInput(message, parameter="columns", path=str(file.path), value=missing, available=file.names)
    with_header = [file for file in files if file.kind == "csv"]
    for name in wanted:
        if len({name in file.text_columns for file in with_header}) > 1:
            paths_with_text = [str(file.path) for file in with_header if name in file.text_columns]
            message = (
                f"column '{name}' has text in {', '.join(paths_with_text)} and numbers in other files; ids would not agree"
            )
            raise FormatError(message, path=paths_with_text[0], column=name)
    if skip_bad:
        files = [replace(file, skip_bad=True, wanted=tuple(wanted)) for file in files]
        if (bad := sum(file.skipped for file in files)) > skip_bad:
            message = f"{bad:,} lines are bad, and skip_bad is {skip_bad:,}; repair them, or skip {bad:,}"
            raise FormatError(message, parameter="skip_bad", value=skip_bad, needed=bad)
    return files, wanted


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _integer(text: str) -> int | Literal[False]:
    """A number of 64 bits, or False."""
    value = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", text) else 1 << 63
    return -(1 << 63) <= value < 1 << 63 and value


def _hashed(texts: Any) -> Any:
    """The ids of texts."""
    import pyarrow

    coded = texts.dictionary_encode()
    ids = [id_of_text(text) for text in coded.dictionary.to_pylist()]
    return pyarrow.array(ids, pyarrow.int64()).take(coded.indices)


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


def _numpy(array: Any) -> NDArray[Any]:
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _running(lengths_B: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int64)


_DIGIT = np.full(256, -1, np.int64)
for _value, _letter in enumerate("0123456789abcdef"):
    _DIGIT[[ord(_letter), ord(_letter.upper())]] = _value
