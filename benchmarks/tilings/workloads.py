"""Workloads of the race of tilings: shapes that FBGEMM was faster on, the record shapes, and draws of the sweep's family."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.sweep import family as S
from benchmarks.sweep.family import SweepWorkload, draw
from benchmarks.sweep.ids import BatchStream, SweepBatch
from benchmarks.sweep.race import STORED
from thermocline import formats as F
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

_MODES = {S.SUM: F.SUM, S.WEIGHTED: F.SUM, S.MEAN: F.MEAN}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DRAWS = 24  # batches whose most frequent rows are cached


def _named(
    number: int, rows: int, dims: Sequence[int], batch: int, lengths: str, mean: float, zipf: float = 0.0, empty: float = 0.0
) -> SweepWorkload:  # fmt: skip
    return SweepWorkload(
        seed=9000, number=number, rows=(rows,) * len(dims), dims=tuple(dims), batch=batch, lengths=lengths, mean_length=mean,
        uneven=False, empty=empty, mode=S.SUM, zipf=zipf, shared=0.0, output="fp32", id_dtype="int64", most_lookups=4_000_000,
    )  # fmt: skip


_MIXED = [16, 32, 48, 64, 96, 128, 200, 256]
NAMED = {
    "96 geo8 uniform": _named(0, 4_000_000, [96] * 6, 10_922, S.GEOMETRIC, 8.0, empty=0.1),
    "96 geo8 zipf": _named(1, 4_000_000, [96] * 6, 10_922, S.GEOMETRIC, 8.0, 1.05, 0.1),
    "48 fix20 uniform": _named(2, 4_000_000, [48] * 8, 8_192, S.FIXED, 20.0),
    "mixed geo5 uniform": _named(3, 500_000, [_MIXED[i % 8] for i in range(40)], 4_096, S.GEOMETRIC, 5.0, empty=0.1),
    "mixed geo5 zipf": _named(4, 500_000, [_MIXED[i % 8] for i in range(40)], 4_096, S.GEOMETRIC, 5.0, 1.05, 0.1),
    "128 fix32 zipf": _named(5, 4_000_000, [128] * 8, 8_192, S.FIXED, 32.0, 1.05),
    "128 one zipf": _named(6, 1_000_000, [128] * 13, 16_384, S.FIXED, 1.0, 1.05),
    "16 geo5 uniform": _named(7, 4_000_000, [16] * 12, 8_192, S.GEOMETRIC, 5.0, empty=0.1),
    "200 geo5 uniform": _named(8, 2_000_000, [200] * 4, 8_192, S.GEOMETRIC, 5.0, empty=0.1),
}


def drawn(seed: int, wanted: int) -> dict[str, SweepWorkload]:
    """Pooled workloads of a seed with 100,000 to 1.5 million lookups that fit 4 GiB."""
    found: dict[str, SweepWorkload] = {}
    for number in range(200):
        workload = draw(S.GPU, seed, number)
        lookups = workload.bags * workload.mean_length * (1 - workload.empty)
        fp32_bytes = 4 * sum(rows * dim for rows, dim in zip(workload.rows, workload.dims, strict=True))
        kinds = len(set(workload.dims))
        if workload.mode != S.NONE and 1e5 <= lookups <= 1.5e6 and fp32_bytes < 4 << 30 and kinds <= 4:
            found[workload.name] = workload
        if len(found) == wanted:
            break
    return found


def small(workload: SweepWorkload) -> SweepWorkload:
    """The same kind of workload for the interpreter."""
    kept = sorted({workload.dims.index(width) for width in workload.dims})[:3]
    return SweepWorkload(
        **{
            **vars(workload), "rows": (50,) * len(kept), "dims": tuple(workload.dims[table] for table in kept), "batch": 5,
            "mean_length": min(4.0, workload.mean_length), "most_lookups": 100,
        }
    )  # fmt: skip


def mode_of(workload: SweepWorkload) -> int:
    return _MODES[workload.mode]


def dtype_of(workload: SweepWorkload) -> torch.dtype:
    return _DTYPES[workload.output]


def filled_arena(workload: SweepWorkload, device: str, stored: str) -> Arena:
    """An arena with random rows, whose most frequent rows are in its cache."""
    precision, share = STORED[stored]
    specs = [
        TableSpec(rows, dim, precision, f"t{table}")
        for table, (rows, dim) in enumerate(zip(workload.rows, workload.dims, strict=True))
    ]
    slots = [math.ceil(share * rows) if share else 0 for rows in workload.rows]
    arena = Arena(specs, device=device, slots=slots if share else None)
    generator = torch.Generator(device=device).manual_seed(1)
    if precision == "fp32":
        arena.codes.view(torch.float32).uniform_(-1, 1, generator=generator)
        return arena
    arena.codes.random_(0, 256, generator=generator)
    if precision == "int8":
        arena.meta.view(torch.float32).uniform_(1e-3, 1e-2, generator=generator)
    else:  # bf16 scales near 0.01 above bf16 biases near 0.06 or -0.06
        arena.meta.random_(0x3C00, 0x3C80, generator=generator)
        signs = torch.empty_like(arena.meta).random_(0, 2, generator=generator)
        arena.meta.copy_((arena.meta << 16) | 0x3D80 | (signs << 15))
    _fill_cache(arena, workload, device, generator)
    return arena


def _fill_cache(arena: Arena, workload: SweepWorkload, device: str, generator: torch.Generator) -> None:
    """Point the most frequent rows of some batches to slots of random values."""
    cache = arena.arrays.cache
    assert cache is not None
    cache.values.uniform_(-1, 1, generator=generator)
    stream = BatchStream(workload, device, seed=8)
    first_T = torch.tensor([field[F.ROW] for field in arena.layout.tables.features], device=device)
    drawn_rows = []
    for _ in range(_DRAWS):
        batch = stream.draw()
        table_N = torch.arange(len(first_T), device=device).repeat_interleave(torch.tensor(batch.counts, device=device))
        drawn_rows.append(batch.ids.long() + first_T[table_N])
    rows_U, counts_U = torch.unique(torch.cat(drawn_rows), return_counts=True)
    rows_U = rows_U[counts_U.argsort(descending=True, stable=True)]
    for pool in arena.layout.tables.pools:
        chosen = rows_U[(rows_U >= pool.row) & (rows_U < pool.row + pool.rows)][: pool.fp32_slots]
        number = pool.base + torch.arange(chosen.numel(), device=device)
        words = F.META_WORDS[pool.format]
        arena.meta[pool.meta + (chosen - pool.row) * words] = (number + F.CACHED).int()


def bytes_of(workload: SweepWorkload, batch: SweepBatch, stored: str) -> int:
    """Bytes that a lookup must move."""
    from benchmarks.sweep.limits import bytes_to_move

    return bytes_to_move(workload, batch, STORED[stored][0]).lookup


def share_cached(arena: Arena, rows_N: Tensor) -> float:
    """Share of arena rows of the first table that are cached."""
    field = arena.layout.tables.features[0]
    words = F.META_WORDS[field[F.FORMAT]]
    if not words or not rows_N.numel():
        return 0.0
    return float((arena.meta[field[F.META] + rows_N * words] < 0).float().mean())
