"""The placeholder parameter: what optimizers, closures, clipping and `zero_grad` see of the gradients of rows."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import thermocline as tc
from support import has

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
    assert [str(each.message) for each in said if "embedding rows" in str(each.message)] == [str(said[-1].message)]


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


@pytest.mark.parametrize("named", [False, True], ids=["positional", "keyword"])
def test_a_closure_sees_row_gradients_and_the_step_after_it_does_not(named):
    """Lightning clips inside the closure of `optimizer.step`."""
    model, seen = new_model(), []
    dense, rows = torch.optim.Adam(model.parameters(), lr=0.1), tc.fused_optimizer(model)

    def closure():
        dense.zero_grad()
        loss = model(IDS).square().sum()
        loss.backward()
        seen.append(nn.utils.clip_grad_norm_([model[0].placeholder], 0.5))
        return loss

    for _ in range(2):
        loss = dense.step(closure=closure) if named else dense.step(closure)
        assert loss > 0 and model[0].placeholder.item() == 0
        torch.testing.assert_close(model[0].placeholder.grad.norm(), torch.tensor(0.5))
        rows.step()
    assert len(seen) == 2 and min(seen) > 0.5 and dense.state[model[0].placeholder] == {}


def test_a_step_that_raises_hides_row_gradients_no_longer_than_to_the_next_backward():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    model = new_model()
    optimizer = Fails(model.parameters(), lr=0.1)
    tc.fused_optimizer(model)
    for _ in range(2):
        model(IDS).square().sum().backward()
        assert nn.utils.clip_grad_norm_([model[0].placeholder], 0.5) > 0.5
        with pytest.raises(MemoryError):
            optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_set_to_zero_end_the_step_of_rows_updated_in_backward(foreach):
    torch.manual_seed(0)
    model = nn.Sequential(tc.EmbeddingBag(31, 6, mode="sum"), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    for _ in range(3):
        model(IDS).sum().backward()
        optimizer.step()
    model(IDS).sum().backward()
    with pytest.raises(tc.BadInput, check=has(parameter="update")):
        model(IDS).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert model[1].weight.grad.abs().sum() == 0
    model(IDS).sum().backward()


def test_an_applied_gradient_reads_as_zero_and_refuses_writes():
    module = tc.EmbeddingBag(31, 6, mode="sum")
    module(IDS).sum().backward()
    grad = module.placeholder.grad
    assert grad.norm() == 0 and grad.data.norm(2).item() == 0 and torch.linalg.vector_norm(grad) == 0
    for write in (lambda: grad.mul_(2), lambda: grad.data.mul_(2), lambda: torch._foreach_mul_([grad], 2.0)):
        with pytest.raises(tc.BadInput, check=has(parameter="update")):
            write()
