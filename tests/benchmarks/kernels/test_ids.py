"""The ids that benchmarks look up."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.cases import Shape
from benchmarks.kernels.ids import EXPONENT, batches

SHAPE = Shape("test", tables=3, rows=1000, dim=4, batch=63, pooling=50)


@pytest.mark.parametrize("kind", ["zipf", "uniform"])
def test_the_same_seed_draws_the_same_ids_and_another_seed_others(kind: str) -> None:
    first, again, other = (batches(SHAPE, kind, 2, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].ids, first[1].ids)
    assert not torch.equal(first[0].ids, other[0].ids)


@pytest.mark.parametrize("kind", ["zipf", "uniform"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_in_range_and_offsets_cover_them(kind: str, dtype: torch.dtype) -> None:
    batch = batches(SHAPE, kind, 1, dtype=dtype)[0]
    assert batch.ids.dtype == batch.offsets.dtype == dtype
    assert batch.ids.numel() == SHAPE.lookups
    assert int(batch.ids.min()) >= 0 and int(batch.ids.max()) < SHAPE.rows
    assert batch.offsets.tolist() == list(range(0, SHAPE.lookups + 1, SHAPE.pooling))


def test_zipf_ids_follow_their_law() -> None:
    shape = Shape("test", tables=1, rows=1000, dim=4, batch=2000, pooling=100)
    counts = torch.bincount(batches(shape, "zipf", 1)[0].ids, minlength=1000).sort(descending=True).values
    weights = torch.arange(1, 1001, dtype=torch.float64).pow(-EXPONENT)
    expected = weights / weights.sum() * shape.lookups
    assert torch.allclose(counts[:20].double(), expected[:20], rtol=0.1)


def test_hot_rows_lie_elsewhere_in_every_table() -> None:
    ids_TN = batches(SHAPE, "zipf", 1)[0].ids.view(SHAPE.tables, -1)
    hottest = {int(torch.bincount(ids_N).argmax()) for ids_N in ids_TN}
    assert len(hottest) == SHAPE.tables
