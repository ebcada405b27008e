"""Settings of a training run, and the tables, model and log that follow from them.

All randomness derives from `seed`: initial rows from (seed, table, row), dense parameters from torch's generator, rounding of
rows from (seed, step, row, column), the order of shuffled samples and negatives from (seed, epoch), and synthetic logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from thermocline.data.click_files import CRITEO, ClickColumns, FileLog, open_log
from thermocline.data.click_log import ClickLog, heat_of
from thermocline.data.id_rows import RawIds
from thermocline.data.sequence_files import open_sequences
from thermocline.data.sequences import SequenceLog
from thermocline.data.synthetic import SyntheticLog, table_rows
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap
from thermocline.models import DLRM, SequenceModel, initialize
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import AUTO, RowConfig
from thermocline.rows.optimizers import RowwiseAdagrad

from .ranks import ONE_RANK, TrainingRanks

TRAIN_PER_TEST = 4  # samples of a synthetic log
ITEM_TABLE, NEGATIVE = "item", "negative"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of both models.

    `data` is a file, or None for a synthetic log. Ids of a file get one row each, or are hashed to `hashed` rows of a table.
    Fields of `RowConfig` (precision, cache, policy) describe the rows. `lr` is the rate of rows (row-wise Adagrad), `dense_lr`
    of dense parameters (Adam).
    """

    data: Path | None = None
    hashed: int | None = None
    precision: str | Mapping[str, float] = "fp32"  # a mapping has shares by heat, and no cache
    cache: float = 0.0
    policy: str = "lfu"
    dim: int = 16
    batch: int = 256  # samples of a step on each rank
    epochs: int = 1
    lr: float = 0.02
    dense_lr: float = 2e-3
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (("dim", 1), ("batch", 1), ("epochs", 1), ("seed", 0)):
            self._check_least(name, least)
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            words = f"device is {self.device!r}, but torch finds no CUDA device; use cpu, or run: thermocline doctor"
            raise BadInput(words, parameter="device", value=self.device)

    def _check_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise BadInput(f"{name} is {getattr(self, name)}; it must be at least {least}", parameter=name)

    def _collection(
        self, tables: list[Table], ranks: TrainingRanks, mode: str = "sum", stochastic: bool = True, **options: Any
    ) -> Any:
        """Tables at the start of a run; under a plan, this rank's shard, with the precision and cache of the plan."""
        planned = ranks.plan is not None
        options = {"precision": self.precision, "cache": self.cache, **options}
        config = RowConfig(
            policy=self.policy, optimizer=RowwiseAdagrad(lr=self.lr), seed=self.seed,
            **({"cache": 0.0} if planned else options),
        )  # fmt: skip
        made = EmbeddingCollection(tables, mode=mode, rows=config, device="meta" if planned else self.device)
        found = ranks.shard(made, self.device) if planned else made
        found.trainer.stochastic = stochastic
        return found


