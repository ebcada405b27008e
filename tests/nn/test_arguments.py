"""Arguments of modules that cannot be right are refused in words of ours, by name and with the way out."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import thermocline as tc
from support import has, mentions


@pytest.mark.parametrize(
    "rows, dim, fields",
    [
        (8.5, 4, {"table": "table", "parameter": "rows", "value": 8.5}),
        ("8", 4, {"parameter": "rows", "value": "8"}),
        (torch.tensor(8), 4, {"parameter": "rows", "value": torch.tensor(8)}),
        (True, 4, {"parameter": "rows", "value": True}),
        (8, 4.0, {"parameter": "columns", "value": 4.0}),
        (8, None, {"parameter": "columns", "value": None}),
    ],
)
@pytest.mark.parametrize("kind", [tc.Embedding, tc.EmbeddingBag])
def test_sizes_that_are_no_integers_are_refused(kind, rows, dim, fields):
    with pytest.raises(tc.BadInput, check=has(**fields)):
        kind(rows, dim)


def test_a_model_that_was_built_from_numbers_of_numpy_can_be_saved(tmp_path):
    rows, keywords = np.int64(9), {"seed": np.int64(3), "optimizer": tc.SGD(lr=np.float32(0.5))}
    table = tc.Table("item", rows, np.int32(4), ids=tc.IdMap.hashed(rows, salt=np.int64(-2)).offset(np.int64(0)))
    model = nn.ModuleDict(
        {
            "bag": tc.EmbeddingBag(
                rows, np.int32(4), padding_idx=np.int64(2), rows=tc.RowConfig(cache=np.float32(0.25), **keywords)
            ),
            "tiers": tc.Embedding(rows, 4, rows=tc.RowConfig({"fp32": np.float32(0.125), "int4": np.float32(0.875)})),
            "adam": tc.Embedding(
                rows, 4, rows=tc.RowConfig(optimizer=tc.Adam(lr=torch.tensor(0.1), betas=(np.float32(0.5), 0.9)))
            ),
            "many": tc.EmbeddingCollection([table], rows=tc.RowConfig(cache="64B", **keywords)),
        }
    )
    model["bag"](torch.tensor([[8]])).sum().backward()
    tc.save(model, tmp_path / "saved")
    torch.save(model.state_dict(), tmp_path / "state")
    tc.save(model["bag"], tmp_path / "alone")
    assert torch.equal(tc.load(tmp_path / "alone").weight, model["bag"].weight)


@pytest.mark.parametrize(
    "name, value, others",
    [
        ("seed", 1 << 63, {}),
        ("seed", "a", {}),
        ("cache", [0.05], {}),
        ("cache", 1, {}),
        ("cache", 0, {}),
        ("cache", True, {}),
        ("cache", 1.5, {}),
        ("cache", -0.1, {}),
        ("cache", float("nan"), {}),
        ("cache", "5 percent", {}),
        ("cache", "2GB!", {}),
        ("cache", "GiB", {}),
        ("budget", {}, {"precision": "auto"}),
        ("budget", 1 << 30, {"precision": "auto"}),
        ("budget", 0.5, {"precision": "auto"}),
        ("staged", b"2GiB", {"residency": "host"}),
        ("staged", 4096, {"residency": "host"}),
        ("staged", 0.2, {}),
        ("policy", "mru", {}),
        ("residency", "disk", {}),
        ("update", "later", {}),
    ],
)
def test_a_row_config_refuses_values_of_another_type_or_range(name, value, others):
    with pytest.raises(tc.BadInput) as caught:
        tc.RowConfig(**{name: value, **others})
    assert caught.value.parameter == name
    assert caught.value.value is value or caught.value.value == value


@pytest.mark.parametrize("make", [tc.Embedding, tc.EmbeddingBag], ids=["embedding", "bag"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("precision", "int4"),
        ("cache", 0.05),
        ("budget", "2GiB"),
        ("policy", "lru"),
        ("optimizer", tc.SGD(lr=0.1)),
        ("residency", "host"),
        ("staged", 0.1),
        ("update", "step"),
        ("seed", 3),
        ("storage", tc.RowConfig()),
        ("deterministic", True),
        ("max_norm", 1.0),
        ("norm_type", 1.0),
        ("scale_grad_by_freq", True),
        ("sparse", True),
        ("padding_idx", 1.5),
        ("rows", "int8"),
    ],
)
def test_modules_refuse_fields_of_rows_and_what_torch_has_alone(make, name, value):
    with pytest.raises(tc.BadInput, check=has(parameter=name, value=value)):
        make(10, 4, **{name: value})
    if name != "padding_idx":
        with pytest.raises(tc.BadInput, check=has(parameter=name, value=value)):
            tc.EmbeddingCollection([tc.Table("a", 10, 4)], **{name: value})


def test_an_unknown_keyword_is_a_type_error_as_in_python():
    with pytest.raises(TypeError, check=mentions("presicion")):
        tc.Embedding(10, 4, presicion="int8")


@pytest.mark.parametrize("make", [tc.Embedding, tc.EmbeddingBag], ids=["embedding", "bag"])
def test_defaults_of_torch_ask_for_nothing_and_are_accepted(make):
    make(10, 4, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False)


def test_a_row_config_compares_by_its_fields_and_cannot_be_changed():
    rows = tc.RowConfig("int4", cache=np.float32(0.25))
    assert rows == tc.RowConfig(precision="int4", cache=0.25) and type(rows.cache) is float
    with pytest.raises(AttributeError):
        rows.cache = 0.5
    assert tc.Embedding(10, 4, rows=rows).rows is rows


@pytest.mark.parametrize(
    "make, parameter, value",
    [
        (lambda: tc.SGD(lr="x"), "lr", "x"),
        (lambda: tc.Adam(lr=0.1, weight_decay=[1]), "weight_decay", [1]),
        (lambda: tc.Adam(lr=0.1, betas=0.9), "betas", 0.9),
        (lambda: tc.Adam(lr=0.1, betas=(0.9,)), "betas", (0.9,)),
        (lambda: tc.IdMap.hashed(1.5), "rows", 1.5),
        (lambda: tc.IdMap.identity("9"), "rows", "9"),
        (lambda: tc.IdMap.hashed(9, salt="a"), "salt", "a"),
        (lambda: tc.IdMap.pruned([1], fallback=2.5), "rows", 2.5),
    ],
)
def test_numbers_of_optimizers_and_id_maps_that_are_none_are_refused(make, parameter, value):
    with pytest.raises(tc.BadInput, check=has(parameter=parameter, value=value)):
        make()


@pytest.mark.parametrize("rows", [[[1.0, 2.0]], np.ones((3, 2))], ids=["list", "array"])
def test_pretrained_rows_that_are_no_tensor_are_refused(rows):
    with pytest.raises(tc.BadInput, check=has(parameter="rows", value=type(rows).__name__)):
        tc.Embedding.from_pretrained(rows)


def test_an_offset_beyond_the_ids_is_told_as_it_was_given():
    with pytest.raises(tc.BadInput, check=mentions("7", "position 1", "4 ids")):
        tc.EmbeddingBag(10, 4)(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 7]))


def test_a_state_of_another_precision_says_how_its_rows_are_taken():
    saved = tc.EmbeddingCollection([tc.Table("user", 9, 4), tc.Table("item", 7, 4)], rows=tc.RowConfig("int8"))
    module = tc.EmbeddingCollection(saved.tables, rows=tc.RowConfig("int4", cache=0.0))
    with pytest.raises(RuntimeError, check=mentions("load_state_dict({'user.weight': rows, 'item.weight': rows})")):
        module.load_state_dict(saved.state_dict())
    module.load_state_dict({f"{name}.weight": saved.get_rows(name) for name in ("user", "item")})
    assert (module.get_rows("user") - saved.get_rows("user")).abs().max() < 0.1


@pytest.mark.parametrize(
    "mistake, kind, fields",
    [
        (lambda: tc.Embedding(9, 4, padding_idx=9), AssertionError, {"parameter": "padding_idx", "value": 9}),
        (lambda: tc.EmbeddingBag(9, 4)(torch.tensor([[1]]), None, torch.ones(1, 1)), NotImplementedError, {"mode": "mean"}),
        (lambda: tc.EmbeddingBag(9, 4)(torch.tensor([1]), torch.tensor([1])), RuntimeError, {"parameter": "offsets"}),
        (lambda: tc.EmbeddingBag(9, 4)(torch.tensor([[9]])), RuntimeError, {"id": 9, "rows": 9}),
        (lambda: tc.Embedding(9, 4)(torch.tensor([-1])), IndexError, {"id": -1, "rows": 9}),
    ],
)
def test_mistakes_raise_what_torch_raises_and_a_bad_input(mistake, kind, fields):
    with pytest.raises(kind, check=has(**fields)) as raised:
        mistake()
    assert isinstance(raised.value, tc.BadInput) and type(pickle.loads(pickle.dumps(raised.value))) is type(raised.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weight_has_the_output_type_of_the_module(dtype):
    module = tc.Embedding(9, 4, rows=tc.RowConfig("fp32")).to(dtype)
    assert torch.equal(module.weight, module(torch.arange(9))) and module.weight.dtype == dtype
    assert (module(torch.tensor([3])) @ module.weight.T).shape == (1, 9)  # scores against all rows
