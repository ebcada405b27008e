"""Prefetched batches: what reaches the arena, when forward recognises a batch, and what it reuses."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import thermocline as tc
from support import has, module_arguments
from thermocline.nn import collection
from thermocline.nn.inputs import read_features
from thermocline.rows.arena import Arena


def ids_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def bag(**keywords: Any) -> tc.EmbeddingBag:
    torch.manual_seed(0)
    return tc.EmbeddingBag(31, 6, mode="sum", **module_arguments(**keywords))


def codes(module: tc.EmbeddingBag | tc.Embedding | tc.EmbeddingCollection) -> Tensor:
    return module.state_dict()["codes"].clone()


class Seen:
    """Stands for an arena's prefetch and remembers what reached it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[list[int], list[int]]] = []
        self.together: list[int] = []
        self.arrivals = 0
        monkeypatch.setattr(Arena, "prefetches", True)
        monkeypatch.setattr(Arena, "prefetch", lambda _, *batches: self._note(batches))
        monkeypatch.setattr(Arena, "arrive", lambda _: self._count())

    def _note(self, batches: tuple[tuple[Tensor, Tensor], ...]) -> None:
        self.together.append(len(batches))
        self.batches += [(ids.tolist(), offsets.tolist()) for ids, offsets in batches]

    def _count(self) -> None:
        self.arrivals += 1


@pytest.mark.parametrize(
    "module, batch, wanted",
    [
        (tc.EmbeddingBag(31, 6), (torch.tensor([[1, 2], [3, 4]]),), ([1, 2, 3, 4], [0, 2, 4])),
        (tc.EmbeddingBag(31, 6), (torch.tensor([1, 2, 3]), torch.tensor([0, 1])), ([1, 2, 3], [0, 1, 3])),
        (tc.Embedding(31, 6, padding_idx=2), (torch.tensor([[1, 2], [3, 4]]),), ([1, 2, 3, 4], [0, 4])),
        (
            tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 9, 3)]),
            ({"b": (torch.tensor([7]), torch.tensor([0, 1])), "a": (torch.tensor([5, 6]), torch.tensor([0, 2]))},),
            ([5, 6, 7], [0, 2, 3]),
        ),
        (tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 9, 3)]), (torch.tensor([[5, 7]]),), ([5, 7], [0, 1, 2])),
    ],
    ids=["bag", "bag with offsets", "embedding", "collection", "one id each"],
)
def test_prefetch_takes_what_forward_takes_and_forward_knows_it_again(module, batch, wanted, monkeypatch):
    seen = Seen(monkeypatch)
    other = copy.deepcopy(batch)
    module.prefetch(*batch)
    assert seen.batches == [wanted]
    module(*other)
    assert seen.arrivals == 0, "another batch waits for nothing"
    module(*batch)
    module(*batch)
    assert seen.arrivals == 1


@pytest.mark.parametrize(
    "module, batch, wrong, parameter",
    [
        (tc.Embedding(31, 6), (torch.tensor([1]),), ([1],), "ids"),
        (tc.EmbeddingBag(31, 6), (torch.tensor([[1]]),), ([[1]],), "ids"),
        (tc.EmbeddingBag(31, 6), (torch.tensor([[1]]),), (torch.tensor([1]), [0]), "offsets"),
        (
            tc.EmbeddingCollection([tc.Table("a", 31, 6)]),
            ({"a": (torch.tensor([5]), torch.tensor([0, 1]))},),
            ({"a": ([5], [0, 1])},),
            "ids",
        ),
    ],
    ids=["embedding", "bag", "bag with offsets", "collection"],
)
def test_ids_that_are_no_tensor_are_refused_by_prefetch_and_after_one(module, batch, wrong, parameter, monkeypatch):
    Seen(monkeypatch)
    module.prefetch(*batch)
    for call in (module, module.prefetch):
        with pytest.raises(tc.BadInput, check=has(parameter=parameter, value="list")):
            call(*wrong)


