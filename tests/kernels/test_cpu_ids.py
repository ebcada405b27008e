"""Mapping ids on the CPU: the numbers of the reference, whatever the maps, the batch and the threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import has
from thermocline import BadInput, IdOutOfRange
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap
from thermocline.kernels.dispatch import map_ids
from thermocline.kernels.ids import cpu, reference

pytestmark = pytest.mark.usefixtures("poisoned_scratch")

MAPS = [
    None,
    IdMap.hashed(1000, 3),
    IdMap.pruned(range(0, 5000, 3), fallback=4),
    IdMap.identity(77).offset(900),
    IdMap.pruned([-(1 << 63), -5, 0, 9, 1 << 40, (1 << 63) - 1], fallback=1 << 33, salt=9),
    IdMap.hashed(1 << 40),
    IdMap.hashed(600, 1).prune(range(0, 600, 2), fallback=2).offset(31),
    IdMap.pruned([], fallback=5),
    IdMap.pruned(range(-9000, 9000, 2), fallback=3).offset(7),
]


def _args(maps: list[Any]) -> tuple[torch.Tensor, ...]:
    held = IdMaps(maps, "cpu")
    return held.fields_FM, held.words, held.counts


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("batch, longest", [(0, 0), (1, 1), (7, 3), (61, 200)])
def test_every_kind_of_map_gives_the_rows_of_the_reference(batch: int, longest: int, count: int, make_raw: Any, threads: Any):
    threads(count)
    ids_N, offsets = make_raw(MAPS, batch, longest, seed=batch)
    rows_N = cpu.map_ids(*_args(MAPS), ids_N, offsets)
    assert torch.equal(rows_N, reference.map_ids(*_args(MAPS), ids_N, offsets))


@pytest.mark.parametrize("each", [m for m in MAPS if m is not None], ids=str)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 8193])
def test_one_feature_alone_around_the_sizes_of_groups_and_tasks(each: IdMap, count: int, make_raw: Any):
    ids_N = make_raw([each], 1, 9000, seed=4)[0][:count]
    ids_N = ids_N.repeat(-(-count // max(1, len(ids_N))))[:count]
    offsets = torch.tensor([0, count])
    assert torch.equal(cpu.map_ids(*_args([each]), ids_N, offsets), reference.map_ids(*_args([each]), ids_N, offsets))


def test_narrow_ids_and_offsets_are_widened(make_raw: Any):
    maps = [IdMap.hashed(1000, 3), IdMap.pruned(range(0, 500, 2))]
    ids_N, offsets = make_raw(maps, 5, 9, dtype=torch.int32)
    wanted_N = reference.map_ids(*_args(maps), ids_N.long(), offsets.long())
    assert torch.equal(map_ids(*_args(maps), ids_N, offsets), wanted_N) and wanted_N.dtype == torch.int64


@pytest.mark.parametrize("bad", [5, -1, -(1 << 63)])
def test_an_id_out_of_range_is_named_with_its_feature_and_position(bad: int):
    maps = [IdMap.hashed(10), IdMap.identity(5).offset(10), None]
    ids_N = torch.tensor([3, 99, 4, 0, bad, 2, 1234567])
    for run in (map_ids, reference.map_ids):
        with pytest.raises(IdOutOfRange, check=has(feature=1, rows=5, position=4, id=bad)):
            run(*_args(maps), ids_N, torch.tensor([0, 2, 2, 4, 6, 7, 7]))


@pytest.mark.parametrize("ids, offsets, fields", [
    ([1.0], [0, 1], {"parameter": "ids", "value": torch.float32}),
    ([[1]], [0, 1], {"parameter": "ids", "value": 2}),
    ([1, 2], [0, 1, 2, 2], {"parameter": "offsets", "value": 4}),
    ([1, 2], [0], {"parameter": "offsets", "value": 0}),
    ([1, 2], [0, 1, 3], {"parameter": "offsets", "position": 2, "value": 3}),
    ([1, 2], [1, 2, 2], {"parameter": "offsets", "position": 0, "value": 1}),
    ([1, 2], [0, 3, 2], {"parameter": "offsets", "position": 1, "value": 3}),
    ([1, 2], [0, 5, 4, 3, 2], {"parameter": "offsets", "position": 2, "value": 4}),
])  # fmt: skip
def test_bad_ids_and_offsets_raise_as_in_a_lookup(ids: Any, offsets: Any, fields: dict[str, Any]):
    with pytest.raises(BadInput, check=has(**fields)):
        map_ids(*_args([None, IdMap.hashed(3)]), torch.tensor(ids), torch.tensor(offsets))


def test_features_that_keep_the_same_ids_hold_them_once():
    kept: Callable[..., Any] = lambda: IdMap.pruned(torch.arange(0, 10_000, 1000))  # noqa: E731
    one, two = IdMaps([kept()], "cpu"), IdMaps([kept(), kept().offset(50)], "cpu")
    assert two.bytes - one.bytes == 8 * one.fields_FM.shape[1]
    ids_N = torch.tensor([1000, 7, 1000, 7])
    assert two(ids_N, torch.tensor([0, 2, 4])).tolist() == [1, 10, 51, 60]
