"""Requests: validation, and joining into one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import embedding, embedding_bag

from support import has
from thermocline import BadInput
from thermocline import formats as F
from thermocline.ids.idmap import IdMap
from thermocline.kernels.quantize.reference import dequantize_rows
from thermocline.serve.tables.lookup import join_requests, split_output
from thermocline.serve.tables.requests import parse_request

IDS = np.array([3, 1, 4, 1, 5])


@pytest.fixture(scope="module")
def version(make_tables: Any) -> Any:
    tables = make_tables([(9, 4, "int8"), (7, 8, "fp32")], features={0: ("user", "friend"), 1: ("item",)})
    return tables.version(2)


@pytest.mark.parametrize(
    "request_, parameter",
    [
        ({}, "inputs"),
        ({"users": IDS}, "users"),
        ({"user.offsets": IDS}, "user"),
        ({"user": IDS, "item.weights": IDS}, "item"),
        ({"user": IDS.astype(np.float32)}, "user"),
        ({"user": IDS[None]}, "user"),
        ({"user": IDS, "user.offsets": np.zeros(0, np.int64)}, "user.offsets"),
        ({"user": IDS, "user.offsets": np.array([1, 2])}, "user.offsets"),
        ({"user": IDS, "user.offsets": np.array([0, 3, 2])}, "user.offsets"),
        ({"user": IDS, "user.offsets": np.array([0, 6])}, "user.offsets"),
        ({"user": IDS, "user.offsets": np.array([0.0])}, "user.offsets"),
        ({"user": IDS, "user.weights": np.ones(5, np.float32)}, "user.offsets"),
        ({"user": IDS, "user.offsets": np.array([0]), "user.weights": np.ones(4, np.float32)}, "user.weights"),
        ({"user": IDS, "user.offsets": np.array([0]), "user.weights": np.ones(5)}, "user.weights"),
        (
            {"user": IDS, "user.offsets": np.array([0]), "user.weights": np.array([1, 2, np.nan, 4, 5], np.float32)},
            "user.weights",
        ),
    ],
)
def test_an_invalid_request_names_its_input(version: Any, request_: Any, parameter: str) -> None:
    with pytest.raises(BadInput, check=has(parameter=parameter)):
        parse_request(version, request_)


def values_of(tables: Any, n: int) -> torch.Tensor:
    info = tables.infos[n]
    return dequantize_rows(torch.from_numpy(tables.codes[n]), torch.from_numpy(tables.meta[n]), info.format, info.dim)


def draw_request(draw: Any, rows: int, name: str) -> dict[str, np.ndarray]:
    ids = np.array(draw(st.lists(st.integers(0, rows - 1), max_size=9)), np.int64)
    if not draw(st.booleans()):
        return {name: ids}
    starts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    offsets = np.array([0, *starts], np.int64)
    request = {name: ids, f"{name}.offsets": offsets}
    if draw(st.booleans()):
        request[f"{name}.weights"] = np.array(
            draw(st.lists(st.integers(-9, 9), min_size=len(ids), max_size=len(ids))), np.float32
        )
    return request


def expected_of(values: torch.Tensor, request: dict[str, np.ndarray], name: str) -> torch.Tensor:
    ids = torch.from_numpy(request[name])
    if f"{name}.offsets" not in request:
        return embedding(ids, values)
    weights = request.get(f"{name}.weights")
    if not len(ids):
        return torch.zeros(len(request[f"{name}.offsets"]), values.shape[1])
    per_sample = None if weights is None else torch.from_numpy(weights)
    return embedding_bag(ids, values, torch.from_numpy(request[f"{name}.offsets"]), mode="sum", per_sample_weights=per_sample)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_joined_requests_give_the_results_of_torch(make_tables: Any, data: Any) -> None:
    draw = data.draw
    shapes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.sampled_from(F.NAMES)), min_size=1, max_size=3))
    tables = make_tables(shapes, seed=draw(st.integers(0, 9)))
    split, shards = draw(st.sampled_from(["hash", "range", "feature", "plan"])), draw(st.sampled_from([1, 2, 3, 5]))
    version = tables.version(shards, split, seed=draw(st.integers(0, 9)))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        chosen = draw(st.sets(st.integers(0, len(shapes) - 1), min_size=1))
        requests.append({key: array for n in chosen for key, array in draw_request(draw, shapes[n][0], f"t{n}").items()})
    read = [parse_request(version, request) for request in requests]
    batch = join_requests(version, read, F.SUM)
    out = torch.full((batch.size,), float("nan"))
    version.look_up(batch.bags, out)
    for request, answer in zip(requests, split_output(version, batch, read, out.numpy()), strict=True):
        assert set(answer) == {key for key in request if "." not in key}
        for name, got in answer.items():
            want = expected_of(values_of(tables, int(name[1:])), request, name)
            torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-6, atol=1e-6)


def test_raw_ids_of_every_map_find_their_rows(make_tables: Any) -> None:
    maps = {
        "a": IdMap.hashed(50, salt=3),
        "b": IdMap.pruned(range(0, 5000, 50), fallback=1),
        "c": IdMap.identity(40).offset(7),
        "d": IdMap.pruned([-5, 1 << 40], fallback=3, salt=1).offset(60),
    }
    tables = make_tables([(50, 4, "int8"), (101, 6, "int4"), (70, 5, "fp32")], features={0: ("a",), 1: ("b",), 2: ("c", "d")})
    version = tables.version(3, "plan", maps)
    ids = {"a": [-1, 1 << 62, 7], "b": [0, 50, 4950, 51, -9], "c": [0, 39], "d": [-5, 1 << 40, 5, 6]}
    read = parse_request(version, {name: np.array(each) for name, each in ids.items()})
    batch = join_requests(version, [read], F.SUM)
    out = torch.empty(batch.size)
    version.look_up(batch.bags, out)
    answer = split_output(version, batch, [read], out.numpy())[0]
    for n, names in ((0, "a"), (1, "b"), (2, "cd")):
        for name in names:
            assert torch.equal(torch.from_numpy(answer[name]), values_of(tables, n)[maps[name](torch.tensor(ids[name]))])
    with pytest.raises(BadInput, check=has(feature="c", rows=40, position=1, id=40)):
        read = parse_request(version, {"a": np.array([1]), "c": np.array([0, 40])})
        version.look_up(join_requests(version, [read], F.SUM).bags, out)