def test_a_prefetched_batch_is_read_once_unless_it_changed(monkeypatch):
    Seen(monkeypatch)
    module, reads = tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 31, 6)], mode="none"), []
    monkeypatch.setattr(collection, "read_features", lambda *args: reads.append(1) or read_features(*args))
    first, second = ((torch.tensor(ids), torch.tensor([0, 2, 3])) for ids in ([7, 8, 9], [5, 6, 7]))
    batch, other = {"a": first, "b": second}, {"a": (first[0].clone(), first[1]), "b": second}
    module.prefetch(batch)
    module.prefetch(other)
    module({"a": second, "b": first})
    assert len(reads) == 3, "the same tensors under other names"
    module({"b": second, "a": first})
    assert len(reads) == 3
    module(batch)
    assert len(reads) == 4, "what was prefetched is used once"
    module.prefetch(batch)
    first[0][0] = 3
    assert torch.equal(module(batch)["a"], module.get_rows("a", torch.tensor([3, 8, 9]))) and len(reads) == 6
    module.prefetch(batch)
    first[1][1] = 1
    assert module(batch).offsets("a").tolist() == [0, 1, 3] and len(reads) == 8


def two_tables() -> tc.EmbeddingCollection:
    torch.manual_seed(0)
    return tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 31, 6)], rows=tc.RowConfig("fp32", cache=0.0))


def both(values: Tensor, *rest: Tensor) -> dict[str, tuple[Tensor, ...]]:
    return {name: (values, torch.tensor([0, 2, 5]), *rest) for name in "ab"}


def test_a_buffer_that_is_refilled_past_autograd_has_the_rows_of_its_newest_batch(monkeypatch):
    Seen(monkeypatch)
    ahead, plain, values = two_tables(), two_tables(), torch.zeros(5, dtype=torch.long)
    batch = both(values)
    for step in range(5):
        values.data.copy_(torch.arange(5) + 5 * step)  # raises no version, as a collective does
        assert values._version == 0
        for _ in range((1, 1, 2, 0, 1)[step]):  # the fourth finds what was prefetched used up
            ahead.prefetch(batch)
        outs = [module(batch).values() for module in (ahead, plain)]
        assert torch.equal(*outs)
        for out in outs:
            out.sum().backward()


def test_memory_of_prefetched_ids_is_not_reused_before_their_forward(monkeypatch):
    Seen(monkeypatch)
    module, values = two_tables(), torch.arange(5)
    memory = StorageWeakRef(values.untyped_storage())
    module.prefetch(both(values))
    values.data = torch.arange(5, 10)
    assert not memory.expired()


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_memory_of_prefetched_ids_is_not_held_after_their_forward(at_once, monkeypatch):
    Seen(monkeypatch)
    module, memory = two_tables(), []

    def loader() -> Iterator[Any]:
        for n in range(7):
            values = ids_of((5,), n)
            memory.append(StorageWeakRef(values.untyped_storage()))
            yield both(values)

    for batch, rows in module.prefetched(loader(), at_once=at_once):  # noqa: B007
        module(batch)
    del batch, rows
    assert all(each.expired() for each in memory)


def test_weights_are_trained_after_a_prefetch_without_gradients(monkeypatch):
    seen = Seen(monkeypatch)
    grads = []
    for prefetched in (True, False):
        module, weights = two_tables(), torch.linspace(-1, 1, 5, requires_grad=True)
        batch = both(torch.arange(5), weights)
        if prefetched:
            with torch.no_grad():
                module.prefetch(batch)
        module(batch).values().square().sum().backward()
        grads.append(weights.grad)
    assert seen.arrivals == 1
    assert grads[1].any() and torch.equal(*grads)


@pytest.mark.parametrize(
    "module, batch",
    [
        (tc.EmbeddingBag(31, 6, rows=tc.RowConfig("fp32")), torch.tensor([[1, 2], [3, 4]])),
        (tc.Embedding(31, 6, rows=tc.RowConfig("fp32")), torch.tensor([[1, 2], [3, 4]])),
        (two_tables(), torch.tensor([[5, 7]])),
    ],
    ids=["bag", "embedding", "collection"],
)
def test_a_prefetch_in_inference_mode_is_no_hindrance_to_training(module, batch, monkeypatch):
    seen, before = Seen(monkeypatch), codes(module)
    with torch.inference_mode():
        module.prefetch(batch)
    out = module(batch)
    (out if isinstance(out, Tensor) else out.values()).sum().backward()
    assert seen.arrivals == 1 and not torch.equal(codes(module), before)


