"""TorchRec's collections in and out, against the real TorchRec."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

torchrec = pytest.importorskip("torchrec", reason="no TorchRec here; CONTRIBUTING.md says how to get it")

import thermocline as tc  # noqa: E402
from support import has  # noqa: E402
from thermocline.nn import KeyedCollection, from_torchrec, to_torchrec  # noqa: E402

ROWS = {"user": 101, "item": 63, "shop": 7}
DIMS = {"user": 16, "item": 16, "shop": 5}


def bags(pooling="SUM", weighted=False):
    torch.manual_seed(0)
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIMS[name],
            feature_names=["clicked", "bought"] if name == "item" else [name],
            pooling=torchrec.PoolingType[pooling],
        )
        for name, rows in ROWS.items()
    ]
    return torchrec.EmbeddingBagCollection(tables=configs, is_weighted=weighted)


def batch(keys=("user", "clicked", "bought", "shop"), samples=9, weighted=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    rows = {"user": 101, "clicked": 63, "bought": 63, "shop": 7, "other": 3}
    lengths = torch.randint(0, 5, (len(keys) * samples,), generator=draw)
    counts = lengths.view(len(keys), samples).sum(1).tolist()
    values = torch.cat([torch.randint(rows[key], (count,), generator=draw) for key, count in zip(keys, counts, strict=True)])
    weights = torch.rand(len(values), generator=draw) if weighted else None
    return torchrec.KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths, weights=weights)


FP32 = tc.RowConfig("fp32")


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_a_bag_collection_returns_what_torchrec_returns(pooling):
    theirs = bags(pooling)
    ours = from_torchrec(theirs, rows=FP32)
    expected, found = theirs(batch()), ours(batch())
    assert found.keys() == expected.keys() and found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values())


@pytest.mark.parametrize("weighted", [False, True])
def test_the_drop_in_takes_more_features_in_any_order_and_weights_where_they_count(weighted):
    theirs = bags(weighted=weighted)
    ours = KeyedCollection(theirs, rows=FP32)
    given = batch(("other", "bought", "shop", "user", "clicked"), weighted=True)
    expected, found = theirs(given), ours(given)
    assert isinstance(found, torchrec.KeyedTensor) and found.keys() == expected.keys()
    torch.testing.assert_close(found.values(), expected.values())
    groups = [["user", "shop"], ["bought"]]
    for mine, other in zip(
        torchrec.KeyedTensor.regroup([found], groups), torchrec.KeyedTensor.regroup([expected], groups), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_unpooled_collections_come_out_as_jagged_tensors():
    torch.manual_seed(0)
    configs = [torchrec.EmbeddingConfig(name="item", num_embeddings=63, embedding_dim=16, feature_names=["clicked", "bought"])]
    theirs = torchrec.EmbeddingCollection(tables=configs)
    ours = KeyedCollection(theirs, rows=FP32)
    given = batch(("bought", "clicked"))
    expected, found = theirs(given), ours(given)
    for name in ("clicked", "bought"):
        torch.testing.assert_close(found[name].values(), expected[name].values())
        assert torch.equal(found[name].lengths(), expected[name].lengths())


def test_training_steps_are_those_of_torchrec():
    theirs = bags()
    ours = KeyedCollection(theirs, rows=replace(FP32, optimizer=tc.SGD(lr=0.1)))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        given = batch(seed=step)
        ours(given).values().square().sum().backward()
        optimizer.zero_grad()
        theirs(given).values().square().sum().backward()
        optimizer.step()
    for name in ROWS:
        torch.testing.assert_close(ours.collection.get_rows(name), theirs.embedding_bags[name].weight.detach())


def test_rows_go_out_and_come_in_again():
    ours = tc.EmbeddingCollection(
        [tc.Table("user", 101, 16), tc.Table("item", 63, 16, ("clicked", "bought"))], rows=tc.RowConfig("int8")
    )
    theirs = to_torchrec(ours)
    given = batch(("user", "clicked", "bought"))
    torch.testing.assert_close(theirs(given).values(), ours(given).values())
    again = from_torchrec(theirs, rows=tc.RowConfig("int8"))
    assert torch.equal(again.get_rows("item"), ours.get_rows("item"))


def test_one_call_converts_a_model_of_torchrec():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.top = bags(), torch.nn.Linear(53, 1)

        def forward(self, features):
            return self.top(self.rows(features).values())

    model = Model()
    expected = model(batch())
    report = tc.convert_(model, tc.RowConfig("fp32"))
    assert {table.name for table in report.tables} == {f"rows.embedding_bags.{name}" for name in ROWS}
    assert not any(table.skipped for table in report.tables)
    torch.testing.assert_close(model(batch()), expected)


def test_what_one_launch_cannot_do_is_refused_with_the_way_out():
    config = {"num_embeddings": 9, "embedding_dim": 4}
    mixed = [
        torchrec.EmbeddingBagConfig(name="a", feature_names=["a"], pooling=torchrec.PoolingType.SUM, **config),
        torchrec.EmbeddingBagConfig(name="b", feature_names=["b"], pooling=torchrec.PoolingType.MEAN, **config),
    ]
    with pytest.raises(tc.BadInput, check=has(parameter="pooling", value=["mean", "sum"])):
        from_torchrec(torchrec.EmbeddingBagCollection(tables=mixed))
    shared = [torchrec.EmbeddingBagConfig(name=name, feature_names=["a"], **config) for name in ("a", "b")]
    with pytest.raises(tc.BadInput, check=has(feature="a")):
        from_torchrec(torchrec.EmbeddingBagCollection(tables=shared))
    with pytest.raises(tc.BadInput, check=has(parameter="theirs", value="Linear")):
        from_torchrec(torch.nn.Linear(2, 2))
    hashed = tc.EmbeddingCollection([tc.Table("a", 9, 4, ids=tc.IdMap.hashed(9, salt=1))])
    with pytest.raises(tc.BadInput, check=has(parameter="ids", features=["a"])):
        to_torchrec(hashed)
