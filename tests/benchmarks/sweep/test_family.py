"""The family of workloads: bounds, determinism, coverage; ids and limits of its batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.sweep import limits
from benchmarks.sweep.family import CPU, GPU, NONE, QUICK, TINY, WEIGHTED, Family, SweepWorkload, draw
from benchmarks.sweep.ids import PATTERNS, BatchStream

FAMILIES = {"gpu": GPU, "cpu": CPU, "quick": QUICK, "tiny": TINY}


def tiny(number: int) -> SweepWorkload:
    return draw(TINY, 5, number)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_workload_lies_within_the_bounds(family: Family) -> None:
    for number in range(300):
        found = draw(family, 3, number)
        assert 1 <= found.tables <= family.tables and len(found.dims) == found.tables
        assert all(family.smallest <= rows <= family.rows for rows in found.rows)
        assert all(4 <= dim <= family.width and dim % 4 == 0 for dim in found.dims)
        assert 1 <= found.batch <= family.batch and 1 <= found.mean_length <= family.length
        assert found.zipf == 0 or 0.8 <= found.zipf <= 1.3
        taken = sum(4 * rows * dim for rows, dim in zip(found.rows, found.dims, strict=True))
        assert taken <= family.table_bytes + 4 * family.smallest * sum(found.dims)
        assert found.tables * found.batch * found.mean_length <= max(family.lookups, found.tables)
        if found.mode != NONE and found.batch > 1:
            assert 4 * found.batch * sum(found.dims) <= family.output_bytes


def test_bag_lengths_stay_within_the_number_of_lookups() -> None:
    for number in range(60):
        found = draw(CPU, 4, number)
        for pattern in range(PATTERNS):
            lengths = found.bag_lengths(pattern)
            assert lengths.shape == (found.bags,) and lengths.min() >= 0 and lengths.sum() <= found.most_lookups
            assert np.array_equal(lengths, found.bag_lengths(pattern))


def test_a_workload_depends_on_seed_and_number_alone() -> None:
    assert draw(GPU, 7, 12) == draw(GPU, 7, 12) != draw(GPU, 8, 12)
    assert draw(GPU, 1, 0).name == "1.00-30t-d16..400-b8-fix26.4-none-uni-fp32-i64"
    names = [draw(GPU, 1, number).name for number in range(100)]
    assert len(set(names)) == 100 and max(map(len, names)) < 80


def test_json_gives_the_same_workload_back() -> None:
    for number in range(20):
        found = draw(GPU, 2, number)
        assert SweepWorkload.from_json(found.to_json()) == found


def test_forty_workloads_cover_the_family() -> None:
    found = [draw(GPU, 1, number) for number in range(40)]
    assert {each.mode for each in found} == {"sum", "mean", "none", "weighted"}
    assert {each.lengths for each in found} == {"fixed", "geometric", "heavy"}
    assert {each.output for each in found} == {"fp32", "fp16", "bf16"}
    assert {each.id_dtype for each in found} == {"int64", "int32"}
    for flag in ("zipf", "shared", "empty", "uneven"):
        assert {bool(getattr(each, flag)) for each in found} == {True, False}
    assert {len(set(each.dims)) > 1 for each in found} == {True, False}
    assert max(each.tables for each in found) > 100 and min(each.tables for each in found) < 5


@pytest.mark.parametrize("number", range(12))
def test_batches_are_valid_and_repeatable(number: int) -> None:
    workload = tiny(number)
    stream, again = BatchStream(workload, "cpu"), BatchStream(workload, "cpu")
    for _ in range(PATTERNS + 1):
        batch, same = stream.draw(), again.draw()
        assert torch.equal(batch.ids, same.ids) and torch.equal(batch.offsets, same.offsets)
        assert batch.ids.dtype == batch.offsets.dtype == getattr(torch, workload.id_dtype)
        assert batch.offsets[0] == 0 and batch.offsets[-1] == batch.ids.numel() == sum(batch.counts) <= stream.most_ids
        assert batch.offsets.numel() == workload.bags + 1 and bool((batch.offsets.diff() >= 0).all())
        assert (batch.weights is not None) == (workload.mode == WEIGHTED)
        for ids, rows in zip(batch.ids.split(batch.counts), workload.rows, strict=True):
            assert not ids.numel() or (int(ids.min()) >= 0 and int(ids.max()) < rows)


def _one_table(zipf: float = 0.0, shared: float = 0.0) -> SweepWorkload:
    return SweepWorkload(1, 0, (5000,), (8,), 500, "fixed", 20.0, False, 0.0, "sum", zipf, shared, "fp32", "int64", 10_000)


def test_zipf_and_shared_ids_are_more_skewed_than_uniform_ones() -> None:
    def share_of_hottest(workload: SweepWorkload) -> float:
        counts = torch.bincount(BatchStream(workload, "cpu").draw().ids, minlength=5000)
        return float(counts.sort(descending=True)[0][:16].sum()) / 10_000

    uniform, shared = share_of_hottest(_one_table()), share_of_hottest(_one_table(shared=0.4))
    assert uniform < 0.02 < 0.38 < shared < 0.45
    assert share_of_hottest(_one_table(zipf=0.8)) < share_of_hottest(_one_table(zipf=1.3)) and uniform < 0.02


def test_new_batches_have_new_ids_and_streams_differ() -> None:
    stream, other = BatchStream(_one_table(), "cpu"), BatchStream(_one_table(), "cpu", seed=1)
    first = stream.draw().ids
    assert not torch.equal(first, stream.draw().ids) and not torch.equal(first, other.draw().ids)


# -- limits --


@pytest.mark.parametrize("number", range(8))
def test_bytes_and_sectors_equal_a_plain_count(number: int) -> None:
    workload = tiny(number)
    batch = BatchStream(workload, "cpu").draw()
    touched, once, rows = 0, set(), set()
    for table, (ids, dim) in enumerate(zip(batch.ids.split(batch.counts), workload.dims, strict=True)):
        for row in ids.tolist():
            sectors = {byte // 32 for byte in range(row * dim, row * dim + dim)}
            touched += len(sectors) + 1
            once |= {(table, sector) for sector in sectors} | {(table, "scale", row * 4 // 32)}
            rows.add((table, row))
    lookups, size = batch.ids.numel(), batch.ids.element_size()
    width = workload.batch * sum(workload.dims) if workload.mode != NONE else lookups * max(workload.dims)
    around = lookups * (size + 4 * (workload.mode == WEIGHTED)) + batch.offsets.numel() * size
    around += width * {"fp32": 4, "fp16": 2, "bf16": 2}[workload.output]
    assert limits.sector_bytes(workload, batch) == (32 * touched + around, 32 * len(once) + around)
    stored = sum(count * (dim + 4) for count, dim in zip(batch.counts, workload.dims, strict=True))
    updated = sum(2 * (workload.dims[table] + 4 + 8) for table, _ in rows)
    assert limits.bytes_to_move(workload, batch, "int8") == (stored + around, stored + 2 * around + updated)
