"""Throughput of heat profiles with exact counts, against a bare pyarrow scan and count of the same columns.

Both read the same Parquet file in turn. pyarrow (`read_table`, then `value_counts` of each column) keeps the whole column in
memory and knows no batches, slices or lengths. `ratio` is pyarrow's time over ours: 0.5 is the required "within 2x".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.runner.timing import seconds
from thermocline.heat.log_files import profile_files

RUNS = 7


def throughput(path: Path, columns: Sequence[str], runs: int = RUNS) -> dict[str, Any]:
    """Seconds of both, medians of several runs in turn, as the fields of a row."""
    import pyarrow
    from pyarrow import compute, parquet

    def bare() -> None:
        table = parquet.read_table(path, columns=list(columns))
        for name in columns:
            is_list = pyarrow.types.is_list(table.schema.field(name).type)
            compute.value_counts(compute.list_flatten(table[name]) if is_list else table[name])

    heat = profile_files([path], columns)  # also compiles
    assert all(table.exact for table in heat.tables.values())
    bare()
    times = [(seconds(lambda: profile_files([path], columns)), seconds(bare)) for _ in range(runs)]
    ours, theirs = (median(column) for column in zip(*times, strict=True))
    lookups = sum(table.lookups for table in heat.tables.values())
    low, high = np.percentile([mine for mine, _ in times], [10, 90])
    return {
        "ours": ours, "peer": "pyarrow read and value_counts", "peer_value": theirs, "unit": "s", "ratio": theirs / ours,
        "spread": float((high - low) / ours), "lookups": lookups, "lookups_per_second": lookups / ours, "runs": runs,
    }  # fmt: skip


def write_synthetic(path: Path, samples: int, seed: int = 0) -> list[str]:
    """A log of Zipf's law with columns of many, few and listed ids, and their names."""
    import pyarrow
    from pyarrow import parquet

    random = np.random.default_rng(seed)
    scatter = 0x9E3779B97F4A7C15  # raw ids are seldom dense
    many = random.zipf(1.2, samples).astype(np.uint64) * np.uint64(scatter)
    few = random.zipf(1.5, samples) % 1_009
    lengths = random.integers(0, 9, samples // 8)
    values = (random.zipf(1.2, int(lengths.sum())) % 200_003).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths), np.full(samples - len(lengths), lengths.sum())])
    bags = pyarrow.ListArray.from_arrays(pyarrow.array(offsets, pyarrow.int32()), pyarrow.array(values))
    table = {"many": pyarrow.array(many.view(np.int64)), "few": pyarrow.array(few), "bags": bags}
    parquet.write_table(pyarrow.table(table), path, compression="zstd", row_group_size=1 << 18)
    return list(table)
