"""Collections against one `nn.EmbeddingBag` for each feature, over all forms of input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc
from support import has, mentions, module_arguments
from thermocline import formats as F

TABLES = [tc.Table("user", 31, 4), tc.Table("shop", 17, 3, ("near", "far")), tc.Table("item", 23, 5)]
FEATURES = ("user", "near", "far", "item")
ONE = torch.zeros(4, dtype=torch.int64)  # an id of each feature
FORMS = ["nested", "keyed", "offsets", "shuffled", "lists"]
TABLE_OF = {"user": "user", "near": "shop", "far": "shop", "item": "item"}


class Keyed:
    """Shaped like TorchRec's KeyedJaggedTensor."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights


class KeyedByOffsets(Keyed):
    def offsets(self) -> Tensor:
        return torch.nn.functional.pad(self._lengths.cumsum(0), (1, 0))


def collection(**keywords: Any) -> tc.EmbeddingCollection:
    torch.manual_seed(0)
    return tc.EmbeddingCollection(TABLES, **module_arguments(precision="fp32", optimizer=tc.SGD(lr=0.1), **keywords))


def batch(size: int, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for feature in FEATURES:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        made[feature] = (torch.randint(0, 17, (int(offsets[-1]),), generator=generator), offsets)
    return made


def reference(module: tc.EmbeddingCollection, mode: str) -> dict[str, nn.EmbeddingBag]:
    bags = {
        t.name: nn.EmbeddingBag.from_pretrained(module.get_rows(t.name), False, mode=mode, include_last_offset=True)
        for t in TABLES
    }
    return {feature: bags[TABLE_OF[feature]] for feature in FEATURES}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_collection_equals_a_bag_for_each_feature_and_trains_as_they_do(mode, size, update):
    module = collection(mode=mode, update=update)
    bags = reference(module, mode)
    distinct = list({id(b): b for b in bags.values()}.values())
    dense = torch.optim.SGD([b.weight for b in distinct], lr=0.1)
    for step in range(3):
        given = batch(size, step)
        out, wanted = module(given), {f: bags[f](*given[f]) for f in FEATURES}
        assert out.keys() == list(FEATURES) and out.values().shape == (size, 15)
        for feature in FEATURES:
            torch.testing.assert_close(out[feature], wanted[feature], rtol=1e-5, atol=1e-6)
            assert torch.equal(out.to_dict()[feature], out[feature])
        for values in (out.values(), torch.cat(list(wanted.values()), 1)):
            (values**2).sum().backward()
        for optimizer in (dense, module.fused_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    for table in ("user", "shop", "item"):
        feature = "near" if table == "shop" else table
        torch.testing.assert_close(module.get_rows(table), bags[feature].weight.detach(), rtol=1e-5, atol=1e-6)


def in_form(form: str, given: dict[str, tuple[Tensor, Tensor]]) -> Any:
    order = ["item", "far", "user", "near"] if form == "shuffled" else list(FEATURES)
    values, lengths = torch.cat([given[f][0] for f in order]), torch.cat([given[f][1].diff() for f in order])
    if form == "nested":
        return {f: torch.nested.nested_tensor_from_jagged(*given[f]) for f in FEATURES}
    if form == "lists":
        return {f: list(given[f]) for f in reversed(FEATURES)}
    return (Keyed if form == "keyed" else KeyedByOffsets)(order, values, lengths)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 7])
def test_every_form_of_input_gives_the_same(form, size):
    module, given = collection(), batch(size)
    wanted = module(given).values()
    assert torch.equal(module(in_form(form, given)).values(), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["sum", "none"])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_an_id_out_of_range_is_told_by_its_feature_and_where_it_stands_there(form, mode, update):
    module, given = collection(mode=mode, update=update), batch(7)
    given["far"][0][3] = 17
    with pytest.raises(tc.IdOutOfRange, check=mentions("'far'", "'shop'", "0 to 16", "position 3 is 17")) as caught:
        module(in_form(form, given))
    error = caught.value
    assert (error.table, error.name, error.position - error.first, error.id) == ("shop", "far", 3, 17)


