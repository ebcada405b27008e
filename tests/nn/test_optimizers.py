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


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize(
    "ours_by, theirs_by",
    [
        pytest.param(tc.SGD(LR, weight_decay=0.3), lambda p: torch.optim.SGD(p, LR, weight_decay=0.3), id="SGD"),
        pytest.param(tc.Adagrad(LR, weight_decay=0.3), lambda p: torch.optim.Adagrad(p, LR, weight_decay=0.3), id="Adagrad"),
    ],
)
def test_weight_decay_equals_torchs_on_the_rows_that_were_looked_up(ours_by, theirs_by, update):
    torch.manual_seed(0)
    theirs = nn.Embedding(ROWS, DIM)
    first = theirs.weight.detach().clone()
    ours = tc.Embedding.from_pretrained(first, False, rows=tc.RowConfig("fp32", optimizer=ours_by, update=update))
    optimizer = theirs_by(theirs.parameters())
    for _ in range(5):
        ids_N = torch.cat([torch.arange(ROWS - 3), torch.randint(ROWS - 3, (19,))])
        factors_ND = torch.randn(len(ids_N), DIM)
        optimizer.zero_grad()
        for module in (theirs, ours):
            (module(ids_N) * factors_ND).sum().backward()
        optimizer.step()
        ours.fused_optimizer.step()
        ours.fused_optimizer.zero_grad()
    torch.testing.assert_close(ours.weight[:-3], theirs.weight[:-3], rtol=1e-5, atol=5e-6)
    assert torch.equal(ours.weight[-3:], first[-3:])


def test_weight_decay_of_rowwise_adagrad_enters_its_mean_of_squares():
    rows = tc.RowConfig("fp32", optimizer=tc.RowwiseAdagrad(LR, weight_decay=0.3))
    weight_RD, factors_RD = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(0))
    module = tc.Embedding.from_pretrained(weight_RD, False, rows=rows)
    (module(torch.arange(ROWS)) * factors_RD).sum().backward()
    grads_RD = factors_RD + 0.3 * weight_RD
    expected = weight_RD - LR * grads_RD / (grads_RD.square().mean(1, keepdim=True).sqrt() + 1e-8)
    torch.testing.assert_close(module.weight.detach().as_subclass(torch.Tensor), expected)
