"""Tables under a model: the same start for every kind, and the same training in fp32."""

from __future__ import annotations

import pytest
import torch

from benchmarks.accuracy.plain_tables import PlainTables, TorchRowwiseAdagrad
from thermocline import EmbeddingCollection, RowConfig, RowwiseAdagrad, Table
from thermocline.models import initial_rows, initialize
from thermocline.models import initialization as initial_module

ROWS = {"user": 301, "item": 63, "shop": 1}
DIM = 6


def ids_of(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, count, (batch,), generator=generator) for count in ROWS.values()], 1)


def collection(precision, lr=0.1):
    tables = [Table(name, count, DIM) for name, count in ROWS.items()]
    return EmbeddingCollection(tables, rows=RowConfig(precision, cache=0.1, optimizer=RowwiseAdagrad(lr=lr)))


def look_up(tables, ids):
    out = tables(ids)
    return out if isinstance(out, torch.Tensor) else out.values()


def both(lr=0.1, precision="fp32"):
    plain, ours = PlainTables(ROWS, DIM, lr), collection(precision, lr)
    for tables in (plain, ours):
        initialize(tables, ROWS, DIM, seed=3)
    return plain, ours


def test_initial_rows_are_a_function_of_seed_table_and_row():
    rows = torch.arange(1000)
    whole = initial_rows(5, 2, rows, 7, 1000)
    assert torch.equal(initial_rows(5, 2, rows[333:334], 7, 1000), whole[333:334])
    assert not torch.equal(initial_rows(6, 2, rows, 7, 1000), whole)
    assert not torch.equal(initial_rows(5, 3, rows, 7, 1000), whole)
    assert initial_rows(5, 2, torch.tensor([2**33 + 1]), 7, 2**34).isfinite().all()


def test_initial_rows_are_uniform_in_their_bound():
    values = initial_rows(0, 0, torch.arange(10_000), 8, 400) * 20
    assert -1 <= values.min() < -0.999 and 0.999 < values.max() < 1
    assert values.mean().abs() < 0.01 and abs(values.std().item() - 3**-0.5) < 0.01


def test_every_kind_of_table_starts_equal_whatever_the_block(monkeypatch):
    plain, ours = both()
    monkeypatch.setattr(initial_module, "BLOCK", 17)
    again = PlainTables(ROWS, DIM, 0.1)
    initialize(again, ROWS, DIM, seed=3)
    ids = ids_of(200, 1)
    assert torch.equal(plain(ids), look_up(ours, ids)) and torch.equal(plain(ids), again(ids))


def test_fp32_tables_train_as_plain_torch_does():
    plain, ours = both()
    target = torch.randn(50, DIM * len(ROWS), generator=torch.Generator().manual_seed(2))
    for step in range(20):
        ids = ids_of(50, step)
        plain.fused_optimizer.zero_grad()
        for tables in (plain, ours):
            (look_up(tables, ids) - target).square().sum().backward()
        plain.fused_optimizer.step()
    torch.testing.assert_close(look_up(ours, ids), plain(ids), atol=1e-4, rtol=1e-4)


def test_row_wise_adagrad_in_torch_is_its_definition():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = TorchRowwiseAdagrad([weight], lr=0.5)
    state = torch.zeros(4)
    expected = weight.detach().clone()
    for _ in range(3):
        bag = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), weight, sparse=True)
        bag.square().sum().backward()
        gradient = torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None] * 2 * expected
        state += gradient.square().mean(1)
        expected -= 0.5 * gradient / (state.sqrt() + 1e-8)[:, None]
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_loaded_table_goes_on_bit_for_bit(precision):
    ours, other = both(precision=precision)[1], both(precision=precision)[1]
    ids = ids_of(40, 7)
    look_up(ours, ids).square().sum().backward()
    other.load_state_dict(ours.state_dict())
    for tables in (ours, other):
        look_up(tables, ids).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_looking_up_without_training_changes_nothing():
    ours = both()[1]
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with torch.no_grad():
        look_up(ours, ids_of(9, 1))
    ours.requires_grad_(False)
    assert not look_up(ours, ids_of(9, 1)).requires_grad
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())
