"""`module.weight` in a forward is differentiable: models that compute with all rows learn as in torch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thermocline as tc
from support import has

USERS, ITEMS, DIM = 7, 11, 6
PAIRS = [
    pytest.param(tc.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), id="SGD"),
    pytest.param(tc.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), id="Adagrad"),
]


def drawn(count: int, rows: int, seed: int) -> Tensor:
    return torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed))


class LightGCN(nn.Module):
    """Two layers of neighbourhood means, BPR loss, and L2 on the rows of the batch (the ego embeddings)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        links_UI = (torch.rand(USERS, ITEMS, generator=torch.Generator().manual_seed(3)) < 0.4).float()
        square = torch.zeros(USERS + ITEMS, USERS + ITEMS)
        square[:USERS, USERS:], square[USERS:, :USERS] = links_UI, links_UI.T
        degree = square.sum(1).clamp(min=1).rsqrt()
        self.graph = degree[:, None] * square * degree

    def loss(self, seed: int) -> Tensor:
        layers = [torch.cat([self.users.weight, self.items.weight])]
        for _ in range(2):
            layers.append(self.graph @ layers[-1])
        users, items = torch.stack(layers).mean(0).split([USERS, ITEMS])
        user, liked, other = drawn(5, USERS, seed), drawn(5, ITEMS, seed + 1), drawn(5, ITEMS, seed + 2)
        scores = (users[user] * (items[liked] - items[other])).sum(1)
        rows = torch.cat([self.users(user), self.items(liked), self.items(other)])
        return -F.logsigmoid(scores).mean() + 0.01 * rows.square().sum()


class SASRec(nn.Module):
    """A sequence of items, and the full softmax over `items.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.mix = nn.GRU(DIM, DIM, batch_first=True)

    def loss(self, seed: int) -> Tensor:
        hidden = self.mix(self.items(drawn(12, ITEMS, seed).view(3, 4)))[0][:, -1]
        return F.cross_entropy(hidden @ self.items.weight.T, drawn(3, ITEMS, seed + 1))


class Functional(nn.Module):
    """Rows by `F.embedding`, by indexing and by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)

    def loss(self, seed: int) -> Tensor:
        parts = [drawn(4, ITEMS, seed + part) for part in range(4)]
        read = F.embedding(parts[0], self.items.weight), self.items.weight[parts[1]], self.items(parts[2]), self.items(parts[3])
        return torch.stack(read).sum(0).sin().sum()


