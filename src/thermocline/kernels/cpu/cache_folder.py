"""Folders of compiled kernels that no other user can change. Kernels are stored as pickles, which run code when loaded."""

from __future__ import annotations

import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("thermocline")


def refusal(folder: Path) -> str | None:
    """Why a folder cannot be trusted with compiled code; None if it can, or does not exist yet."""
    try:
        found = os.lstat(folder)
    except OSError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    return "can be written by other users" if found.st_mode & 0o022 else None


def private_folder(places: Iterable[str], name: str) -> Path:
    """`name` in the first place that can be written and that only this user can change; else a new temporary folder."""
    for place in map(Path, places):
        try:
            if _make_private(place) and _make_private(place / name):
                tempfile.TemporaryFile(dir=place / name).close()
                return place / name
        except OSError:  # cannot be written
            continue
    return Path(tempfile.mkdtemp(prefix="thermocline-"))


def _make_private(folder: Path) -> bool:
    """Create a folder for this user only; whether it, or the one that was there, can be trusted."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if reason := refusal(folder):
        say(f"thermocline: compiled CPU kernels are not kept in {folder}, which {reason}; remove it, or set THERMOCLINE_CACHE")
    return reason is None


def say(line: str) -> None:
    """Log a line and print it to stderr, whatever that is connected to."""
    _log.info(line)
    with suppress(OSError, ValueError):  # closed, or a broken pipe
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)
