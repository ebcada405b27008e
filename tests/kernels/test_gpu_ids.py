"""Triton maps ids to the rows of the reference, and tells of bad ids without a stall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import has
from thermocline import IdOutOfRange
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.ids import gpu, reference

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
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


@pytest.mark.parametrize("batch, longest", [(0, 0), (1, 1), (1, 600), (7, 3), (61, 40)])
def test_every_kind_of_map_gives_the_rows_of_the_reference(batch: int, longest: int, make_raw: Any, on: On) -> None:
    ids_N, offsets = make_raw(MAPS, batch, longest, seed=batch)
    rows_N = gpu.map_ids(*on(_args(MAPS)), on(ids_N), on(offsets))
    assert torch.equal(rows_N.cpu(), reference.map_ids(*_args(MAPS), ids_N, offsets))


@pytest.mark.parametrize("each", MAPS[1:], ids=str)
@pytest.mark.parametrize("count", [0, 1, 511, 513])
def test_one_feature_alone_around_the_size_of_a_tile(each: IdMap, count: int, make_raw: Any, on: On) -> None:
    ids_N = make_raw([each], 1, 2000, seed=4)[0]
    ids_N = ids_N.repeat(-(-count // max(1, len(ids_N))))[:count]
    offsets = torch.tensor([0, count])
    rows_N = gpu.map_ids(*on(_args([each])), on(ids_N), on(offsets))
    assert torch.equal(rows_N.cpu(), reference.map_ids(*_args([each]), ids_N, offsets))


def test_narrow_ids_and_offsets_are_widened(make_raw: Any, on: On) -> None:
    maps = [IdMap.hashed(1000, 3), IdMap.pruned(range(0, 500, 2))]
    ids_N, offsets = make_raw(maps, 5, 9, dtype=torch.int32)
    rows_N = gpu.map_ids(*on(_args(maps)), on(ids_N), on(offsets))
    assert torch.equal(rows_N.cpu(), reference.map_ids(*_args(maps), ids_N.long(), offsets.long()))


@pytest.mark.parametrize("bad", [5, -1, -(1 << 63)])
def test_an_id_out_of_range_is_reported_and_its_row_is_minus_one(bad: int, make_arena: Any, on: On) -> None:
    maps = [IdMap.hashed(10), IdMap.identity(5).offset(10), None]
    ids_N, offsets = torch.tensor([3, 99, 4, 0, bad, 2, 1234567]), torch.tensor([0, 2, 2, 4, 6, 7, 7])
    fields_FM, words, counts = on(_args(maps))
    gone = fields_FM.view_as(fields_FM)  # of an arena that was freed, whose memory the fields have now
    error_buffer(fields_FM).open(gone, make_arena([(5, 4, "int8"), (5, 4, "int8")]).layout.tables)
    del gone
    rows_N = gpu.map_ids(fields_FM, words, counts, on(ids_N), on(offsets)).cpu()
    assert rows_N[2:].tolist() == [14, 10, -1, 12, 1234567]
    with pytest.raises(IdOutOfRange, check=has(feature=1, rows=5, position=4, id=bad, table=None)):
        error_buffer(fields_FM).raise_pending()


def test_wrong_offsets_are_left_for_the_lookup_to_tell(on: On) -> None:
    """Nothing is read or written outside; the lookup that follows reports them."""
    maps = [IdMap.hashed(10), IdMap.hashed(10)]
    for offsets in ([0, 9, 3], [0, -5, 3], [2, 1, 7]):
        rows_N = gpu.map_ids(*on(_args(maps)), on(torch.tensor([1, 2, 3])), on(torch.tensor(offsets)))
        assert rows_N.shape == (3,)
