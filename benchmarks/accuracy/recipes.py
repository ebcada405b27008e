"""Tuned settings for each log of the accuracy benchmark. They were chosen for fp32 rows; every precision trains with them.

Tuned at D=16 on one thread without the test part: trained on the first 80% of the training part (Criteo by time, MovieLens at
random), validated on its rest. A coarse grid with one seed came first, then its best settings with 3 (Criteo) or 4 seeds.

    log          epochs   validation AUC, LogLoss   worst of the grid
    criteo       1        0.7667, 0.4822            0.7542 (batch 512, lr .01, dense_lr 5e-4)
    movielens    2        0.7991, 0.5313            0.7954 (batch 1024, lr .02, dense_lr 1e-3)

Neighbours on the grid are at most 8e-4 of AUC worse. MovieLens was tuned again at D=64: none of 48 settings was better for
certain over five further seeds. `LARGE` is for synthetic logs of 4M samples and more, where a GPU step of 16,384 samples takes
about as long as one of 256; it was tuned on a separate log of 20M samples (ten settings were within 3.5e-4 of AUC).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thermocline.train import DLRMSettings


@dataclass(frozen=True)
class Recipe:
    """Tuned settings for one log."""

    epochs: int
    batch: int
    lr: float
    dense_lr: float
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    def apply(self, settings: DLRMSettings) -> DLRMSettings:
        """Settings with this recipe applied."""
        return replace(settings, **vars(self))


CRITEO = Recipe(epochs=1, batch=256, lr=0.02, dense_lr=2e-3, bottom=(64, 32), top=(256, 128))
MOVIELENS = Recipe(epochs=2, batch=256, lr=0.1, dense_lr=3e-3, bottom=(), top=(64,))
LARGE = Recipe(epochs=1, batch=16_384, lr=0.03, dense_lr=1e-3, bottom=(64, 32), top=(256, 128))
