"""Baselines in plain PyTorch: fp32 embeddings, row-wise Adagrad over sparse gradients, and reproducible initial rows.

The baselines use none of this package's kernels, so that an error of a kernel shows in a comparison. Initial rows are a
function of (seed, table, row), the same on every device and in any order, uniform in ±1/sqrt(rows of the table).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thermocline.kernels.quantize.reference import random_bits

BLOCK = 1 << 18
_DOMAIN = 0x696E6974  # other bits than those that round the same rows


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


class Settable(Protocol):
    """Tables with `set_rows`."""

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None: ...


def initial_rows(seed: int, table: int, rows_N: Tensor, dim: int, rows: int) -> Tensor:
    """Initial values of rows of table number `table`, which has `rows` rows."""
    clock = torch.tensor([seed ^ _DOMAIN << 32, table], device=rows_N.device)
    uniform_ND = (random_bits(clock, rows_N, dim) >> 8).float() * 2.0**-23 - 1.0
    return uniform_ND * float(rows**-0.5)


def initialize(tables: Settable, rows: Mapping[str, int], dim: int, seed: int, device: torch.device | str = "cpu") -> None:
    """Set all rows of all tables, a block at a time; `rows` has the tables in the order of their numbers."""
    for number, (name, count) in enumerate(rows.items()):
        for first in range(0, count, BLOCK):
            rows_N = torch.arange(first, min(first + BLOCK, count), device=device)
            tables.set_rows(name, rows_N, initial_rows(seed, number, rows_N, dim, count))
