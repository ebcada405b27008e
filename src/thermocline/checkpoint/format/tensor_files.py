"""Safetensors files, written and read a piece at a time.

The format is a length (8 bytes, little-endian), a JSON header with name, type, shape and place of every tensor, and the bytes.
The package of that name writes tensors that all exist at once and copies them on the way; tables barely fit into memory once.
Here the shapes come first, and every tensor is made when its turn has come. What is written any reader of safetensors reads:
tensors lie without gaps (the format asks for it) and begin at multiples of 8 bytes (readers that map files ask for it), so
where sizes are odd a few bytes of filling come between, under names that begin with "_/".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import FormatError, ThermoclineError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGN = 8
_MOST_HEADER = 1 << 28
_BREAK, _BREATH = 2, 2e-4  # pieces, seconds
FILLING = "_/"
CHUNK = 1 << 19  # bytes hashed, written or read at a time: what was hashed is in a core's cache when it is written


class Entry(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Made = Tensor | Iterable[Tensor]  # a tensor, or pieces of it along its first dimension
Lot = tuple[Sequence[Entry], Callable[[], Sequence[Made]]]  # tensors that are made together, in this order


def breathe() -> None:
    """A moment's sleep after a few milliseconds of work beside training.

    Where every core is busy, the system does not look for long whether threads lie well: two of training were seen to share a
    core for 90 ms, waiting for each other by turns, while the thread that writes had the other one to itself. It does look when
    a core falls idle.
    """
    time.sleep(_BREATH)


def write_file(path: Path, lots: Sequence[Lot], gently: bool = False) -> tuple[int, str]:
    """Write a file and make it last; its bytes and its sha256. `gently`, with breaks for training."""
    header, plan = _lay_out(lots)
    digest, size = hashlib.sha256(), 0
    with writing(path), open(path, "wb", buffering=0) as file:
        for number, piece in enumerate(_pieces(header, plan)):
            digest.update(piece)
            size += len(piece)
            left = piece
            while len(left):
                left = left[file.write(left) :]
            del piece, left  # or the tensor would live while the next one is made
            if gently and number % _BREAK == 0:
                breathe()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what it means if the system does not let us write."""
    try:
        yield
    except OSError as error:
        raise ThermoclineError(
            f"'{error.filename or path}' could not be written: {error.strerror}. What was saved before is intact; make room or "
            "give a folder that can be written to, and save again"
        ) from error


def _lay_out(lots: Sequence[Lot]) -> tuple[dict[str, Any], list[tuple[Lot, list[int]]]]:
    """The header, and for each lot how many bytes of filling follow each tensor."""
    header: dict[str, Any] = {}
    plan: list[tuple[Lot, list[int]]] = []
    at = 0
    for lot in lots:
        fillings = []
        for entry in lot[0]:
            size, filling = entry.bytes, -entry.bytes % _ALIGN
            assert entry.name not in header
            header[entry.name] = _described(_NAMES[entry.dtype], entry.shape, at, size)
            if filling:
                header[f"{FILLING}{at + size}"] = _described("U8", (filling,), at + size, filling)
            at += size + filling
            fillings.append(filling)
        plan.append((lot, fillings))
    return header, plan


def _described(dtype: str, shape: Sequence[int], at: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}


def _pieces(header: Mapping[str, Any], plan: Sequence[tuple[Lot, list[int]]]) -> Iterator[memoryview]:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for lot, fillings in plan:
        yield from _pieces_of(lot, fillings)


def _pieces_of(lot: Lot, fillings: list[int]) -> Iterator[memoryview]:
    entries, make = lot
    for entry, made, filling in zip(entries, make(), fillings, strict=True):
        size = 0
        for tensor in [made] if isinstance(made, Tensor) else made:
            assert tuple(tensor.shape[1:]) == entry.shape[1:] and tensor.dtype == entry.dtype, (entry, tensor.shape)
            view = memoryview(bytes_of(tensor.detach().cpu().contiguous()))  # type: ignore[arg-type]
            size += len(view)
            for first in range(0, len(view), CHUNK):
                yield view[first : first + CHUNK]
        assert size == entry.bytes, (entry, size)
        if filling:
            yield memoryview(bytes(filling))


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor."""
    found: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


class TensorFile:
    """A file to read tensors from, whole or some of their first dimension. Nothing is kept in memory but the header."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            raise FormatError(
                f"'{path}' is missing, and the checkpoint needs it; copy the whole folder again, or use another checkpoint"
            ) from None
        self._size = os.fstat(self._file.fileno()).st_size
        if size is not None and self._size != size:
            raise damaged(path, f"it has {self._size} bytes and was written with {size}")
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER, self._size - 8):
            raise damaged(path, f"its header would have {length} bytes, and the file has {self._size}")
        try:
            header = json.loads(self._file.read(length))
            self._header = {
                name: (_TYPES[e["dtype"]], tuple(e["shape"]), *e["data_offsets"])
                for name, e in header.items()
                if name[:2] != "__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, f"its header cannot be read ({error})") from None
        self._begin = 8 + length

    def names(self) -> list[str]:
        return [name for name in self._header if not name.startswith(FILLING)]

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def entry(self, name: str) -> Entry:
        return Entry(name, *self._entry(name)[:2])

    def place(self, name: str) -> int:
        """The byte of the file where a tensor begins: for those who map it."""
        return self._begin + self._entry(name)[2]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """A tensor, or the part of it from `first` to before `last` of its first dimension."""
        dtype, shape, _, _ = self._entry(name)
        if shape:
            shape = ((shape[0] if last is None else last) - first, *shape[1:])
        out = torch.empty(shape, dtype=dtype)
        self.read_into(name, out, first)
        return out

    def read_into(self, name: str, out: Tensor, first: int = 0) -> None:
        """The same into a contiguous CPU tensor; its first dimension says how much."""
        dtype, shape, begin, end = self._entry(name)
        assert out.dtype == dtype and out.is_contiguous() and out.shape[1:] == shape[1:]
        each = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        at = self._begin + begin + first * each
        if at + out.numel() * dtype.itemsize > self._begin + end or self._begin + end > self._size:
            raise damaged(self.path, f"tensor {name!r} ends at byte {self._begin + end} of {self._size}")
        view = memoryview(bytes_of(out))  # type: ignore[arg-type]
        while len(view):
            got = os.preadv(self._file.fileno(), [view], at)
            if got == 0:
                raise damaged(self.path, "it ends too early")
            view, at = view[got:], at + got

    def _entry(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        if name not in self._header:
            raise damaged(self.path, f"it has no tensor {name!r}")
        return self._header[name]

    def close(self) -> None:
        self._file.close()


class TensorFiles:
    """Tensors of several files, no two of which have one of the same name."""

    def __init__(self, files: list[TensorFile]) -> None:
        self._first, self._files = files[0], {name: file for file in files for name in file.names()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def file(self, name: str) -> TensorFile:
        return self._files.get(name, self._first)

    def entry(self, name: str) -> Entry:
        return self.file(name).entry(name)


def sha256_of(path: Path) -> str:
    """Of a whole file."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(memoryview(buffer)[:got])
    return digest.hexdigest()


def damaged(path: Path, why: str) -> FormatError:
    return FormatError(f"'{path}' is damaged: {why}; copy it again from where it was written, or use another checkpoint")
