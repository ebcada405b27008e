"""The fused optimizers against torch's with the same hyperparameters: repeated ids, gradients of all sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import thermocline as tc

ROWS, DIM, LR = 31, 6, 0.1


class FormulaRowwiseAdagrad(torch.optim.Optimizer):
    """FBGEMM's row-wise Adagrad, and DLRM's: s += mean(g^2), w -= lr * g / (sqrt(s) + eps)."""

    def __init__(self, params: Iterable[Any], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self.sums = torch.zeros(ROWS)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (weight,) = self.param_groups[0]["params"]
        grad = weight.grad.coalesce()  # repeated ids become one gradient
        rows_U, grads_UD = grad.indices()[0], grad.values()
        self.sums[rows_U] += grads_UD.square().mean(1)
        weight[rows_U] -= self.defaults["lr"] * grads_UD / (self.sums[rows_U].sqrt() + self.defaults["eps"])[:, None]


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-7], ids=str)  # eps counts for small gradients
@pytest.mark.parametrize(
    "ours_by, theirs_by",
    [
        pytest.param(tc.SGD(LR), lambda p: torch.optim.SGD(p, LR), id="SGD"),
        pytest.param(tc.Adagrad(LR), lambda p: torch.optim.Adagrad(p, LR), id="Adagrad"),
        pytest.param(tc.Adagrad(LR, eps=1e-6), lambda p: torch.optim.Adagrad(p, LR, eps=1e-6), id="Adagrad eps"),
        pytest.param(tc.RowwiseAdagrad(LR), lambda p: FormulaRowwiseAdagrad(p, LR, 1e-8), id="RowwiseAdagrad"),
        pytest.param(
            tc.RowwiseAdagrad(LR, eps=1e-10), lambda p: FormulaRowwiseAdagrad(p, LR, 1e-10), id="RowwiseAdagrad of DLRM"
        ),
        pytest.param(tc.Adam(LR), lambda p: torch.optim.SparseAdam(p, LR), id="Adam"),
    ],
)
def test_rows_train_as_with_torch_and_the_same_hyperparameters(ours_by, theirs_by, size):
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    ours = tc.EmbeddingBag.from_pretrained(theirs.weight, False, mode="sum", rows=tc.RowConfig("fp32", optimizer=ours_by))
    optimizer = theirs_by(theirs.parameters())
    for _ in range(9):
        ids_BL, factors_BD = torch.randint(ROWS, (19, 4)), size * torch.randn(19, DIM)
        optimizer.zero_grad()
        for module in (theirs, ours):
            (module(ids_BL) * factors_BD).sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-5, atol=5e-6)