def test_an_id_out_of_range_of_one_tensor_is_told_by_its_feature_and_sample():
    ids_BF = torch.zeros(7, 4, dtype=torch.int64)
    ids_BF[5, 2] = -1
    with pytest.raises(tc.IdOutOfRange, check=mentions("'far'", "'shop'", "position 5 is -1")):
        collection()(ids_BF)


def test_a_compiled_collection_tells_the_feature_too():
    module, given = collection(), batch(7)
    run = torch.compile(lambda given: module(given).values() * 2, fullgraph=True, backend="aot_eager")
    run(given)
    given["far"][0][3] = 17
    with pytest.raises(tc.IdOutOfRange, check=mentions("'far'", "'shop'", "0 to 16", "position 3 is 17")):
        run(given)


def test_one_id_each_may_come_as_one_tensor():
    module = collection()
    ids_BF = torch.randint(0, 17, (7, 4), generator=torch.Generator().manual_seed(1))
    wanted = module({f: (ids_BF[:, i], torch.arange(8)) for i, f in enumerate(FEATURES)})
    assert torch.equal(module(ids_BF).values(), wanted.values())
    assert module(ids_BF[:0]).values().shape == (0, 15)


@pytest.mark.parametrize("mode", ["sum", "none"])
def test_outputs_are_asked_as_dicts_are(mode):
    out = collection(mode=mode)(batch(3))
    assert list(out) == out.keys() == list(out.to_dict()) == list(FEATURES) and len(out) == 4
    assert "near" in out and "shop" not in out and 0 not in out
    assert all(torch.equal(rows, out[name]) for name, rows in {**out}.items())


