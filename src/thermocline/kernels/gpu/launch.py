"""Launching Triton kernels quickly: on the device of the tensors, and exact where bits must match.

Our kernels take their arguments in one order: tensors, then numbers, then compile-time constants. So what a compiled kernel
depends on is known at a glance (types and alignment of the tensors, kind of the numbers, the constants), and a kernel that was
launched before is found again with one dictionary lookup. Triton's own launch re-derives all that for each argument, which
takes longer than a small lookup takes on the GPU.

Arrays that one launch leaves to the next come from one allocation (`scratch`), and are not made tensors at all: an allocation
takes as long as a launch, a view of a tensor half as long.

`exact=True` forbids fused multiply-add. With TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly: that is how
they are tested where there is no GPU.
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

# The compiled kernel's own call is not a public interface: other versions of Triton take the long way.
_DIRECT = triton.__version__.startswith("3.6.")
_dtype = attrgetter("dtype")
_compiled: dict[tuple[Any, ...], Any] = {}


def ceil_div(n: int, by: int) -> int:
    """n / by, rounded up (Triton's own takes a microsecond)."""
    return -(-n // by)


def power_of_two(n: int) -> int:
    """The smallest power of two at or above n."""
    return 1 << (n - 1).bit_length()


class Piece:
    """Part of an allocation: what a launch wants to know of a tensor."""

    __slots__ = ("dtype", "home", "length", "pointer")

    def __init__(self, home: Tensor, pointer: int, length: int, dtype: torch.dtype) -> None:
        self.home, self.pointer, self.length, self.dtype = home, pointer, length, dtype

    def data_ptr(self) -> int:
        return self.pointer

    def numel(self) -> int:
        return self.length

    def tensor(self) -> Tensor:
        """The same as a tensor."""
        begin = self.pointer - self.home.data_ptr()
        return self.home.view(torch.uint8)[begin : begin + self.length * self.dtype.itemsize].view(self.dtype)


Array = Tensor | Piece


def as_tensor(array: Array) -> Tensor:
    return array.tensor() if isinstance(array, Piece) else array


def scratch(device: torch.device, *wanted: tuple[int, torch.dtype]) -> list[Array]:
    """Arrays of so many elements, not initialized. The interpreter wants tensors."""
    if INTERPRETED:
        return [torch.empty(length, dtype=dtype, device=device) for length, dtype in wanted]
    starts, size = [], 0
    for length, dtype in wanted:
        starts.append(size)
        size += (length * dtype.itemsize + 255) & ~255
    home = torch.empty(size, dtype=torch.uint8, device=device)
    base = home.data_ptr()
    return [Piece(home, base + start, *kind) for start, kind in zip(starts, wanted, strict=True)]


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Array, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    *,
    exact: bool,
    warps: int = 4,
    registers: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Launch `programs` programs of `kernel` on the device of the first tensor, with at most so many registers a thread.

    Without a stream, on the current one.
    """
    if INTERPRETED:
        kernel[(programs,)](*map(as_tensor, tensors), *numbers, *constants)
        return
    first = tensors[0]
    index = (first.home if isinstance(first, Piece) else first).device.index
    if index != torch._C._cuda_getDevice():  # which is torch.cuda.current_device without its look at whether CUDA is there
        with torch.cuda.device(index):
            _launch(kernel, programs, tensors, numbers, constants, exact, warps, registers, index, stream)
    else:
        _launch(kernel, programs, tensors, numbers, constants, exact, warps, registers, index, stream)


def _watched() -> bool:
    """Whether a profiler wants to see launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def _launch(
    kernel: Any, programs: int, tensors: tuple[Array, ...], numbers: tuple[int, ...], constants: tuple[Any, ...],
    exact: bool, warps: int, registers: int | None, index: int, stream: torch.cuda.Stream | None,
) -> None:  # fmt: skip
    pointers = [t.data_ptr() for t in tensors]
    aligned = True if reduce(or_, pointers) & 15 == 0 else tuple([p & 15 == 0 for p in pointers])
    key = (kernel.__name__, index, constants, exact, warps, registers, tuple(map(_dtype, tensors)), aligned, _kinds(numbers))
    ready = _compiled.get(key)
    if ready is None or _watched():
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            ready = kernel[(programs,)](
                *map(as_tensor, tensors),
                *numbers,
                *constants,
                num_warps=warps,
                num_stages=1,
                enable_fp_fusion=not exact,
                maxnreg=registers,
            )
        if _DIRECT:
            _compiled[key] = _prepared(ready)
        return
    handle = torch._C._cuda_getCurrentRawStream(index) if stream is None else stream.cuda_stream
    # Addresses instead of tensors: Triton asks the driver about every tensor it is given.
    call, function, fixed = ready
    call(programs, 1, 1, handle, function, *fixed, None, None, None, *pointers, *numbers, *constants)


def current_stream(index: int) -> torch.cuda.Stream:
    """The current stream of a device, as torch's own function returns it, without making it anew."""
    return _stream(index, torch._C._cuda_getCurrentRawStream(index))


@lru_cache(maxsize=64)
def _stream(index: int, handle: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(index)  # which has this handle


@lru_cache(maxsize=4096)
def _kinds(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """What a compiled kernel may assume about each number."""
    return tuple((n & 15 == 0) + 2 * (n == 1) + 4 * (n >= 1 << 31) for n in numbers)


def _prepared(ready: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """(what to call, the kernel, arguments that never change). Kernels without scratch memory skip a layer of Triton's."""
    run = ready.run
    if run.global_scratch_size or run.profile_scratch_size:
        return run, ready.function, (ready.packed_metadata,)
    fixed = (run.launch_cooperative_grid, run.launch_pdl, None, None, ready.packed_metadata)
    return run.launch, ready.function, fixed
