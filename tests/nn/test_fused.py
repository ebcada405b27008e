"""The optimizer of rows: schedulers, accumulation, scaling and clipping, against torch's optimizers on torch's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc
from support import has, module_arguments

ROWS, DIM = 31, 6
PAIRS = [
    pytest.param(tc.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), id="SGD"),
    pytest.param(tc.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), id="Adagrad"),
    pytest.param(tc.Adam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1), id="Adam"),
]


def ids_of(seed: int, shape: tuple[int, ...] = (5, 3)) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def pair(optimizer: Any, theirs_by: Any, update: str = "step", sparse: bool = True) -> tuple[Any, Any, Any, Any]:
    """(torch's module, its optimizer, ours with equal fp32 rows, its optimizer)."""
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse)
    ours = tc.EmbeddingBag.from_pretrained(
        theirs.weight, False, mode="sum", rows=tc.RowConfig("fp32", optimizer=optimizer, update=update)
    )
    return theirs, theirs_by(theirs.parameters()), ours, ours.fused_optimizer


def loss_of(module: nn.Module, seed: int) -> Tensor:
    return (module(ids_of(seed)) ** 2).sum()


def bag(**keywords: Any) -> tc.EmbeddingBag:
    torch.manual_seed(0)
    return tc.EmbeddingBag(ROWS, DIM, mode="sum", **module_arguments(**keywords))


