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
_SCRATCH = F.MAX_DIM + R.PAD


@kernel("void(" + ", ".join(["int64"] * 7) + ")")
def _read_rows(codes, meta, format, dim, out, first, last):
    """Dequantize rows first to last - 1."""
    width, words = R.row_bytes(format, dim), R.meta_bytes(format)
    for i in range(first, last):
        R.read_row(format, codes + i * width, meta + i * words, dim, out + 4 * i * dim)


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
    table = (*addresses("Bi", codes_NB, meta_NW), format, dim, *addresses("f", values_ND))
    threads.run_chunks(lambda first, last: _read_rows(*table, first, last), count, CHUNK)
    return values_ND