def test_rows_of_tensors_that_are_prefetched_twice_arrive_twice(monkeypatch):
    seen, module, ids = Seen(monkeypatch), bag(), ids_of((5, 3))
    for step in range(3):
        module.prefetch(ids)
        module(ids)
        assert seen.arrivals == step + 1


class Keyed:
    """Shaped like a KeyedJaggedTensor that makes its offsets when asked for them."""

    def __init__(self, keys: str) -> None:
        self.names, self.ids = list(keys), torch.arange(5)

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> Tensor:
        return self.ids

    def offsets(self) -> Tensor:
        return torch.tensor([0, 1, 2, 4, 5])


@pytest.mark.parametrize("what", ["inference", "new offsets", "another order"])
def test_rows_arrive_for_batches_that_may_have_changed(what, monkeypatch):
    seen, module = Seen(monkeypatch), two_tables().eval()
    with torch.inference_mode(what == "inference"):
        values = torch.arange(5)
    batch: Any = both(values) if what == "inference" else Keyed("ab" if what == "new offsets" else "ba")
    with torch.no_grad():
        wanted = module(batch).values()
        for step in range(3):
            module.prefetch(batch)
            assert torch.equal(module(batch).values(), wanted)
            module(batch)
            assert seen.arrivals == step + 1


def test_keys_in_another_order_are_another_batch(monkeypatch):
    Seen(monkeypatch)
    module, first, second = two_tables(), Keyed("ab"), Keyed("ba")
    offsets = first.offsets()
    second.ids = first.ids
    monkeypatch.setattr(Keyed, "offsets", lambda _: offsets)
    wanted = [module(keyed).values() for keyed in (first, second)]
    module.prefetch(first)
    assert torch.equal(module(second).values(), wanted[1]) and torch.equal(module(first).values(), wanted[0])


def test_a_forward_that_is_captured_uses_nothing_that_was_prefetched(monkeypatch):
    seen, module, given = Seen(monkeypatch), bag(), [ids_of((5, 3)), None]
    module.prefetch(*given)
    with monkeypatch.context() as card:
        card.setattr(Arena, "device", torch.device("cuda"))
        card.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert module.take_prefetched(given) is None and seen.arrivals == 0
    assert module.take_prefetched(given) is not None and seen.arrivals == 1


def test_a_compiled_model_does_not_depend_on_what_is_prefetched(monkeypatch):
    Seen(monkeypatch)
    module, graphs = bag(), []
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=lambda graph, _: graphs.append(1) or graph.forward)
    with torch.no_grad():
        for step in range(4):
            compiled(ids_of((5, 3), step))
            module.prefetch(ids_of((5, 3), step + 1))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "module, batches, ids",
    [
        (bag(), [(ids_of((5, 3), n), n) for n in range(7)], lambda batch: batch[0]),
        (bag(), [(n, ids_of((5,), n), torch.tensor([0, 2])) for n in range(7)], lambda batch: batch[1:]),
        (tc.Embedding(31, 6), [ids_of((5, 3), n) for n in range(7)], lambda batch: batch),
        (two_tables(), [both(ids_of((5,), n)) for n in range(7)], lambda batch: batch),
    ],
    ids=["bag", "bag with offsets", "embedding", "collection"],
)
def test_a_loop_prefetches_the_rows_of_three_batches_together(module, batches, ids, monkeypatch):
    seen, given, arrivals = Seen(monkeypatch), [], []
    for batch, rows in module.prefetched(iter(batches), ids=ids, at_once=3):
        inputs = ids(batch) if isinstance(ids(batch), tuple) else (ids(batch),)
        module(*inputs)
        assert len(rows.arguments) == len(inputs) and all(map(operator.is_, rows.arguments, inputs))
        given.append(batch)
        arrivals.append(seen.arrivals)
    assert all(one is other for one, other in zip(given, batches, strict=True)) and seen.together == [3, 1]
    assert arrivals == [0, 0, 0, 0, 0, 0, 1], "rows of the others were there when more were asked for"


