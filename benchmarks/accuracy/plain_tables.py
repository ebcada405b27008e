"""Baselines in plain PyTorch: fp32 embeddings, and row-wise Adagrad over sparse gradients.

The baselines use none of the package's kernels, so that an error of a kernel shows in a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thermocline.data.click_log import ClickLog
from thermocline.models import DLRM, initialize
from thermocline.train import DLRMSettings


class TorchRowwiseAdagrad(torch.optim.Optimizer):
    """The arithmetic of `thermocline.RowwiseAdagrad` over sparse gradients."""

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
    """One `nn.EmbeddingBag` for each feature: ids [B, F] -> [B, F * dim]."""

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


class PlainItems(nn.Module):
    """An `nn.Embedding` for `SequenceModel`. `rows_of` maps raw ids to rows."""

    def __init__(self, rows: int, dim: int, lr: float, rows_of: Callable[[Tensor], Tensor], column: str = "item") -> None:
        super().__init__()
        self.features = (column, "negative")
        self.table = nn.Embedding(rows, dim, sparse=True)
        self.fused_optimizer = TorchRowwiseAdagrad([self.table.weight], lr)
        self._rows_of = rows_of

    def forward(self, bags: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        together = self.table(self._rows_of(torch.cat([bags[feature][0] for feature in self.features])))
        return dict(zip(self.features, together.split([len(bags[feature][0]) for feature in self.features]), strict=True))

    def get_rows(self, table: str, ids: Tensor) -> Tensor:
        return self.table.weight.detach()[ids]

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        with torch.no_grad():
            self.table.weight[ids] = values


def plain_dlrm(settings: DLRMSettings, log: ClickLog) -> DLRM:
    """The model of the settings at its start, with plain tables."""
    rows = {f"C{feature + 1}": count for feature, count in enumerate(log.rows)}
    tables = PlainTables(rows, settings.dim, settings.lr, settings.device)
    initialize(tables, rows, settings.dim, settings.seed, settings.device)
    return settings.model_of(tables, len(rows), log.dense)
