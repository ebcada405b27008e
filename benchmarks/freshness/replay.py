"""Progressive validation on a real log: each batch is predicted by what a server would have, then trained on.

Time is that of a trainer that updates `RATE` rows a second, and a publish is served at once. With a tenth of the bytes, rows
wait; a lookup of a row that waits is as old as the row's first change of which nothing is served. Bytes are those of the
messages to a server, without the dense part, which is sent whole each time with and without a budget.

Criteo has clicks and others. Globo has clicks only: for each, the same user with an article of another click of the batch
counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import thermocline
from thermocline.checkpoint.format.module_entries import find_modules
from thermocline.checkpoint.publishes.part import PublishPart, model_signature
from thermocline.data.click_files import ClickFile
from thermocline.data.metrics import measures
from thermocline.kernels import dequantize_rows
from thermocline.models.dlrm import DLRM
from thermocline.publishing.budgeted_sends import BudgetedSends
from thermocline.publishing.changed_rows import ModuleRows

RATE, INTERVAL, BATCH, DIM, HASH = 100_000, 0.25, 256, 16, 100_003
LOGS = {"criteo": "criteo_kaggle_uniform_0p3pct.parquet", "globo": "globo_clicks_first80.parquet"}
_GLOBO = ("user", "item", "environment", "device", "os", "country", "region", "referrer")


@dataclass(frozen=True)
class Log:
    """Samples in the order of time."""

    ids_NF: NDArray[np.int64]
    dense_NI: NDArray[np.float32]
    label_N: NDArray[np.float32]


def read_log(name: str, folder: Path, samples: int) -> Log:
    """The first samples of a log, ids hashed to `HASH` rows a feature."""
    if name == "criteo":
        chunks = list(ClickFile(folder / LOGS[name]).chunks(0, samples))
        ids = np.concatenate([chunk.ids_BF.numpy() for chunk in chunks])
        dense = np.concatenate([chunk.dense_BI.numpy() for chunk in chunks])
        return Log(ids % HASH, dense, np.concatenate([chunk.label_B.numpy() for chunk in chunks]))
    table = parquet.read_table(folder / LOGS[name], columns=list(_GLOBO)).slice(0, samples // 2)
    ids = np.stack([table.column(column).to_numpy().astype(np.int64) for column in _GLOBO], 1) % HASH
    other, draw = ids.copy(), np.random.default_rng(1)
    for first in range(0, len(ids), BATCH // 2):
        part = slice(first, first + BATCH // 2)
        other[part, 1] = draw.permutation(ids[part, 1])
    pairs = np.stack([ids, other], 1).reshape(-1, len(_GLOBO))
    return Log(pairs, np.zeros((len(pairs), 0), np.float32), np.tile(np.array([1, 0], np.float32), len(ids)))


class Clock:
    """Seconds of the replay."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Replay:
    """One way to publish: a trainer, and the model that a server has. `budget`: bytes a second, or None for everything."""

    def __init__(self, log: Log, budget: float | None) -> None:
        torch.manual_seed(0)
        self._log, self.clock, features = log, Clock(), log.ids_NF.shape[1]
        tables = [thermocline.Table(f"f{n}", HASH, DIM) for n in range(features)]
        rows = thermocline.RowConfig("int8", cache=0.05, optimizer=thermocline.RowwiseAdagrad(lr=0.05))
        collection = thermocline.EmbeddingCollection(tables, rows=rows)
        self.model = DLRM(collection, features, DIM, log.dense_NI.shape[1], (32,), (64,))
        self._adam = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._served_FRD = torch.stack([collection.get_rows(f"f{n}") for n in range(features)])
        self._rows = ModuleRows(find_modules(self.model)[0])
        self._budget = None if budget is None else BudgetedSends([self._rows], budget, self.clock)
        self._changed_FR = np.full((features, HASH), np.inf)  # the first change that is not served
        self._next, self.sent = INTERVAL, 0
        self.ages: list[NDArray[np.float64]] = []
        self._dense = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self._server = DLRM(_Served(), features, DIM, log.dense_NI.shape[1], (32,), (64,))

    def run(self) -> dict[str, float]:
        """Predict and train batch by batch."""
        logits, labels = [], []
        for first in range(0, len(self._log.label_N), BATCH):
            part = slice(first, first + BATCH)
            ids_BF, dense_BI = torch.from_numpy(self._log.ids_NF[part]), torch.from_numpy(self._log.dense_NI[part])
            label_B = torch.from_numpy(self._log.label_N[part])
            logits.append(self._predict(dense_BI, ids_BF))
            labels.append(label_B)
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(dense_BI, ids_BF), label_B)
            self._adam.zero_grad()
            loss.backward()
            self._adam.step()
            self.clock.now += ids_BF.numel() / RATE
            for feature, ids_B in enumerate(ids_BF.T.numpy()):
                self._changed_FR[feature, ids_B] = np.minimum(self._changed_FR[feature, ids_B], self.clock.now)
            if self.clock.now >= self._next:
                self._publish()
                self._next = self.clock.now + INTERVAL
        found, ages = measures(logits, labels), np.concatenate(self.ages)
        p50, p99 = np.quantile(ages, (0.5, 0.99)).tolist()
        seconds = max(self.clock.now, 1e-9)
        return {
            "auc": found.auc,
            "mean": float(ages.mean()),
            "p50": p50,
            "p99": p99,
            "bytes": self.sent / seconds,
            "s": seconds,
        }

    @torch.no_grad()
    def _predict(self, dense_BI: Tensor, ids_BF: Tensor) -> Tensor:
        features = range(ids_BF.shape[1])
        first_BF = np.stack([self._changed_FR[n, ids_BF[:, n].numpy()] for n in features])
        self.ages.append(np.maximum(self.clock.now - first_BF, 0.0).ravel())
        served: Any = self._server.embeddings
        served.rows_BW = torch.stack([self._served_FRD[n, ids_BF[:, n]] for n in features], 1).flatten(1)
        logit_B: Tensor = torch.func.functional_call(self._server, self._dense, (dense_BI, ids_BF))
        return logit_B

    def _publish(self) -> None:
        """Serve changed rows, as many as the budget allows, and the dense part."""
        part = PublishPart(1, 1, 0, model_signature(self._rows.tables), {})
        if self._budget is None:
            part = small = replace(part, deltas=self._rows.take(self._rows.changed()))
        else:
            copied = self._budget.copy(everything=False, reloaded=False)
            part, small = self._budget.choose(part, copied, self._budget.budget.available(), steps=True)
        self.sent += small.size
        formats = {table.name: table.format for table in self._rows.tables}
        for name, delta in part.deltas.items():
            feature, row_K = int(name[1:]), torch.from_numpy(delta.rows_K)
            codes, meta = torch.from_numpy(delta.codes_KB), torch.from_numpy(delta.meta_KW)
            self._served_FRD[feature, row_K] = dequantize_rows(codes, meta, formats[name], DIM)
            self._changed_FR[feature, delta.rows_K] = np.inf
        self._dense = {name: value.detach().clone() for name, value in self.model.named_parameters()}


class _Served(nn.Module):
    """Rows that were looked up already."""

    rows_BW: Tensor

    def forward(self, ids_BF: Tensor) -> Tensor:
        return self.rows_BW