def pair(model: type, optimizer: Any, theirs_by: Any, update: str, precision: str = "fp32") -> list[tuple[Any, list[Any]]]:
    """(torch's model and optimizers, the converted model and optimizers)."""
    torch.manual_seed(0)
    theirs = model()
    ours = copy.deepcopy(theirs)
    tc.convert_(ours, tc.RowConfig(precision, optimizer=optimizer, update=update))
    tables = {id(p) for m in theirs.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    rows = theirs_by([p for p in theirs.parameters() if id(p) in tables])
    dense = [
        [torch.optim.SGD(own, lr=0.1)] if (own := [p for p in m.parameters() if p.numel() > 1 and id(p) not in tables]) else []
        for m in (theirs, ours)
    ]
    return [(theirs, [rows, *dense[0]]), (ours, [tc.fused_optimizer(ours), *dense[1]])]


def train(both: list[tuple[Any, list[Any]]], steps: int) -> list[list[float]]:
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        for (model, optimizers), seen in zip(both, losses, strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model.loss(10 * step)
            loss.backward()
            seen.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
    return losses


def rows_of(model: nn.Module) -> list[Tensor]:
    return [m.weight.detach() for m in model.modules() if isinstance(m, (nn.Embedding, tc.Embedding))]


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("ours_by, theirs_by", PAIRS)
@pytest.mark.parametrize("model", [LightGCN, SASRec, Functional])
def test_models_that_compute_with_weight_learn_as_in_torch(model, ours_by, theirs_by, update):
    both = pair(model, ours_by, theirs_by, update)
    before = rows_of(both[1][0])
    losses = train(both, 6)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for ours, theirs, old in zip(rows_of(both[1][0]), rows_of(both[0][0]), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
        assert not torch.equal(ours, old)
    clocks = {m.trainer.clock[1].item() for m in both[1][0].modules() if isinstance(m, tc.Embedding)}
    assert clocks == {6}


@pytest.mark.parametrize("update", ["backward", "step"])
def test_adam_moves_rows_with_a_gradient_as_sparse_adam(update):
    """torch's dense Adam also moves rows without one, by their old momentum."""
    both = pair(Functional, tc.Adam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1), update)
    for step in range(5):
        for (model, (optimizer, *_)), sparse in zip(both, (True, False), strict=True):
            optimizer.zero_grad()
            model.loss(10 * step).backward()
            if sparse:
                model.items.weight.grad = model.items.weight.grad.to_sparse(1)
            optimizer.step()
    torch.testing.assert_close(both[1][0].items.weight, both[0][0].items.weight.detach(), rtol=2e-5, atol=2e-5)


def test_quantized_rows_learn_through_weight():
    (_, _), (model, _) = pair(SASRec, tc.SGD(lr=0.1), PAIRS[0].values[1], "backward", "int8")
    first = model.loss(0).item()
    for _ in range(20):
        model.loss(0).backward()
    assert model.loss(0).item() < first - 0.3


def module(**keywords: Any) -> tc.Embedding:
    torch.manual_seed(0)
    return tc.Embedding(ITEMS, DIM, rows=tc.RowConfig(**{"precision": "fp32", "optimizer": tc.SGD(lr=0.1), **keywords}))


def test_rows_without_a_gradient_keep_codes_cache_and_state():
    table = module(precision="int8", optimizer=tc.Adam(lr=0.1), cache=0.3)
    table(torch.tensor([1, 2, 3])).sum().backward()
    before, stats = table.weight.detach(), table.stats()
    F.embedding(torch.tensor([4]), table.weight, sparse=True).sum().backward()
    changed = (table.weight.detach() != before).any(1).nonzero().flatten().tolist()
    assert changed == [4] and table.stats() == stats  # reading all rows is no lookup


def test_weight_requires_grad_where_rows_train():
    table = module()
    assert table.weight.requires_grad and table.eval().weight.requires_grad
    with torch.no_grad():
        assert not table.weight.requires_grad
    table.requires_grad_(False)
    assert not table.weight.requires_grad
    before = table.weight
    (table.weight * torch.ones(1, requires_grad=True)).sum().backward()
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_weight_that_was_kept_over_a_step_raises(update):
    """A model that stores `table.weight` when it is built would compute with old rows."""
    table = module(update=update)
    kept = table.weight
    kept.sum().backward()
    table.fused_optimizer.step()
    before = table.weight.detach()
    with pytest.raises(tc.BadInput, check=has(parameter="weight")):
        (2 * kept).sum().backward()
    assert torch.equal(table.weight, before)


def test_gradients_of_weight_accumulate_and_are_clipped():
    table, theirs = module(update="step"), nn.Embedding(ITEMS, DIM)
    theirs.load_state_dict({"weight": table.weight.detach()})
    optimizers = [table.fused_optimizer, torch.optim.SGD(theirs.parameters(), lr=0.1)]
    for each, optimizer in zip((table, theirs), optimizers, strict=True):
        for part in range(3):
            (each.weight[part:] ** 2).sum().backward()
        each(torch.tensor([5, 5])).sum().backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(table.weight, theirs.weight.detach())


def test_a_dense_gradient_above_the_limit_raises_with_both_numbers(monkeypatch):
    monkeypatch.setattr("thermocline.nn.backward_pass.MOST_DENSE_BYTES", 4 * ITEMS * DIM - 1)
    table = module()
    before = table.weight.detach()
    with pytest.raises(tc.BadInput, check=has(parameter="weight", value=4 * ITEMS * DIM, available=4 * ITEMS * DIM - 1)):
        (table(torch.tensor([3])) @ table.weight.T).sum().backward()
    assert torch.equal(table.weight, before) and not table.placeholder.passes


def test_a_compiled_model_learns_through_weight():
    both = pair(SASRec, *PAIRS[0].values, "backward")
    _, (ours, _) = both
    ours.items.padding_idx = None
    eager = copy.deepcopy(ours)
    compiled = torch.compile(lambda hidden: (hidden @ ours.items.weight.T).logsumexp(1).sum(), backend="aot_eager")
    hidden = torch.randn(3, DIM)
    for _ in range(3):
        loss = compiled(hidden)
        loss.backward()
        (hidden @ eager.items.weight.T).logsumexp(1).sum().backward()
    torch.testing.assert_close(ours.items.weight, eager.items.weight)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_norm_over_parameters_warns_that_it_leaves_rows_out(update):
    model = nn.Sequential(tc.Embedding(9, 4, rows=tc.RowConfig("fp32", update=update)), nn.Linear(4, 1))
    with pytest.warns(UserWarning, match="weight_decay"):
        (model(torch.tensor([1, 2])).sum() + sum(p.square().sum() for p in model.parameters())).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(torch.tensor([1, 2])).sum() + copy.deepcopy(model)[0].weight.square().sum()).backward()
