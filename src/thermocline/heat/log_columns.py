"""Columns of a log as ids.

integers          raw 64 bits; uint64 beyond 2^63 reads as negative
text              an id by a hash, `id_of_text`; in Criteo's TSV a hexadecimal number
floats            integers, if all are whole; NaN is missing (pandas writes integers beside missing ones so)
booleans          0 and 1
lists of these    the ids of a bag
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import FormatError

from .profile import Ints
from .text_ids import id_of_text

_LARGEST_FLOAT = 1 << 53  # whole numbers beyond are not exact


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


def bags_of_ids(path: Path, name: str, array: Any) -> LogIds:
    """The ids of a column; nulls are left out and counted."""
    values, offsets = array, None
    if _is_list(array.type):
        offsets = _running(_numpy(array.value_lengths().fill_null(0)).astype(np.int64))
        values = array.flatten()
    values = _integers(path, name, values)
    missing = values.null_count + (0 if offsets is None else array.null_count)
    if values.null_count:
        before_N = _running(_numpy(values.is_valid()).astype(np.int64))
        offsets = before_N if offsets is None else before_N[offsets]
        values = values.drop_null()
    return LogIds(_numpy(values).astype(np.int64), offsets, missing)


def one_id_each(path: Path, name: str, array: Any, missing: int) -> Ints:
    """The id of each sample; `missing` stands for a null."""
    if _is_list(array.type):
        message = f"column '{name}' of '{path}' is {array.type}; this model takes one id per sample"
        raise FormatError(message, path=str(path), column=name, value=str(array.type))
    return np.array(_numpy(_integers(path, name, array).fill_null(missing))).astype(np.int64)


def _integers(path: Path, name: str, values: Any) -> Any:
    """A column without lists as integers."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if types.is_string(values.type) or types.is_large_string(values.type):
        return _hashed(values)
    if types.is_boolean(values.type):
        return values.cast(pyarrow.int64())
    whole = _whole(values) if types.is_floating(values.type) else values
    if whole is None or not types.is_integer(whole.type):
        message = f"column '{name}' of '{path}' is {values.type}; ids are whole numbers, text, or lists of them"
        raise FormatError(message, path=str(path), column=name, value=str(values.type))
    return whole


def _hashed(texts: Any) -> Any:
    """The ids of texts."""
    import pyarrow

    coded = texts.dictionary_encode()
    ids = [id_of_text(text) for text in coded.dictionary.to_pylist()]
    return pyarrow.array(ids, pyarrow.int64()).take(coded.indices)


def _whole(values: Any) -> Any:
    """Floats as integers; None if some are not whole."""
    import pyarrow

    floats_N = _numpy(values.cast(pyarrow.float64()))  # a null becomes NaN
    absent_N = np.isnan(floats_N)
    floats_N = np.where(absent_N, 0, floats_N)
    if not (np.abs(floats_N) <= _LARGEST_FLOAT).all() or (floats_N != np.trunc(floats_N)).any():
        return None
    return pyarrow.array(floats_N.astype(np.int64), mask=absent_N)


def from_hexadecimal(path: Path, name: str, array: Any) -> Ints:
    """Hexadecimal text as numbers; missing values are 0."""
    from pyarrow import compute

    text = compute.utf8_lpad(array.fill_null(""), 8, padding="0")
    fits = compute.all(compute.equal(compute.binary_length(text), 8)).as_py()
    if fits is not False:
        begin, letters = 8 * text.offset, np.frombuffer(text.buffers()[2] or b"", np.uint8)
        digits_N8 = _DIGIT[letters[begin : begin + 8 * len(text)]].reshape(-1, 8)
        if (digits_N8 >= 0).all():
            return np.asarray((digits_N8 << np.arange(28, -1, -4)).sum(1), np.int64)
    message = f"column '{name}' of '{path}' has a category that is not a hexadecimal number of at most 8 digits"
    raise FormatError(message, path=str(path), column=name, expected="hexadecimal")


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _numpy(array: Any) -> NDArray[Any]:
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _running(lengths_B: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int64)


_DIGIT = np.full(256, -1, np.int64)
for _value, _letter in enumerate("0123456789abcdef"):
    _DIGIT[[ord(_letter), ord(_letter.upper())]] = _value
