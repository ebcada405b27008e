"""System shared memory: tensors of clients on this machine lie in files of /dev/shm, as in Triton's extension.

The server copies them with `pread` and `pwrite`. Rejected: mapping them, because a client that shrinks its file would end the
server (SIGBUS), and one that changes ids after they were checked would read anything. Clients name the files that the server
opens, with the server's rights: only names with the operator's prefix, no links, and nothing but files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput

REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
MAX_REGIONS = 1024
_VALUE_BYTES = 64  # texts have several
_FOLDER = "/dev/shm"
_KEY = re.compile(r"/?([A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,200})", re.ASCII)
Array = NDArray[Any]


class SharedRegion(NamedTuple):
    """Bytes of a file in /dev/shm."""

    name: str
    key: str
    offset: int
    byte_size: int


class SharedRange(NamedTuple):
    """Where a tensor lies: a region's name, the offset in it, and its bytes."""

    region: str
    offset: int
    size: int

    @classmethod
    def of(cls, tensor: str, parameters: Mapping[str, Any]) -> SharedRange | None:
        """The range that a tensor's parameters give, if they give one."""
        if REGION not in parameters:
            return None
        region, offset, size = parameters[REGION], parameters.get(OFFSET, 0), parameters.get(SIZE)
        if not isinstance(region, str) or not _is_size(offset) or not _is_size(size):
            words = f"tensor {tensor!r}: {REGION} must be a name, {SIZE} and {OFFSET} integers of 0 or more"
            raise BadInput(words, parameter=tensor)
        return cls(region, offset, size or 0)

    def parameters(self) -> dict[str, Any]:
        """Parameters of an output that lies here."""
        return {REGION: self.region, SIZE: self.size} | ({OFFSET: self.offset} if self.offset else {})


class SharedRegions:
    """Registered regions by name. `prefix`: of the keys that may be opened; None refuses every region."""

    def __init__(self, prefix: str | None) -> None:
        self.prefix = prefix
        self.regions: dict[str, SharedRegion] = {}

    def register(self, name: Any, key: Any, offset: Any, byte_size: Any) -> None:
        """Register a region. Raises `BadInput` if its file is not there, too short, or not for clients."""
        self._check_enabled()
        names = isinstance(name, str) and 0 < len(name) <= 256 and isinstance(key, str)
        if not names or not _is_size(offset) or not _is_size(byte_size):
            raise BadInput("a region needs a name, a key, and an offset and a byte_size of 0 or more", parameter="region")
        if name in self.regions or len(self.regions) >= MAX_REGIONS:
            limit = f"there are {len(self.regions)} regions, the limit is {MAX_REGIONS}"
            raise BadInput(f"region {name!r} is registered already" if name in self.regions else limit, parameter="region")
        with _opened(key, self.prefix or "") as (_, size):
            if offset + byte_size > size:
                words = f"region {name!r} ends at byte {offset + byte_size:,}, and {key[:100]!r} has {size:,}"
                raise BadInput(words, parameter="byte_size", needed=offset + byte_size, available=size)
        self.regions[name] = SharedRegion(name, key, offset, byte_size)

    def unregister(self, name: str) -> None:
        """Forget a region, or all of them without a name."""
        self._check_enabled()
        if name:
            self.regions.pop(name, None)
        else:
            self.regions.clear()

    def status(self, name: str) -> list[dict[str, Any]]:
        """A region, or all of them without a name."""
        self._check_enabled()
        if name and name not in self.regions:
            raise BadInput(f"there is no region {name[:100]!r}", parameter="region")
        return [each._asdict() for each in self.regions.values() if name in ("", each.name)]

    def read(self, tensor: str, at: SharedRange, values: int, before: int = 0) -> bytes:
        """The bytes of an input: at most `_VALUE_BYTES` for each of `values`, with the bytes of inputs `before` it."""
        limit = _VALUE_BYTES * values - before
        region, begin = self._place(tensor, at)
        if at.size > limit:
            words = f"tensor {tensor!r} has {at.size:,} bytes in shared memory, the request may have {limit:,} more"
            raise BadInput(words, parameter=tensor, needed=at.size, available=limit)
        with _opened(region.key, self.prefix or "") as (file, _):
            data = os.pread(file, at.size, begin)
        if len(data) < at.size:
            raise BadInput(f"tensor {tensor!r}: region {at.region!r} has become shorter", parameter=tensor)
        return data

    def write(self, tensor: str, at: SharedRange, array: Array) -> SharedRange:
        """Write an output; returns where it lies."""
        region, begin = self._place(tensor, at)
        if array.nbytes > at.size:
            words = f"output {tensor!r} has {array.nbytes:,} bytes, and {SIZE} is {at.size:,}"
            raise BadInput(words, parameter=tensor, needed=array.nbytes, available=at.size)
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        with _opened(region.key, self.prefix or "") as (file, size):
            if begin + len(data) > size:  # writing beyond its end would make it longer
                raise BadInput(f"tensor {tensor!r}: region {at.region!r} has become shorter", parameter=tensor)
            while len(data):
                try:
                    done = os.pwrite(file, data, begin)
                except OSError as error:  # the file has holes, and no memory is left for them
                    words = f"output {tensor!r} cannot be written to region {at.region!r}: {error.strerror}"
                    raise BadInput(words, parameter=tensor) from None
                data, begin = data[done:], begin + done
        return at._replace(size=array.nbytes)

    def placer(self, outputs: Mapping[str, SharedRange]) -> Callable[[str, Array], dict[str, Any] | None] | None:
        """A function that writes outputs to their ranges."""

        def place(tensor: str, array: Array) -> dict[str, Any] | None:
            at = outputs.get(tensor)
            return None if at is None else self.write(tensor, at, array).parameters()

        return place if outputs else None

    def _place(self, tensor: str, at: SharedRange) -> tuple[SharedRegion, int]:
        self._check_enabled()
        region = self.regions.get(at.region)
        if region is None:
            raise BadInput(f"tensor {tensor!r}: there is no region {at.region[:100]!r}", parameter=tensor)
        if at.offset + at.size > region.byte_size:
            ends = f"tensor {tensor!r} ends at byte {at.offset + at.size:,} of region {at.region!r}"
            words = f"{ends}, which has {region.byte_size:,}"
            raise BadInput(words, parameter=tensor, needed=at.offset + at.size, available=region.byte_size)
        return region, region.offset + at.offset

    def _check_enabled(self) -> None:
        if self.prefix is None:
            words = f"{REGION} is not supported by this server: start it with --shared-memory, or send tensors with the request"
            raise BadInput(words, parameter=REGION)


def _is_size(given: object) -> bool:
    return type(given) is int and given >= 0


@contextmanager
def _opened(key: str, prefix: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a file in /dev/shm."""
    found = _KEY.fullmatch(key)
    if found is None or not found[1].startswith(prefix):
        raise BadInput(f"key {key[:100]!r} must begin with {prefix!r}, and name a file of {_FOLDER}", parameter="key")
    try:
        file = os.open(f"{_FOLDER}/{found[1]}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"key {key[:100]!r} cannot be opened: {error.strerror}", parameter="key") from None
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:  # another name of the file may not have the prefix
            raise BadInput(f"key {key[:100]!r} is not shared memory", parameter="key")
        yield file, about.st_size
    finally:
        os.close(file)


NO_REGIONS = SharedRegions(None)
