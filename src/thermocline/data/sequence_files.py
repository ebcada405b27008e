"""Histories from Parquet, or from CSV with a header.

user, item, time      one interaction per row, in any order; times are numbers, timestamps, or text such as 2026-01-31 12:00:00
items                 one history per row, oldest item first (Parquet)

Other names are given as `columns`. Items and users are whole numbers or text, as in a heat profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput, FormatError
from thermocline.heat.log_columns import bags_of_ids, one_id_each
from thermocline.heat.log_reader import LogFile, without_bad_lines

from .sequences import SequenceLog, by_user

TIMES = ("time", "timestamp", "ts", "ts_ms", "ts_s")
ITEM, ITEMS, USER = "item", "items", "user"
CHUNK = 1 << 16


def open_sequences(path: Path | str, columns: Sequence[str] = (), skip_bad: int = 0, **settings: Any) -> SequenceLog:
    """The histories of a file.

    `columns` are those of user, item and time, or one of lists. `skip_bad` bad lines, at most, are left out. `settings` are
    fields of `SequenceLog`.
    """
    file = LogFile(Path(path))
    columns = tuple(columns) or _found(file)
    if missing := [name for name in columns if name not in file.names]:
        raise FormatError(file.lacks(missing), path=str(path), parameter="columns", columns=file.names)
    if len(columns) == 1:
        log = _lists(file, columns[0], settings)
    elif len(set(columns)) == 3:
        numbers = tuple(file.float_columns.intersection(columns[2:]))
        ids = [name for name in columns if name not in numbers]
        file = without_bad_lines([file], ids, numbers, skip_bad)[0]
        log = _interactions(file, columns, numbers, settings)
    else:
        message = f"columns are {', '.join(columns)}; name those of user, item and time, or one of lists"
        raise BadInput(message, parameter="columns", value=columns)
    if not log.samples or not log.trials:
        raise BadInput(
            f"'{path}' has {log.samples} training samples and {log.trials} test histories of 3 or more items; both are needed",
            path=str(path),
        )
    return log


def _found(file: LogFile) -> tuple[str, ...]:
    if ITEMS in file.names:
        return (ITEMS,)
    time = next((name for name in TIMES if name in file.names), None)
    if time is None or not {USER, ITEM} <= set(file.names):
        needed = f"user, item and a time ({', '.join(TIMES)}), or items; name others with --columns"
        message = f"'{file.path}' has the columns {file.listed}; a sequence log has {needed}"
        raise FormatError(message, path=str(file.path), parameter="columns", columns=file.names)
    return USER, ITEM, time


def _interactions(file: LogFile, columns: Sequence[str], numbers: Sequence[str], settings: dict[str, Any]) -> SequenceLog:
    parts: list[list[NDArray[Any]]] = [[], [], []]
    for batch in file.batches(columns, 0, CHUNK, numbers):
        for name, part, read in zip(columns, parts, (_ids, _ids, times_of), strict=True):
            column = batch.column(name)
            if column.null_count:
                message = f"column '{name}' of '{file.path}' has {column.null_count} missing values or more; fill or drop them"
                raise FormatError(message, path=str(file.path), column=name, missing=column.null_count)
            part.append(read(file, name, column))
    user_N, item_N, time_N = (np.concatenate(part) if part else np.empty(0, np.int64) for part in parts)
    return by_user(user_N, item_N, time_N, column=columns[1], **settings)


def _ids(file: LogFile, name: str, column: Any) -> NDArray[Any]:
    return one_id_each(file.path, name, column, missing=0)


def times_of(file: LogFile, name: str, column: Any) -> NDArray[Any]:
    """Times as numbers that can be sorted."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    try:
        if types.is_string(kind) or types.is_large_string(kind):
            column = column.cast(pyarrow.timestamp("us"))
        if types.is_date(column.type):
            column = column.cast(pyarrow.timestamp("ms"))
        if types.is_timestamp(column.type):
            column = column.cast(pyarrow.int64())
    except pyarrow.ArrowInvalid as error:
        raise FormatError(f"column '{name}' of '{file.path}' is no time: {error}", path=str(file.path), column=name) from None
    if not types.is_integer(column.type) and not types.is_floating(column.type):
        message = f"column '{name}' of '{file.path}' is {kind}; a time is a number, a timestamp, or text of one"
        raise FormatError(message, path=str(file.path), column=name, value=str(kind))
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _lists(file: LogFile, name: str, settings: dict[str, Any]) -> SequenceLog:
    found = [bags_of_ids(file.path, name, batch.column(name)) for batch in file.batches([name], 0, CHUNK)]
    if any(bags.offsets is None for bags in found):
        message = f"column '{name}' of '{file.path}' has one item per row; a history is a list of items"
        raise FormatError(message, path=str(file.path), column=name)
    items_N = np.concatenate([np.empty(0, np.int64), *(bags.ids_N for bags in found)])
    lengths = [np.diff(bags.offsets) for bags in found if bags.offsets is not None]
    return SequenceLog(items_N, np.cumsum(np.concatenate([[0], *lengths]).astype(np.int64)), column=name, **settings)
