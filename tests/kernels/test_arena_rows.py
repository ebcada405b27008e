"""The arena rows of a batch against a loop over its lookups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thermocline
from thermocline.kernels.stage.reference import arena_rows


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("wrong", [False, True])
def test_arena_rows_are_those_of_each_lookup_in_range(dtype, wrong):
    draw = np.random.default_rng(3)
    for trial in range(60):
        features, batch = int(draw.choice([1, 2, 5])), int(draw.choice([0, 1, 63]))
        sizes = draw.integers(1, 50, features)
        tables = [thermocline.Table(f"t{n}", int(rows), 4) for n, rows in enumerate(sizes)]
        layout = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.0)).arena.layout
        offsets = np.concatenate([[0], draw.integers(0, 4, features * batch).cumsum()])
        feature_N = np.repeat(np.arange(features), np.diff(offsets[::batch])) if batch else np.zeros(0, int)
        ids_N = draw.integers(-1 if wrong else 0, 60 if wrong else 1 << 30, len(feature_N))
        if not wrong:
            ids_N %= sizes[feature_N]
        first = np.concatenate([[0], sizes.cumsum()])
        expected = [first[f] + id for f, id in zip(feature_N, ids_N, strict=True) if 0 <= id < sizes[f]]
        found = arena_rows(layout, torch.tensor(ids_N, dtype=dtype), torch.tensor(offsets, dtype=dtype))
        assert found.dtype == torch.int64 and found.tolist() == expected, trial
