"""Compile the CPU kernels once per machine, at the first call of any (folder and locks: docs/decisions/kernel_notes.md)."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
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
import torch
from torch import Tensor

from thermocline.errors import BadInput

_log = logging.getLogger("thermocline")
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_MODULES = tuple(f"{name}.cpu" for name in "cache exchange gather ids quantize serve sum_gradients update".split())
_TYPES = {"B": torch.uint8, "i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}  # as in `struct`
UNUSED_SECONDS = 30 * 24 * 3600  # seconds after which kernels of another version are deleted
_kernels: list[Kernel] = []
_names: Counter[tuple[str, str]] = Counter()  # of decorated functions
_lock = threading.RLock()


def helper(function: Callable[..., Any]) -> Any:
    """Decorate a function that kernels call; LLVM decides whether to inline it."""
    return numba.njit(**_OPTIONS)(_unique_name(function))


def _unique_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give the function a unique qualified name; modules are imported in a fixed order, so names are stable."""
    name = (function.__module__, function.__qualname__)
    if _names[name]:
        function.__qualname__ += f"_{_names[name]}"
    _names[name] += 1
    return function


def inlined(function: Callable[..., Any]) -> Any:
    """Decorate a function that Numba inlines into its callers."""
    return numba.njit(inline="always", **_OPTIONS)(function)


class Kernel:
    """A compiled function of one signature. Releases the GIL while it runs if `nogil`."""

    def __init__(self, function: Callable[..., Any], signature: Any, nogil: bool) -> None:
        self.function, self.signature, self._nogil = _unique_name(function), signature, nogil
        self._compiled: Callable[..., Any] | None = None
        _kernels.append(self)

    def load(self, folder: Path) -> None:
        """Compile into `folder`, or load from it."""
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


def addresses(types: str, *arrays: Any) -> list[int]:
    """Addresses of tensors and NumPy arrays, as kernels take them; 0 for None.

    `types`: a letter of `_TYPES` for each array. Kernels know no types: they would write past the end of an array of another.
    """
    found = []
    for letter, array in zip(types, arrays, strict=True):
        if array is None:
            found.append(0)
            continue
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)  # half the time of array.ctypes.data
        if tensor.dtype is not _TYPES[letter] or not tensor.is_contiguous():
            message = f"a kernel takes {_TYPES[letter]}, contiguous, not {tensor.dtype} with strides {tensor.stride()}"
            raise BadInput(message, parameter="array", value=tensor.dtype, needed=_TYPES[letter])
        found.append(tensor.data_ptr())
    return found


def as_int64(tensor: Tensor) -> Tensor:
    """As contiguous int64; usually unchanged."""
    return tensor if tensor.dtype is torch.int64 and tensor.is_contiguous() else tensor.to(torch.int64).contiguous()


def prepare() -> None:
    """Compile or load all CPU kernels."""
    with _lock:
        for name in _MODULES:
            importlib.import_module(f"thermocline.kernels.{name}")
        missing = [k for k in _kernels if k._compiled is None]
        if not missing:
            return
        folder = cache_folder()
        _delete_unused(folder)
        if not _is_complete(folder):
            _compile(missing, folder)
        for each in missing:
            if each._compiled is None:
                each.load(folder)


def _compile(kernels: list[Kernel], folder: Path) -> None:
    """Compile all kernels, unless another process has done it meanwhile."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, even if the process dies
        if _is_complete(folder):
            return
        line = f"thermocline: compiling CPU kernels, once per machine (about a minute; kept in {folder})"
        _log.info(line)
        if sys.stderr is not None and sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
        start = time.perf_counter()
        for left in folder.iterdir():  # by an interrupted process
            if left.name != "lock":
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        for each in kernels:
            each.load(folder)
        (folder / "done").touch()
        _log.info("compiled %d CPU kernels in %.1f s", len(kernels), time.perf_counter() - start)


def _is_complete(folder: Path) -> bool:
    """Whether a folder has all kernels; if so, updates its time of last use."""
    done = folder / "done"
    if not done.exists():
        return False
    with suppress(OSError):
        os.utime(done)
    return True


@cache
def _delete_unused(folder: Path) -> None:
    """Delete sibling folders of other versions that were unused for a month; once per process."""
    for other in folder.parent.glob("cpu-" + "[0-9a-f]" * 16) if folder.name.startswith("cpu-") else ():
        with suppress(OSError):  # of another user, or gone
            used = (other / "done" if (other / "done").exists() else other).stat().st_mtime
            if other != folder and time.time() - used > UNUSED_SECONDS:
                shutil.rmtree(other)
                _log.info("deleted CPU kernels of another version, not used for a month: %s", other)


@cache
def cache_folder() -> Path:
    """Folder of compiled kernels: the first writable one of THERMOCLINE_CACHE, the user's cache and a temporary folder."""
    name = f"cpu-{source_hash()}"
    configured = os.environ.get("THERMOCLINE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    shared = os.path.join(tempfile.gettempdir(), f"thermocline-{os.getuid()}")
    for place in filter(None, (configured, os.path.join(home, "thermocline"), shared)):
        folder = Path(place) / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return Path(tempfile.mkdtemp(prefix="thermocline-"))


def source_hash() -> str:
    """Hash of the kernel sources, their folder and the compiler versions."""
    here = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]} {here}".encode())
    names = ("cpu/*.py", "../formats.py", "*/cpu.py", "*/fields.py", "quantize/reference.py", "cache/reference.py")
    for path in sorted(p for pattern in names for p in here.glob(pattern)):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
