"""What a run of training is made of, and the model, tables and log that follow from it.

Everything random follows from `seed`: initial rows from (seed, table, row), the MLPs from torch's generator set to it, the
rounding of rows from (seed, step, row, column), the order of shuffled logs from (seed, epoch), and a synthetic log as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from thermocline.data import Log, SyntheticLog, heat_of, open_log
from thermocline.data.click_files import FileLog
from thermocline.data.synthetic import table_rows
from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap
from thermocline.models import DLRM, PlainTables, initialize
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import AUTO, RowConfig
from thermocline.rows.optimizers import RowwiseAdagrad

from .distributed import Cards

TEST_PER_TRAIN = 4  # a synthetic log has one test sample for so many training samples


@dataclass(frozen=True)
class Settings:
    """One run. `data` is a file (and `test` one more, or None for the last fifth of the first), or None for a synthetic log of
    `samples` and `rows`. Ids of a file get a row each, or are hashed to `hashed` rows a table. `lr` is that of the rows
    (row-wise Adagrad), `dense_lr` that of the MLPs (Adam). `residency` "host" keeps the tables in host memory, for a card.
    `budget` ("2GiB") is what rows and cache may take with precision "auto", which then has no other cache."""

    data: Path | None = None
    test: Path | None = None
    samples: int = 400_000
    rows: int = 100_000
    hashed: int | None = None
    precision: str | Mapping[str, float] = "fp32"  # or shares by heat, as modules take them; then there is no cache
    cache: float = 0.0
    budget: str | None = None
    policy: str = "lfu"
    residency: str = "device"
    warm: bool = False  # begin with the hottest rows of the training part in the cache; takes a pass over it
    stochastic: bool = True  # rounding of rows; False rounds to nearest
    dim: int = 16
    batch: int = 256
    epochs: int = 1
    lr: float = 0.02
    dense_lr: float = 2e-3
    bottom: tuple[int, ...] = (64, 32)
    top: tuple[int, ...] = (256, 128)
    seed: int = 0
    device: str = "cpu"
    plain: bool = False  # the baseline: plain nn.EmbeddingBag instead of our tables

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("dim", 1), ("batch", 1), ("epochs", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}; it has to be at least {least}")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise BadInput(f"device is {self.device!r}, but torch finds no CUDA card here; use cpu, or see: thermocline doctor")
        if (self.precision == AUTO) != (self.budget is not None):
            raise BadInput(
                f"precision is {self.precision!r} and budget {self.budget!r}; precision 'auto' needs the bytes that rows and "
                "cache may take as budget, such as 2GiB, and other precisions take none"
            )
        if self.plain and (self.precision != "fp32" or self.cache):
            raise BadInput(f"plain tables are fp32 without a cache; precision is {self.precision!r}, cache {self.cache}")
        if self.test is not None and self.data is None:
            raise BadInput(f"test is '{self.test}' but there is no file to train on; name it with data")

    def logs(self) -> tuple[Log, Log]:
        """The training and the test part."""
        if self.data is not None:
            return open_log(self.data, self.test, self.hashed, self.seed)
        rows, test = table_rows(self.rows), max(1, self.samples // TEST_PER_TRAIN)
        made = SyntheticLog(rows, self.samples, self.seed, device=self.device)
        return made, SyntheticLog(rows, test, self.seed, first=self.samples, device=self.device)

    def model(self, log: Log) -> DLRM:
        """The model at its start, for the tables and dense features of a log to train on."""
        rows, dense = log.rows, log.dense
        names = {f"C{feature + 1}": count for feature, count in enumerate(rows)}
        tables = self._tables(names)
        if self.warm and isinstance(tables, EmbeddingCollection):  # before rows are set, so that hot ones are not rounded
            tables.warm(dict(zip(names, heat_of(log), strict=True)))
        initialize(tables, names, self.dim, self.seed, self.device)
        return self.model_of(tables, len(rows), dense)

    def planned(self, train: Log, test: Log, cards: Cards) -> tuple[Log, Log, DLRM]:
        """Logs and model for the plan of `cards`, on which only their parts of the tables ever are.

        A plan goes by the heat of raw ids, so the tables' own maps make rows of the ids of a file. Precision and cache are the
        plan's.
        """
        rows = train.rows
        maps: tuple[IdMap | None, ...] = (None,) * len(rows)
        if isinstance(train, FileLog) and isinstance(test, FileLog):
            (train, maps), (test, _) = train.raw(), test.raw()
        elif not isinstance(train, SyntheticLog):
            raise BadInput(
                f"'{self.data}' holds pairs, which have no heat by raw id; plans are for click logs with C1, C2, ..."
            )
        fitted = {f"C{n + 1}": cards.fit(f"C{n + 1}", each or IdMap.identity(rows[n])) for n, each in enumerate(maps)}
        tables = [Table(name, each.rows, self.dim, ids=each) for name, each in fitted.items()]
        optimizer = RowwiseAdagrad(lr=self.lr)
        config = RowConfig(cache=0.0, policy=self.policy, optimizer=optimizer, seed=self.seed)
        whole = EmbeddingCollection(tables, rows=config, device="meta")
        made = cards.shard(whole, self.device)
        made.trainer.stochastic = self.stochastic
        initialize(made, {name: each.rows for name, each in fitted.items()}, self.dim, self.seed, self.device)
        return train, test, self.model_of(made, len(rows), train.dense)

    def model_of(self, tables: torch.nn.Module, features: int, dense: int) -> DLRM:
        """The model at its start, around tables that are made already."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # after the tables: those of torch draw numbers too
            return DLRM(tables, features, self.dim, dense, self.bottom, self.top).to(self.device)

    def _tables(self, rows: dict[str, int]) -> PlainTables | EmbeddingCollection:
        if self.plain:
            return PlainTables(rows, self.dim, self.lr, self.device)
        uncached = isinstance(self.precision, Mapping) or (self.precision == AUTO and not self.cache)
        config = RowConfig(
            self.precision, cache=None if uncached else self.cache, budget=self.budget, policy=self.policy,
            optimizer=RowwiseAdagrad(lr=self.lr), residency=self.residency, seed=self.seed,
        )  # fmt: skip
        tables = [Table(name, count, self.dim) for name, count in rows.items()]
        made = EmbeddingCollection(tables, rows=config, device=self.device)
        made.trainer.stochastic = self.stochastic
        return made
