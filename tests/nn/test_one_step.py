"""One backward pass is one optimizer step on summed gradients, however often a forward reads the rows of a module."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import thermocline as tc
from support import has

ROWS, DIM = 31, 6
PAIRS = [
    pytest.param(tc.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), id="SGD"),
    pytest.param(tc.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), id="Adagrad"),
    pytest.param(tc.Adam(lr=0.1, eps=1e-12), lambda p: torch.optim.SparseAdam(p, lr=0.1, eps=1e-12), id="Adam"),
]


def ids_of(seed: int, shape: tuple[int, ...] = (5, 3)) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def bpr(table: nn.Module, seed: int) -> Tensor:
    """Users, positives and negatives of one table."""
    user, positive, negative = (table(ids_of(seed + part, (7,))) for part in (0, 50, 90))
    return -nn.functional.logsigmoid((user * (positive - negative)).sum(1)).sum()


def siamese(table: nn.Module, seed: int) -> Tensor:
    """Two towers over one table; the second sees other batches, of another size."""
    left, right = torch.tanh(table(ids_of(seed, (5, 3)))), torch.sigmoid(table(ids_of(seed + 50, (4, 2))))
    return (left.reshape(-1, DIM).mean(0) * right.reshape(-1, DIM).mean(0)).sum()


def thrice(table: nn.Module, seed: int) -> Tensor:
    return sum((table(ids_of(seed + part)) ** 2).sum() for part in range(3))  # type: ignore[return-value]


CASES = [
    pytest.param(nn.Embedding, {}, bpr, id="bpr"),
    pytest.param(nn.Embedding, {"padding_idx": 3}, siamese, id="siamese with padding"),
    pytest.param(nn.EmbeddingBag, {"mode": "mean"}, siamese, id="siamese bags"),
    pytest.param(nn.EmbeddingBag, {"mode": "max"}, thrice, id="max"),
]


def pair(kind: type, arguments: dict[str, Any], optimizer: Any, theirs_by: Any, update: str) -> list[tuple[Any, Any]]:
    """Modules with equal fp32 rows and their optimizers: torch's and ours."""
    torch.manual_seed(0)
    sparse = arguments.get("mode") != "max"
    theirs = kind(ROWS, DIM, sparse=sparse, **arguments)
    rows = tc.RowConfig("fp32", optimizer=optimizer, update=update)
    ours: Any = getattr(tc, kind.__name__).from_pretrained(theirs.weight, False, rows=rows, **arguments)
    return [(theirs, theirs_by(theirs.parameters())), (ours, ours.fused_optimizer)]


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("ours_by, theirs_by", PAIRS)
@pytest.mark.parametrize("kind, arguments, loss_of", CASES)
def test_several_lookups_take_one_step_as_in_torch(kind, arguments, loss_of, ours_by, theirs_by, update):
    if arguments.get("mode") == "max" and isinstance(ours_by, tc.Adam):
        pytest.skip("torch has no sparse gradients of max pooling")
    both = pair(kind, arguments, ours_by, theirs_by, update)
    for step in range(4):
        for module, optimizer in both:
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
    assert both[1][0].trainer.clock.tolist() == [0, 4]
    torch.testing.assert_close(both[1][0].weight, both[0][0].weight.detach(), rtol=2e-5, atol=2e-5)


def test_weights_of_some_lookups_count_as_in_torch():
    both = pair(nn.EmbeddingBag, {"mode": "sum"}, *PAIRS[1].values, "backward")
    grads = []
    for module, optimizer in both:
        weights = torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()
        for step in range(3):
            optimizer.zero_grad()
            (module(ids_of(step), per_sample_weights=weights) ** 2).sum().add((module(ids_of(step + 9)) ** 2).sum()).backward()
            optimizer.step()
        grads.append(weights.grad)
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(both[1][0].weight, both[0][0].weight.detach(), rtol=2e-5, atol=2e-5)


def collection(**keywords: Any) -> tc.EmbeddingCollection:
    torch.manual_seed(0)
    tables = [tc.Table("a", ROWS, 4, features=("x", "y")), tc.Table("b", 9, 2)]
    return tc.EmbeddingCollection(tables, rows=tc.RowConfig(optimizer=tc.Adagrad(lr=0.1), **keywords))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_two_lookups_of_a_collection_are_one_step(precision):
    """Two batches that are looked up apart train to the rows of one batch with both."""
    apart, together = collection(precision=precision), collection(precision=precision)
    for step in range(3):
        first, second = ids_of(step, (5, 3)) % 9, ids_of(step + 9, (2, 3)) % 9
        (apart(first).values().square().sum() + apart(second).values().square().sum()).backward()
        together(torch.cat([first, second])).values().square().sum().backward()
    assert apart.trainer.clock.tolist() == together.trainer.clock.tolist() == [0, 3]
    for table in ("a", "b"):
        torch.testing.assert_close(apart.get_rows(table), together.get_rows(table), rtol=1e-5, atol=1e-5)


