"""The baseline of every comparison: one plain fp32 `nn.EmbeddingBag` a table, and row-wise Adagrad in plain PyTorch.

torch has no row-wise Adagrad, so here is one over its sparse gradients, with the arithmetic of `thermocline.RowwiseAdagrad`.
Nothing here uses our kernels: a fault of theirs cannot hide in the arm it is measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class TorchRowwiseAdagrad(torch.optim.Optimizer):
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps), over the rows of sparse gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros(len(weight), device=weight.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient = weight.grad.coalesce()
                row_N, gradient_ND = gradient.indices()[0], gradient.values()
                sum_N = self.state[weight]["sum"][row_N] + gradient_ND.square().mean(1)
                self.state[weight]["sum"][row_N] = sum_N
                weight[row_N] -= group["lr"] / (sum_N.sqrt() + group["eps"])[:, None] * gradient_ND


class PlainTables(nn.Module):
    """ids [B, F] -> [B, F * dim] from plain `nn.EmbeddingBag`s, one a feature."""

    def __init__(self, rows: Mapping[str, int], dim: int, lr: float, device: torch.device | str = "cpu") -> None:
        super().__init__()
        bags = {name: nn.EmbeddingBag(count, dim, mode="sum", sparse=True, device=device) for name, count in rows.items()}
        self.bags = nn.ModuleDict(bags)
        self.fused_optimizer = TorchRowwiseAdagrad([bag.weight for bag in bags.values()], lr)

    def forward(self, ids_BF: Tensor) -> Tensor:
        columns_FB1 = ids_BF.t().contiguous()[:, :, None]
        return torch.cat([bag(ids_B1) for bag, ids_B1 in zip(self.bags.values(), columns_FB1, strict=True)], dim=1)

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        bag = self.bags[table]
        assert isinstance(bag, nn.EmbeddingBag)
        with torch.no_grad():
            bag.weight[ids] = values
