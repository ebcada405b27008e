"""Huge pages for served rows.

Lookups touch rows at random, and with pages of 4 KiB nearly every one also misses the TLB. With other data in the caches, as in
a server, 2,048 rows of 256 bytes from 256 MB took 106 us with pages of 4 KiB and 63 with pages of 2 MiB.

`MADV_MADV_COLLAPSE` moves memory into a huge page, if its mapping is aligned. That takes 0.4 to 6 ms a page, and readers of the
page wait. So a thread does it after the version is in use, one page at a time, with pauses. Rejected: before rows are loaded,
which took four times as long as loading on a virtual machine.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

HUGE_PAGE = 2 << 20  # bytes; other sizes are not supported
PAUSE = 4  # times as long as a page took
MAX_FAILURES = 8  # consecutive pages
_MADV_COLLAPSE = 25  # since Linux 6.1
_MAP_FIXED = 0x10
_SETTING = Path("/sys/kernel/mm/transparent_hugepage")
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_aligned(descriptor: int, size: int) -> Bytes:
    """Map a file at an address that is a multiple of a huge page; unmapped with the last view."""
    room = size + HUGE_PAGE
    begin = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)  # reserves addresses
    at = -(-begin // HUGE_PAGE) * HUGE_PAGE
    whole = (ctypes.c_uint8 * size).from_address(at)
    weakref.finalize(whole, _libc.munmap, begin, room).atexit = False  # threads may read until the process ends
    _map(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    return np.frombuffer(memoryview(whole), np.uint8)


def _map(at: int | None, size: int, access: int, how: int, descriptor: int) -> int:
    found = _libc.mmap(at, size, access, how, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{size:,} bytes cannot be mapped")
    return int(found)


def are_enabled() -> bool:
    """Whether this system has huge pages of 2 MiB, and `transparent_hugepage/enabled` is not `never`."""
    with suppress(OSError, ValueError):
        size = int((_SETTING / "hpage_pmd_size").read_text())
        return size == HUGE_PAGE and "[never]" not in (_SETTING / "enabled").read_text()
    return False


class HugePageThread:
    """Moves memory in use into huge pages, in a thread. Holds weak references: freed memory is skipped."""

    def __init__(self, memories: Sequence[Bytes]) -> None:
        self._memories = [weakref.ref(memory) for memory in memories]
        self._stopped, self._failures = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, name="huge-pages", daemon=True)
        if are_enabled():
            self._thread.start()

    def stop(self) -> None:
        """Stop before the next page."""
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Wait until all memory is done."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for memory in self._memories:
            at = 0
            while (took := self._collapse_page(memory(), at)) is not None:
                if self._stopped.wait(PAUSE * took):
                    return
                at += HUGE_PAGE

    def _collapse_page(self, memory: Bytes | None, at: int) -> float | None:
        """Move one page, and return the seconds that it took; None after the last page."""
        if memory is None or at + HUGE_PAGE > memory.nbytes or self._failures >= MAX_FAILURES:
            return None
        began = time.perf_counter()
        if collapse(memory.__array_interface__["data"][0] + at, HUGE_PAGE):
            self._failures = 0
        elif ctypes.get_errno() == errno.EINVAL:  # an older kernel, or memory of another kind
            self._failures = MAX_FAILURES
        else:
            self._failures += 1
        return time.perf_counter() - began


def collapse(address: int, size: int) -> bool:
    """Move memory into huge pages. Returns False on failure; `ctypes.get_errno` has the reason."""
    return bool(_libc.madvise(address, size, _MADV_COLLAPSE) == 0)
