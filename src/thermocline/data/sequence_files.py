"""Histories from Parquet files.

user, item, time      one interaction per row, in any order; the time column is `time`, `timestamp`, `ts`, `ts_ms` or `ts_s`
items                 one history per row, oldest item first
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from thermocline.errors import BadInput, FormatError
from thermocline.heat.log_reader import parquet_file

from .sequences import Ints, SequenceLog, by_user

TIMES = ("time", "timestamp", "ts", "ts_ms", "ts_s")
ITEM, ITEMS, USER = "item", "items", "user"


def open_sequences(path: Path | str, **settings: Any) -> SequenceLog:
    """The histories of a file; `settings` are fields of `SequenceLog`."""
    path = Path(path)
    if not path.is_file():
        message = f"there is no file '{path}'; give a Parquet file with the columns user, item and time, or items"
        raise BadInput(message, path=path)
    file = parquet_file(path)
    names = file.schema_arrow.names
    if ITEMS in names:
        log = _lists(file, path, settings)
    else:
        log = _interactions(file, path, settings)
    if not log.samples or not log.trials:
        raise BadInput(
            f"'{path}' has {log.samples} training samples and {log.trials} test histories of 3 or more items; both are needed",
            path=path,
        )
    return log


def _interactions(file: Any, path: Path, settings: dict[str, Any]) -> SequenceLog:
    names = file.schema_arrow.names
    time = next((name for name in TIMES if name in names), None)
    if time is None or not {USER, ITEM} <= set(names):
        needed = f"user, item and a time ({', '.join(TIMES)}), or items"
        raise FormatError(f"'{path}' has the columns {', '.join(names)}; a sequence log has {needed}", path=path, columns=names)
    table = file.read(columns=[USER, ITEM, time])
    user_N, item_N, time_N = (_integers(table.column(name), name, path) for name in (USER, ITEM, time))
    return by_user(user_N, item_N, time_N, column=ITEM, **settings)


def _lists(file: Any, path: Path, settings: dict[str, Any]) -> SequenceLog:
    import pyarrow

    column = file.read(columns=[ITEMS]).column(ITEMS).combine_chunks()
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        message = f"column {ITEMS!r} of '{path}' is {column.type}; a history is a list of integers"
        raise FormatError(message, path=path, column=ITEMS)
    lengths = np.nan_to_num(column.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)  # a null is empty
    items_N = _integers(column.flatten(), ITEMS, path)
    return SequenceLog(items_N, np.concatenate([[0], np.cumsum(lengths)]), column=ITEMS, **settings)


def _integers(column: Any, name: str, path: Path) -> Ints:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_timestamp(kind):
        column = column.cast(pyarrow.int64())
    elif not pyarrow.types.is_integer(kind) or column.null_count:
        message = f"column {name!r} of '{path}' is {kind} with {column.null_count} nulls; it must hold integers without nulls"
        raise FormatError(message, path=path, column=name)
    return np.array(column.to_numpy(), np.int64)
