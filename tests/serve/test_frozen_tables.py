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
from support import has
from thermocline import BadInput, IdMap
from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.models import DLRM
from thermocline.serve.errors import NotReady
from thermocline.serve.tables.shard_group import ShardGroup


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
def group(trained: Any) -> Iterator[ShardGroup]:
    with ShardGroup(trained[1], shards=2, name="frozen") as group:
        yield group


def served(trained: Any, group: ShardGroup) -> DLRM:
    model = DLRM(group.module(), features=3, dim=8, dense=4)
    model.load_state_dict({k: v for k, v in trained[0].state_dict().items() if not k.startswith("embeddings")}, strict=False)
    return model.eval()


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator), torch.randint(57, (size, 3), generator=generator)


def test_logits_equal_those_of_the_trained_model_in_every_bit(trained: Any, group: ShardGroup) -> None:
    model = served(trained, group)
    with torch.no_grad():
        for size in (1, 63):
            assert torch.equal(model(*batch(size)), trained[0](*batch(size)))


def test_the_exported_model_gives_the_same_logits_for_any_batch(trained: Any, group: ShardGroup, tmp_path: Path) -> None:
    model = served(trained, group)
    dynamic = torch.export.Dim("batch", min=2, max=512)
    program = torch.export.export(model, batch(7), dynamic_shapes=({0: dynamic}, {0: dynamic}))
    assert not any(name.startswith("embeddings") for name in program.state_dict)  # no rows in it
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        for size in (2, 33):
            torch.testing.assert_close(again(*batch(size)), trained[0](*batch(size)), rtol=1e-6, atol=1e-6)


def test_weighted_bags_equal_those_of_the_collection(trained: Any, group: ShardGroup) -> None:
    random = np.random.default_rng(1)
    input = {}
    for name in "acd":
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(random.integers(0, 5, 11))]))
        ids = torch.from_numpy(random.integers(0, 57, int(offsets[-1])))
        input[name] = (ids, offsets, torch.from_numpy(random.standard_normal(len(ids)).astype(np.float32)))
    with torch.no_grad():
        assert torch.equal(group.module()(input), trained[0].embeddings(input).values())


def test_the_module_uses_a_delta_at_once(trained: Any) -> None:
    with ShardGroup(trained[1], shards=2, name="delta") as group:
        module = group.module()
        ids = torch.zeros(1, 3, dtype=torch.int64)
        before = module(ids)
        rows = group.current.layout.tables[1].views(group.current.segments[0].numpy(), 0)
        row = np.array([0])
        codes, meta = np.full((1, rows[0].shape[1]), 1, np.uint8), np.array([[0x3F800000]], np.int32)
        group.apply_deltas("2", {"b": RowDelta(row, codes, meta)})
        after = module(ids)
        assert torch.equal(after[:, :8], before[:, :8]) and torch.equal(after[:, 8:], torch.ones(1, 16))
    with pytest.raises(NotReady):
        module(ids)


def test_invalid_input_is_refused(trained: Any, group: ShardGroup) -> None:
    module = group.module()
    with pytest.raises(BadInput, check=has(parameter="input", value=(3, 2))):
        module(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(BadInput, check=has(parameter="d")):
        module({"a": (), "c": ()})
    with pytest.raises(BadInput):
        pickle.dumps(module)
    refused = pytest.raises(BadInput, check=has(parameter="name", value="frozen"))
    with ShardGroup(trained[1], shards=1, name="frozen") as other, refused:
        other.module()
