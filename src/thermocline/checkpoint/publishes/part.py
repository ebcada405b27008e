"""One rank's part of a publish: changed rows as stored, with what a server needs to refuse a bad one.

    part      size of JSON (8 bytes), JSON, arrays in the order of the JSON, each padded to 8 bytes
    JSON      the fields of `PublishPart`; of each table rows, row bytes and meta words; of each table with elastic ids the rows
              that got other ids; of each dense tensor dtype and shape; of steps (`row_steps.py`) tables and sizes

The same bytes go over a connection and into the log of the checkpoint folder. A part with `since` s and `number` n has all rows
that changed after publish s: it fits a server whose publish is from s to n - 1. Parts of all ranks make a publish. A part with
steps fits publish s only, and is not for the log.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadPublish
from thermocline.ids.moved_ids import MovedIds

from .row_delta import RowDelta, are_rows
from .row_steps import MOST_CODES, RowSteps, step_codes

_SIZE = struct.Struct("<Q")
_MAX_HEADER, MAX_RANKS, _MAX_TABLES = 1 << 22, 1 << 14, 1 << 16
_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
           torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}  # fmt: skip
# Bits of an infinite or NaN 16-bit half of a meta word: bf16 and fp16.
_EXPONENTS = {F.INT4: 0x7F80, F.INT2: 0x7F80, F.INT4_AFFINE: 0x7C00, F.INT2_AFFINE: 0x7C00}


class PublishedTable(NamedTuple):
    """A table as servers hold it."""

    name: str
    rows: int
    dim: int
    format: int


def model_signature(tables: Sequence[PublishedTable]) -> str:
    """A digest that is equal for models whose rows fit each other."""
    return hashlib.sha256(json.dumps(sorted(map(list, tables))).encode()).hexdigest()


@dataclass(frozen=True)
class PublishPart:
    """Rows that one rank publishes. `run` names the training run since its last start."""

    run: int
    number: int
    since: int
    model: str  # signature
    deltas: Mapping[str, RowDelta]
    dense: Mapping[str, Tensor] = field(default_factory=dict)
    ids: Mapping[str, MovedIds] = field(default_factory=dict)  # by table
    rank: int = 0
    ranks: int = 1
    at: float = 0.0  # Unix time of the step
    step: int = 0
    # Changed rows that wait for a later publish: (age in seconds, share of all updates), and the bytes a second of the budget.
    waiting: tuple[tuple[float, float], ...] = ()
    steps: Sequence[RowSteps] = ()

    def encode(self) -> list[Any]:
        """The bytes of the part, in pieces that are not copied."""
        tables = [(name, len(each.rows_K), each.codes_KB.shape[1], each.meta_KW.shape[1]) for name, each in self.deltas.items()]
        dense = {name: tensor.detach().cpu().contiguous() for name, tensor in self.dense.items()}
        fields = {name: getattr(self, name) for name in _NUMBERS}
        fields |= {"tables": tables, "dense": [(name, str(t.dtype)[6:], list(t.shape)) for name, t in dense.items()]}
        fields["ids"] = [(name, len(moved.rows_K)) for name, moved in self.ids.items()]
        fields["steps"] = [(each.tables, len(each.codes_DK), each.step, [*map(len, each.pieces)]) for each in self.steps]
        text = json.dumps(fields).encode()
        arrays: list[NDArray[Any]] = [np.frombuffer(text, np.uint8)]
        for each in self.deltas.values():
            arrays += [each.rows_K, each.meta_KW, each.codes_KB]
        arrays += [tensor.numpy() for moved in self.ids.values() for tensor in moved]
        arrays += [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in dense.values()]
        arrays += [np.frombuffer(piece, np.uint8) for each in self.steps for piece in each.pieces]
        pieces: list[Any] = [_SIZE.pack(len(text))]
        for array in arrays:
            pieces += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, bytes(-array.nbytes % 8)]
        return pieces

    @property
    def size(self) -> int:
        """The length of `encode`."""
        return sum(len(piece) for piece in self.encode())

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> PublishPart:
        """The inverse of `encode`; arrays share the memory of `data`. Raises `BadPublish` if it is damaged."""
        try:
            (size,) = _SIZE.unpack_from(data)
            if size > _MAX_HEADER:
                raise ValueError(f"its header has {size} bytes")
            fields = json.loads(bytes(memoryview(data)[_SIZE.size : _SIZE.size + size]))
            read = _Arrays(data, _SIZE.size + size + -size % 8)
            deltas = {str(name): read.delta(rows, width, words) for name, rows, width, words in fields["tables"]}
            ids = {str(name): read.moved(rows) for name, rows in fields["ids"]}
            dense = {str(name): read.tensor(_DTYPES[dtype], shape) for name, dtype, shape in fields["dense"]}
            claimed = [_claimed(*each) for each in fields.get("steps", ())]
            _check_sizes(claimed)
            steps = tuple(read.steps(*each) for each in claimed)
            if read.at != len(data) or max(len(deltas), len(dense), len(ids)) > _MAX_TABLES:
                raise ValueError(f"it has {len(data)} bytes, and its header {read.at}")
            numbers = {name: kind(fields[name]) for name, kind in _NUMBERS.items()}
            waiting = tuple((float(age), float(share)) for age, share in numbers.pop("waiting"))
            part = cls(deltas=deltas, dense=dense, ids=ids, waiting=waiting, steps=steps, **numbers)
        except (ValueError, KeyError, TypeError, struct.error, RecursionError, OverflowError) as error:
            raise BadPublish(f"a publish is damaged: {error}", "damaged") from None
        if not (0 <= part.rank < part.ranks <= MAX_RANKS and 0 <= part.since < part.number):
            where = f"rank {part.rank} of {part.ranks}, publish {part.number} after {part.since}"
            raise BadPublish(f"a publish is damaged: {where}", "damaged")
        return part

    def check(self, tables: Sequence[PublishedTable]) -> None:
        """Raise `BadPublish` unless all rows are rows of the tables, and all values are finite."""
        if self.model != model_signature(tables):
            words = "the publish is of other tables (names, rows, columns or precisions); serve a checkpoint of its model"
            raise BadPublish(words, "model")
        known = {table.name: table for table in tables}
        for name, delta in self.deltas.items():
            if name not in known:
                raise BadPublish(f"the publish has a table {name[:100]!r}; there are {', '.join(known)}", "model", table=name)
            _check_delta(known[name], delta)
        for name, tensor in self.dense.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise BadPublish(f"dense parameter {name!r} has a value that is not finite", "values", parameter=name)


_NUMBERS: dict[str, Any] = {
    "run": int, "number": int, "since": int, "model": str, "rank": int, "ranks": int, "at": float, "step": int, "waiting": list
}  # fmt: skip


class _Arrays:
    """Reads the arrays of a part one after another."""

    def __init__(self, data: bytes | bytearray | memoryview, at: int) -> None:
        self._data, self.at = data, at

    def _read(self, dtype: Any, *shape: int) -> NDArray[Any]:
        if min(shape) < 0:
            raise ValueError(f"an array has the shape {shape}")
        count = int(np.prod(shape, dtype=object))
        array = np.frombuffer(self._data, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at += array.nbytes + -array.nbytes % 8
        return array.reshape(shape)

    def delta(self, rows: int, width: int, words: int) -> RowDelta:
        rows_K, meta_KW = self._read(np.int64, rows), self._read(np.int32, rows, words)
        return RowDelta(rows_K, self._read(np.uint8, rows, width), meta_KW)

    def moved(self, rows: int) -> MovedIds:
        rows_K, ids_K = (self._read(np.int64, rows).copy() for _ in range(2))
        return MovedIds(*map(torch.from_numpy, (rows_K, ids_K, self._read(np.uint8, rows) != 0)))

    def steps(self, tables: Sequence[tuple[str, int]], dim: int, step: float, sizes: Sequence[int]) -> RowSteps:
        return RowSteps.decode(tables, dim, step, [self._read(np.uint8, size).tobytes() for size in sizes])

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        found = self._read(np.uint8, size).copy()
        return torch.from_numpy(found).view(dtype).reshape(tuple(shape)) if size else torch.empty(tuple(shape), dtype=dtype)


ClaimedSteps = tuple[list[tuple[str, int]], int, float, Sequence[int]]  # tables, columns, step, sizes of pieces


def _claimed(tables: Sequence[Sequence[Any]], dim: Any, step: Any, sizes: Sequence[int]) -> ClaimedSteps:
    return [(str(name), int(rows)) for name, rows in tables], int(dim), float(step), sizes


def _check_sizes(claimed: Sequence[ClaimedSteps]) -> None:
    """Raise ValueError unless steps have each table once, and few codes in all: a few bytes may stand for many."""
    names = [name for tables, *_ in claimed for name, _ in tables]
    sizes = [(sum(max(rows, 0) for _, rows in tables), max(dim, 0)) for tables, dim, *_ in claimed]
    codes = sum(step_codes(rows, dim) for rows, dim in sizes)
    if len(set(names)) < len(names) or codes > MOST_CODES:
        raise ValueError(f"steps have {codes:,} codes of {len(names)} tables; {MOST_CODES:,} may be, and each table once")


def check_steps(table: PublishedTable | None, steps: RowSteps, rows: slice) -> None:
    """Raise `BadPublish` unless steps change rows of a table."""
    rows_K = steps.rows_K[rows]
    if table is None or table.dim != len(steps.codes_DK):
        raise BadPublish("the publish has steps of another table", "model")
    if not are_rows(rows_K, table.rows):
        raise BadPublish(f"steps of table {table.name!r} must be of rows 0 to {table.rows - 1}", "damaged", table=table.name)


def _check_delta(table: PublishedTable, delta: RowDelta) -> None:
    shape = F.row_bytes(table.format, table.dim), F.META_WORDS[table.format]
    if (found := (delta.codes_KB.shape[1], delta.meta_KW.shape[1])) != shape:
        words = f"rows of table {table.name!r} have {found[0]} bytes and {found[1]} meta words, not {shape[0]} and {shape[1]}"
        raise BadPublish(words, "model", table=table.name)
    rows_K = delta.rows_K
    if not are_rows(rows_K, table.rows):
        words = f"rows of table {table.name!r} must be 0 to {table.rows - 1}, ascending and each once"
        raise BadPublish(words, "damaged", table=table.name, rows=table.rows)
    bad_K = not_finite(table.format, delta.codes_KB, delta.meta_KW)
    if bad_K.any():
        row = int(rows_K[int(bad_K.argmax())])
        words = f"{int(bad_K.sum())} rows of table {table.name!r} are not finite (row {row}): look for NaN in the training step"
        raise BadPublish(words, "values", table=table.name, row=row)


def not_finite(format: int, codes_KB: NDArray[np.uint8], meta_KW: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which rows hold a NaN or an Inf, or a pointer into a cache in place of their scale."""
    bad_K: NDArray[np.bool_] = np.zeros(len(codes_KB), np.bool_)
    if format in (F.FP32, F.FP16):
        values_KD = np.ascontiguousarray(codes_KB).view(np.float32 if format == F.FP32 else np.float16)
        bad_K |= ~np.isfinite(values_KD).all(axis=1)
        return bad_K
    if format == F.BF16:
        bad_K |= (np.ascontiguousarray(codes_KB).view(np.uint16) & 0x7F80 == 0x7F80).any(axis=1)
        return bad_K
    if (bits := _EXPONENTS.get(format)) is not None:
        halves_K2 = np.ascontiguousarray(meta_KW).view(np.uint16).reshape(-1, 2)
        bad_K |= (halves_K2 & bits == bits).any(axis=1)
    else:
        bad_K |= ~np.isfinite(np.ascontiguousarray(meta_KW).view(np.float32)).all(axis=1)
    if format == F.FP8:
        bad_K |= (codes_KB & 0x7F == 0x7F).any(axis=1)
    bad_K |= meta_KW[:, 0] < 0
    return bad_K


def merge_parts(parts: Sequence[PublishPart]) -> dict[str, list[RowDelta]]:
    """Deltas of several parts by table, in the order of the parts."""
    found: dict[str, list[RowDelta]] = {}
    for part in parts:
        for name, delta in part.deltas.items():
            if len(delta.rows_K):
                found.setdefault(name, []).append(delta)
    return found


def moved_ids(parts: Sequence[PublishPart]) -> dict[str, MovedIds]:
    """Ids of several parts that moved, by table; later ones win."""
    found: dict[str, MovedIds] = {}
    for part in parts:
        for name, moved in part.ids.items():
            if len(moved.rows_K):
                found[name] = found[name].merged(moved) if name in found else moved
    return found


def dense_of(parts: Sequence[PublishPart]) -> Iterator[tuple[str, Tensor]]:
    """Dense parameters of several parts; later ones win."""
    for part in parts:
        yield from part.dense.items()
