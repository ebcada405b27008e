"""Memory of large answers is kept for the next one.

glibc gives blocks of 128 KiB and more back to the system when they are freed, and the system clears every page before it hands
it out again: 0.13 ms for each of the two copies of an answer of half a MiB, several times what filling it takes. A server
allocates the same sizes again and again, so it tells malloc to keep them.
"""

from __future__ import annotations

import ctypes

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
KEPT = 256 << 20  # bytes that stay with the process at most, beyond what is in use
LARGE = 32 << 20  # larger blocks still come from the system, and go back


def keep_memory() -> None:
    """For this process, from now on; where malloc is not glibc's, nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP, LARGE)
        mallopt(_TRIM, KEPT)
