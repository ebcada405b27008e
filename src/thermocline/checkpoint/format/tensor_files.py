"""Safetensors files, written and read in pieces.

A file is a length (8 bytes, little-endian), a JSON header with name, type, shape and offsets of every tensor, and the bytes.
The safetensors package writes tensors that exist all at once and copies them; tables barely fit into memory once. Here shapes
come first, and each tensor is made when it is written. Any safetensors reader opens the files: tensors lie without gaps, as the
format requires, and begin at multiples of 8 bytes, as readers that map files require. Padding tensors have names that begin
with "_/".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import FormatError, ThermoclineError, open_regular

from .manifest import FileEntry

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGN = 8
_MAX_HEADER = 1 << 28
_PAUSE_EVERY, _PAUSE_SECONDS = 2, 2e-4  # chunks, seconds
PADDING = "_/"
CHUNK = 1 << 19  # bytes hashed, written or read at a time: hashed bytes are still in the core's cache when they are written


class TensorInfo(NamedTuple):
    """Name, type and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def padding(self) -> int:
        """Bytes between this tensor and the next one."""
        return -self.bytes % _ALIGN


class TensorGroup(NamedTuple):
    """Tensors that are made together, in this order; `make` gives each as a tensor or as pieces along its first dimension."""

    tensors: Sequence[TensorInfo]
    make: Callable[[], Sequence[Tensor | Iterable[Tensor]]]


def yield_core() -> None:
    """Sleep briefly after a few milliseconds of background work.

    The scheduler rebalances threads when a core falls idle. Without a pause, two training threads were seen to share one core
    for 90 ms while the writer thread had the other core to itself.
    """
    time.sleep(_PAUSE_SECONDS)


