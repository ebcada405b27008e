"""Lightning's Trainer with thermocline tables: nothing to adapt. Needs `pip install lightning`.

python examples/lightning_trainer.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thermocline


class Clicks(lightning.LightningModule):
    """One collection for all features, and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        tables = [thermocline.Table("user", 20_000, 32), thermocline.Table("item", 50_000, 32)]
        self.rows = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.05))
        self.top = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        ids, label = batch
        return nn.functional.binary_cross_entropy_with_logits(self.top(self.rows(ids).values()).squeeze(1), label)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.top.parameters(), lr=1e-3)  # rows bring their own


def main(samples: int = 20_000) -> None:
    lightning.seed_everything(0)
    ids = (torch.rand(samples, 2) ** 3 * torch.tensor([20_000, 50_000])).long()
    loader = DataLoader(TensorDataset(ids, (ids.sum(1) % 2).float()), batch_size=256)
    trainer = lightning.Trainer(max_epochs=1, accelerator="auto", devices=1, logger=False, enable_checkpointing=False)
    model = Clicks()
    trainer.fit(model, loader)
    print(model.rows.memory(), model.rows.stats(), sep="\n")


if __name__ == "__main__":
    main()
