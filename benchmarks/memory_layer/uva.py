"""A plain gather of rows in pinned memory by a GPU kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gather(table, rows, out, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, mask = tl.load(rows + at), column < DIM
    tl.store(out + at * DIM + column, tl.load(table + row * DIM + column, mask=mask), mask=mask)


def gather_rows(table_RD: Tensor, rows_N: Tensor) -> Tensor:
    """Rows of a pinned table, on the GPU of `rows_N`."""
    out_ND = torch.empty(len(rows_N), table_RD.shape[1], dtype=table_RD.dtype, device=rows_N.device)
    _gather[(len(rows_N),)](table_RD, rows_N, out_ND, table_RD.shape[1], triton.next_power_of_2(table_RD.shape[1]))
    return out_ND
