"""Lower limits of the time of a lookup or step: bytes over the memory bandwidth.

Bytes of a lookup, each lookup counted, whether its row lies in a processor cache or not:

    lookups * (bytes of a stored row + bytes of an id [+ 4 for a weight]) + bags * bytes of an offset + bytes of the output

Bytes of a step: those, the gradient of the output, ids [and weights] once more, and for each distinct row its bytes and 8
bytes of optimizer state, read and written.

Sectors of 32 bytes, the unit in which a GPU reads memory, for an int8 row of D columns (`docs/row_format.md`): codes begin at
byte r * D of a table that begins at a sector, so row r touches

    floor((r * D + D - 1) / 32) - floor(r * D / 32) + 1   sectors of codes, and 1 sector for its scale

The sector limit replaces the bytes of the rows by 32 bytes for each sector that a lookup touches. `distinct` counts each
sector once in a batch: what memory must deliver if a cache keeps everything. A row in the fp32 cache touches more sectors than
counted here. A share of the limit above 1 is possible where hot rows come from a cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.sweep.family import NONE, OUTPUT_BYTES, SweepWorkload
from benchmarks.sweep.ids import SweepBatch
from thermocline.rows.precision import bytes_per_row

SECTOR = 32
SHOWN_FROM = 100_000  # lookups of a workload whose share of the sector limit counts


class WorkloadBytes(NamedTuple):
    """Bytes of one batch."""

    lookup: int
    step: int


class SectorBytes(NamedTuple):
    """Bytes of an int8 lookup in whole sectors: for every lookup, and each sector once."""

    touched: int
    distinct: int


def output_elements(workload: SweepWorkload, lookups: int) -> int:
    return lookups * max(workload.dims) if workload.mode == NONE else workload.batch * sum(workload.dims)


def _around(workload: SweepWorkload, batch: SweepBatch) -> int:
    """Bytes of a lookup without its rows."""
    lookups = batch.ids.numel()
    per_lookup = batch.ids.element_size() + (4 if batch.weights is not None else 0)
    output = output_elements(workload, lookups) * OUTPUT_BYTES[workload.output]
    return lookups * per_lookup + batch.offsets.numel() * batch.offsets.element_size() + output


def bytes_to_move(workload: SweepWorkload, batch: SweepBatch, precision: str) -> WorkloadBytes:
    """Necessary bytes of a lookup and of a step."""
    row_bytes = [bytes_per_row(precision, dim) for dim in workload.dims]
    rows = sum(count * size for count, size in zip(batch.counts, row_bytes, strict=True))
    lookup = rows + _around(workload, batch)
    distinct = _distinct(workload, batch)
    updated = sum(2 * count * (size + 8) for count, size in zip(distinct, row_bytes, strict=True))
    return WorkloadBytes(lookup, lookup + _around(workload, batch) + updated)


def sector_bytes(workload: SweepWorkload, batch: SweepBatch) -> SectorBytes:
    """Bytes of an int8 lookup in whole sectors."""
    touched = distinct = 0
    for rows_N, dim in zip(batch.ids.long().split(batch.counts), workload.dims, strict=True):
        first_N, last_N = rows_N * dim // SECTOR, (rows_N * dim + dim - 1) // SECTOR
        touched += int((last_N - first_N + 1).sum()) + rows_N.numel()
        distinct += _sectors_once(first_N, last_N) + torch.unique(rows_N * 4 // SECTOR).numel()
    around = _around(workload, batch)
    return SectorBytes(touched * SECTOR + around, distinct * SECTOR + around)


def _sectors_once(first_N: Tensor, last_N: Tensor) -> int:
    """Number of distinct sectors in these ranges."""
    begins_U, at_U = torch.unique(first_N, return_inverse=True)
    if not begins_U.numel():
        return 0
    ends_U = torch.zeros_like(begins_U).scatter_reduce_(0, at_U, last_N, "amax", include_self=False)
    reached_U = torch.cat([begins_U[:1] - 1, ends_U.cummax(0).values[:-1]])  # the last sector of all ranges before
    return int((ends_U - torch.maximum(begins_U - 1, reached_U)).clamp_(min=0).sum())


def _distinct(workload: SweepWorkload, batch: SweepBatch) -> list[int]:
    """Distinct rows of each table."""
    first_T = torch.tensor([0, *workload.rows]).cumsum(0)[:-1].to(batch.ids.device)
    table_N = torch.arange(workload.tables, device=batch.ids.device).repeat_interleave(
        torch.tensor(batch.counts, device=batch.ids.device)
    )
    rows_U = torch.unique(batch.ids.long() + first_T[table_N])
    counted = torch.bincount(torch.searchsorted(first_T, rows_U, right=True) - 1, minlength=workload.tables)
    return [int(count) for count in counted.tolist()]


def copy_rate(device: str, quick: bool) -> float:
    """GB/s of a copy on the device, counting reads and writes: the bandwidth of the limits."""
    if device.startswith("cuda"):
        from benchmarks.kernels import bandwidth

        return bandwidth.copy_rate(quick)
    from benchmarks.runner.timing import seconds

    source = torch.ones((4 << 20) if quick else (256 << 20), dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(seconds(lambda: target.copy_(source)) for _ in range(5)) / 1e9
