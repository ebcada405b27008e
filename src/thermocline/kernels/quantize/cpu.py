"""Quantize and dequantize rows on the CPU (definition: `reference.py`): loops over rows, in tasks of `CHUNK` rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cpu import rows as R
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import addresses, kernel
from thermocline.kernels.cpu.vectors import get_i64
from thermocline.kernels.cpu.write_row import measure_row, write_row

CHUNK = 1024
_PREFETCH_DISTANCE = 8
_ZERO = np.float32(0)
_SCRATCH = F.MAX_DIM + R.PAD


@kernel("int64(" + ", ".join(["int64"] * 14) + ")")
def read_rows(codes, meta, values, int8_slots, format, dim, limit, ids, out, pitch, target, scratch, first, last):
    """Read rows ids[first:last] (if ids is 0: rows first to last - 1) to `pitch` floats each; returns -1 or a bad position."""
    width, words = R.row_bytes(format, dim), R.meta_bytes(format)
    for i in range(first, last):
        row = get_i64(ids, i) if ids != 0 else i
        if row < 0 or row >= limit:
            return i
        if ids != 0 and i + _PREFETCH_DISTANCE < last:
            R.prefetch_lines(codes + get_i64(ids, i + _PREFETCH_DISTANCE) * width, width)
            R.prefetch_lines(meta + get_i64(ids, i + _PREFETCH_DISTANCE) * words, words)
        stored, address, row_meta = R.locate_row(format, codes, meta, width, words, values, int8_slots, dim, row)
        if target == F.FP32:
            R.read_row(stored, address, row_meta, dim, out + 4 * i * pitch)
            R.fill_floats(out + 4 * (i * pitch + dim), pitch - dim, _ZERO)
        else:
            R.read_row(stored, address, row_meta, dim, scratch)
            R.fill_floats(scratch + 4 * dim, pitch - dim, _ZERO)
            R.narrow(scratch, out + 2 * i * pitch, pitch, target)
    return -1


@kernel("void(" + ", ".join(["int64"] * 12) + ")")
def _write_rows(values, format, dim, codes, meta, rows, seed, step, stochastic, scratch, first, last):
    """Quantize rows first to last - 1; the row numbers `rows` seed the random bits."""
    width, words = R.row_bytes(format, dim), R.meta_bytes(format)
    shared = R.step_key(seed, step)
    for i in range(first, last):
        R.copy_floats(values + 4 * i * dim, scratch, dim)
        key = R.row_key(shared, get_i64(rows, i)) if stochastic else 0
        low, high, size = measure_row(scratch, dim)
        write_row(format, scratch, dim, low, high, size, codes + i * width, meta + i * words, key, stochastic)


def quantize_rows(values_ND: Tensor, format: int, clock: Tensor | None, rows_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 rows -> (codes as bytes, meta words). Stochastic if a clock is given, with `rows_N` naming the rows."""
    count, dim = values_ND.shape
    values_ND = values_ND.contiguous()
    if format == F.FP32:
        return values_ND.view(torch.uint8).reshape(count, 4 * dim), values_ND.new_empty((count, 0), dtype=torch.int32)
    codes_NB = torch.empty(count, F.row_bytes(format, dim), dtype=torch.uint8)
    meta_NW = torch.empty(count, F.META_WORDS[format], dtype=torch.int32)
    seed, step, names = 0, 0, None
    if clock is not None:
        assert rows_N is not None and rows_N.numel() == count
        seed, step = clock.tolist()[: F.CLOCK_FIELDS]
        names = rows_N.to(torch.int64).contiguous()
    values, codes, meta, numbers = addresses("fBiq", values_ND, codes_NB, meta_NW, names)
    where = (values, format, dim, codes, meta, numbers, seed, step, names is not None)

    def task(first: int, last: int) -> None:
        scratch = np.empty(_SCRATCH, dtype=np.float32)
        _write_rows(*where, *addresses("f", scratch), first, last)

    threads.run_chunks(task, count, CHUNK)
    return codes_NB, meta_NW


def dequantize_rows(codes_NB: Tensor, meta_NW: Tensor, format: int, dim: int) -> Tensor:
    """(codes as bytes, meta words) -> fp32 rows."""
    codes_NB, meta_NW, count = codes_NB.contiguous(), meta_NW.contiguous(), codes_NB.shape[0]
    if format == F.FP32:
        return codes_NB.view(torch.float32)
    values_ND = torch.empty(count, dim, dtype=torch.float32)
    table = (*addresses("Bi", codes_NB, meta_NW), 0, 0, format, dim, count)
    where = (0, *addresses("f", values_ND), dim, F.FP32, 0)  # fp32 needs no scratch
    threads.run_chunks(lambda first, last: read_rows(*table, *where, first, last), count, CHUNK)
    return values_ND
