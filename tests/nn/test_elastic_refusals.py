"""Elastic ids of converted tables, and what they refuse."""

from __future__ import annotations

import pytest
import torch

import thermocline as tc
from support import has
from thermocline import BadInput, IdMap, RowConfig, Table

EXACT = RowConfig("fp32", optimizer=tc.SGD(lr=0.5))


def _bag() -> tc.EmbeddingBag:
    return tc.EmbeddingBag(65, 4, mode="sum", rows=EXACT, ids=IdMap.elastic(65, shared=1))


def test_converted_tables_take_rules_for_new_ids_beside_their_config():
    model = torch.nn.ModuleDict({"item": torch.nn.EmbeddingBag(500, 4, mode="sum"), "hour": torch.nn.Embedding(24, 4)})
    tc.convert_(model, EXACT, ids={"item": IdMap.elastic(80)})
    model["item"](torch.tensor([[1 << 50]])).sum().backward()
    assert model["item"].elastic().state()["rows"] == 64 and model["hour"].num_embeddings == 24
    with pytest.raises(BadInput, check=has(parameter="ids")):
        tc.convert_(torch.nn.ModuleDict({"a": torch.nn.Embedding(5, 4)}), EXACT, ids={"b": IdMap.elastic(80)})


def test_features_with_different_rules_in_one_table_are_refused_by_name():
    maps = {"seen": IdMap.elastic(100), "bought": IdMap.elastic(100, admit_after=2)}
    with pytest.raises(BadInput, check=has(parameter="ids", features=("seen", "bought"))):
        tc.EmbeddingCollection([Table("item", 100, 4, features=("seen", "bought"), ids=maps)])


def test_what_elastic_ids_cannot_do_yet_is_refused():
    with pytest.raises(BadInput, check=has(parameter="ids", device=torch.device("mps"))):
        _bag().maps.check_device(torch.device("mps"))
    with pytest.raises(BadInput, check=has(parameter="feature")):
        tc.EmbeddingBag(5, 4).elastic()
    with pytest.raises(BadInput, check=has(parameter="ids")):
        _bag()(torch.tensor([[1.5]]))
    with pytest.raises(BadInput, check=has(parameter="ids")):
        tc.revert_(torch.nn.ModuleDict({"bag": _bag()}))
