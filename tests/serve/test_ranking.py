"""One user, N candidates: the scores of the trained model fed N pairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline
from support import has
from thermocline import BadInput, IdMap
from thermocline.models import DLRM
from thermocline.serve.ranking import RankingModel
from thermocline.serve.tables.lookup import LookupResult
from thermocline.serve.tables.shard_group import ShardGroup

FEATURES = ("user", "city", "item", "shop")


def make_dlrm(folder: Path, dense: int) -> DLRM:
    torch.manual_seed(dense)
    tables = [
        thermocline.Table("user", 211, 8, features=("user", "city"), ids=IdMap.hashed(211, salt=1)),
        thermocline.Table("item", 97, 8, features=("item", "shop")),
    ]
    model = DLRM(
        thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.0)), features=4, dim=8, dense=dense
    )
    thermocline.save(model, folder)
    return model.eval()


@pytest.fixture(scope="module", params=[3, 0])
def ranked(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DLRM, RankingModel]]:
    folder = tmp_path_factory.mktemp("rank") / "saved"
    model = make_dlrm(folder, request.param)
    with ShardGroup(folder, shards=2, name="rank") as group:
        yield model, RankingModel(group)


def make_request(model: DLRM, count: int, several: tuple[str, ...], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    made: dict[str, Any] = {n: random.integers(0, 97, count if n in several else 1) for n in FEATURES}
    if model.dense:
        shape = (count, model.dense) if "dense" in several else (model.dense,)
        made["dense"] = random.standard_normal(shape).astype(np.float32)
    return made


def asked_of(model: DLRM, request: dict[str, np.ndarray]) -> torch.Tensor:
    """The model's own answer to all pairs."""
    count = max(len(request[n]) for n in FEATURES) if not model.dense or request["dense"].ndim == 1 else len(request["dense"])
    ids = torch.stack([torch.from_numpy(request[n]).expand(count) for n in FEATURES], 1)
    dense = torch.from_numpy(request["dense"]).expand(count, -1) if model.dense else torch.zeros(count, 0)
    with torch.no_grad():
        return model(dense, ids)


SEVERAL = [(), ("item", "shop"), ("item",), ("user", "shop"), FEATURES, ("dense",), ("dense", "item")]


def test_scores_match_the_model_on_all_pairs(ranked: Any) -> None:
    model, rank = ranked
    cases = [(count, several) for count in (1, 2, 63) for several in SEVERAL if several or count == 1]
    requests = [make_request(model, count, several, n) for n, (count, several) in enumerate(cases)]
    for request, answer in zip(requests, rank.infer(requests), strict=True):
        assert isinstance(answer, LookupResult) and answer.version == "1"
        torch.testing.assert_close(torch.from_numpy(answer["score"]), asked_of(model, request), rtol=1e-4, atol=1e-5)


def test_an_invalid_request_fails_alone(ranked: Any) -> None:
    model, rank = ranked
    good = make_request(model, 5, ("item",), 1)
    bad = [
        ({**good, "shop": np.arange(4)}, has(parameter="shop")),
        ({**good, "shop": np.arange(0)}, has(parameter="shop")),
        ({name: each for name, each in good.items() if name != "item"}, has(parameter="item")),
        ({**good, "shops": np.arange(1)}, has(parameter="shops")),
        ({**good, "item": np.full(5, 97)}, has(feature="item", rows=97, id=97)),
        ({**good, "item": np.ones(5, np.float32)}, has(parameter="item")),
    ]
    answers = rank.infer([good, *(request for request, _ in bad), good])
    for (_, expected), answer in zip(bad, answers[1:-1], strict=True):
        assert isinstance(answer, BadInput) and expected(answer)
    assert isinstance(answers[0], LookupResult) and np.array_equal(answers[0]["score"], answers[-1]["score"])


def test_scores_of_a_sequence_model_match_the_model(tmp_path: Path) -> None:
    sequence = pytest.importorskip("thermocline.models.sequence")
    torch.manual_seed(1)
    table = thermocline.Table("item", 301, 12, features=("item", "negative"), ids=IdMap.hashed(301, salt=5))
    model = sequence.SequenceModel(
        thermocline.EmbeddingCollection([table], mode="none", rows=thermocline.RowConfig("int8", cache=0.0)),
        dim=12,
        length=20,
        blocks=2,
        heads=3,
    )
    thermocline.save(model, tmp_path / "saved")
    with ShardGroup(tmp_path / "saved", shards=3) as group:
        rank = RankingModel(group)
        random = np.random.default_rng(1)
        for length in (1, 7, 20):
            request = {"history": random.integers(0, 1 << 40, length), "candidates": random.integers(0, 1 << 40, 33)}
            answer = rank.infer([request])[0]
            with torch.no_grad():
                hidden = model.encode(torch.from_numpy(request["history"]), torch.tensor([0, length]))[0]
                rows = model.embeddings.get_rows("item", IdMap.hashed(301, salt=5)(torch.from_numpy(request["candidates"])))
            torch.testing.assert_close(torch.from_numpy(answer["score"]), rows @ hidden, rtol=1e-4, atol=1e-5)
        answers = rank.infer(
            [{"history": np.arange(21), "candidates": np.arange(2)}, {"history": np.arange(2)}, {"user": np.arange(1)}]
        )
        for answer, parameter in zip(answers, ("history", "candidates", "user"), strict=True):
            assert isinstance(answer, BadInput) and answer.parameter == parameter


def test_a_sequence_model_of_an_older_checkpoint_has_two_heads(tmp_path: Path) -> None:
    sequence = pytest.importorskip("thermocline.models.sequence")
    table = thermocline.Table("item", 31, 12, features=("item", "negative"))
    tables = thermocline.EmbeddingCollection([table], mode="none", rows=thermocline.RowConfig("int8", cache=0.0))
    model = sequence.SequenceModel(tables, dim=12, length=5, blocks=1, heads=2)
    thermocline.save(model, tmp_path / "saved")
    with ShardGroup(tmp_path / "saved", shards=1) as group:
        version = group.current
        assert len(version.dense["encoder.heads"]) == 2
        request, now = {"history": np.arange(4), "candidates": np.arange(9)}, RankingModel(group).infer
        old = {name: tensor for name, tensor in version.dense.items() if name != "encoder.heads"}
        expected = now([request])[0]
        group.apply_deltas("old", {}, old)
        assert np.array_equal(RankingModel(group).infer([request])[0]["score"], expected["score"])


def test_a_checkpoint_of_tables_alone_has_no_ranking_model(tmp_path: Path) -> None:
    thermocline.save(
        thermocline.EmbeddingCollection([thermocline.Table("a", 9, 4)], rows=thermocline.RowConfig(cache=0.0)),
        tmp_path / "saved",
    )
    with ShardGroup(tmp_path / "saved", shards=1) as group, pytest.raises(BadInput, check=has(parameter="folder")):
        RankingModel(group)
