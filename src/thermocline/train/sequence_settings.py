"""What a run of the sequence model is made of, and the model, table and log that follow from it.

Everything random follows from `seed`, as for click logs: initial rows from (seed, row), the encoder from torch's generator set
to it, rounding from (seed, step, row, column), the order of samples and their negatives from (seed, epoch), a synthetic log as
a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thermocline.data.sequence_files import open_sequences
from thermocline.data.sequences import SequenceLog
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap
from thermocline.models import PlainItems, SequenceModel, initialize
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.rows.optimizers import RowwiseAdagrad

from .distributed import ALONE, Cards

TABLE, NEGATIVE = "item", "negative"


@dataclass(frozen=True)
class SequenceSettings:
    """One run. `data` is a file, or None for a synthetic log of `users` and `items`. Items of a file get a row each, and one
    for all that the training part does not have, or are hashed to `hashed` rows. The model looks back on `length` items. `lr`
    is that of the rows (row-wise Adagrad), `dense_lr` that of the encoder (Adam)."""

    data: Path | None = None
    users: int = 20_000
    items: int = 10_000
    hashed: int | None = None
    precision: str = "fp32"
    cache: float = 0.0
    policy: str = "lfu"
    dim: int = 32
    length: int = 50
    blocks: int = 2
    heads: int = 2
    negatives: int = 64
    batch: int = 128
    epochs: int = 2
    lr: float = 0.1
    dense_lr: float = 1e-3
    seed: int = 0
    device: str = "cpu"
    plain: bool = False  # the baseline: plain nn.Embedding instead of our table

    def __post_init__(self) -> None:
        for name in ("dim", "batch", "epochs"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it has to be at least 1")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise BadInput(f"device is {self.device!r}, but torch finds no CUDA card here; use cpu, or see: thermocline doctor")
        if self.plain and (self.precision != "fp32" or self.cache):
            raise BadInput(f"plain tables are fp32 without a cache; precision is {self.precision!r}, cache {self.cache}")

    def log(self) -> SequenceLog:
        settings: dict[str, Any] = {"length": self.length, "negatives": self.negatives, "seed": self.seed}
        if self.data is not None:
            return open_sequences(self.data, **settings)
        return SyntheticSequences(self.users, self.items, self.seed).log(**settings)

    def id_map(self, log: SequenceLog, cards: Cards = ALONE) -> IdMap:
        """How items become rows."""
        if self.hashed is not None:
            return IdMap.hashed(self.hashed)
        return cards.fit(TABLE, log.id_map()) if self.data is not None else IdMap.identity(self.items)

    def model(self, log: SequenceLog, cards: Cards = ALONE) -> SequenceModel:
        """The model at its start. With a plan, its part on this card, and precision and cache are the plan's."""
        ids = self.id_map(log, cards)
        tables = self._tables(log.column, ids, cards)
        initialize(tables, {TABLE: ids.rows}, self.dim, self.seed, self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # after the tables: those of torch draw numbers too
            return SequenceModel(tables, self.dim, self.length, self.blocks, self.heads).to(self.device)

    def _tables(self, column: str, ids: IdMap, cards: Cards) -> Any:
        if self.plain:
            return PlainItems(ids.rows, self.dim, self.lr, ids, column)
        planned = cards.plan is not None
        config = RowConfig(
            "int8" if planned else self.precision, cache=0.0 if planned else self.cache, policy=self.policy,
            optimizer=RowwiseAdagrad(lr=self.lr), seed=self.seed,
        )  # fmt: skip
        table = Table(TABLE, ids.rows, self.dim, (column, NEGATIVE), ids=ids)
        made = EmbeddingCollection([table], mode="none", rows=config, device="meta" if planned else self.device)
        return cards.shard(made, self.device) if planned else made
