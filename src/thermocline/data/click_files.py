"""Click logs in files: any columns of Parquet or CSV, Criteo's text format, and MovieLens pairs.

    Parquet, CSV            a label of 0 and 1, numbers and ids; `ClickColumns` names the columns, by default those of Criteo
    Criteo TSV (also .gz)   label, I1..I13, C1..C26 between tabs, no header; categories in hexadecimal; empty = missing
    MovieLens               columns user, item, rating, if none is named; a rating of 4 or 5 is a click; no dense features

A dense feature x becomes log(1 + max(x, 0)), because counts are heavy-tailed; a missing one becomes 0. A missing category is
the raw id 0. `heat/log_reader.py` reads all formats in bounded chunks, and gives text the same ids as a heat profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput, FormatError
from thermocline.heat.log_columns import from_hexadecimal, one_id_each
from thermocline.heat.log_reader import LogFile, without_bad_lines
from thermocline.ids.idmap import IdMap

from .click_log import ClickLog, Clicks, MemoryLog, rebatch
from .id_rows import IdRows, MappedRows, RawIds, Vocabulary, hashed_rows
from .random_bits import bits, key_of, right

if TYPE_CHECKING:
    import pyarrow

CHUNK = 1 << 16
MISSING = 0  # id
TRAIN_SHARE = 0.8
_PAIR_SPLIT = 20  # key of the hash that splits MovieLens


def transform_dense(raw: Tensor) -> Tensor:
    """log(1 + max(x, 0)) in fp32, with NaN (missing) as 0."""
    return torch.log1p(raw.float().nan_to_num(nan=0.0).clamp(min=0.0))


@dataclass(frozen=True)
class ClickColumns:
    """The columns of a click log. Empty ones are those of Criteo: label, I1, I2, ... and C1, C2, ...

    A label "rating>=4" is 1 where the column `rating` is at least 4.
    """

    label: str = ""
    dense: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()


CRITEO = ClickColumns()


class ClickFile:
    """A file of samples with raw ids."""

    def __init__(self, path: Path | str, columns: ClickColumns = CRITEO, skip_bad: int = 0) -> None:
        self.path, self._file = Path(path), LogFile(Path(path))
        names = set(self._file.names)
        self.pairs = columns == CRITEO and {"user", "item", "rating"} <= names
        if self.pairs:
            columns = ClickColumns("rating>=4", (), ("user", "item"))
        label, _, least = columns.label.partition(">=")
        self.label_name, self._least = label.strip() or "label", _threshold(columns.label, least)
        self.id_names = columns.ids or _numbered("C", names)
        self.dense_names = columns.dense or (() if self.pairs else _numbered("I", names))
        if not self.id_names:
            message = f"'{self.path}' has the columns {self._file.listed}; name those of ids (--ids)"
            raise FormatError(message, path=str(self.path), columns=sorted(names))
        self._check_names(names)
        self._numbers = (self.label_name, *self.dense_names)
        self._file = without_bad_lines([self._file], self.id_names, self._numbers, skip_bad)[0]

    def _check_names(self, names: set[str]) -> None:
        for parameter, wanted in (("label", [self.label_name]), ("dense", self.dense_names), ("ids", self.id_names)):
            if missing := [name for name in wanted if name not in names]:
                message = f"{self._file.lacks(missing)} (name others with --{parameter})"
                raise FormatError(message, path=str(self.path), parameter=parameter, columns=sorted(names))
        wanted = [self.label_name, *self.dense_names, *self.id_names]
        if twice := sorted({name for name in wanted if wanted.count(name) > 1}):
            message = f"{', '.join(twice)} of '{self.path}' is named twice; a column is the label, a number or an id"
            raise BadInput(message, parameter="ids", path=str(self.path), value=twice)

    @property
    def skipped(self) -> int:
        """Bad lines that are left out."""
        return self._file.skipped

    @property
    def samples(self) -> int:
        return self._file.samples

    def chunks(self, first: int = 0, count: int | None = None) -> Iterator[Clicks]:
        """Samples `first` to `first + count` in chunks of at most 65,536."""
        left = self.samples - first if count is None else min(count, self.samples - first)
        columns = [*self._numbers, *self.id_names]
        for batch in self._file.batches(columns, first, CHUNK, self._numbers) if left > 0 else ():
            yield self._clicks(batch.slice(0, left))
            left -= batch.num_rows
            if left <= 0:
                return

    def _clicks(self, batch: pyarrow.RecordBatch) -> Clicks:
        label_B = torch.from_numpy(self._floats(batch.column(self.label_name)))
        if self._least is not None:
            label_B = (label_B >= self._least).float()
        elif not ((label_B == 0) | (label_B == 1)).all():
            name, other = self.label_name, label_B[(label_B != 0) & (label_B != 1)][0].item()
            message = (
                f"column '{name}' of '{self.path}' has {other:g}; labels are 0 and 1, or a threshold (--label '{name}>=4')"
            )
            raise FormatError(message, path=str(self.path), column=name, value=other)
        dense = [self._floats(batch.column(name)) for name in self.dense_names]
        dense_BI = torch.from_numpy(np.stack(dense, axis=1)) if dense else torch.empty(len(label_B), 0)
        ids = [self._ids(name, batch.column(name)) for name in self.id_names]
        return Clicks(label_B, transform_dense(dense_BI), torch.from_numpy(np.stack(ids, axis=1)))

    def _floats(self, column: Any) -> NDArray[np.float32]:
        """A column as numbers; missing values become NaN."""
        import pyarrow

        try:
            return np.array(column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False), np.float32)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            message = f"'{self.path}' has a label or dense feature that is not a number: {error}"
            raise FormatError(message, path=str(self.path)) from None

    def _ids(self, name: str, column: Any) -> NDArray[np.int64]:
        if self._file.kind == "tsv":
            return from_hexadecimal(self.path, name, column)
        return one_id_each(self.path, name, column, MISSING)


@dataclass(frozen=True)
class FileLog:
    """A range of samples of a file, with ids mapped to rows."""

    file: ClickFile
    ids: IdRows
    first: int
    samples: int

    @property
    def rows(self) -> tuple[int, ...]:
        return self.ids.rows

    @property
    def names(self) -> tuple[str, ...]:
        return self.file.id_names

    @property
    def dense(self) -> int:
        return len(self.file.dense_names)

    def batches(self, size: int, epoch: int = 0, first: int = 0) -> Iterator[Clicks]:
        done = first * size
        for batch in rebatch(self.file.chunks(self.first + done, self.samples - done), size):
            yield batch._replace(ids_BF=self.ids(batch.ids_BF))

    def raw(self) -> tuple[FileLog, tuple[IdMap, ...]]:
        """The log with raw ids, and the id maps that tables then need."""
        assert isinstance(self.ids, (Vocabulary, MappedRows))
        return replace(self, ids=RawIds(self.rows)), self.ids.maps


def open_log(
    path: Path | str, test: Path | str | None = None, hashed: int | None = None, seed: int = 0, raw: bool = False,
    columns: ClickColumns = CRITEO, skip_bad: int = 0,
) -> tuple[ClickLog, ClickLog]:  # fmt: skip
    """The training and the test part of a log; without a second file, the last 20% are the test part.

    Ids are mapped by a vocabulary of the training part, or hashed to `hashed` rows of each table. MovieLens pairs are split by
    a fixed hash of the pair and shuffled by `seed`, because the file is sorted by user.
    `skip_bad` bad lines of a file, at most, are left out.
    """
    file = ClickFile(path, columns, skip_bad)
    if file.pairs:
        if test is not None or hashed is not None:
            message = f"'{path}' holds pairs, which have a fixed split and vocabulary; omit test and hash"
            raise BadInput(message, path=str(path))
        return _open_pairs(file, seed, raw)
    other = ClickFile(test, columns, skip_bad) if test is not None else file
    if (other.dense_names, other.id_names) != (file.dense_names, file.id_names):
        message = f"'{path}' and '{test}' have different columns: {len(file.id_names)} and {len(other.id_names)} ids"
        raise BadInput(message, parameter="test")
    count = file.samples if test is not None else int(file.samples * TRAIN_SHARE)
    ids: IdRows
    if raw:
        ids = RawIds()
    elif hashed is not None:
        ids = hashed_rows([hashed] * len(file.id_names))
    else:
        ids = Vocabulary((chunk.ids_BF for chunk in file.chunks(0, count)), len(file.id_names))
    start = 0 if test is not None else count
    return FileLog(file, ids, 0, count), FileLog(other, ids, start, other.samples - start)


def _open_pairs(file: ClickFile, seed: int, raw: bool) -> tuple[MemoryLog, MemoryLog]:
    clicks = Clicks.cat(list(file.chunks()))
    pair_N = clicks.ids_BF[:, 0] << 32 | clicks.ids_BF[:, 1]
    is_train_N = right(bits(key_of(_PAIR_SPLIT), pair_N), 32) < int(TRAIN_SHARE * 2**32)
    train, test = (Clicks(*(part[chosen_N] for part in clicks)) for chosen_N in (is_train_N, ~is_train_N))
    ids: IdRows = RawIds() if raw else Vocabulary([train.ids_BF], 2)
    train, test = (part._replace(ids_BF=ids(part.ids_BF)) for part in (train, test))
    return MemoryLog(train, ids.rows, shuffle=seed), MemoryLog(test, ids.rows)


def _threshold(label: str, text: str) -> float | None:
    """The number after ">=" in a label."""
    try:
        return float(text) if ">=" in label else None
    except ValueError:
        message = f"label is '{label}'; write a column, or a column and a number, as rating>=4"
        raise BadInput(message, parameter="label", value=label) from None


def _numbered(letter: str, names: set[str]) -> tuple[str, ...]:
    """Existing columns among I1, I2, ... (or C1, C2, ...), in order."""
    return tuple(name for i in range(1, len(names) + 1) if (name := f"{letter}{i}") in names)
