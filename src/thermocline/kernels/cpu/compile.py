"""Compile the CPU kernels once per machine, at the first call of any (folder and locks: docs/decisions/kernel_notes.md)."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import itertools
import logging
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import torch
from llvmlite import binding as llvm
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from torch import Tensor

from thermocline.errors import BadInput

from .cache_folder import private_folder, say

_log = logging.getLogger("thermocline")
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True}
_FOLDERS = "cache elastic exchange gather ids ngrams quantize serve sum_gradients update"
_MODULES = (*(f"{name}.cpu" for name in _FOLDERS.split()), "serve.wire_cpu")
_TYPES = {"B": torch.uint8, "i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}  # as in `struct`

# Kernels that are compiled together, at the first call of one: a training model does not wait for those of a server, and one
# of fp32 and int8 rows not for lookups of other formats, which take half of the time of all lookups.
OWN_GROUPS, FORMATS, TRAIN = ("elastic", "exchange", "ids", "ngrams", "quantize", "serve"), "formats", "train"
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


class _KernelFile(NullCache):  # type: ignore[misc]
    """Numba's cache of one function, in one file. (Numba's own names files by the path of the source.)"""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(data))

    def save_overload(self, sig: Any, data: Any) -> None:
        assert not data.library.has_dynamic_globals, f"{self._path.stem} holds addresses of this process"
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(dumps(data._reduce()))
        temporary.replace(self._path)


class Kernel:
    """A compiled function of one signature. Releases the GIL while it runs if `nogil`."""

    def __init__(self, function: Callable[..., Any], signature: Any, nogil: bool, group: str) -> None:
        self.function, self.signature, self._nogil = _unique_name(function), signature, nogil
        self._compiled: Callable[..., Any] | None = None
        self.group = next((name for name in OWN_GROUPS if f".{name}." in function.__module__), group)
        _kernels.append(self)

    def load(self, folder: Path) -> None:
        """Compile into `folder`, or load from it."""
        dispatcher = numba.njit(**{**_OPTIONS, "nogil": self._nogil})(self.function)
        dispatcher._cache = _KernelFile(folder / f"{self.function.__module__}.{self.function.__qualname__}.kernel")
        with _own_numbers():
            dispatcher.compile(self.signature)
        dispatcher.disable_compile()
        self._compiled = dispatcher

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            prepare(self.group)
            assert self._compiled is not None
        return self._compiled(*args)


def kernel(signature: Any, nogil: bool = True, group: str = TRAIN) -> Callable[[Callable[..., Any]], Kernel]:
    """Mark a function as a kernel with this Numba signature."""
    return lambda function: Kernel(function, signature, nogil, group)


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


def prepare(*groups: str) -> int:
    """Compile or load the CPU kernels of these groups (default: all); returns how many were compiled."""
    with _lock:
        for name in _MODULES:
            importlib.import_module(f"thermocline.kernels.{name}")
        return sum(_prepare(group) for group in groups or (TRAIN, FORMATS, *OWN_GROUPS))


def _prepare(group: str) -> int:
    missing = [k for k in _kernels if k._compiled is None and k.group == group]
    if not missing:
        return 0
    folder, compiled = cache_folder(group), 0
    _delete_unused(folder)
    if not _is_complete(folder):
        compiled = _compile(missing, folder)
    for each in missing:
        if each._compiled is None:
            each.load(folder)
    return compiled


def _compile(kernels: list[Kernel], folder: Path) -> int:
    """Compile all kernels, unless another process has done it meanwhile; returns how many were compiled."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, even if the process dies
        if _is_complete(folder):
            return 0
        _announce(folder.parent)
        start = time.perf_counter()
        for left in folder.iterdir():  # by an interrupted process
            if left.name != "lock":
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        with _no_collection():
            for done, each in enumerate(kernels):
                _show_progress(done, len(kernels))
                each.load(folder)
        _show_progress(len(kernels), len(kernels))
        (folder / "done").touch()
        _log.info("compiled %d CPU kernels in %.1f s", len(kernels), time.perf_counter() - start)
        return len(kernels)


@cache
def _announce(place: Path) -> None:
    """Say that kernels are compiled; once per process."""
    say(f"thermocline: compiling CPU kernels, once per machine (up to a minute; kept in {place})")


def _show_progress(done: int, total: int) -> None:
    """Show on a terminal how many kernels are compiled."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r{done} of {total} kernels", end="\n" if done == total else "", file=sys.stderr, flush=True)


@contextmanager
def _own_numbers() -> Iterator[None]:
    """Number functions from a random number on. Numba counts them per process, and mixes up those of one name and number."""
    before = FunctionIdentity._unique_ids
    FunctionIdentity._unique_ids = itertools.count(random.SystemRandom().getrandbits(60))
    try:
        yield
    finally:
        FunctionIdentity._unique_ids = before


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector, which takes a fifth of the time to compile: it walks Numba's trees again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
def cache_folder(group: str = TRAIN) -> Path:
    """Folder of compiled kernels: in the first usable one of THERMOCLINE_CACHE, the user's cache and a temporary folder."""
    configured = os.environ.get("THERMOCLINE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    shared = os.path.join(tempfile.gettempdir(), f"thermocline-{os.getuid()}")
    places = filter(None, (configured, os.path.join(home, "thermocline"), shared))
    return private_folder(places, f"cpu-{source_hash(group)}")


def source_hash(group: str = TRAIN) -> str:
    """Hash of the kernel sources, the compiler versions, the processor and the group of kernels."""
    here = Path(__file__).resolve().parents[1]
    versions = (numba.__version__, llvmlite.__version__, sys.version_info[:2], sys.implementation.name)
    digest = hashlib.sha256(repr((group, versions, _processor())).encode())
    names = (
        "cpu/*.py",
        "../formats.py",
        "*/cpu.py",
        "*/wire_cpu.py",
        "*/fields.py",
        "quantize/reference.py",
        "cache/reference.py",
    )
    for path in sorted(p for pattern in names for p in here.glob(pattern)):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _processor() -> tuple[object, ...]:
    """What compiled code depends on: the target that Numba compiles for, and the host, whose features choose vector code."""
    return cpu_target.target_context.codegen().magic_tuple(), llvm.get_host_cpu_features().flatten()
