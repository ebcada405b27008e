"""Memory that rows may take: what the machine has, and every control group above this process allows.

Limits of control groups are nested, so each level counts: v2 (`memory.max`), v1 (`memory.limit_in_bytes`), and both at once.
Page cache, which the kernel gives back, is not in use. Loads that run at the same time see each other's reservations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thermocline.errors import BadInput

_OWN_GROUPS, _MEMORY = Path("/proc/self/cgroup"), Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_V1, _V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), ("memory.max", "memory.current", "")
_lock = threading.Lock()
_reserved = 0  # bytes of loads in progress


def check_fits(needed: int, what: str, available: int | None = None) -> None:
    """Raise `BadInput` if `needed` bytes do not fit into the available memory, by default of this machine."""
    free = max(0, free_bytes() - _reserved) if available is None else available
    if needed > free:
        way_out = "unload a version, serve a smaller precision, or use a machine with more memory"
        raise BadInput(f"{what} needs {needed:,} bytes, and {free:,} are free; {way_out}", needed=needed, available=free)


@contextmanager
def reserve(needed: int, what: str) -> Iterator[None]:
    """Keep memory for a load until it is done. Raises `BadInput` if it does not fit beside other loads."""
    global _reserved
    with _lock:
        check_fits(needed, what)
        _reserved += needed
    try:
        yield
    finally:
        with _lock:
            _reserved -= needed


def free_bytes() -> int:
    """Available memory of the machine, or of its control groups if that is less."""
    lines = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    return max(0, min([1024 * int(lines["MemAvailable"].split()[0]), *_free_in_groups()]))


def _free_in_groups() -> Iterator[int]:
    """What each limit leaves: of the own group, and of all above it."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield from _free_above(_GROUPS / "memory", path, *_V1)
            elif not controllers:
                for root in (_GROUPS, _GROUPS / "unified"):
                    yield from _free_above(root, path, *_V2)


def _free_above(root: Path, path: str, limit: str, used: str, prefix: str) -> Iterator[int]:
    """In a container, the path may be that of the host, and the root is the group itself."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # a group without a limit, or none of this kind
            allowed, taken = (int((group / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield allowed - taken + cache
        if group == root:
            return
