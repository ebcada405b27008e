"""Memory bandwidth of the GPU: a copy, and a gather of random rows that are summed 32 at a time.

The gather reads as a lookup must (an id, then a row of 128 or 512 bytes anywhere in 16 GB) and does next to nothing else. Its
rate, counting rows, ids and output, is the ceiling of lookups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.runner.timing import gpu_chunk, quantile

POOL = 32
_TABLE_BYTES = 16_000_000_000 // 4096 * 4096
_READ_BYTES = 2 << 30
_ITERATIONS = 20
_LAUNCHES = ((8, 1), (16, 2), (32, 4))  # rows loaded at once, warps


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gather_sum(table, ids, out, POOL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    bag = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, POOL, BLOCK):
        rows = tl.load(ids + bag * POOL + first + tl.arange(0, BLOCK))
        total += tl.sum(tl.load(table + rows[:, None] * WIDTH + columns[None, :]), 0)
    tl.store(out + bag * WIDTH + columns, total)


def copy_rate(quick: bool = False) -> float:
    """GB/s of a copy on the GPU, counting reads and writes."""
    source = torch.empty((1 << 26) if quick else _READ_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = _median(lambda _: target.copy_(source), [None])
    return 2 * source.numel() / ms / 1e6


def gather_rate(row_bytes: int, quick: bool = False) -> float:
    """GB/s of the best launch of the gather over rows of `row_bytes` bytes."""
    width = row_bytes // 4
    total = _TABLE_BYTES // 64 if quick else _TABLE_BYTES
    table_RW = torch.empty(total // row_bytes, width, device="cuda").uniform_(0.5, 1.0)
    count = (_READ_BYTES // 16 if quick else _READ_BYTES) // row_bytes // 4096 * 4096
    ids = [torch.randint(0, table_RW.shape[0], (count,), device="cuda") for _ in range(3)]
    out_BW = torch.full((count // POOL, width), float("nan"), device="cuda")
    best = float("inf")
    for block, warps in _LAUNCHES:

        def launch(ids_N: Tensor, block: int = block, warps: int = warps) -> None:
            _gather_sum[(count // POOL,)](table_RW, ids_N, out_BW, POOL, width, block, num_warps=warps)

        best = min(best, _median(launch, ids))
        launch(ids[0])
        exact_BW = table_RW[ids[0][: 64 * POOL]].view(64, POOL, width).sum(1)
        torch.testing.assert_close(out_BW[:64], exact_BW, rtol=1e-5, atol=1e-4)
    return (count * (row_bytes + 8) + out_BW.numel() * 4) / best / 1e6


def _median(run: Any, inputs: list[Any]) -> float:
    return quantile(gpu_chunk(run, inputs)(_ITERATIONS), 0.5)