# -- update="step" ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours_by, theirs_by", PAIRS)
def test_accumulated_gradients_step_as_torchs_sparse_ones(ours_by, theirs_by):
    theirs, their_optimizer, ours, our_optimizer = pair(ours_by, theirs_by)
    for step in range(3):
        for module, optimizer in ((theirs, their_optimizer), (ours, our_optimizer)):
            for part in range(3):
                (loss_of(module, 3 * step + part) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ours.placeholder.pending is None
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("ours_by, theirs_by", PAIRS)
def test_a_grad_scaler_steps_as_it_does_on_torchs_sparse_training(ours_by, theirs_by):
    theirs, their_optimizer, ours, our_optimizer = pair(ours_by, theirs_by)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for module, optimizer, scaler in ((theirs, their_optimizer, scalers[0]), (ours, our_optimizer, scalers[1])):
            loss = loss_of(module, step) * (float("inf") if step == 2 else 1.0)  # one step is to be skipped
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**11
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("first", [0, 1], ids=["rows first", "dense first"])
def test_a_grad_scaler_of_two_optimizers_unscales_rows_once(first):
    """The dense one was given all parameters, as the pages show; rows are none of its business."""
    models, norms = [], []
    for embedding in pair(tc.SGD(lr=0.1), PAIRS[0].values[1], sparse=False)[::2]:
        torch.manual_seed(1)
        models.append(nn.Sequential(embedding, nn.Linear(DIM, 2)))
    rows = [torch.optim.SGD(models[0][0].parameters(), lr=0.1), models[1][0].fused_optimizer]
    dense = [torch.optim.SGD((models[0][1] if model is models[0] else model).parameters(), lr=0.1) for model in models]
    for model, optimizers in zip(models, zip(rows, dense, strict=True), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(2):
            scaler.scale(loss_of(model, step).mean()).backward()
            for optimizer in (optimizers[first], optimizers[1 - first]):
                scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            for optimizer in (optimizers[first], optimizers[1 - first]):
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    torch.testing.assert_close(norms[2:], norms[:2])
    torch.testing.assert_close(models[1][0].weight, models[0][0].weight.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(models[1][1].weight, models[0][1].weight, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("ours_by, theirs_by", PAIRS[:2])
@pytest.mark.parametrize("foreach", [None, False])
def test_clipped_gradients_step_as_torchs_dense_ones(ours_by, theirs_by, foreach):
    """torch does not clip sparse gradients at all (see the next test); for SGD and Adagrad dense training is the same."""
    theirs, their_optimizer, ours, our_optimizer = pair(ours_by, theirs_by, sparse=False)
    for step in range(3):
        norms = []
        for module, optimizer in ((theirs, their_optimizer), (ours, our_optimizer)):
            loss_of(module, step).backward()
            loss_of(module, step + 9).backward()  # accumulated: the norm is that of the sum
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=foreach))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[0], norms[1])
        assert norms[0] > 1
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("ours_by, theirs_by", PAIRS)
def test_gradients_clipped_by_value_step_as_torchs_sparse_ones(ours_by, theirs_by):
    """torch clips the values of sparse gradients by hand only: those of distinct rows, as ours wait."""
    theirs, their_optimizer, ours, our_optimizer = pair(ours_by, theirs_by)
    for step in range(3):
        for module in (theirs, ours):
            loss_of(module, step).backward()
            loss_of(module, step + 9).backward()
        theirs.weight.grad = theirs.weight.grad.coalesce()
        theirs.weight.grad.values().clamp_(-0.5, 0.5)
        assert ours.placeholder.grad.abs().max() > 0.5
        torch.nn.utils.clip_grad_value_(ours.parameters(), 0.5)
        for optimizer in (their_optimizer, our_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=2e-5, atol=2e-5)


def test_gradients_are_unscaled_then_clipped_as_torchs_dense_ones():
    theirs, their_optimizer, ours, our_optimizer = pair(tc.SGD(lr=0.1), PAIRS[0].values[1], sparse=False)
    for module, optimizer in ((theirs, their_optimizer), (ours, our_optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(loss_of(module, 0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=2e-5, atol=2e-5)


def test_torch_itself_does_not_clip_sparse_gradients():
    """If this fails, torch has learnt it, and the test above should compare with sparse training."""
    theirs = nn.EmbeddingBag(ROWS, DIM, sparse=True)
    loss_of(theirs, 0).backward()
    with pytest.raises(NotImplementedError):
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)


def test_clipping_covers_dense_parameters_and_rows_together():
    models = []
    for embedding in (nn.EmbeddingBag(ROWS, DIM, mode="sum"), bag(precision="fp32", update="step", optimizer=tc.SGD(lr=0.1))):
        torch.manual_seed(1)
        models.append(nn.Sequential(embedding, nn.Linear(DIM, 2)))
    models[1][0].load_state_dict(models[0][0].state_dict())
    norms = []
    for model in models:
        loss_of(model, 1).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(models[1][1].weight.grad, models[0][1].weight.grad)


@pytest.mark.parametrize("dense", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW], ids=lambda o: o.__name__)
def test_an_optimizer_of_torch_leaves_rows_to_their_fused_optimizer(dense):
    model = nn.Sequential(bag(update="step"), nn.Linear(DIM, 2))
    optimizer, _ = dense(model.parameters(), lr=0.1), tc.fused_optimizer(model)
    loss_of(model, 0).backward()
    rows, top = model[0].weight, model[1].weight.clone()
    optimizer.step()
    assert torch.equal(model[0].weight, rows) and not torch.equal(model[1].weight, top) and model[0].placeholder.item() == 0
    model[0].fused_optimizer.step()
    assert not torch.equal(model[0].weight, rows)
    optimizer.zero_grad()
    assert model[0].placeholder.pending is None and model[0].placeholder.grad is None


def test_a_second_backward_through_a_graph_adds_as_it_does_in_torch():
    module = bag(update="step")
    loss = loss_of(module, 0)
    loss.backward(retain_graph=True)
    once = module.placeholder.grad.clone()
    loss.backward()
    assert torch.equal(module.placeholder.grad, 2 * once)


def test_gradients_of_a_mixed_collection_wait_together():
    torch.manual_seed(0)
    module = tc.EmbeddingCollection(
        [tc.Table("a", 9, 4), tc.Table("b", 7, 2, row_config=tc.RowConfig("int4"))], rows=tc.RowConfig(update="step")
    )
    out = module(torch.tensor([[1, 2], [1, 3]])).values()
    out.backward(torch.ones_like(out))
    assert module.placeholder.grad.shape == (3, 4)  # rows 1 of a, 2 and 3 of b
    assert sorted(module.placeholder.grad.sum(1).tolist()) == [2.0, 2.0, 8.0]
    with pytest.raises(tc.BadInput, check=has(parameter="grad")):
        module.placeholder.grad = torch.zeros(1)


# -- update="backward" ------------------------------------------------------------------------------------------------


def test_accumulation_raises_once_the_user_has_called_step():
    module = bag()
    for seed in range(2):
        loss_of(module, seed).backward()  # nobody called step: two updates
    module.fused_optimizer.step()
    for seed in range(2):
        loss_of(module, seed).backward()
        module.fused_optimizer.step()
    loss_of(module, 3).backward()
    before = module.weight
    with pytest.raises(tc.BadInput, check=has(parameter="update", value="backward")):
        loss_of(module, 4).backward()
    assert torch.equal(module.weight, before)
    for clear in (module.fused_optimizer.zero_grad, module.zero_grad):
        clear()
        loss_of(module, 4).backward()


def test_a_module_used_twice_in_one_graph_is_no_accumulation():
    module = bag()
    module.fused_optimizer.step()
    (loss_of(module, 0) + loss_of(module, 1)).backward()
    assert module.trainer.clock.tolist() == [0, 1]


def test_an_optimizer_of_torch_over_all_parameters_tells_steps_apart_too():
    """A user who lets it step and never calls ours would accumulate unnoticed."""
    model = nn.Sequential(bag(), nn.Linear(DIM, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    loss_of(model, 3).backward()
    before = model[0].weight
    with pytest.raises(tc.BadInput, check=has(parameter="update", value="backward")):
        loss_of(model, 4).backward()
    assert torch.equal(model[0].weight, before)
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    assert not torch.equal(model[0].weight, before)


def test_an_optimizer_that_only_clears_gradients_makes_no_step():
    model = nn.Sequential(bag(), nn.Linear(DIM, 2))
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    for seed in range(2):
        loss_of(model, seed).backward()  # nobody ever stepped: two updates


@pytest.mark.parametrize("tool", ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"])
def test_clipping_is_refused_with_the_other_mode(tool):
    model = nn.Sequential(bag(), nn.Linear(DIM, 2))
    loss_of(model, 0).backward()
    with pytest.raises(tc.BadInput, check=has(parameter="update", tool="gradient clipping")):
        getattr(torch.nn.utils, tool)(model.parameters(), 1.0, *[torch.tensor(2.0)] * (tool == "clip_grads_with_norm_"))
    torch.nn.utils.clip_grad_norm_(model[1].parameters(), 1.0)
    model[0].requires_grad_(False)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # frozen rows have nothing to clip


@pytest.mark.parametrize("whose", ["fused", "dense over all"])
def test_a_grad_scaler_raises_and_names_the_other_mode(whose):
    model = nn.Sequential(bag(), nn.Linear(DIM, 2))
    optimizer = model[0].fused_optimizer if whose == "fused" else torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(tc.BadInput, check=has(parameter="update", tool="GradScaler")):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def test_a_second_backward_through_a_graph_raises_and_changes_nothing():
    module = bag()
    loss = loss_of(module, 0)
    loss.backward(retain_graph=True)
    before = module.weight
    with pytest.raises(tc.BadInput, check=has(parameter="retain_graph")):
        loss.backward()
    assert torch.equal(module.weight, before)


def test_asking_for_the_gradient_of_the_output_is_no_update():
    module = bag()
    out = module(ids_of(0))
    before = module.weight
    torch.autograd.grad((out**2).sum(), out, retain_graph=True)
    assert torch.equal(module.weight, before)
    (out**2).sum().backward()
    assert not torch.equal(module.weight, before) and module.placeholder.grad.abs().sum() == 0


# -- torch.optim.Optimizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_scheduler_changes_the_rate_that_kernels_use(update):
    theirs, their_optimizer, ours, our_optimizer = pair(tc.SGD(lr=0.1), PAIRS[0].values[1], update)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (their_optimizer, our_optimizer)]
    for step in range(3):
        for module, optimizer, scheduler in zip((theirs, ours), (their_optimizer, our_optimizer), schedulers, strict=True):
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
            scheduler.step()
    assert schedulers[1].get_last_lr() == [0.1 * 0.5**3] and ours.trainer.hyper[0].item() == 0.1 * 0.5**3
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=2e-5, atol=2e-5)


def test_schedulers_that_turn_other_knobs_reach_them_too():
    module = bag(optimizer=tc.Adam(lr=0.1, betas=(0.9, 0.99)))
    optimizer = module.fused_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    group = optimizer.param_groups[0]
    assert module.trainer.hyper[:5].tolist() == [group["lr"], group["eps"], *group["betas"], group["weight_decay"]]
    assert group["betas"][0] != 0.9


def test_the_state_of_an_optimizer_is_its_groups():
    first, second = bag(optimizer=tc.Adam(lr=0.1)), bag(optimizer=tc.Adam(lr=0.1))
    first.fused_optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.6), weight_decay=0.01)
    saved = first.fused_optimizer.state_dict()
    assert saved["state"] == {0: {}}
    second.fused_optimizer.load_state_dict(saved)
    assert torch.equal(second.trainer.hyper, first.trainer.hyper)
    assert second.fused_optimizer.param_groups[0]["params"][0] is second.placeholder
    with pytest.raises(tc.BadInput, check=has(value=2, needed=1)):
        second.fused_optimizer.load_state_dict({"param_groups": saved["param_groups"] * 2})


@pytest.mark.parametrize("update", ["backward", "step"])
def test_one_optimizer_serves_all_modules_of_a_model(update):
    model = nn.ModuleDict(
        {"a": bag(update=update, optimizer=tc.SGD(lr=0.1)), "b": bag(update=update, optimizer=tc.Adam(lr=0.1))}
    )
    optimizer = tc.fused_optimizer(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    optimizer.param_groups[1]["lr"] = 0.3
    assert model["b"].trainer.hyper[0] == 0.3 and model["b"].fused_optimizer.param_groups[0]["lr"] == 0.3
    before = model["a"].weight, model["b"].weight
    (loss_of(model["a"], 0) + loss_of(model["b"], 0)).backward()
    optimizer.step()
    assert not torch.equal(model["a"].weight, before[0]) and not torch.equal(model["b"].weight, before[1])
    optimizer.zero_grad()
    assert model["a"].placeholder.pending is None


def test_a_model_without_our_modules_has_no_fused_optimizer():
    with pytest.raises(tc.BadInput, check=has(parameter="model")):
        tc.fused_optimizer(nn.Linear(2, 2))


def test_parameters_of_others_are_refused_by_name():
    with pytest.raises(tc.BadInput, check=has(parameter="param_group")):
        bag().fused_optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(
    "make, parameter",
    [
        (lambda: tc.SGD(lr=-1.0), "lr"),
        (lambda: tc.Adagrad(lr=0.1, eps=-1.0), "eps"),
        (lambda: tc.Adam(lr=0.1, weight_decay=float("nan")), "weight_decay"),
        (lambda: tc.Adam(lr=0.1, betas=(0.9, 1.0)), "betas"),
    ],
)
def test_numbers_that_torchs_optimizers_refuse_are_refused(make, parameter):
    with pytest.raises(tc.BadInput, check=has(parameter=parameter)):
        make()


def test_a_closure_is_called_by_step():
    module = bag(update="step")

    def closure() -> Tensor:
        module.fused_optimizer.zero_grad()
        loss = loss_of(module, 0)
        loss.backward()
        return loss

    first, second = (module.fused_optimizer.step(closure).item() for _ in range(2))
    assert second < first
