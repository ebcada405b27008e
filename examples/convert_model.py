"""Convert a model you have: one line, a third of the memory, and the same training loop.

python examples/convert_model.py
"""

from __future__ import annotations

import torch
from torch import nn

import thermocline


class Model(nn.Module):
    """Two tables and a layer, as in any recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20_000, 64), nn.EmbeddingBag(50_000, 64, mode="sum")
        self.top = nn.Linear(128, 1)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.users(user), self.items(items)], dim=1)).squeeze(1)


def main(steps: int = 200) -> None:
    torch.manual_seed(0)
    model = Model()
    print(thermocline.convert_(model, thermocline.RowConfig("int8", cache=0.05)))  # the one line
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)  # passes the rows by: they have their own optimizer

    for step in range(steps):
        user = (torch.rand(256) ** 3 * 20_000).long()
        items = (torch.rand(256, 10) ** 3 * 50_000).long()
        label = ((user + items.sum(1)) % 2).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(user, items), label)
        loss.backward()  # the rows of this batch are updated here
        dense.step()
        dense.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}")
    print(model.items.memory(), model.items.stats(), sep="\n")


if __name__ == "__main__":
    main()
