"""The checks of `thermocline doctor`, one function each.

A check changes nothing. Its `Finding` is `ok`; `warn` if things run slower or not on every GPU; `broken` if something will
fail. Every finding that is not ok has the command that fixes it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Literal

GIB = 1 << 30
MIN_TORCH = (2, 10)
MIN_TRITON = (3, 4)
MIN_FREE_MEMORY = 2 * GIB
MIN_SHARED_MEMORY = 1 * GIB

CUDA_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report. `fix` is a command, empty if the state is ok."""

    name: str
    state: Literal["ok", "warn", "broken"]
    found: str
    fix: str = ""


def check_triton() -> Finding:
    """Triton loads, with a C compiler and Python headers for its launchers on a GPU."""
    if sys.platform != "linux":
        return Finding("Triton", "ok", "not used on this system")
    finding = _check_module("Triton", "triton", MIN_TRITON)
    if finding.state != "ok":
        return finding
    if _has_gpu() and not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
        return Finding("Triton", "broken", f"{finding.found}, but no C compiler", "sudo apt install gcc")
    if _has_gpu() and not Path(sysconfig.get_path("include"), "Python.h").exists():
        return Finding("Triton", "broken", f"{finding.found}, but no Python.h", "sudo apt install python3-dev")
    return finding


def check_serving() -> Finding:
    """Packages of `thermocline serve`: an extra that training does not need."""
    missing = [name for name in ("grpc", "google.protobuf", "aiohttp", "prometheus_client") if not _importable(name)]
    if missing:
        return Finding("serving", "warn", f"no {', '.join(missing)}: cannot serve", "pip install 'thermocline[serve]'")
    return Finding("serving", "ok", f"gRPC {metadata.version('grpcio')}, HTTP by aiohttp {metadata.version('aiohttp')}")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _check_module(name: str, module: str, minimum: tuple[int, int]) -> Finding:
    wanted = ".".join(map(str, minimum))
    fix = f"pip install --upgrade '{module}>={wanted}'" if any(minimum) else f"pip install --upgrade {module}"
    try:
        importlib.import_module(module)
        version = metadata.version(module)
    except Exception as error:  # a broken installation fails in many ways
        return Finding(name, "broken", f"{type(error).__name__}: {_first_line(str(error))}", fix)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < minimum:
        return Finding(name, "broken", f"{version}, older than {wanted}", fix)
    return Finding(name, "ok", version)


def check_cuda() -> Finding:
    """torch can use the GPU, if there is one."""
    torch = _torch()
    if torch is None:
        return Finding("CUDA", "broken", "unknown: torch does not load", "pip install --upgrade torch")
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("CUDA", "ok", f"{torch.version.cuda}, {len(gpus)} GPU(s): {', '.join(dict.fromkeys(gpus))}")
    if not _has_gpu():
        return Finding("CUDA", "ok", "no GPU; the CPU kernels are used")
    if torch.version.cuda is None:
        return Finding("CUDA", "warn", "there is a GPU, but this torch is a CPU build", CUDA_TORCH)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("CUDA", "warn", "GPUs are hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")
    found = f"torch for CUDA {torch.version.cuda} cannot use driver {_driver_version()}"
    fix = "sudo ubuntu-drivers install" if shutil.which("ubuntu-drivers") else "sudo apt install nvidia-driver"
    return Finding("CUDA", "broken", found, fix)


