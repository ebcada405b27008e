"""Tuned settings for each log, for the accuracy benchmark: chosen for fp32 rows alone, and never looked at again.

Tuned at D=16 on one thread, without the test part: on the first 80% of the training part (Criteo: by time; MovieLens: a random
80%), judged on its rest. Means over seeds 0, 1, 2 (MovieLens: 0, 1); neighbours on the grid lie within 5e-4.

    Criteo sample, one epoch     batch 64, 128, 256, 512; lr .01, .02, .03, .04, .08; dense_lr 5e-4, 1e-3, 2e-3, 4e-3; seven
                                 pairs of MLPs from () / (64,) to (256,) / (512, 256); Adagrad (.01, .02) instead of Adam
    MovieLens, two epochs        batch 512, 1024; lr .02, .05, .1, .2, .4; dense_lr 1e-3, 3e-3; top (), (64,), (128, 64), (256,)

    chosen       validation AUC, LogLoss       worst of the grid beside it
    criteo       0.7667, 0.4822                0.7542 (batch 512, lr .01, dense_lr 5e-4)
    movielens    0.7995, 0.5314                0.7954 (batch 1024, lr .02, dense_lr 1e-3)

Adam was better than Adagrad for the MLPs by 3e-4 on Criteo. The synthetic log uses Criteo's settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .settings import Settings


@dataclass(frozen=True)
class Recipe:
    """How one log is trained on."""

    epochs: int
    batch: int
    lr: float
    dense_lr: float
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    def apply(self, settings: Settings) -> Settings:
        """The same settings with this recipe."""
        return replace(settings, **vars(self))


CRITEO = Recipe(epochs=1, batch=256, lr=0.02, dense_lr=2e-3, bottom=(64, 32), top=(256, 128))
MOVIELENS = Recipe(epochs=2, batch=512, lr=0.2, dense_lr=3e-3, bottom=(), top=(64,))
