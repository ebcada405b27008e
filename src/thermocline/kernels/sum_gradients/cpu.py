"""Sum the gradients of repeated rows on the CPU (definition: `reference.py`), sorted by row first."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import addresses, kernel
from thermocline.kernels.cpu.rows import PAD, copy_floats, fill_floats
from thermocline.kernels.cpu.sort import piece_start, row_end, sort_lookups
from thermocline.kernels.cpu.sum_rows import gradient_address, sum_row
from thermocline.kernels.cpu.vectors import get_i64, put_i64
from thermocline.kernels.layout import Layout

_ZERO = np.float32(0)


@kernel("int64(int64, int64, int64, int64, int64)")
def _count_rows(keys, bits, count, piece, pieces):
    """Distinct rows of a piece."""
    at, last = piece_start(keys, bits, count, piece, pieces), piece_start(keys, bits, count, piece + 1, pieces)
    rows = 0
    while at < last:
        at = row_end(keys, bits, at, last)
        rows += 1
    return rows


@kernel("void(" + ", ".join(["int64"] * 17) + ")")
def _sum_rows(
    keys, bits, count, place, factor, within, winners, grad, kind, tables, rows, grads, pitch, scratch, at_row, piece, pieces
):  # fmt: skip
    """Rows of a piece and their sums, from output row `at_row` on. `tables`: (first arena row, dim), and an end."""
    at, last = piece_start(keys, bits, count, piece, pieces), piece_start(keys, bits, count, piece + 1, pieces)
    table = 0
    while at < last:
        row, end = get_i64(keys, at) >> bits, row_end(keys, bits, at, last)
        while row >= get_i64(tables, 2 * table + 2):
            table += 1
        dim = get_i64(tables, 2 * table + 1)
        put_i64(rows, at_row, row)
        sum_row(keys, (1 << bits) - 1, at, end, place, factor, within, winners, grad, kind, dim, scratch)
        copy_floats(scratch, grads + 4 * at_row * pitch, dim)
        fill_floats(grads + 4 * (at_row * pitch + dim), pitch - dim, _ZERO)
        at, at_row = end, at_row + 1


def sum_row_gradients(layout: Layout, call: LookupCall, winners: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct arena rows in ascending order, their gradients [rows, max_dim], zeros after a row's dimension)."""
    winners, pitch = winners.contiguous(), layout.tables.max_dim
    lookups, grad = sort_lookups(layout, *call[:4], grad_out)
    count, pieces = call.ids_N.numel(), lookups.pieces
    keys = (*addresses("q", lookups.keys_N), lookups.bits, count)
    counts = [0] * pieces

    def count_task(number: int) -> None:
        counts[number] = _count_rows(*keys, number, pieces)

    threads.run(count_task, pieces)
    starts = list(accumulate(counts, initial=0))
    rows_U, grads_UW = torch.empty(starts[-1], dtype=torch.int64), torch.empty(starts[-1], pitch, dtype=torch.float32)
    tables = np.array([(f[F.ROW], f[F.DIM]) for f in layout.tables.distinct] + [(1 << 62, 0)], dtype=np.int64)
    arrays = (
        *lookups.places,
        *addresses("i", winners),
        *gradient_address(grad),
        *addresses("qqf", tables, rows_U, grads_UW),
        pitch,
    )

    def sum_task(number: int) -> None:
        scratch = np.empty(F.MAX_DIM + PAD, dtype=np.float32)
        _sum_rows(*keys, *arrays, *addresses("f", scratch), starts[number], number, pieces)

    threads.run(sum_task, pieces)
    return rows_U, grads_UW