def write_file(path: Path, groups: Sequence[TensorGroup], background: bool = False) -> FileEntry:
    """Write and fsync a file of a save. In the background, pause for training now and then."""
    digest, size = hashlib.sha256(), 0
    with explain_write_errors(path), open(path, "wb", buffering=0) as file:
        for number, piece in enumerate(_pieces(groups)):
            digest.update(piece)
            size += len(piece)
            left = piece
            while len(left):
                left = left[file.write(left) :]
            del piece, left  # frees the tensor before the next one is made
            if background and number % _PAUSE_EVERY == 0:
                yield_core()
        os.fsync(file.fileno())
    return FileEntry(name=f"{path.parent.name}/{path.name}", bytes=size, sha256=digest.hexdigest())


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of writing into an error that says what is still intact."""
    try:
        yield
    except OSError as error:
        raise ThermoclineError(
            f"'{error.filename or path}' could not be written: {error.strerror}. Earlier saves are intact; free some space or "
            "give a writable folder, and save again"
        ) from error


def _header(groups: Sequence[TensorGroup]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for entry in (entry for group in groups for entry in group.tensors):
        assert entry.name not in header
        end = at + entry.bytes
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end + entry.padding
        if entry.padding:
            header[f"{PADDING}{end}"] = {"dtype": "U8", "shape": [entry.padding], "data_offsets": [end, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def _pieces(groups: Sequence[TensorGroup]) -> Iterator[memoryview]:
    yield memoryview(_header(groups))
    for group in groups:
        yield from _pieces_of(group)


def _pieces_of(group: TensorGroup) -> Iterator[memoryview]:
    for entry, made in zip(group.tensors, group.make(), strict=True):
        size = 0
        for tensor in [made] if isinstance(made, Tensor) else made:
            assert tuple(tensor.shape[1:]) == entry.shape[1:] and tensor.dtype == entry.dtype, (entry, tensor.shape)
            view = memoryview(bytes_of(tensor.detach().cpu().contiguous()))  # type: ignore[arg-type]
            size += len(view)
            for first in range(0, len(view), CHUNK):
                yield view[first : first + CHUNK]
        assert size == entry.bytes, (entry, size)
        if entry.padding:
            yield memoryview(bytes(entry.padding))


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    found: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


class TensorFile:
    """An open safetensors file; reads tensors, or ranges of their first dimension. Keeps only the header in memory."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
        except FileNotFoundError:
            raise FormatError(
                f"'{path}' is missing; copy the whole checkpoint folder again, or use another checkpoint", path=path
            ) from None
        self._size = os.fstat(self._file.fileno()).st_size
        if size is not None and self._size != size:
            raise damaged(path, f"the file has {self._size} bytes and was written with {size}")
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, self._size - 8):
            raise damaged(path, f"the header claims {length} bytes and the file has {self._size}")
        self._begin = 8 + length
        try:
            header = json.loads(self._file.read(length))
            self._header = {
                name: (_TYPES[e["dtype"]], tuple(e["shape"]), *e["data_offsets"])
                for name, e in header.items()
                if name[:2] != "__"
            }
            room = self._size - self._begin
            wrong = [name for name, entry in self._header.items() if len(entry) != 4 or not _is_consistent(*entry)]
            at = 0
            for begin, end, name in () if wrong else sorted((*entry[2:], name) for name, entry in self._header.items()):
                wrong += [name] * (begin != at)  # the format has no gaps, and no byte belongs to two tensors
                at = end
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, f"the header cannot be read ({error})") from None
        if wrong or at != room:
            which = repr(wrong[0][:100]) if wrong else "the last"
            raise damaged(path, f"tensor {which} is not where its header says")

    def names(self) -> list[str]:
        return [name for name in self._header if not name.startswith(PADDING)]

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(name, *self._entry(name)[:2])

    def offset(self, name: str) -> int:
        """The file offset of a tensor, for mapping it."""
        return self._begin + self._entry(name)[2]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """A tensor, or indices `first` to `last` (exclusive) of its first dimension."""
        dtype, shape, _, _ = self._entry(name)
        if shape:
            shape = ((shape[0] if last is None else last) - first, *shape[1:])
            if not 0 <= shape[0] <= self._entry(name)[1][0]:
                raise damaged(self.path, f"tensor {name!r} has no indices {first} to {last}")
        out = torch.empty(shape, dtype=dtype)
        self.read_into(name, out, first)
        return out

    def read_into(self, name: str, out: Tensor, first: int = 0) -> None:
        """Read into a contiguous CPU tensor, whose first dimension gives the count."""
        dtype, shape, begin, end = self._entry(name)
        assert out.dtype == dtype and out.is_contiguous() and out.shape[1:] == shape[1:]
        each = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        at = self._begin + begin + first * each
        if first < 0 or at + out.numel() * dtype.itemsize > self._begin + end:
            raise damaged(self.path, f"tensor {name!r} ends at byte {self._begin + end} of {self._size}")
        view = memoryview(bytes_of(out))  # type: ignore[arg-type]
        while len(view):
            got = os.preadv(self._file.fileno(), [view], at)
            if got == 0:
                raise damaged(self.path, "the file ends too early")
            view, at = view[got:], at + got

    def _entry(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        if name not in self._header:
            raise damaged(self.path, f"the file has no tensor {name!r}")
        return self._header[name]

    def close(self) -> None:
        self._file.close()


def _is_consistent(dtype: torch.dtype, shape: tuple[int, ...], begin: int, end: int) -> bool:
    """Whether a tensor of this shape takes exactly bytes `begin` to `end` (exclusive)."""
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        return False
    return end - begin == math.prod(shape) * dtype.itemsize


def sha256_of(path: Path) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    with open_regular(path) as file:
        while got := file.readinto(buffer):
            digest.update(memoryview(buffer)[:got])
    return digest.hexdigest()


def damaged(path: Path, why: str) -> FormatError:
    return FormatError(f"'{path}' is damaged: {why}; copy it again from its source, or use another checkpoint", path=path)
