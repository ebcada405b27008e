"""`EmbeddingBag` and `Embedding` against torch's own, with fp32 rows; int8 rows against the arena path beneath."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thermocline as tc
from support import has
from thermocline.rows.arena import Arena

ROWS, DIM = 101, 7
MODES = ["sum", "mean", "max"]


def pair(kind: str, seed: int = 0, optimizer: Any = None, **keywords: Any) -> tuple[Any, Any]:
    """(torch's module, ours with fp32 rows), equal rows."""
    torch.manual_seed(seed)
    theirs = getattr(nn, kind)(ROWS, DIM, **keywords)
    torch.manual_seed(seed)
    ours = getattr(tc, kind)(ROWS, DIM, **keywords, rows=tc.RowConfig("fp32", optimizer=optimizer or tc.SGD(lr=0.1)))
    return theirs, ours


def ids_of(shape: tuple[int, ...], seed: int = 0, rows: int = ROWS) -> Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["EmbeddingBag", "Embedding"])
@pytest.mark.parametrize(
    "of", [lambda c: c.__init__, lambda c: c.from_pretrained, lambda c: c.forward], ids=["init", "from", "call"]
)
def test_arguments_have_the_names_order_and_defaults_of_torch(kind, of):
    theirs, ours = (list(inspect.signature(of(getattr(m, kind))).parameters.values()) for m in (nn, tc))
    positional = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs[: len(positional)]]
    defaults = {p.name: p.default for p in theirs}
    assert all(defaults[p.name] == p.default for p in ours if p.name in defaults)


@pytest.mark.parametrize("kind", ["EmbeddingBag", "Embedding"])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_initial_rows_are_those_that_torch_draws_from_the_same_seed(kind, padding_idx):
    theirs, ours = pair(kind, padding_idx=padding_idx)
    assert torch.equal(ours.weight, theirs.weight)
    assert ours.padding_idx == theirs.padding_idx


def test_rows_that_are_drawn_in_blocks_are_torchs_too():
    torch.manual_seed(4)
    theirs = nn.EmbeddingBag(70_001, 3).weight
    torch.manual_seed(4)
    assert torch.equal(tc.EmbeddingBag(70_001, 3, rows=tc.RowConfig("fp32")).weight, theirs)


