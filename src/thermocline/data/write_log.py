"""Writes a synthetic log as Parquet with Criteo's columns: label, I1..I13 (counts), C1..C26 (rows)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from .metrics import Measures, Scores
from .synthetic import SyntheticLog

_CHUNK = 1 << 16


def write_parquet(log: SyntheticLog, path: Path, progress: Callable[[int, int, str], None]) -> Measures:
    """Write all samples in chunks, atomically; return the metrics of the true probabilities."""
    import pyarrow
    import pyarrow.parquet

    names = ["label", *(f"I{i + 1}" for i in range(log.dense)), *(f"C{t + 1}" for t in range(len(log.rows)))]
    types = [pyarrow.uint8(), *[pyarrow.int32()] * log.dense, *[pyarrow.uint32()] * len(log.rows)]
    schema = pyarrow.schema(list(zip(names, types, strict=True)))
    part = path.with_name(path.name + ".part")
    truth = Scores()
    try:
        with pyarrow.parquet.ParquetWriter(part, schema, compression="zstd") as writer:
            for start in range(0, log.samples, _CHUNK):
                count = min(_CHUNK, log.samples - start)
                clicks = log.clicks(start, count)
                truth.add(torch.logit(log.probability(start, count)), clicks.label_B)
                columns = [clicks.label_B[None], log.counts(start, count).t(), clicks.ids_BF.t()]
                arrays = [column.cpu().numpy() for part in columns for column in part]
                cast = [pyarrow.array(array).cast(type) for array, type in zip(arrays, types, strict=True)]
                writer.write_batch(pyarrow.record_batch(cast, schema=schema))
                progress(start + count, log.samples, "samples")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return truth.measures()
