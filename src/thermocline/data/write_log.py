"""Writes synthetic logs as Parquet files, which appear under their names when they are complete."""

from __future__ import annotations

from pathlib import Path

import torch

from thermocline.errors import written_aside

from .metrics import Measures, measures
from .synthetic import SyntheticLog
from .synthetic_sequences import ReportProgress, SyntheticSequences

_CHUNK = 1 << 16


def write_parquet(log: SyntheticLog, path: Path, progress: ReportProgress) -> Measures:
    """Write label, I1..I13 (counts) and C1..C26 (rows) in chunks; return the metrics of the true probabilities."""
    import pyarrow
    import pyarrow.parquet

    names = ["label", *(f"I{i + 1}" for i in range(log.dense)), *(f"C{t + 1}" for t in range(len(log.rows)))]
    types = [pyarrow.uint8(), *[pyarrow.int32()] * log.dense, *[pyarrow.uint32()] * len(log.rows)]
    schema = pyarrow.schema(list(zip(names, types, strict=True)))
    truth: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    with written_aside(path) as part, pyarrow.parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        for start in range(0, log.samples, _CHUNK):
            count = min(_CHUNK, log.samples - start)
            clicks = log.clicks(start, count)
            truth.append(torch.logit(log.probability(start, count)).float())
            labels.append(clicks.label_B > 0.5)
            columns = [*clicks.label_B[None], *log.counts(start, count).t(), *clicks.ids_BF.t()]
            arrays = [pyarrow.array(column.cpu().numpy()).cast(type) for column, type in zip(columns, types, strict=True)]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
            progress(start + count, log.samples, "samples")
    return measures(truth, labels)


def write_sequences(made: SyntheticSequences, path: Path, progress: ReportProgress = lambda done, total, what: None) -> int:
    """Write user, item and time, sorted by time; return the number of interactions."""
    import pyarrow
    import pyarrow.parquet

    user_N, item_N, time_N = made.interactions(progress)
    order_N = time_N.argsort(stable=True)
    columns = {"user": user_N[order_N].numpy(), "item": item_N[order_N].numpy(), "time": time_N[order_N].numpy()}
    with written_aside(path) as part:
        pyarrow.parquet.write_table(pyarrow.table(columns), part, compression="zstd")
    return len(user_N)
