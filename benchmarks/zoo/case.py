"""What a model of the zoo is, and the click log that four of them learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from torch import Tensor, nn

from thermocline.data.metrics import auc
from thermocline.data.synthetic import SyntheticLog
from thermocline.rows.optimizers import RowOptimizer

TABLES = (5000, 3000, 2000, 1000, 500, 100, 30, 7)
LOG = SyntheticLog(TABLES, samples=40_000, seed=1)
TRAIN = LOG.clicks(0, 30_000)
TEST = LOG.clicks(30_000, 10_000)

Convert = Callable[[nn.Module], None]


class Trained(NamedTuple):
    """Result of one training run."""

    metric: float
    losses: list[float]  # of steps or epochs


@dataclass(frozen=True)
class ZooCase:
    """A model of another library.

    `train(seed, convert)` builds the model, calls `convert(model)` once, trains and tests it, with the loop of its library if
    it has one. `optimizer` is for rows: the equal of the one that trains the tables of the unconverted model.
    """

    name: str
    library: str  # name of the distribution, or of the repository
    metric: str
    optimizer: RowOptimizer
    train: Callable[[int, Convert], Trained]
    lines: int = 1  # changed to convert it

    @property
    def version(self) -> str:
        return self.library if "/" in self.library else f"{self.library} {metadata.version(self.library)}"


def auc_of(score_N: Tensor) -> float:
    """AUC of scores of the test samples."""
    return auc(score_N.detach().flatten(), TEST.label_B.bool())
