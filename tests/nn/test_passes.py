"""Rows train in the passes in which torch trains parameters: `inputs=`, `autograd.grad`, checkpoints, threads."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import thermocline as tc
from support import has
from thermocline.nn.backward_pass import OpenLookup, OpenRows

ROWS, DIM = 53, 7
UPDATES = pytest.mark.parametrize("update", ["backward", "step"])


def ids_of(seed: int, shape: tuple[int, ...] = (5, 3)) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def models(update: str, kind: str = "EmbeddingBag", **arguments: Any) -> tuple[Any, Any]:
    """The same model with a table of torch's and with one of ours, in fp32."""
    torch.manual_seed(0)
    bag = {"mode": "sum"} if kind == "EmbeddingBag" else {}
    theirs = nn.Sequential(getattr(nn, kind)(ROWS, DIM, **bag), nn.Linear(DIM, 1))
    rows = tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.1), update=update, **arguments)
    ours = copy.deepcopy(theirs)
    ours[0] = getattr(tc, kind).from_pretrained(theirs[0].weight, False, rows=rows, **bag)
    return theirs, ours


def step(model: Any) -> None:
    table = model[0]
    if isinstance(table, nn.Embedding | nn.EmbeddingBag):
        torch.optim.SGD(table.parameters(), lr=0.1).step()
        table.zero_grad()
    elif table.rows.update == "step":
        table.fused_optimizer.step()
        table.fused_optimizer.zero_grad()


def check(update: str, run: Callable[[Any], Any], kind: str = "EmbeddingBag", tolerance: float = 1e-5) -> None:
    """Run the same with both models, take a step, and compare the tables."""
    theirs, ours = models(update, kind)
    for model in (theirs, ours):
        run(model)
        step(model)
    torch.testing.assert_close(ours[0].weight.detach(), theirs[0].weight.detach(), rtol=tolerance, atol=tolerance)


@UPDATES
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_reentrant_checkpoints_read_rows_as_they_were_before_the_pass(update: str, kind: str) -> None:
    def run(model: Any) -> None:
        tie = torch.ones(1, requires_grad=True)

        def inner(tie: Tensor) -> Tensor:
            return torch.tanh(model(ids_of(1))) * tie

        kept = [checkpoint(inner, tie, use_reentrant=True) for _ in range(2)]
        (kept[0].sum() + kept[1].square().sum() + model(ids_of(1)).sum()).backward()

    check(update, run, kind)


@UPDATES
def test_a_backward_with_inputs_trains_rows_among_them_only(update: str) -> None:
    def run(model: Any) -> None:
        model(ids_of(1)).square().sum().backward(inputs=[model[1].weight])
        model(ids_of(2)).square().sum().backward(inputs=list(model.parameters()))

    check(update, run)


@UPDATES
@pytest.mark.parametrize("read", ["lookup", "weight"])
def test_autograd_grad_of_other_tensors_trains_no_rows(update: str, read: str) -> None:
    def run(model: Any) -> None:
        loss = model(ids_of(1)).square().sum() if read == "lookup" else model[1](model[0].weight).square().sum()
        torch.autograd.grad(loss, model[1].weight, retain_graph=True)
        loss.backward()

    check(update, run)


@UPDATES
def test_autograd_grad_of_sample_weights_trains_no_rows(update: str) -> None:
    def run(model: Any) -> None:
        weights = torch.linspace(0.5, 2.0, 15).view(5, 3).requires_grad_()
        loss = model[0](ids_of(1), per_sample_weights=weights).square().sum()
        found.append(torch.autograd.grad(loss, weights, retain_graph=True)[0])
        loss.backward()

    found: list[Tensor] = []
    check(update, run)
    torch.testing.assert_close(found[0], found[1])


@UPDATES
def test_autograd_grad_of_a_compiled_model_trains_no_rows(update: str) -> None:
    def run(model: Any) -> None:
        compiled = torch.compile(model, backend="aot_eager")
        torch.autograd.grad(compiled(ids_of(1)).sum(), model[1].weight)
        compiled(ids_of(1)).square().sum().backward(inputs=list(model.parameters()))

    check(update, run)


@UPDATES
def test_rows_are_no_input_of_autograd_grad(update: str) -> None:
    model = models(update)[1]
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(model(ids_of(1)).sum(), list(model.parameters()))
    step(model)
    assert torch.equal(model[0].weight, before)


