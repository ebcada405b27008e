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
from thermocline import formats as F

IDS = torch.randint(0, 31, (5, 3), generator=torch.Generator().manual_seed(0))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(tc.EmbeddingBag(31, 6, mode="sum", rows=tc.RowConfig("fp32", update="step")), nn.Linear(6, 1))


def fp32_bag(optimizer) -> tc.EmbeddingBag:
    return tc.EmbeddingBag(41, 6, mode="sum", rows=tc.RowConfig("fp32", update="step", optimizer=optimizer))


def train(model, *optimizers, clear=lambda optimizer: optimizer.zero_grad(), steps=3):
    for _ in range(steps):
        for optimizer in optimizers:
            clear(optimizer)
        model(IDS).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "clear",
    [lambda o: o.zero_grad(), lambda o: o.zero_grad(set_to_none=False), lambda o: None],
    ids=["dropped", "zeroed", "never cleared"],
)
@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_of_torch_over_all_parameters_steps_rows_as_its_own(clear, scheduled):
    found = []
    for embedding in (nn.EmbeddingBag(41, 6, mode="sum"), fp32_bag(tc.SGD(lr=0.01))):
        torch.manual_seed(0)
        model = nn.Sequential(embedding, nn.Linear(6, 1))
        embedding.load_state_dict({"weight": torch.randn(41, 6)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, total_iters=2) if scheduled else None
        for _ in range(3):
            train(model, optimizer, clear=clear, steps=1)
            if schedule is not None:
                schedule.step()
        found.append(model[0].weight.detach())
    torch.testing.assert_close(found[1], found[0])


def test_the_rate_of_rows_follows_the_schedule_of_the_optimizer_that_steps_them():
    model = nn.Sequential(fp32_bag(tc.Adagrad(lr=0.3)), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 1e-5}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    for _ in range(3):
        train(model, optimizer, steps=1)
        rates.append(float(model[0].trainer.hyper[F.LR]))
        schedule.step()
    assert rates == pytest.approx([0.3, 0.15, 0.075])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scaler_and_an_optimizer_of_torch_step_rows_once_unscaled(fused, unscaled):
    found = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = nn.Sequential(fp32_bag(tc.SGD(lr=0.1)), nn.Linear(6, 1))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu", scale)
        for inputs in (IDS, IDS + 9):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().sum()).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append([model[0].weight.detach(), model[1].weight.detach()])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_leaves_rows_alone(fused):
    model = nn.Sequential(fp32_bag(tc.SGD(lr=0.1)), nn.Linear(6, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu")
    before = model[0].weight
    scaler.scale(model(IDS).sum()).backward()
    model[1].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    assert torch.equal(model[0].weight, before)


def test_a_weight_decay_of_torch_that_leaves_out_rows_is_warned_of_once():
    def decayed(rows, group=0.01, steps=2):
        model = nn.Sequential(fp32_bag(rows), nn.Linear(6, 1))
        groups = [{"params": model[1].parameters()}, {"params": model[0].parameters(), "weight_decay": group}]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, torch.optim.AdamW(groups, lr=0.1), steps=steps)
        return [str(each.message) for each in caught]

    assert len(decayed(tc.SGD(lr=0.1))) == 1
    assert not decayed(tc.SGD(lr=0.1), group=0.0) and not decayed(tc.SGD(lr=0.1, weight_decay=0.1))


def test_rows_of_a_fused_optimizer_that_never_steps_are_warned_of_once():
    model = new_model()
    before, _ = model[0].weight, tc.fused_optimizer(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model[0].weight, before)
    assert len([each for each in said if "fused optimizer" in str(each.message)]) == 1


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