def test_an_empty_batch_of_bags_is_an_empty_output():
    none = (torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert collection()({feature: none for feature in FEATURES}).values().shape == (0, 15)


@pytest.mark.parametrize("order", [FEATURES, ("item", "far", "user", "near")])
def test_weights_come_with_either_form_and_get_gradients(order):
    module, given = collection(), batch(7)
    weights = {f: torch.rand(given[f][0].numel(), requires_grad=True) for f in FEATURES}
    out = module({f: (*given[f], weights[f]) for f in FEATURES})
    keyed = Keyed(
        list(order), *(torch.cat(p) for p in zip(*[(given[f][0], given[f][1].diff(), weights[f]) for f in order], strict=True))
    )
    assert torch.equal(module(keyed).values(), out.values())
    out.values().sum().backward()
    assert all(weights[f].grad is not None for f in FEATURES)


def test_weights_in_double_precision_are_taken_as_bags_take_them():
    module, given = collection(), batch(7)
    weights = {f: torch.rand(len(given[f][0]), dtype=torch.float64, requires_grad=True) for f in FEATURES}
    out = module({f: (*given[f], weights[f]) for f in FEATURES}).values()
    assert torch.equal(out, module({f: (*given[f], weights[f].float()) for f in FEATURES}).values())
    out.sum().backward()
    assert all(weights[f].grad is not None and weights[f].grad.dtype == torch.float64 for f in FEATURES)


def test_weights_of_a_keyed_input_count_however_it_is_asked_for_them():
    class Plain(Keyed):
        weights_or_none = property()  # it has none of that name

        def weights(self) -> Tensor | None:
            return self._weights

    class Attribute(Plain):
        @property
        def weights(self) -> Tensor | None:
            return self._weights

    module, given = collection(), batch(7)
    parts = [torch.cat([given[f][0] for f in FEATURES]), torch.cat([given[f][1].diff() for f in FEATURES])]
    weights = torch.rand(len(parts[0]))
    wanted = module(Keyed(list(FEATURES), *parts, weights)).values()
    for kind in (Plain, Attribute):
        assert torch.equal(module(kind(list(FEATURES), *parts, weights)).values(), wanted)
        assert not torch.equal(module(kind(list(FEATURES), *parts, None)).values(), wanted)


def test_unpooled_features_have_a_vector_for_each_id():
    module, given = collection(mode="none"), batch(7)
    out = module(given)
    for feature in FEATURES:
        assert torch.equal(out[feature], module.get_rows(TABLE_OF[feature], given[feature][0]))
        assert torch.equal(out.offsets(feature), given[feature][1])
    assert out.to_dict().keys() == set(FEATURES)


def test_tables_of_different_precisions_equal_their_own_modules():
    torch.manual_seed(0)
    tables = [
        tc.Table("a", 31, 4, row_config=tc.RowConfig("int8")),
        tc.Table("b", 17, 6, row_config=tc.RowConfig("int4")),
        tc.Table("c", 9, 4),
    ]
    module = tc.EmbeddingCollection(tables, rows=tc.RowConfig("fp32", cache=0.5))
    assert {F.NAMES[pool.format]: pool.slots for pool in module.arena.pools} == {"int8": 15, "int4": 8}
    assert [t.precision for t in module.arena.tables] == ["int8", "int4", "fp32"]
    ids_BF = torch.randint(0, 9, (7, 3))
    out = module(ids_BF)
    for index, table in enumerate(tables):
        assert torch.equal(out[table.name], module.get_rows(table.name, ids_BF[:, index]))


def test_a_collection_keeps_everything_in_its_state():
    first, second = collection(), collection()
    first(batch(7)).values().sum().backward()
    second.load_state_dict(first.state_dict())
    for table in ("user", "shop", "item"):
        assert torch.equal(first.get_rows(table), second.get_rows(table))
    plain = {f"{t.name}.weight": torch.randn(t.rows, t.dim) for t in TABLES}
    second.load_state_dict(plain)
    assert torch.equal(second.get_rows("shop"), plain["shop.weight"])


@pytest.mark.parametrize(
    "change, fields",
    [
        (lambda b: b.pop("near"), {"missing": ["near"], "unknown": []}),
        (lambda b: b.update(extra=b["user"]), {"missing": [], "unknown": ["extra"]}),
        (lambda b: b.update(far=(b["far"][0], b["far"][1][:-1])), {"feature": "far", "value": 7, "needed": 8}),
        (lambda b: b.update(far=(b["far"][0][:-1], b["far"][1])), {"feature": "far", "parameter": "offsets"}),
        (lambda b: b.update(far=b["far"][0]), {"feature": "far", "value": "Tensor"}),
        (lambda b: b.update(far=([1, 2], [0, 2])), {"parameter": "ids", "value": "list"}),
        (lambda b: b.update(far=(b["far"][0].numpy(), b["far"][1])), {"parameter": "ids", "value": "ndarray"}),
        (lambda b: b.update(far=(b["far"][0] > 0, b["far"][1])), {"parameter": "ids", "value": torch.bool}),
        (lambda b: b.update(far=(b["far"][0], b["far"][1].tolist())), {"parameter": "offsets", "value": "list"}),
        (lambda b: b.update(far=(b["far"][0], b["far"][1].float())), {"parameter": "offsets", "value": torch.float32}),
        (lambda b: b.update(far=(b["far"][0][None], b["far"][1])), {"feature": "far", "value": (2, 1)}),
        (lambda b: b.update(user=(b["user"][0], torch.tensor(7))), {"feature": "user", "value": (1, 0)}),
        (lambda b: b.update(far=(*b["far"], [1.0])), {"parameter": "weights", "value": "list"}),
        (
            lambda b: b.update(far=torch.nested.nested_tensor([torch.tensor([True])] * 7, layout=torch.jagged)),
            {"parameter": "ids", "value": torch.bool},
        ),
        (
            lambda b: b.update(far=(*b["far"], torch.ones(b["far"][0].numel()))),
            {"feature": "user", "parameter": "weights"},
        ),
        (lambda b: b.update(far=(*b["far"], torch.ones(2))), {"feature": "far", "parameter": "weights", "value": (2,)}),
        (
            lambda b: b.update(far=(b["far"][0], b["far"][1] + torch.tensor([1] + [0] * 7))),
            {"feature": "far", "parameter": "offsets"},
        ),
        (
            lambda b: b.update({f: (b[f][0][:0], b[f][1][:0]) for f in FEATURES}),
            {"feature": "user", "parameter": "offsets", "value": 0},
        ),
        (lambda b: b.update(item=(b["item"][0] + 23, b["item"][1])), {"name": "item", "rows": 23}),
    ],
)
def test_input_that_cannot_be_right_names_the_feature(change, fields):
    given = batch(7)
    change(given)
    with pytest.raises(tc.BadInput, check=has(**fields)):
        collection()(given)


def test_offsets_without_their_end_are_noticed():
    given = {f: (values, offsets[:-1]) for f, (values, offsets) in batch(7).items()}
    with pytest.raises(tc.BadInput, check=has(parameter="offsets")) as caught:
        collection()(given)
    assert caught.value.value[1] < caught.value.needed == len(given[caught.value.feature][0])


@pytest.mark.parametrize(
    "call, fields",
    [
        (lambda: tc.EmbeddingCollection([]), {"parameter": "tables", "value": None}),
        (lambda: tc.EmbeddingCollection([tc.Table("a", 3, 4), tc.Table("a", 3, 4)]), {"parameter": "tables", "value": "a"}),
        (
            lambda: tc.EmbeddingCollection([tc.Table("a", 3, 4), tc.Table("b", 3, 4, ("a",))]),
            {"parameter": "tables", "value": "a"},
        ),
        (lambda: tc.EmbeddingCollection([tc.Table("a", 3, 4)], mode="avg"), {"parameter": "mode", "value": "avg"}),
        (lambda: collection().get_rows("users"), {"table": "users", "available": ["user", "shop", "item"]}),
        (lambda: collection()(torch.zeros(2, 3, dtype=torch.int64)), {"parameter": "input", "value": (2, 3), "features": 4}),
        (lambda: collection()(7), {"parameter": "input", "value": "int"}),
        (lambda: collection()(Keyed(FEATURES, ONE, [1] * 4)), {"parameter": "lengths", "value": "list"}),
        (lambda: collection()(Keyed(FEATURES, ONE, torch.ones(4, 1).long())), {"parameter": "lengths", "value": 2}),
        (lambda: collection()(Keyed(FEATURES, ONE, torch.ones(4))), {"parameter": "lengths", "value": torch.float32}),
        (
            lambda: collection()(SimpleNamespace(keys=lambda: FEATURES, values=lambda: ONE)),
            {"parameter": "input", "value": "SimpleNamespace"},
        ),
        (lambda: collection(mode="none")(Keyed(FEATURES, ONE, torch.tensor([2, -1] * 4))), {}),
        (lambda: tc.Table("a", 3, 4, features="clicked"), {"parameter": "features", "table": "a", "value": "clicked"}),
        (lambda: tc.Table(3, 3, 4), {"parameter": "name", "value": 3}),
        (lambda: tc.EmbeddingCollection(tc.Table("a", 3, 4)), {"parameter": "tables", "value": "Table"}),
        (lambda: tc.EmbeddingCollection([("a", 3, 4)]), {"parameter": "tables", "value": "tuple"}),
        (lambda: collection()(Keyed(FEATURES, [1], torch.ones(4).long())), {"parameter": "ids", "value": "list"}),
        (lambda: collection()(torch.zeros(2, 4, dtype=torch.int64))["users"], {"feature": "users", "available": FEATURES}),
    ],
)
def test_what_a_collection_cannot_do_it_says(call, fields):
    with pytest.raises(tc.BadInput, check=has(**fields)):
        call()


def test_small_tables_begin_in_the_cache_and_are_not_rounded():
    torch.manual_seed(2)
    tables = [tc.Table("large", 900, 6), tc.Table("tiny", 3, 6), tc.Table("small", 20, 6), tc.Table("medium", 40, 6)]
    collection = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int4", cache=0.05))  # 48 slots: tiny and small fit whole
    torch.manual_seed(2)
    exact = tc.EmbeddingCollection(tables, rows=tc.RowConfig("fp32"))
    equal = {t.name: torch.equal(collection.get_rows(t.name), exact.get_rows(t.name)) for t in tables}
    assert equal == {"large": False, "tiny": True, "small": True, "medium": False}
    assert {name: count for name, count in collection.stats().items() if count} == {"admissions": 23, "bytes_moved": 23 * 7}
    collection.flush()
    assert collection.stats()["evictions"] == 23
    assert not torch.equal(collection.get_rows("tiny"), exact.get_rows("tiny"))