@UPDATES
def test_a_second_derivative_through_sample_weights_raises_as_in_torch(update: str) -> None:
    for model in models(update):
        weights = torch.ones(5, 3, requires_grad=True)
        loss = model[0](ids_of(1), per_sample_weights=weights).square().sum()
        gradient = torch.autograd.grad(loss, weights, create_graph=True)[0]
        with pytest.raises(RuntimeError):
            gradient.square().sum().backward()


@UPDATES
def test_functional_call_does_not_train_the_rows_behind_other_parameters(update: str) -> None:
    model = models(update)[1]
    before = model[0].weight.detach().clone()
    fixed = {name: p if name.startswith("1") else p.detach() for name, p in model.named_parameters()}
    functional_call(model, fixed, (ids_of(1),)).sum().backward()
    step(model)
    assert torch.equal(model[0].weight, before)

    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(tc.BadInput, check=has(tool="torch.func.functional_call")):
        functional_call(model, copies, (ids_of(1),))

    functional_call(model, dict(model.named_parameters()), (ids_of(1),)).sum().backward()
    step(model)
    assert not torch.equal(model[0].weight, before)


@UPDATES
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_parameters_of_a_table_warns_that_it_never_runs(update: str, register: str) -> None:
    model, seen = models(update)[1], []
    with pytest.warns(UserWarning, match="hook"):
        handle = getattr(model[0].placeholder, register)(seen.append)
    model(ids_of(1)).sum().backward()
    handle.remove()
    assert not seen


@UPDATES
def test_a_compiled_step_of_an_optimizer_of_torch_leaves_rows_to_their_own(update: str) -> None:
    theirs, ours = models(update)
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(ids_of(1)).square().mean().backward()
            optimizer.step()

        compiled = torch.compile(train, backend="eager")
        for _ in range(3):
            (train if model is theirs else compiled)()
    torch.testing.assert_close(ours[0].weight.detach(), theirs[0].weight.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1].weight, theirs[1].weight)


@UPDATES
def test_threads_that_train_one_table_lose_no_gradient(update: str) -> None:
    def run(model: Any) -> None:
        begin = threading.Barrier(4)

        def work(seed: int) -> None:
            begin.wait()
            for each in range(30):
                model[0](ids_of(100 * seed + each, (200, 9))).sum().backward()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        check(update, run, tolerance=1e-3)
    finally:
        sys.setswitchinterval(interval)


@UPDATES
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_no_thread_takes_the_row_of_a_lookup_that_waits_for_its_backward(
    update: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only row of the table belongs to 7; while it is looked up or trained, another thread looks up 8."""
    rows = tc.RowConfig("fp32", optimizer=tc.SGD(lr=1.0), update=update)
    bag = tc.EmbeddingBag(2, 3, mode="sum", rows=rows, ids=tc.IdMap.elastic(2, shared=1, evict="lru"))
    placeholder, begun = bag.trained.placeholder, list[bool]()

    def look_up_8() -> None:
        begun.append(placeholder.lock.acquire(blocking=False))  # as a lookup does, which would wait
        if begun[-1]:
            bag(torch.tensor([[8]]))
            placeholder.lock.release()

    def at_the_moment(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            result = run(*arguments)
            if not begun:
                thread = threading.Thread(target=look_up_8)
                thread.start()
                thread.join()
            return result

        return wrapped

    wrapped = (type(bag.maps), "admit") if moment == "forward" else (OpenLookup if update == "backward" else OpenRows, "close")
    monkeypatch.setattr(*wrapped, at_the_moment(getattr(*wrapped)))
    out = bag(torch.tensor([[7]]))
    (3.0 * out).sum().backward()
    step([bag])
    assert begun == [False] and bag.elastic().ids().tolist() == [7]
    assert torch.equal(bag.get_rows(torch.tensor([0])), out.detach() - 3.0)


@UPDATES
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_are_frozen_before_a_backward_stay_as_they_are(update: str, compiled: bool) -> None:
    def run(model: Any) -> None:
        loss = (torch.compile(model, backend="aot_eager") if compiled else model)(ids_of(1)).square().sum()
        model.requires_grad_(False)
        loss.backward()

    check(update, run)
