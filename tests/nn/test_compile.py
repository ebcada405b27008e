"""torch.compile: one graph a forward, no compilation when sizes change, and the checks and sums of an eager step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import thermocline as tc
from support import has

TABLES = [tc.Table("a", 31, 4), tc.Table("b", 31, 2)]
STEP = tc.RowConfig(optimizer=tc.Adagrad(lr=0.1), update="step")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Twice(nn.Module):
    """A table that is looked up twice in a forward, with a dense part."""

    def __init__(self, first: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.top = first, nn.Linear(width, 3, bias=False)

    def forward(self, *inputs: tuple[Any, ...]) -> Tensor:
        outs = [self.first(*given) for given in inputs]
        outs = [out if isinstance(out, Tensor) else out.values() for out in outs]
        return sum((self.top(out.reshape(-1, out.shape[-1])) ** 2).sum() for out in outs)


def flat(batch: int, count: int) -> tuple[Any, ...]:
    return torch.randint(0, 31, (count,)), torch.linspace(0, count, batch + 1).long()[:-1]


def square(batch: int, count: int) -> tuple[Any, ...]:
    return (torch.randint(0, 31, (batch, count)),)


def features(batch: int, count: int) -> tuple[Any, ...]:
    return ({name: (torch.randint(0, 31, (count,)), torch.linspace(0, count, batch + 1).long()) for name in "ab"},)


def column(batch: int, count: int) -> tuple[Any, ...]:
    return (torch.randint(0, 31, (batch, 2)),)


KINDS: dict[str, tuple[Callable[[tc.RowConfig], nn.Module], int, Callable[[int, int], tuple[Any, ...]]]] = {
    "bags": (lambda rows: tc.EmbeddingBag(31, 6, mode="sum", rows=rows), 6, flat),
    "padded bags": (lambda rows: tc.EmbeddingBag(31, 6, padding_idx=3, rows=rows), 6, square),
    "padded ids": (lambda rows: tc.Embedding(31, 6, padding_idx=3, rows=rows), 6, square),
    "hashed ids": (lambda rows: tc.Embedding(31, 6, ids=tc.IdMap.hashed(31), rows=rows), 6, square),
    "features": (lambda rows: tc.EmbeddingCollection(TABLES, rows=rows), 6, features),
    "unpooled features": (lambda rows: tc.EmbeddingCollection(TABLES, mode="none", rows=rows), 4, features),
    "one id each": (lambda rows: tc.EmbeddingCollection(TABLES, rows=rows), 6, column),
}
SIZES = [(13, 57), (14, 9), (6, 21), (2, 6), (9, 64), (33, 40)]


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("update", ["backward", "step", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_change_without_a_graph_break_or_another_compilation(kind, update):
    """The first change makes sizes dynamic, as for any compiled model; no later one compiles."""
    torch.manual_seed(0)
    make, width, inputs = KINDS[kind]
    model = Twice(make(STEP if update == "step" else tc.RowConfig()), width)
    run = torch.compile(model.train(update != "eval"), backend="aot_eager")
    compiled = []
    for sizes in SIZES:
        with torch.set_grad_enabled(update != "eval"):
            loss = run(inputs(*sizes))
        if update != "eval":
            loss.backward()
            model.first.fused_optimizer.step()
            model.first.fused_optimizer.zero_grad()
        compiled.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert compiled[0] == 1
    assert compiled[1] == compiled[-1] == 2


@pytest.mark.parametrize("kind", ["bags", "features"])
def test_dynamic_sizes_compile_once(kind):
    make, width, inputs = KINDS[kind]
    run = torch.compile(Twice(make(tc.RowConfig()), width), backend="aot_eager", dynamic=True)
    for sizes in SIZES:
        run(inputs(*sizes)).backward()
    assert counters["stats"]["unique_graphs"] == 1


INDUCTOR = [("padded bags", "backward", "inductor"), ("features", "step", "inductor")]  # which takes seconds


@pytest.mark.parametrize("kind, update, backend", [*product(KINDS, ["backward", "step"], ["aot_eager"]), *INDUCTOR])
def test_several_compiled_lookups_of_a_table_are_one_step(kind, update, backend):
    torch.manual_seed(0)
    make, width, inputs = KINDS[kind]
    eager = Twice(make(tc.RowConfig("fp32", optimizer=tc.Adagrad(lr=0.1), update=update)), width)
    model = copy.deepcopy(eager)
    run = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(3):
        given = [inputs(4, 9 + step), inputs(3, 5)]
        for each, module in ((eager, eager), (run, model)):
            each(*given).backward()
            module.first.fused_optimizer.step()
            module.first.fused_optimizer.zero_grad()
    assert model.first.trainer.clock.tolist() == eager.first.trainer.clock.tolist() == [0, 3]
    states = eager.state_dict(), model.state_dict()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) or torch.allclose(
            value.view(torch.float32), states[1][name].view(torch.float32)
        )


def test_one_compiled_lookup_updates_rows_without_a_copy_of_its_gradient(monkeypatch):
    model = Twice(tc.EmbeddingBag(31, 6), 6)
    run = torch.compile(model, backend="aot_eager")
    monkeypatch.setattr(tc.nn.backward_pass.CollectedGradients, "apply", lambda self: pytest.fail("gradients were collected"))
    for _ in range(3):
        run(square(4, 3)).backward()
    assert model.first.trainer.clock.tolist() == [0, 3]


def test_accumulation_in_a_compiled_model_is_refused_as_in_eager():
    model = Twice(tc.EmbeddingBag(31, 6), 6)
    run, dense = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1)
    run(square(4, 3)).backward()
    dense.step()
    run(square(4, 3)).backward()
    with pytest.raises(tc.BadInput, check=has(parameter="update", value="backward")):
        run(square(4, 3)).backward()


def test_accumulation_in_a_compiled_model_with_deferred_updates():
    torch.manual_seed(0)
    eager = Twice(tc.EmbeddingBag(31, 6, rows=STEP), 6)
    model = copy.deepcopy(eager)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for given in [square(4, 3), square(2, 5)]:
            eager(given).backward()
            run(given).backward()
        for module in (eager, model):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            module.first.fused_optimizer.step()
            module.first.fused_optimizer.zero_grad()
            module.top.zero_grad()
    assert equal(eager.first, model.first)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: torch.load(_saved(model), weights_only=False)])
def test_a_copy_of_a_compiled_module_gets_its_own_gradients(copied):
    torch.manual_seed(0)
    model = Twice(tc.EmbeddingBag(31, 6), 6)
    torch.compile(model, backend="aot_eager")(square(4, 3)).backward()
    other = copied(model)
    before = copy.deepcopy(model.first.state_dict())
    torch.compile(other, backend="aot_eager")(square(4, 3)).backward()
    assert other.first.trainer.clock.tolist() == [0, 2]
    assert all(torch.equal(before[name], value) for name, value in model.first.state_dict().items())


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_weights_of_padded_bags_get_their_gradient_when_compiled():
    torch.manual_seed(0)
    bag = tc.EmbeddingBag(31, 6, mode="sum", padding_idx=3)
    ids, weights = torch.tensor([[3, 1], [2, 3], [3, 3]]), torch.rand(3, 2)
    found = []
    for run in (copy.deepcopy(bag), torch.compile(copy.deepcopy(bag), backend="aot_eager", fullgraph=True)):
        given = weights.clone().requires_grad_()
        run(ids, per_sample_weights=given).square().sum().backward()
        found.append(given.grad)
    assert torch.equal(*found)
    assert torch.equal(found[0] == 0, ids == 3)


def test_a_bad_id_between_padding_is_named_by_its_position_when_compiled():
    bag = torch.compile(tc.EmbeddingBag(31, 6, padding_idx=3), backend="aot_eager")
    with pytest.raises(tc.IdOutOfRange, check=has(position=3, id=31)):
        bag(torch.tensor([[3, 1], [3, 31]]))