@st.composite
def bags(draw: Any) -> tuple[list[int], list[int]]:
    """(ids, lengths of bags): empty bags, empty batches, few distinct ids."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=0, max_size=9))
    return draw(st.lists(st.integers(0, 12), min_size=sum(lengths), max_size=sum(lengths))), lengths


@given(bags(), st.sampled_from(MODES), st.booleans(), st.sampled_from([None, 3]), st.sampled_from([torch.int32, torch.int64]))
def test_flat_ids_with_offsets_give_what_torch_gives(given_bags, mode, last, padding_idx, dtype):
    ids_N = torch.tensor(given_bags[0], dtype=dtype)
    ends = torch.tensor([0, *given_bags[1]]).cumsum(0).to(dtype)
    offsets = ends if last else ends[:-1]
    theirs, ours = pair("EmbeddingBag", mode=mode, include_last_offset=last, padding_idx=padding_idx)
    assert ours(ids_N, offsets).shape == (len(given_bags[1]), DIM)
    if given_bags[1]:  # torch itself is of two minds about no bags at all
        torch.testing.assert_close(ours(ids_N, offsets), theirs(ids_N, offsets), rtol=1e-6, atol=1e-6)


@given(st.integers(0, 9), st.integers(1, 5), st.sampled_from(MODES), st.sampled_from([None, 0]))
def test_two_dimensional_ids_give_what_torch_gives(batch, length, mode, padding_idx):
    theirs, ours = pair("EmbeddingBag", mode=mode, padding_idx=padding_idx)
    ids_BL = ids_of((batch, length), rows=5)
    torch.testing.assert_close(ours(ids_BL), theirs(ids_BL), rtol=1e-6, atol=1e-6)


def test_bags_of_no_ids_are_zeros():
    _, ours = pair("EmbeddingBag")
    assert torch.equal(ours(torch.zeros(3, 0, dtype=torch.int64)), torch.zeros(3, DIM))


@pytest.mark.parametrize("weighted", [False, True])
def test_nested_jagged_ids_give_what_flat_ones_give(weighted):
    _, ours = pair("EmbeddingBag", mode="sum")
    parts = [ids_of((n,), n) for n in (3, 0, 5)]
    weights = [torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in (3, 0, 5)] if weighted else None
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    nested_weights = torch.nested.nested_tensor(weights, layout=torch.jagged) if weights else None
    flat = ours(torch.cat(parts), torch.tensor([0, 3, 3]), torch.cat(weights) if weights else None)
    assert torch.equal(ours(nested, per_sample_weights=nested_weights), flat)


@given(
    st.lists(st.integers(0, 4), min_size=0, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_embedding_takes_ids_of_any_shape(shape, padding_idx, dtype):
    theirs, ours = pair("Embedding", padding_idx=padding_idx)
    ids = ids_of(tuple(shape), rows=5).to(dtype)
    assert torch.equal(ours(ids), theirs(ids))


OPTIMIZERS = [
    (tc.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (tc.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    (tc.Adam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
]


@pytest.mark.parametrize("ours_by, theirs_by", OPTIMIZERS, ids=["SGD", "Adagrad", "Adam"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_training_equals_torchs_sparse_training(ours_by, theirs_by, mode, update, padding_idx):
    torch.manual_seed(1)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True, padding_idx=padding_idx)
    ours = tc.EmbeddingBag.from_pretrained(
        theirs.weight, False, mode=mode, rows=tc.RowConfig("fp32", optimizer=ours_by, update=update), padding_idx=padding_idx
    )
    optimizer = theirs_by(theirs.parameters())
    for step in range(4):
        ids_BL = ids_of((9, 4), step, rows=20)
        for module, by in ((theirs, optimizer), (ours, ours.fused_optimizer)):
            by.zero_grad()
            (module(ids_BL) ** 2).sum().backward()
            by.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_max_pooling_trains_as_torchs_does(update):
    torch.manual_seed(1)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode="max")
    ours = tc.EmbeddingBag.from_pretrained(
        theirs.weight, False, mode="max", rows=tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.1), update=update)
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        for module, by in ((theirs, optimizer), (ours, ours.fused_optimizer)):
            by.zero_grad()
            (module(ids_of((9, 4), step)) ** 2).sum().backward()
            by.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("padding_idx", [None, 4])
def test_embedding_trains_as_torchs_does(update, padding_idx):
    torch.manual_seed(1)
    theirs = nn.Embedding(ROWS, DIM, padding_idx)
    ours = tc.Embedding.from_pretrained(
        theirs.weight, False, rows=tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.1), update=update), padding_idx=padding_idx
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        for module, by in ((theirs, optimizer), (ours, ours.fused_optimizer)):
            by.zero_grad()
            (module(ids_of((3, 4, 2), step, rows=9)) ** 2).sum().backward()
            by.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_per_sample_weights_get_torchs_gradient(update, padding_idx, frozen):
    torch.manual_seed(2)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=padding_idx)
    ours = tc.EmbeddingBag.from_pretrained(
        theirs.weight, frozen, mode="sum", rows=tc.RowConfig("fp32", update=update), padding_idx=padding_idx
    )
    ids_BL, grads = ids_of((5, 3), rows=6), []
    for module in (theirs, ours):
        weights = torch.rand(5, 3, generator=torch.Generator().manual_seed(3)).requires_grad_()
        (module(ids_BL, per_sample_weights=weights) ** 2).sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "optimizer", [tc.SGD(lr=0.1), tc.RowwiseAdagrad(lr=0.1), tc.Adam(lr=0.1)], ids=lambda o: type(o).__name__
)
def test_int8_rows_train_to_the_bits_of_the_arena_path(optimizer):
    module = tc.EmbeddingBag(ROWS, DIM, mode="sum", rows=tc.RowConfig(optimizer=optimizer, seed=5))
    arena = tc.Arena([tc.TableSpec(ROWS, DIM, "int8")], slots=[int(0.05 * ROWS)])
    arena.codes.copy_(module.arena.codes)
    arena.meta.copy_(module.arena.meta)
    trainer = tc.Trainer(arena, optimizer, seed=5)
    for step in range(3):
        ids_BL = ids_of((9, 4), step)
        (module(ids_BL) ** 2).sum().backward()
        (tc.lookup(arena, ids_BL.reshape(-1), torch.arange(0, 37, 4), trainer=trainer) ** 2).sum().backward()
    assert torch.equal(module.arena.codes, arena.codes) and torch.equal(module.arena.meta, arena.meta)


def test_waiting_updates_equal_fused_ones_bit_for_bit():
    """One lookup a step: the sums and the rounding bits are the same, so the two modes are."""
    modules = [
        tc.EmbeddingBag(ROWS, DIM, mode="sum", rows=tc.RowConfig("int4", update=u, seed=3)) for u in ("backward", "step")
    ]
    modules[1].set_rows(torch.arange(ROWS), modules[0].weight)
    modules[1].load_state_dict(modules[0].state_dict())
    for step in range(3):
        for module in modules:
            (module(ids_of((9, 4), step)) ** 2).sum().backward()
            module.fused_optimizer.step()
            module.fused_optimizer.zero_grad()
    assert torch.equal(modules[0].weight, modules[1].weight)


def test_rows_can_be_read_and_set():
    module = tc.Embedding(ROWS, DIM, rows=tc.RowConfig("fp32"))
    values = torch.randn(2, DIM)
    module.set_rows(torch.tensor([100, 3]), values)
    assert torch.equal(module.get_rows(torch.tensor([100, 3])), values)
    assert torch.equal(module.weight[100], values[0])


def test_a_frozen_module_does_not_change():
    module = tc.EmbeddingBag.from_pretrained(torch.randn(9, 4), mode="sum")
    before = module.weight
    weights = torch.ones(2, 3, requires_grad=True)
    module(ids_of((2, 3), rows=9), per_sample_weights=weights).sum().backward()
    assert torch.equal(module.weight, before) and weights.grad is not None


def test_lookups_without_grad_and_of_frozen_rows_change_nothing():
    module = tc.EmbeddingBag(ROWS, DIM, mode="sum")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        module(ids_of((5, 3)))
    module.requires_grad_(False)
    weights = torch.ones(5, 3, requires_grad=True)
    module(ids_of((5, 3)), per_sample_weights=weights).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


LONGS_22 = torch.zeros(2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    "call, fields",
    [
        (lambda: tc.EmbeddingBag(9, 4, max_norm=1.0), {"parameter": "max_norm", "value": 1.0}),
        (lambda: tc.Embedding(9, 4, scale_grad_by_freq=True), {"parameter": "scale_grad_by_freq"}),
        (lambda: tc.Embedding(9, 4, padding_idx=9), {"parameter": "padding_idx", "value": 9}),
        (lambda: tc.Embedding(9, 4, rows=tc.RowConfig(update="later")), {"parameter": "update", "value": "later"}),
        (lambda: tc.Embedding(9, 4, rows=tc.RowConfig(policy="mru")), {"parameter": "policy", "value": "mru"}),
        (lambda: tc.Embedding(9, 4, rows=tc.RowConfig("int9")), {"parameter": "precision", "value": "int9"}),
        (lambda: tc.Embedding(9, 4, rows=tc.RowConfig(optimizer=torch.optim.SGD)), {"parameter": "optimizer"}),  # type: ignore[arg-type]
        (lambda: tc.EmbeddingBag(9, 4, mode="none"), {"parameter": "mode", "value": "none"}),
        (lambda: tc.EmbeddingBag(9, 4)(LONGS_22, torch.zeros(2)), {"parameter": "offsets"}),
        (lambda: tc.EmbeddingBag(9, 4)(torch.zeros(2, dtype=torch.int64)), {"parameter": "offsets", "value": 1}),
        (lambda: tc.EmbeddingBag(9, 4)(torch.nested.nested_tensor([torch.tensor([1])])), {"parameter": "ids"}),
        (lambda: tc.EmbeddingBag(9, 4)(LONGS_22, None, torch.ones(2, 2)), {"parameter": "per_sample_weights", "mode": "mean"}),
        (
            lambda: tc.EmbeddingBag(9, 4, mode="sum")(LONGS_22, None, torch.ones(2)),
            {"parameter": "per_sample_weights", "value": (2,), "needed": (2, 2)},
        ),
        (lambda: tc.Embedding(9, 4)(torch.tensor([9])), {"rows": 9, "id": 9}),
        (lambda: tc.Embedding(9, 4).set_rows(torch.tensor([9]), torch.ones(1, 4)), {"parameter": "ids", "available": 9}),
        (lambda: tc.Embedding(9, 4).set_rows(torch.tensor([8]), torch.ones(1, 5)), {"parameter": "values", "needed": (1, 4)}),
        (lambda: tc.Embedding.from_pretrained(torch.ones(4)), {"parameter": "embeddings"}),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")  # which is refused here
def test_what_is_not_supported_is_refused_by_name(call, fields):
    with pytest.raises(tc.BadInput, check=has(**fields)):
        call()


def slots_of(module):
    return sum(pool.slots for pool in module.arena.pools)


@pytest.mark.parametrize(
    "cache, precision, slots",
    [
        (0.05, "int8", 50), (0.05, "fp16", 0), (0.0, "int8", 0), ("1MiB", "int8", 1000), ("1600B", "int4", 100),
        ("1.5KiB", "int2", 96), (1.0, "int8", 1000),
    ],
)  # fmt: skip
def test_a_cache_is_a_share_of_rows_or_bytes(cache, precision, slots):
    assert slots_of(tc.Embedding(1000, 4, rows=tc.RowConfig(precision, cache=cache))) == slots


def test_a_cache_larger_than_the_table_holds_all_rows():
    assert slots_of(tc.Embedding(10, 4, rows=tc.RowConfig(cache="1MiB"))) == 10


def test_a_cache_smaller_than_a_row_is_refused_with_both_numbers():
    with pytest.raises(tc.BadInput, check=has(parameter="cache", needed=16, available=15)):
        tc.Embedding(10, 4, rows=tc.RowConfig(cache="15B"))


@pytest.mark.parametrize(
    "make",
    [lambda: tc.Embedding(10**9, 4, device="meta"), lambda: tc.EmbeddingCollection([tc.Table("a", 10**9, 4)], device="meta")],
)
def test_no_row_of_a_module_without_values_is_drawn(make, monkeypatch):
    def written(*_: Any) -> None:
        raise AssertionError("a block of rows was drawn")

    monkeypatch.setattr(Arena, "write", written)
    assert make().memory().parts["codes"] == 4 * 10**9


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_takes_nested_jagged_ids_and_gives_nested_rows(padding_idx):
    ids = torch.nested.nested_tensor([torch.tensor([1, 2, 5]), torch.tensor([2])], layout=torch.jagged)
    theirs = nn.Embedding(10, 4, padding_idx)
    ours = tc.Embedding.from_pretrained(theirs.weight.detach(), padding_idx=padding_idx, rows=tc.RowConfig("fp32"))
    for got, expected in zip(ours(ids).unbind(), theirs(ids).unbind(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "ask, parameter, value",
    [
        (lambda module: module([1, 2]), "ids", "list"),
        (lambda module: module.get_rows(torch.tensor([1j])), "ids", torch.complex64),
        (lambda module: module.get_rows(torch.tensor([1], dtype=torch.uint16)), "ids", torch.uint16),
        (lambda module: module.set_rows(torch.tensor([1]), [[0.0] * 4]), "values", "list"),
        (lambda module: module.set_rows(torch.tensor([[1, 2]]), torch.zeros(1, 2, 4)), "values", (1, 2, 4)),
        (lambda module: module.get_rows([1, 2]), "ids", "list"),
        (lambda module: module.get_rows(torch.tensor([1.5])), "ids", torch.float32),
        (lambda module: module.set_rows(torch.tensor([True]), torch.zeros(1, 4)), "ids", torch.bool),
    ],
)
@pytest.mark.parametrize("kind", [tc.Embedding, tc.EmbeddingBag])
def test_ids_that_are_no_tensor_of_integers_are_refused(kind, ask, parameter, value):
    with pytest.raises(tc.BadInput, check=has(parameter=parameter, value=value)):
        ask(kind(10, 4))


@pytest.mark.parametrize(
    "given, parameter, value",
    [
        (([[1, 2]], None, torch.ones(1, 2)), "ids", "list"),
        ((np.array([[1, 2]]),), "ids", "ndarray"),
        ((torch.tensor([[1, 2]]), None, [[1.0, 1.0]]), "per_sample_weights", "list"),
        ((torch.tensor([1, 2]), [0, 1]), "offsets", "list"),
        ((torch.tensor([1, 2]), torch.tensor([0.0, 1.5])), "offsets", torch.float32),
        ((torch.tensor([1, 2]), torch.tensor([[0, 1]])), "offsets", 2),
    ],
)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_bags_of_what_is_no_tensor_of_integers_are_refused(padding_idx, given, parameter, value):
    with pytest.raises(tc.BadInput, check=has(parameter=parameter, value=value)):
        tc.EmbeddingBag(10, 4, mode="sum", padding_idx=padding_idx)(*given)


@pytest.mark.parametrize("ours, theirs", [(tc.Embedding, nn.Embedding), (tc.EmbeddingBag, nn.EmbeddingBag)])
def test_code_that_reads_torchs_attributes_finds_them(ours, theirs):
    here, there = ours(10, 4, padding_idx=3), theirs(10, 4, padding_idx=3)
    assert {name: getattr(here, name) for name in there.__constants__} == {n: getattr(there, n) for n in there.__constants__}


def test_rows_are_set_by_ids_of_any_shape():
    module, values_ND = tc.Embedding(10, 4, rows=tc.RowConfig("fp32")), torch.randn(6, 4)
    module.set_rows(torch.tensor([[1, 2, 3], [5, 6, 7]]), values_ND)
    assert torch.equal(module.get_rows(torch.tensor([1, 2, 3, 5, 6, 7])), values_ND)
    module.set_rows(torch.tensor(4), values_ND[:1])
    assert torch.equal(module.get_rows(torch.tensor(4)), values_ND[:1])


@pytest.mark.parametrize("dtype", [torch.int8, "float32"])
def test_a_dtype_that_is_no_float_of_torch_is_refused(dtype):
    with pytest.raises(tc.BadInput, check=has(parameter="dtype", value=dtype)):
        tc.Embedding(10, 4, dtype=dtype)