def bag(**keywords: Any) -> tc.EmbeddingBag:
    torch.manual_seed(0)
    keywords = {"optimizer": tc.Adagrad(lr=0.1), **keywords}
    return tc.EmbeddingBag(ROWS, DIM, mode="sum", rows=tc.RowConfig(**keywords))


def loss_of(module: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    return (module(ids_of(seed)) ** 2).sum()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_lookup_beside_an_unused_one_has_the_bits_of_a_single_one(precision):
    """A forward whose backward never runs, for instance of a validation batch, changes nothing."""
    alone, beside = bag(precision=precision), bag(precision=precision)
    kept = []
    for step in range(4):
        kept.append(beside(ids_of(77 + step)))
        for module in (alone, beside):
            loss_of(module, step).backward()
    assert beside.trainer.clock.tolist() == [0, 4] and torch.equal(alone.weight, beside.weight)
    assert all(torch.equal(a, b) for a, b in zip(alone.trainer.states, beside.trainer.states, strict=True))


def test_a_single_lookup_is_applied_at_once(monkeypatch):
    """Without sums in memory, also after lookups that were dropped or trained before."""
    module = bag()
    monkeypatch.setattr("thermocline.nn.backward_pass.CollectedGradients", None)
    for step in range(3):
        module(ids_of(90 + step))
        out = module(ids_of(step))
        out.sum().backward()
    assert module.trainer.clock.tolist() == [0, 3] and not module.placeholder.open


def test_a_forward_of_an_earlier_pass_is_summed_with_a_later_one():
    both = pair(nn.EmbeddingBag, {"mode": "sum"}, *PAIRS[1].values, "backward")
    for module, optimizer in both:
        early, now = module(ids_of(0)).square().sum(), module(ids_of(1)).square().sum()
        now.backward()
        optimizer.step()
        optimizer.zero_grad()
        (early + module(ids_of(2)).square().sum()).backward()
        optimizer.step()
    assert both[1][0].trainer.clock.tolist() == [0, 2]
    torch.testing.assert_close(both[1][0].weight, both[0][0].weight.detach(), rtol=2e-5, atol=2e-5)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("planted")


def test_a_pass_that_raises_changes_no_row_and_leaves_nothing_behind():
    module, plain = bag(), bag()
    module.fused_optimizer.step()
    before = module.weight.detach()
    weights = torch.ones(5, 3, requires_grad=True)
    bad = module(ids_of(0), per_sample_weights=Failing.apply(weights))  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError):
        (bad.sum() + loss_of(module, 1) + loss_of(module, 2)).backward()
    assert torch.equal(module.weight, before) and module.trainer.clock.tolist() == [0, 0]
    del bad
    gc.collect()
    assert not module.placeholder.open and not module.placeholder.passes
    for each in (module, plain):
        (loss_of(each, 3) + loss_of(each, 4)).backward()
    assert torch.equal(module.weight, plain.weight)


def test_a_second_pass_through_several_lookups_raises():
    module = bag()
    loss = loss_of(module, 0) + loss_of(module, 1)
    loss.backward(retain_graph=True)
    before = module.weight.detach()
    with pytest.raises(tc.BadInput, check=has(parameter="retain_graph")):
        loss.backward()
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_checkpointed_lookups_take_one_step_as_in_torch(reentrant, update):
    both = pair(nn.EmbeddingBag, {"mode": "sum"}, *PAIRS[1].values, update)
    for step in range(3):
        for module, optimizer in both:
            out = module(ids_of(step)) + torch.zeros(5, DIM, requires_grad=True)
            for part in (1, 2):
                read = lambda sum, ids, module=module: sum + module(ids).sin()  # noqa: E731
                out = torch.utils.checkpoint.checkpoint(read, out, ids_of(10 * part + step), use_reentrant=reentrant)
            optimizer.zero_grad()
            (out**2).sum().backward()
            optimizer.step()
    del out
    assert both[1][0].trainer.clock.tolist() == [0, 3] and not both[1][0].placeholder.open
    torch.testing.assert_close(both[1][0].weight, both[0][0].weight.detach(), rtol=2e-5, atol=2e-5)


def test_tracked_writes_include_collected_lookups():
    module, marked = bag(), []
    module.arena.before_write_hook = marked.append
    (loss_of(module, 0) + loss_of(module, 1)).backward()
    expected = torch.cat([ids_of(0).flatten(), ids_of(1).flatten()]).unique()
    assert torch.equal(torch.cat(marked).unique(), expected)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_rows_train_in_eval_mode_as_in_torch(update):
    both = pair(nn.EmbeddingBag, {"mode": "sum"}, *PAIRS[1].values, update)
    for step in range(3):
        for module, optimizer in both:
            module.eval()
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
    torch.testing.assert_close(both[1][0].weight, both[0][0].weight.detach(), rtol=2e-5, atol=2e-5)
