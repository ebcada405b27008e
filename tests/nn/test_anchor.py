"""Rows that wait for a step: who takes it, and who is told when nobody does."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import thermocline as tc

IDS = torch.randint(0, 31, (5, 3), generator=torch.Generator().manual_seed(0))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(tc.EmbeddingBag(31, 6, mode="sum", rows=tc.RowConfig("fp32", update="step")), nn.Linear(6, 1))


def train(model, *optimizers, clear=lambda optimizer: optimizer.zero_grad()):
    for _ in range(3):
        for optimizer in optimizers:
            clear(optimizer)
        model(IDS).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    "clear",
    [lambda o: o.zero_grad(), lambda o: o.zero_grad(set_to_none=False), lambda o: None],
    ids=["dropped", "zeroed", "never cleared"],
)
def test_rows_that_no_optimizer_of_ours_has_are_warned_of_once(clear):
    model = new_model()
    before = model[0].weight
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), clear=clear)
    assert torch.equal(model[0].weight, before)
    assert [str(each.message) for each in said if "it passes rows by, so they are not trained" in str(each.message)] == [
        str(said[-1].message)
    ]


class Late:
    """Steps the optimizer that a module makes when it is asked for."""

    def __init__(self, module):
        self.module = module

    def step(self):
        self.module.fused_optimizer.step()

    def zero_grad(self):
        self.module.fused_optimizer.zero_grad()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows", [lambda model: tc.fused_optimizer(model), lambda model: Late(model[0])], ids=["made before", "made late"]
)
def test_rows_that_are_stepped_beside_an_optimizer_of_torch_are_not_warned_of(rows):
    model = new_model()
    before = model[0].weight
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rows(model))
    assert not torch.equal(model[0].weight, before)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_a_model_copied_with_its_optimizers_trains_as_the_first(copied):
    model = new_model()
    first = model, torch.optim.SGD(model[1].parameters(), lr=0.1), tc.fused_optimizer(model)
    second = copied(first)
    second[2].param_groups[0]["lr"] = first[2].param_groups[0]["lr"] = 0.5
    for each in (first, second):
        train(*each)
    assert torch.equal(first[0][0].weight, second[0][0].weight)
    assert not torch.equal(first[0][0].weight, new_model()[0].weight)