@dataclass(frozen=True, kw_only=True)
class DLRMSettings(RunSettings):
    """Settings of a DLRM on a click log.

    `test` is a file to test on; without it, the last fifth of `data` is the test part. `columns` names the columns of
    files, and `skip_bad` bad lines of each are left out. A synthetic log has `samples` training samples over `rows` rows. With
    precision "auto", `budget` ("2GiB") limits rows and cache. `residency` "host" keeps tables in host memory. `warm` fills the
    cache with the hottest rows of the training part. `stochastic` False rounds rows to nearest. With `elastic`, ids of `data`
    come and go in that many rows of each table.
    """

    test: Path | None = None
    columns: ClickColumns = CRITEO
    skip_bad: int = 0
    elastic: int | None = None
    samples: int = 400_000
    rows: int = 100_000
    budget: str | None = None
    residency: str = "device"
    warm: bool = False
    stochastic: bool = True
    bottom: tuple[int, ...] = (64, 32)
    top: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_least("samples", 1)
        if (self.precision == AUTO) != (self.budget is not None):
            words = f"precision is {self.precision!r} and budget {self.budget!r}"
            way_out = "precision 'auto' needs a budget for rows and cache, such as 2GiB, and other precisions take none"
            raise BadInput(f"{words}; {way_out}", parameter="budget", value=self.budget)
        if self.elastic is not None and (self.data is None or self.hashed is not None or self.warm):
            words = f"elastic is {self.elastic}; it takes the ids of a file, and works neither with hashed nor with warm"
            raise BadInput(words, parameter="elastic", value=self.elastic)
        if self.test is not None and self.data is None:
            raise BadInput(f"test is '{self.test}' but data is missing; give the file to train on", parameter="data")

    def logs(self) -> tuple[ClickLog, ClickLog]:
        """The training and the test part."""
        if self.data is not None:
            raw, about = self.elastic is not None, (self.columns, self.skip_bad)
            logs = open_log(self.data, self.test, self.hashed, self.seed, raw, *about)
            return (self._with_rows(logs[0]), self._with_rows(logs[1])) if raw else logs
        rows, test = table_rows(self.rows), max(1, self.samples // TRAIN_PER_TEST)
        made = SyntheticLog(rows, self.samples, self.seed, device=self.device)
        return made, SyntheticLog(rows, test, self.seed, first=self.samples, device=self.device)

    def _with_rows(self, log: ClickLog) -> ClickLog:
        """A log with raw ids, for elastic tables."""
        if not isinstance(log, FileLog) or self.elastic is None:
            words = f"'{self.data}' holds pairs, whose ids do not come and go; elastic needs --label and --ids"
            raise BadInput(words, parameter="elastic", value=self.elastic)
        return replace(log, ids=RawIds((self.elastic,) * len(log.names)))

    def model(self, log: ClickLog) -> DLRM:
        """The model at its start, for the tables and dense features of a training log."""
        ids = None if self.elastic is None else IdMap.elastic(self.elastic, salt=self.seed)
        names = dict(zip(log.names, log.rows, strict=True))
        no_cache = isinstance(self.precision, Mapping) or (self.precision == AUTO and not self.cache)
        tables = self._collection(
            [Table(name, count, self.dim, ids=ids) for name, count in names.items()], ONE_RANK, stochastic=self.stochastic,
            budget=self.budget, residency=self.residency, cache=None if no_cache else self.cache,
        )  # fmt: skip
        if self.warm:  # before rows are set, so that hot rows are not rounded
            tables.warm(dict(zip(names, heat_of(log), strict=True)))
        if ids is None:
            initialize(tables, names, self.dim, self.seed, self.device)
        return self.model_of(tables, len(names), log.dense)

    def planned(self, train: ClickLog, test: ClickLog, ranks: TrainingRanks) -> tuple[ClickLog, ClickLog, DLRM]:
        """Logs and model under the plan of `ranks`. A plan knows raw ids, so id maps of the tables map the ids of a file."""
        if self.elastic is not None:
            words = (
                f"elastic is {self.elastic}, and a plan is given; train without one, or shard_ the model in a loop of your own"
            )
            raise BadInput(words, parameter="elastic", value=self.elastic)
        rows = train.rows
        maps: tuple[IdMap | None, ...] = (None,) * len(rows)
        if isinstance(train, FileLog) and isinstance(test, FileLog):
            (train, maps), (test, _) = train.raw(), test.raw()
        elif not isinstance(train, SyntheticLog):
            words = f"'{self.data}' holds pairs, which have no heat by raw id; plans need --label and --ids"
            raise BadInput(words, parameter="data", value=self.data)
        parts = zip(train.names, maps, rows, strict=True)
        fitted = {name: ranks.fit(name, each or IdMap.identity(count)) for name, each, count in parts}
        tables = [Table(name, each.rows, self.dim, ids=each) for name, each in fitted.items()]
        made = self._collection(tables, ranks, stochastic=self.stochastic)
        initialize(made, {name: each.rows for name, each in fitted.items()}, self.dim, self.seed, self.device)
        return train, test, self.model_of(made, len(rows), train.dense)

    def model_of(self, tables: torch.nn.Module, features: int, dense: int) -> DLRM:
        """The model at its start, around existing tables."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # after the tables: torch's own tables draw numbers too
            return DLRM(tables, features, self.dim, dense, self.bottom, self.top).to(self.device)


@dataclass(frozen=True, kw_only=True)
class SequenceSettings(RunSettings):
    """Settings of the sequence model on users' histories.

    A synthetic log has `users` and `items`. Items of a file get one row each, and one row is for unknown items. The model reads
    the last `length` items; each sample has `negatives` negative items.
    """

    columns: tuple[str, ...] = ()  # of user, item and time in a file, or one of lists
    skip_bad: int = 0
    users: int = 20_000
    items: int = 10_000
    dim: int = 32
    length: int = 50
    blocks: int = 2
    heads: int = 2
    negatives: int = 64
    batch: int = 128
    epochs: int = 2
    lr: float = 0.1
    dense_lr: float = 1e-3

    def log(self) -> SequenceLog:
        settings: dict[str, Any] = {"length": self.length, "negatives": self.negatives, "seed": self.seed}
        if self.data is not None:
            return open_sequences(self.data, self.columns, self.skip_bad, **settings)
        return SyntheticSequences(self.users, self.items, self.seed).log(**settings)

    def id_map(self, log: SequenceLog, ranks: TrainingRanks = ONE_RANK) -> IdMap:
        """The map from items to rows."""
        if self.hashed is not None:
            return IdMap.hashed(self.hashed)
        return ranks.fit(ITEM_TABLE, log.id_map()) if self.data is not None else IdMap.identity(self.items)

    def model(self, log: SequenceLog, ranks: TrainingRanks = ONE_RANK) -> SequenceModel:
        """The model at its start; under a plan, with this rank's shard of the table."""
        ids = self.id_map(log, ranks)
        table = Table(ITEM_TABLE, ids.rows, self.dim, (log.column, NEGATIVE), ids=ids)
        tables = self._collection([table], ranks, mode="none")
        initialize(tables, {ITEM_TABLE: ids.rows}, self.dim, self.seed, self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # after the tables: torch's own tables draw numbers too
            return SequenceModel(tables, self.dim, self.length, self.blocks, self.heads).to(self.device)
