"""The DLRM: what it computes, and that it fits what surrounds models."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from benchmarks.accuracy.plain_tables import PlainTables
from support import has
from thermocline import BadInput
from thermocline.models import DLRM


class Fixed(nn.Module):
    """Embeddings that ignore their ids; `wrapped` gives them as a collection does."""

    def __init__(self, values, wrapped=False):
        super().__init__()
        self.fixed, self.wrapped = values, wrapped

    def forward(self, ids):
        return self if self.wrapped else self.fixed

    def values(self):
        return self.fixed


def made(dense=13, features=3, dim=5, batch=7, wrapped=False):
    torch.manual_seed(0)
    values = torch.randn(batch, features * dim)
    model = DLRM(Fixed(values, wrapped), features, dim, dense, bottom=(11,), top=(9, 4))
    return model, torch.randn(batch, dense), torch.zeros(batch, features, dtype=torch.int64), values


@pytest.mark.parametrize("dense", [0, 1, 13])
def test_the_top_sees_every_pair_once_and_the_bottom(dense):
    model, x, ids, values = made(dense)
    vectors = list(values.view(7, 3, 5).unbind(1))
    beside = values
    if dense:
        beside = model.bottom(x)
        vectors = [beside, *vectors]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i + 1, len(vectors))]
    expected = model.top(torch.cat([beside, torch.stack(pairs, 1)], 1)).squeeze(1)
    torch.testing.assert_close(model(x, ids), expected)


def test_one_table_without_dense_features_has_no_pairs():
    model, x, ids, values = made(dense=0, features=1)
    torch.testing.assert_close(model(x, ids), model.top(values).squeeze(1))


def test_a_collection_can_stand_in_for_a_tensor():
    plain, x, ids, _ = made()
    wrapped = made(wrapped=True)[0]
    assert torch.equal(plain(x, ids), wrapped(x, ids))


def test_an_empty_batch_has_no_logits():
    model, x, ids, _ = made(batch=0)
    assert model(x, ids).shape == (0,)


def test_it_runs_under_autocast():
    model, x, ids, _ = made()
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x, ids)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), model(x, ids), atol=0.05, rtol=0.05)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_it_compiles_in_one_graph():
    torch.manual_seed(0)
    tables = PlainTables({"a": 10, "b": 20}, 4, lr=0.1)
    model = DLRM(tables, 2, 4)
    x, ids = torch.randn(6, 13), torch.randint(0, 10, (6, 2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, ids), model(x, ids))


def test_no_features_are_refused():
    with pytest.raises(BadInput, check=has(parameter="features", value=0)):
        DLRM(nn.Identity(), 0, 4)
