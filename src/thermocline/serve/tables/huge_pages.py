"""Rows that are served, in large pages: from a moment after they are served.

A lookup touches rows at random, and with pages of 4 KiB nearly every one also misses the table of addresses (the TLB). While
the processor's caches hold that table this costs little; but between two lookups of a server they hold answers, and what
other programs read. 2,048 rows of 256 bytes from 256 MB took 41 us with pages of 4 KiB and 38 with pages of 2 MiB where caches
were left alone, 106 and 63 where 64 MiB were written before each lookup.

The system hands out large pages for shared memory only where it was set up so, but puts any memory into them when asked to
(MADV_COLLAPSE), if its mapping begins where a large page may. That takes 0.4 to 6 ms for each, and readers of a page wait
meanwhile. So it is done when rows are served already, one page after another, with pauses four times as long: readiness does
not wait for it, and lookups are slower for a while, not stopped. Rejected: before rows are put in place, which took four times
as long as putting them there on a virtual machine that had to get its free memory from its host first.
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

LARGE = 2 << 20  # bytes; where pages are larger still, nothing happens
PAUSE = 4  # times as long as a page took
GIVE_UP = 8  # pages in a row that the system has no room for
_COLLAPSE = 25  # of madvise, since Linux 6.1
_FIXED = 0x10  # MAP_FIXED of mmap
_SETTING = Path("/sys/kernel/mm/transparent_hugepage")
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def mapped(descriptor: int, size: int) -> Bytes:
    """A file's bytes in memory, from where a large page may begin; they are let go with the last view of them."""
    room = size + LARGE
    begin = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)  # addresses only
    at = -(-begin // LARGE) * LARGE
    whole = (ctypes.c_uint8 * size).from_address(at)
    weakref.finalize(whole, _libc.munmap, begin, room).atexit = False  # threads may read until the very end
    _map(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, descriptor)
    return np.frombuffer(memoryview(whole), np.uint8)


def _map(at: int | None, size: int, access: int, how: int, descriptor: int) -> int:
    found = _libc.mmap(at, size, access, how, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{size:,} bytes could not be mapped")
    return int(found)


def are_wanted() -> bool:
    """Whether this system has large pages of the size we know, and was not told to use none."""
    with suppress(OSError, ValueError):
        size = int((_SETTING / "hpage_pmd_size").read_text())
        return size == LARGE and "[never]" not in (_SETTING / "enabled").read_text()
    return False


class Enlarging:
    """Puts memory that is in use into large pages, in a thread of its own. It keeps none of it: what is let go is left out."""

    def __init__(self, memories: Sequence[Bytes]) -> None:
        self._memories = [weakref.ref(memory) for memory in memories]
        self._ended, self._full = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, name="large-pages", daemon=True)
        if are_wanted():
            self._thread.start()

    def stop(self) -> None:
        """Not a page more."""
        self._ended.set()
        self.wait()

    def wait(self) -> None:
        """Until all is done."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for memory in self._memories:
            at = 0
            while (took := self._enlarge(memory(), at)) is not None:
                if self._ended.wait(PAUSE * took):
                    return
                at += LARGE

    def _enlarge(self, memory: Bytes | None, at: int) -> float | None:
        """One page, and the seconds that it took; None where there is none."""
        if memory is None or at + LARGE > memory.nbytes or self._full >= GIVE_UP:
            return None
        began = time.perf_counter()
        if collapse(memory.__array_interface__["data"][0] + at, LARGE):
            self._full = 0
        elif ctypes.get_errno() == errno.EINVAL:  # an older system, or memory that is none of ours
            self._full = GIVE_UP
        else:
            self._full += 1
        return time.perf_counter() - began


def collapse(address: int, size: int) -> bool:
    """Whether memory is in large pages now; else `ctypes.get_errno` says why."""
    return bool(_libc.madvise(address, size, _COLLAPSE) == 0)
