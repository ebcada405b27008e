"""Served tables inside a PyTorch model: the trained model's own answers, exported too."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline
from thermocline import BadInput, IdMap
from thermocline.models import DLRM
from thermocline.serve.errors import NotReady
from thermocline.serve.tables.shard_group import CardGroup
from thermocline.serve.tables.version import Changed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(1)
    tables = [thermocline.Table("a", 101, 8, ids=IdMap.hashed(101, salt=1)), thermocline.Table("b", 57, 8, features=("c", "d"))]
    model = DLRM(
        thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.1)), features=3, dim=8, dense=4
    )
    for _ in range(3):
        model(torch.randn(32, 4), torch.randint(57, (32, 3))).square().mean().backward()
    folder = tmp_path_factory.mktemp("frozen") / "saved"
    thermocline.save(model, folder)
    model.embeddings.flush()
    return model.eval(), folder


@pytest.fixture(scope="module")
def group(trained: Any) -> Iterator[CardGroup]:
    with CardGroup(trained[1], cards=2, name="frozen") as group:
        yield group


def served(trained: Any, group: CardGroup) -> DLRM:
    model = DLRM(group.module(), features=3, dim=8, dense=4)
    model.load_state_dict({k: v for k, v in trained[0].state_dict().items() if not k.startswith("embeddings")}, strict=False)
    return model.eval()


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator), torch.randint(57, (size, 3), generator=generator)


def test_a_model_with_served_tables_gives_the_logits_of_the_trained_one_bit_for_bit(trained: Any, group: CardGroup) -> None:
    model = served(trained, group)
    with torch.no_grad():
        for size in (1, 63):
            assert torch.equal(model(*batch(size)), trained[0](*batch(size)))


def test_the_exported_model_does_too_whatever_the_batch(trained: Any, group: CardGroup, tmp_path: Path) -> None:
    model = served(trained, group)
    dynamic = torch.export.Dim("batch", min=2, max=512)
    program = torch.export.export(model, batch(7), dynamic_shapes=({0: dynamic}, {0: dynamic}))
    assert not any(name.startswith("embeddings") for name in program.state_dict)  # no rows in it
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        for size in (2, 33):
            torch.testing.assert_close(again(*batch(size)), trained[0](*batch(size)), rtol=1e-6, atol=1e-6)


def test_bags_with_weights_are_summed_as_the_collection_does(trained: Any, group: CardGroup) -> None:
    random = np.random.default_rng(1)
    input = {}
    for name in "acd":
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(random.integers(0, 5, 11))]))
        ids = torch.from_numpy(random.integers(0, 57, int(offsets[-1])))
        input[name] = (ids, offsets, torch.from_numpy(random.standard_normal(len(ids)).astype(np.float32)))
    with torch.no_grad():
        assert torch.equal(group.module()(input), trained[0].embeddings(input).values())


def test_a_delta_is_seen_by_the_module_at_once(trained: Any) -> None:
    with CardGroup(trained[1], cards=2, name="delta") as group:
        module = group.module()
        ids = torch.zeros(1, 3, dtype=torch.int64)
        before = module(ids)
        rows = group.current.arrangement.shelves[1].views(group.current.segments[0].numpy(), 0)
        row = np.array([0])
        codes, meta = np.full((1, rows[0].shape[1]), 1, np.uint8), np.array([[0x3F800000]], np.int32)
        group.apply("2", {"b": Changed(row, codes, meta)})
        after = module(ids)
        assert torch.equal(after[:, :8], before[:, :8]) and torch.equal(after[:, 8:], torch.ones(1, 16))
    with pytest.raises(NotReady, match="no tables named 'delta' are open"):
        module(ids)


def test_what_cannot_be_is_refused(trained: Any, group: CardGroup) -> None:
    module = group.module()
    with pytest.raises(BadInput, match="3 features need"):
        module(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(BadInput, match="the input lacks d"):
        module({"a": (), "c": ()})
    with pytest.raises(BadInput, match="not saved with a model"):
        pickle.dumps(module)
    with CardGroup(trained[1], cards=1, name="frozen") as other, pytest.raises(BadInput, match="other tables named 'frozen'"):
        other.module()
