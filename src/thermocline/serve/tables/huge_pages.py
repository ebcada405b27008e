"""Huge pages for served rows: in pages of 4 KiB, nearly every row that is looked up misses the TLB.

Collapsing memory into a page of 2 MiB takes 0.4 to 6 ms, and readers of the page wait. So a thread does it after the version is
in use, one page at a time, with pauses. Before rows are loaded it would take four times as long as loading.
"""

from __future__ import annotations

import ctypes
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
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{size:,} bytes cannot be mapped")
    return int(found)


def are_enabled() -> bool:
    """Whether this system has huge pages of 2 MiB, and `transparent_hugepage/enabled` is not `never`."""
    with suppress(OSError, ValueError):
        size = int((_SETTING / "hpage_pmd_size").read_text())
        return size == HUGE_PAGE and "[never]" not in (_SETTING / "enabled").read_text()
    return False


def collapse(address: int, size: int) -> bool:
    """Move memory into huge pages; whether that succeeded."""
    return bool(_libc.madvise(address, size, _MADV_COLLAPSE) == 0)


class HugePageThread:
    """Moves memory in use into huge pages, in a thread, until `stop`."""

    def __init__(self, memories: Sequence[Bytes]) -> None:
        self._memories, self._stopped = memories, threading.Event()
        self._thread = threading.Thread(target=self._run, name="huge-pages", daemon=True)
        if are_enabled():
            self._thread.start()

    def stop(self) -> None:
        """Stop before the next page."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        for memory in self._memories:
            begin = memory.__array_interface__["data"][0]
            for at in range(begin, begin + memory.nbytes - HUGE_PAGE + 1, HUGE_PAGE):
                began = time.perf_counter()
                failures = 0 if collapse(at, HUGE_PAGE) else failures + 1
                if failures == MAX_FAILURES or self._stopped.wait(PAUSE * (time.perf_counter() - began)):
                    return