def check_nccl() -> Finding:
    """NCCL, which exchanges rows between GPUs; CPU processes use gloo."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available():
        return Finding("NCCL", "broken", "torch has no distributed package", "pip install --upgrade torch")
    if not torch.cuda.is_available():
        return Finding("NCCL", "ok", "not needed without a GPU; gloo is used")
    if not torch.distributed.is_nccl_available():
        return Finding("NCCL", "broken", "this torch was built without NCCL", CUDA_TORCH)
    return Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def _has_gpu() -> bool:
    return _driver_version() is not None


def _driver_version() -> str | None:
    """Version of the loaded NVIDIA driver; None without one."""
    loaded = Path("/proc/driver/nvidia/version")
    if loaded.exists():
        number = re.search(r"\d+\.\d+(\.\d+)?", loaded.read_text())
        return number.group() if number else "unknown"
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _first_line(answer.stdout) or None if answer.returncode == 0 else None


def _torch() -> ModuleType | None:
    try:
        return importlib.import_module("torch")
    except Exception:  # check_torch reports the error
        return None


def check_locked_memory() -> Finding:
    """Limit of pinned memory, which network adapters need for direct transfers."""
    limit, highest = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    if not _has_gpu():
        return Finding("locked memory", "ok", f"{_size(limit)}; enough without a GPU")
    if highest == resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited"
    elif _in_container():
        fix = "docker run --ulimit memlock=-1 ..."
    else:
        fix = "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf   (then log in again)"
    return Finding("locked memory", "warn", f"limited to {_size(limit)}", fix)


def check_shared_memory() -> Finding:
    """/dev/shm, where processes of one machine share tensors. Containers often have 64 MiB."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "warn", "no /dev/shm", "sudo mount -t tmpfs -o size=8G shm /dev/shm")
    space = shutil.disk_usage(folder)
    found = f"/dev/shm holds {_size(space.total)}, {_size(space.free)} free"
    if space.total < MIN_SHARED_MEMORY:
        fix = "docker run --shm-size 8g ..." if _in_container() else "sudo mount -o remount,size=8G /dev/shm"
        return Finding("shared memory", "warn", found, fix)
    if space.free < MIN_SHARED_MEMORY:  # killed processes leave their segments behind
        return Finding("shared memory", "warn", found, "ls -lS /dev/shm | head   (and remove unused files)")
    return Finding("shared memory", "ok", found)


def check_cores() -> Finding:
    """Cores of this process, and whether the container grants less CPU time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    granted = cores if quota.strip() == "max" else int(quota) / int(period)
    if granted < cores:
        found = f"{cores}, but this container is granted the time of {granted:g}"
        return Finding("cores", "warn", found, f"export OMP_NUM_THREADS={max(1, int(granted))}")
    return Finding("cores", "ok", str(cores))


def check_free_memory() -> Finding:
    """Memory available for tables."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    if not available:
        return Finding("free memory", "ok", "unknown on this system")
    free = int(available.group(1)) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit and used and limit.strip() != "max":
        free = min(free, int(limit) - int(used))
    if free < MIN_FREE_MEMORY:
        return Finding("free memory", "warn", _size(free), "ps -eo rss,pid,comm --sort=-rss | head")
    return Finding("free memory", "ok", _size(free))


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def check_cpu_cache() -> Finding:
    """Folder of compiled CPU kernels; without one every process compiles them again."""
    configured = os.environ.get("THERMOCLINE_CACHE")
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = [*([Path(configured)] if configured else []), user_cache / "thermocline"]
    return _check_cache("CPU kernels", folders, 'export THERMOCLINE_CACHE="$(mktemp -d)"')


def check_triton_cache() -> Finding:
    """Folder of compiled GPU kernels."""
    configured = os.environ.get("TRITON_CACHE_DIR")
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(configured) if configured else home / ".triton" / "cache"
    return _check_cache("Triton cache", [folder], 'export TRITON_CACHE_DIR="$(mktemp -d)"')


def _check_cache(name: str, folders: list[Path], fix: str) -> Finding:
    for folder in folders:
        if reason := _refusal(folder):
            return Finding(name, "warn", f"{folder} {reason}", f'ls -ld "{folder}"   (remove it: it may hold foreign code)')
        if _can_write(folder):
            return Finding(name, "ok", str(folder))
    return Finding(name, "warn", f"{' and '.join(map(str, folders))} cannot be written", fix)


def _refusal(folder: Path) -> str | None:
    """Why compiled code in `folder` cannot be trusted, if there is a reason."""
    try:
        from thermocline.kernels.cpu.cache_folder import refusal
    except ImportError:  # torch is missing, which has its own line
        return None
    return refusal(folder)


def _can_write(folder: Path) -> bool:
    """Whether files can be created in `folder`, or in its nearest existing parent."""
    nearest = next((place for place in (folder, *folder.absolute().parents) if place.exists()), None)
    return nearest is not None and nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


CHECKS: tuple[Callable[[], Finding], ...] = (
    lambda: Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}"),
    partial(_check_module, "torch", "torch", MIN_TORCH),
    lambda: Finding("NVIDIA driver", "ok", _driver_version() or "none"),
    check_cuda,
    check_triton,
    check_nccl,
    partial(_check_module, "Numba", "numba", (0, 0)),  # it refuses versions of NumPy newer than its own
    check_serving,
    check_locked_memory,
    check_shared_memory,
    check_cores,
    check_free_memory,
    check_cpu_cache,
    check_triton_cache,
)
