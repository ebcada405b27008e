"""Sum the gradient of one row over its lookups, in the order of their positions, into a scratch row.

fp32 gradients are summed in registers. fp16 and bf16 are widened as they are added to the scratch row: units of registers for
them would be compiled for every size, for sums that are bound by memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F

from .codes import short_to_float
from .compile import helper, inlined
from .rows import fill_floats
from .vectors import WIDTH, Emit, Vec, block, by_format, get_f32, get_i64, get_u32

_ONE = np.float32(1)
_FORMATS = {torch.float32: F.FP32, torch.float16: F.FP16, torch.bfloat16: F.BF16}

_MOST = 8  # vectors of columns that one pass over the lookups of a row sums


def _unit(blocks: int) -> Any:
    """Sum `blocks` vectors of columns over the lookups of a row, of which the last may be partial."""

    start = block(f"-> acc{blocks}")(lambda e: [e.zeros()] * blocks)

    @block(f"acc{blocks} i64 i64 f32 -> acc{blocks}")
    def add(e: Emit, acc: list[Vec], grad: Any, left: Any, factor: Any) -> list[Vec]:
        scale, counts = e.splat(factor), [None] * (blocks - 1) + [e.at(left, (1 - blocks) * WIDTH)]
        return [a + e.load_f32(e.at(grad, 4 * k * WIDTH), counts[k]) * scale for k, a in enumerate(acc)]

    @block(f"acc{blocks} i64 -> none")
    def finish(e: Emit, acc: list[Vec], out: Any) -> None:
        for k, vec in enumerate(acc):
            e.store(e.at(out, 4 * k * WIDTH), vec)

    @helper
    def unit(keys, mask, first, last, place, factor, grad, left, out):
        acc = start()
        for k in range(first, last):
            i = get_i64(keys, k) & mask
            scale = get_f32(factor, i) if factor != 0 else _ONE
            acc = add(acc, grad + 4 * get_i64(place, i), left, scale)
        finish(acc, out)

    return unit


_sum_unit = by_format(_unit, (1, 2, 3, 4, 6, 8), " ".join(["i64"] * 9))


def _short_adder(format: int) -> Any:
    """Add a gradient of 16 bits, times a factor, to a scratch row."""

    def add_block(masked: bool) -> Any:
        @block("i64 i64 i64 f32 -> none")
        def add(e: Emit, grad: Any, out: Any, left: Any, factor: Any) -> None:
            value = short_to_float(e, e.load_unsigned(grad, 16, left if masked else None), format)
            e.store(out, e.load_f32(out) + value * e.splat(factor))

        return add

    whole, part = add_block(False), add_block(True)

    @helper
    def add_short(grad, out, dim, factor):
        end = dim // WIDTH * WIDTH  # masked loads of 16 bits are slower
        for c in range(0, end, WIDTH):
            whole(grad + 2 * c, out + 4 * c, WIDTH, factor)
        if end < dim:
            part(grad + 2 * end, out + 4 * end, dim - end, factor)

    return add_short


_add_short = by_format(_short_adder, (F.FP16, F.BF16), "i64 i64 i64 f32")


@inlined
def _sum_short(keys, mask, first, last, place, factor, grad, format, dim, out):
    fill_floats(out, dim, np.float32(0))
    for k in range(first, last):
        i = get_i64(keys, k) & mask
        scale = get_f32(factor, i) if factor != 0 else _ONE
        _add_short(format, grad + 2 * get_i64(place, i), out, dim, scale)


_start = block("-> acc1")(lambda e: [e.zeros()])
_finish = block("acc1 i64 -> none")(lambda e, acc, out: e.store(out, acc[0]))


@block("acc1 i64 i64 i64 i64 -> acc1")
def _add_winners(e: Emit, acc: list[Vec], grad: Any, winners: Any, within: Any, left: Any) -> list[Vec]:
    """Add the gradient in those columns that this lookup won."""
    won = e.load_unsigned(winners, 32, left).compare("==", e.splat(within))
    return [acc[0] + e.load_f32(grad, left).where(won, 0.0)]


@inlined
def _sum_max_winners(keys, mask, first, last, place, within, winners, grad, dim, out):
    for c in range(0, dim, WIDTH):
        acc = _start()
        for k in range(first, last):
            i = get_i64(keys, k) & mask
            at = 4 * (get_i64(place, i) + c)
            acc = _add_winners(acc, grad + at, winners + at, get_u32(within, i), dim - c)
        _finish(acc, out + 4 * c)


@helper
def sum_row(keys, mask, first, last, place, factor, within, winners, grad, format, dim, out):
    """Sum the gradients of keys first to last - 1, all of one row, into the scratch row `out`."""
    if format != F.FP32:
        _sum_short(keys, mask, first, last, place, factor, grad, format, dim, out)
        return
    if within != 0:
        _sum_max_winners(keys, mask, first, last, place, within, winners, grad, dim, out)
        return
    c = 0
    while c < dim:
        blocks = min((dim - c + WIDTH - 1) // WIDTH, _MOST)
        blocks -= (blocks == 5) + (blocks == 7)  # sizes that are not compiled
        _sum_unit(blocks, keys, mask, first, last, place, factor, grad + 4 * c, dim - c, out + 4 * c)
        c += blocks * WIDTH


def gradient_address(grad: Tensor) -> tuple[int, int]:
    """A contiguous gradient as kernels take it: its address and its format."""
    assert grad.is_contiguous(), "kernels take contiguous gradients"
    return grad.data_ptr(), _FORMATS[grad.dtype]
