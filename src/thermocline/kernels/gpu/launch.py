"""Launch Triton kernels with little host time: 6 us, where Triton's own launch takes 40 to 70 us for 30 arguments.

All kernels take tensors, numbers, then compile-time constants. `exact=True` forbids fused multiply-add.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache, reduce
from operator import attrgetter, or_
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# The call of a compiled kernel is not a public interface: other versions of Triton use the ordinary launch.
_DIRECT = triton.__version__.startswith("3.6.")
_dtype = attrgetter("dtype")
_compiled: dict[tuple[Any, ...], Any] = {}


def ceil_div(n: int, by: int) -> int:
    """n / by, rounded up (Triton's own takes a microsecond)."""
    return -(-n // by)


def power_of_two(n: int) -> int:
    """The smallest power of two at or above n."""
    return 1 << (n - 1).bit_length()


class ScratchArray:
    """Part of an allocation, with the attributes of a tensor that a launch reads."""

    __slots__ = ("dtype", "home", "length", "pointer")

    def __init__(self, home: Tensor, pointer: int, length: int, dtype: torch.dtype) -> None:
        self.home, self.pointer, self.length, self.dtype = home, pointer, length, dtype

    def data_ptr(self) -> int:
        return self.pointer

    def numel(self) -> int:
        return self.length

    def tensor(self) -> Tensor:
        """A tensor of the same memory."""
        begin = self.pointer - self.home.data_ptr()
        return self.home.view(torch.uint8)[begin : begin + self.length * self.dtype.itemsize].view(self.dtype)


Array = Tensor | ScratchArray


def as_tensor(array: Array) -> Tensor:
    return array.tensor() if isinstance(array, ScratchArray) else array


def scratch(device: torch.device, *wanted: tuple[int, torch.dtype]) -> list[Array]:
    """Uninitialized arrays of (length, dtype), in one allocation; tensors under the interpreter."""
    if INTERPRETED:
        return [torch.empty(length, dtype=dtype, device=device) for length, dtype in wanted]
    starts, size = [], 0
    for length, dtype in wanted:
        starts.append(size)
        size += (length * dtype.itemsize + 255) & ~255
    home = torch.empty(size, dtype=torch.uint8, device=device)
    base = home.data_ptr()
    return [ScratchArray(home, base + start, *kind) for start, kind in zip(starts, wanted, strict=True)]


def launch(
    kernel: Any, programs: int, tensors: tuple[Array, ...], numbers: tuple[int, ...], constants: tuple[Any, ...], *,
    exact: bool, warps: int = 4, registers: int | None = None, stream: torch.cuda.Stream | None = None,
) -> None:  # fmt: skip
    """Launch `programs` programs of `kernel` on the device of the first tensor, with at most `registers` a thread."""
    if INTERPRETED:
        kernel[(programs,)](*map(as_tensor, tensors), *numbers, *constants)
        return
    first = tensors[0]
    index = (first.home if isinstance(first, ScratchArray) else first).device.index
    if index != torch._C._cuda_getDevice():  # torch.cuda.current_device without its initialization check
        with torch.cuda.device(index):
            _launch(kernel, programs, tensors, numbers, constants, exact, warps, registers, index, stream)
    else:
        _launch(kernel, programs, tensors, numbers, constants, exact, warps, registers, index, stream)


def _is_profiled() -> bool:
    """Whether a profiler hooks launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def _launch(
    kernel: Any, programs: int, tensors: tuple[Array, ...], numbers: tuple[int, ...], constants: tuple[Any, ...],
    exact: bool, warps: int, registers: int | None, index: int, stream: torch.cuda.Stream | None,
) -> None:  # fmt: skip
    pointers = [t.data_ptr() for t in tensors]
    aligned = True if reduce(or_, pointers) & 15 == 0 else tuple([p & 15 == 0 for p in pointers])
    dtypes = tuple(map(_dtype, tensors))
    key = (kernel.__name__, index, constants, exact, warps, registers, dtypes, aligned, _specialize(numbers))
    ready = _compiled.get(key)
    if ready is None or _is_profiled():
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            arguments = (*map(as_tensor, tensors), *numbers, *constants)
            options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": not exact, "maxnreg": registers}
            ready = kernel[(programs,)](*arguments, **options)
        if _DIRECT:
            _compiled[key] = _direct_call(ready)
        return
    handle = torch._C._cuda_getCurrentRawStream(index) if stream is None else stream.cuda_stream
    # Addresses instead of tensors: Triton queries the driver for every tensor.
    call, function, fixed = ready
    call(programs, 1, 1, handle, function, *fixed, None, None, None, *pointers, *numbers, *constants)


def current_stream(index: int) -> torch.cuda.Stream:
    """`torch.cuda.current_stream(index)`, with the stream object cached."""
    return _stream(index, torch._C._cuda_getCurrentRawStream(index))


@lru_cache(maxsize=64)
def _stream(index: int, handle: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(index)  # which has this handle


@lru_cache(maxsize=4096)
def _specialize(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """What Triton specializes a kernel on for each number."""
    return tuple((n & 15 == 0) + 2 * (n == 1) + 4 * (n >= 1 << 31) for n in numbers)


def _direct_call(ready: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """(function to call, kernel, constant arguments). Kernels without scratch memory bypass a layer of Triton."""
    run = ready.run
    if run.global_scratch_size or run.profile_scratch_size:
        return run, ready.function, (ready.packed_metadata,)
    fixed = (run.launch_cooperative_grid, run.launch_pdl, None, None, ready.packed_metadata)
    return run.launch, ready.function, fixed
