"""One optimizer made of several, as people write them, under a GradScaler."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import nn

import thermocline as tc


class Both:
    """Steps two optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return list(chain.from_iterable(one.param_groups for one in self.optimizers))

    def step(self):
        for one in self.optimizers:
            one.step()


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        tc.Embedding(9, 4, rows=tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.1), update="step")), nn.Linear(4, 1)
    )


@pytest.mark.parametrize("dense", [lambda m: m[1].parameters(), lambda m: m.parameters()], ids=["dense part", "all parameters"])
def test_rows_are_unscaled_once_by_any_optimizer_that_has_them(dense):
    found = []
    for scale in (1.0, 1024.0):
        model = new_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(torch.arange(9)).sum()).backward()
        scaler.step(Both(torch.optim.SGD(dense(model), lr=0.1), tc.fused_optimizer(model)))
        found.append(model[0].weight)
    torch.testing.assert_close(found[1], found[0])


def test_clipping_after_unscale_of_both_optimizers_equals_that_of_an_unscaled_loss():
    found = []
    for scale in (1.0, 1024.0):
        model = new_model()
        dense, rows = torch.optim.SGD(model[1].parameters(), lr=0.1), tc.fused_optimizer(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(torch.arange(9)).square().sum()).backward()
        scaler.unscale_(dense)
        scaler.unscale_(rows)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in (dense, rows):
            scaler.step(optimizer)
        found.append([norm, model[0].weight, *model[1].parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_rows_are_unscaled_beside_an_optimizer_that_unscales_in_its_kernel():
    """GradScaler gives it gradients as they are, and asks with a scale of 1 whether they are finite."""
    found = []
    for scale in (1.0, 1024.0):
        model = new_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizers = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), tc.fused_optimizer(model)
        scaler.scale(model(torch.arange(9)).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        found.append(model[0].weight)
    torch.testing.assert_close(found[1], found[0])
