"""Compiling the CPU kernels once per machine.

`@kernel("int64(int64, float32)")` marks a function that Python calls; `@helper` one that only kernels call. Nothing
is compiled when modules are imported. The first call of any kernel compiles all of them, or loads them from the disk:

    ~/.cache/thermocline/cpu-<hash>/   THERMOCLINE_CACHE or XDG_CACHE_HOME move it; else a temporary folder
        lock                           held while compiling: of several processes one compiles, the rest load
        done                           all kernels are here; its time says when they were last used
        ...                            Numba's own cache files

The hash covers the sources of all kernels, the folder they lie in, and the versions of Numba, LLVM and Python. Numba's own
cache looks at the one file a function stands in, so a change of a helper in another file would leave old code in use; and it
files code by that file's path, so that a second checkout of the same sources would find the folder done and compile in every
process. (Numba itself tells processors apart inside the folder.) Folders of other versions that nobody used for a month are
deleted. Rejected: signatures in the decorator, which compile at import, a minute in which `import thermocline` seems to hang.

Numba tells functions of one name apart by a number that it counts up in each process, and a process that loads two functions
of the same name and number takes one for the other, without a word. So kernels of a folder are compiled by one process from the
first to the last (what an interrupted one has left is deleted), and functions that a factory makes get names of their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba

_log = logging.getLogger("thermocline")
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_MODULES = (
    "cache.cpu",
    "exchange.cpu",
    "gather.cpu",
    "ids.cpu",
    "quantize.cpu",
    "serve.cpu",
    "sum_gradients.cpu",
    "update.cpu",
)
UNUSED = 30 * 24 * 3600  # seconds after which kernels of another version are deleted
_NAME = re.compile("cpu-[0-9a-f]{16}")  # of folders that are ours to delete
_kernels: list[Kernel] = []
_names: Counter[tuple[str, str]] = Counter()  # functions that were compiled, or will be
_lock = threading.RLock()


def helper(function: Callable[..., Any]) -> Any:
    """A function that kernels call; LLVM decides whether to inline it."""
    return numba.njit(**_OPTIONS)(_named(function))


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, under a name that no other has: modules make theirs as they are imported, always in the same order."""
    name = (function.__module__, function.__qualname__)
    if _names[name]:
        function.__qualname__ += f"_{_names[name]}"
    _names[name] += 1
    return function


def inlined(function: Callable[..., Any]) -> Any:
    """A function that kernels call, inlined before it is compiled: nothing to compile for itself, and fastest."""
    return numba.njit(inline="always", **_OPTIONS)(function)


class Kernel:
    """A compiled function of one signature. Releases the GIL while it runs, unless it is said to be over too soon for that."""

    def __init__(self, function: Callable[..., Any], signature: Any, nogil: bool) -> None:
        self.function, self.signature, self._nogil = _named(function), signature, nogil
        self._compiled: Callable[..., Any] | None = None
        _kernels.append(self)

    def load(self, folder: Path) -> None:
        """Compile into `folder`, or take what is there."""
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            dispatcher = numba.njit(cache=True, **{**_OPTIONS, "nogil": self._nogil})(self.function)
        finally:
            numba.config.CACHE_DIR = before
        dispatcher.compile(self.signature)
        dispatcher.disable_compile()
        self._compiled = dispatcher

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            prepare()
            assert self._compiled is not None
        return self._compiled(*args)


def kernel(signature: Any, nogil: bool = True) -> Callable[[Callable[..., Any]], Kernel]:
    """Mark a function as a kernel with this Numba signature."""
    return lambda function: Kernel(function, signature, nogil)


def prepare() -> None:
    """Have all CPU kernels ready to run: compile them, once per machine, or load them."""
    with _lock:
        for name in _MODULES:
            importlib.import_module(f"thermocline.kernels.{name}")
        missing = [k for k in _kernels if k._compiled is None]
        if not missing:
            return
        folder = cache_folder()
        _sweep(folder)
        if _ready(folder):
            _load(missing, folder)
            return
        with open(folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also if this process dies
            if _ready(folder):
                _load(missing, folder)
                return
            _announce(f"thermocline: compiling CPU kernels, once per machine (about a minute; kept in {folder})")
            start = time.perf_counter()
            _empty(folder)
            _load(missing, folder)
            (folder / "done").touch()
            _log.info("compiled %d CPU kernels in %.1f s", len(missing), time.perf_counter() - start)


def _ready(folder: Path) -> bool:
    """Whether a folder has all kernels; if so, they are used now."""
    done = folder / "done"
    if not done.exists():
        return False
    with suppress(OSError):
        os.utime(done)
    return True


@cache
def _sweep(folder: Path) -> None:
    """Delete folders of other versions beside this one that were not used for a month, once per process.

    Whoever compiles in one holds its lock, and whoever loads from one has made it young first. Should one be deleted just then
    all the same, Numba compiles what it does not find.
    """
    for other in folder.parent.glob("cpu-*") if _NAME.fullmatch(folder.name) else ():
        if other == folder or not _NAME.fullmatch(other.name) or not _is_old(other):
            continue
        try:
            with open(other / "lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other)
        except OSError:  # in use, somebody else's, or gone
            continue
        _log.info("deleted CPU kernels of another version, not used for a month: %s", other)


def _is_old(folder: Path) -> bool:
    done = folder / "done"
    try:
        return time.time() - (done if done.exists() else folder).stat().st_mtime > UNUSED
    except OSError:
        return False


def _load(kernels: list[Kernel], folder: Path) -> None:
    for each in kernels:
        each.load(folder)


def _empty(folder: Path) -> None:
    """Of all but its lock, which we hold."""
    for each in folder.iterdir():
        if each.name != "lock":
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def _announce(line: str) -> None:
    _log.info(line)
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: the first of the usual places that can be written."""
    name = f"cpu-{source_hash()}"
    asked = os.environ.get("THERMOCLINE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    shared = os.path.join(tempfile.gettempdir(), f"thermocline-{os.getuid()}")
    for place in filter(None, (asked, os.path.join(home, "thermocline"), shared)):
        folder = Path(place) / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return Path(tempfile.mkdtemp(prefix="thermocline-"))


def source_hash() -> str:
    """Changes when any source of a CPU kernel, where it lies, or a compiler does."""
    here = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]} {here}".encode())
    names = (
        "cpu/*.py",
        "../formats.py",
        "*/cpu.py",
        "exchange/fields.py",
        "ids/fields.py",
        "serve/fields.py",
        "quantize/reference.py",
        "cache/reference.py",
    )
    for path in sorted(p for pattern in names for p in here.glob(pattern)):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
