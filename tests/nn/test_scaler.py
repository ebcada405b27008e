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


@pytest.mark.parametrize("dense", [lambda m: m[1].parameters(), lambda m: m.parameters()], ids=["dense part", "all parameters"])
def test_rows_are_unscaled_once_whoever_steps_the_optimizer_that_has_them(dense):
    found = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = nn.Sequential(tc.Embedding(9, 4, precision="fp32", update="step", optimizer=tc.SGD(lr=0.1)), nn.Linear(4, 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(torch.arange(9)).sum()).backward()
        scaler.step(Both(torch.optim.SGD(dense(model), lr=0.1), tc.fused_optimizer(model)))
        found.append(model[0].weight)
    torch.testing.assert_close(found[1], found[0])
