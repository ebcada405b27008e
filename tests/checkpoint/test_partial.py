"""Models that share some tables with a checkpoint: more or fewer tables, and tables with more rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thermocline as tc
from support import has

ROWS = {"user": 97, "item": 63, "shop": 11}


def collection(names, precision="int8", cache=0.2, **more) -> tc.EmbeddingCollection:
    torch.manual_seed(len(names) + sum(more.values()))
    tables = [tc.Table(name, ROWS.get(name, 7) + more.get(name, 0), 8) for name in names]
    return tc.EmbeddingCollection(tables, rows=tc.RowConfig(precision, cache=cache))


def trained(names) -> tc.EmbeddingCollection:
    tables = collection(names)
    ids = torch.arange(3 * 40 * len(names)).view(-1, len(names)) % 11
    tables(ids).values().square().sum().backward()
    return tables


@pytest.fixture
def saved(tmp_path):
    tables = trained(["user", "item"])
    tc.save(tables, tmp_path)
    return tmp_path, {name: tables.get_rows(name) for name in ("user", "item")}


def near(model, name, expected):
    """Rows without a slot in another cache are rounded to int8."""
    return torch.allclose(model.get_rows(name), expected, atol=float(expected.abs().max()) / 100)


@pytest.mark.parametrize(
    "names, missing, unknown",
    [
        (["item"], [], ["user"]),
        (["user", "item", "shop"], ["shop"], []),
        (["shop", "item"], ["shop"], ["user"]),
    ],
)
def test_other_tables_are_refused_or_left_out(saved, names, missing, unknown):
    path, rows = saved
    model = collection(names)
    before = {name: model.get_rows(name) for name in names}
    with pytest.raises(tc.BadInput, check=has(missing=missing, unknown=unknown)):
        tc.load_into(model, path)
    assert all(torch.equal(model.get_rows(name), before[name]) for name in names)
    keys = tc.load_into(model, path, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (missing, unknown)
    for name in names:
        assert near(model, name, rows.get(name, before[name])), name


def test_a_table_with_more_rows_keeps_its_new_ones(saved):
    path, rows = saved
    model = collection(["user", "item"], item=5)
    before = model.get_rows("item")
    with pytest.raises(tc.BadInput, check=has(table="item", model=(68, 8), saved=(63, 8))):
        tc.load_into(model, path)
    assert tc.load_into(model, path, strict=False) == ([], [])
    assert near(model, "user", rows["user"])
    assert near(model, "item", torch.cat([rows["item"], before[63:]]))
    model(torch.tensor([[96, 67]])).values().sum().backward()
    tc.save(model, path)
    assert torch.equal(tc.load(path).get_rows("item"), model.get_rows("item"))


def test_what_cannot_be_shared_is_refused_even_if_not_strict(saved):
    path, _ = saved
    with pytest.raises(tc.BadInput, check=has(table="item", model=(62, 8), saved=(63, 8))):
        tc.load_into(collection(["item"], item=-1), path, strict=False)
    hashed = tc.EmbeddingCollection([tc.Table("item", 70, 8, ids=tc.IdMap.hashed(70))])
    with pytest.raises(tc.BadInput, check=has(feature="item", saved=tc.IdMap.identity(63))):
        tc.load_into(hashed, path, strict=False)
    with pytest.raises(tc.BadInput, check=has(missing=["shop"], unknown=["user", "item"])):
        tc.load_into(collection(["shop"]), path, strict=False)
    two = tc.EmbeddingCollection([tc.Table("item", 63, 8, ["a", "b"]), tc.Table("user", 97, 8)])
    with pytest.raises(tc.BadInput, check=has(table="item", saved=("item",), model=("a", "b"))):
        tc.load_into(two, path)


def test_modules_and_dense_parameters_are_left_out_too(tmp_path):
    old = nn.ModuleDict({"rows": trained(["user"]), "old": tc.EmbeddingBag(9, 4), "top": nn.Linear(3, 2)})
    tc.save(old, tmp_path)
    model = nn.ModuleDict({"rows": collection(["user"]), "new": tc.EmbeddingBag(5, 4), "top": nn.Linear(3, 2, bias=False)})
    with pytest.raises(tc.BadInput, check=has(saved=["rows", "old"], model=["rows", "new"])):
        tc.load_into(model, tmp_path)
    keys = tc.load_into(model, tmp_path, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["new"], ["old", "top.bias"])
    assert torch.equal(model["rows"].get_rows("user"), old["rows"].get_rows("user"))
    assert torch.equal(model["top"].weight, old["top"].weight)
    other = nn.ModuleDict({"rows": collection(["user"]), "top": nn.Linear(4, 2)})
    with pytest.raises(tc.BadInput, check=has(wrong_shape=["top.weight"])):
        tc.load_into(other, tmp_path, strict=False)