def test_rows_arrive_with_the_first_batch_of_a_joint_prefetch_whichever_it_is(monkeypatch):
    seen, module, batches = Seen(monkeypatch), two_tables(), [both(ids_of((5,), n)) for n in range(3)]
    for first in (2, 0, 1):
        module.prefetch_rows(*(module.prefetch_request(batch) for batch in batches))
        for at in (first, 0, 1, 2):
            module(batches[at])
            assert seen.arrivals == 1
        seen.arrivals = 0


def test_batches_that_come_together_are_each_read_once(monkeypatch):
    Seen(monkeypatch)
    module, reads, batches = two_tables(), [], [both(ids_of((5,), n)) for n in range(9)]
    monkeypatch.setattr(collection, "read_features", lambda *args: reads.append(1) or read_features(*args))
    for batch, _ in module.prefetched(batches):
        module(batch)
    assert len(reads) == 9


@pytest.mark.parametrize("kind", ["bag", "embedding", "collection"])
def test_forward_takes_the_input_of_a_loop_whose_ids_are_new_tensors(kind, monkeypatch):
    """Tensors that are made anew cannot be recognised; those of the pair can."""
    seen = Seen(monkeypatch)
    module: Any = {"bag": bag, "embedding": lambda: tc.Embedding(31, 6), "collection": two_tables}[kind]()
    batches = [{"x": ids_of((5, 3), n), "label": n} for n in range(2)]
    outs = [module(rows) for _, rows in module.prefetched(batches, ids=lambda batch: batch["x"][:, :2], at_once=1)]
    assert seen.arrivals == 1
    for out, batch in zip(outs, batches, strict=True):
        wanted = module(batch["x"][:, :2])
        assert torch.equal(*(each if isinstance(each, Tensor) else each.values() for each in (out, wanted)))


def test_batches_are_as_they_are_where_nothing_is_prefetched_and_none_are_none(monkeypatch):
    module, read = bag(residency="host"), []
    upcoming = (read.append(n) or n for n in range(9))
    assert next(module.prefetched(upcoming))[0] == 0 and read == [0]
    seen = Seen(monkeypatch)
    assert list(module.prefetched([])) == [] and seen.together == []
    with pytest.raises(tc.BadInput, check=has(parameter="at_once", value=0)):
        next(module.prefetched([ids_of((5, 3))], at_once=0))


def test_prefetch_without_a_card_does_nothing():
    module, ids = bag(residency="host"), ids_of((5, 3))
    before = copy.deepcopy(module.state_dict())
    module.prefetch(ids)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert "staging" not in module.memory().parts


def test_room_for_staged_rows_is_asked_for_as_a_cache_is(tmp_path: Path):
    assert bag(residency="host").arena.staged is None
    assert bag(residency="host", staged=0.25).arena.staged == 0.25
    assert bag(residency="host", staged="310B").arena.staged == pytest.approx(310 / (31 * (6 + 4 + 13)))
    assert bag(residency="host", staged="1GiB").arena.staged == 1.0
    copied = copy.deepcopy(bag(residency="host", staged=0.25))
    assert copied.arena.staged == 0.25 == copied.rows.staged
    tc.save(copied, tmp_path / "saved")
    assert tc.load(tmp_path / "saved").arena.staged == 0.25


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"residency": "host", "cache": 0.0},
        {"residency": "host", "precision": "fp32"},
        {"residency": "host", "staged": 0.0},
        {"residency": "host", "staged": "0B"},
        {"residency": "host", "staged": -1.0},
        {"residency": "host", "staged": "much"},
    ],
)
def test_room_for_staged_rows_is_refused_where_it_means_nothing(keywords):
    with pytest.raises(tc.BadInput, check=has(parameter="staged", value=keywords.get("staged", 0.2))):
        bag(**{"staged": 0.2, **keywords})
