"""Maps from ids to rows, against the definition written once more in Python's own integers, and against fixed numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from support import has
from thermocline import BadInput, FormatError, IdOutOfRange
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap
from thermocline.ids.kept_ids import KeptIds
from thermocline.kernels.ids import reference

WORD = (1 << 64) - 1
RAW = [0, 1, 2, 41, 42, -1, -2, 1 << 31, -(1 << 31), 1 << 32, (1 << 63) - 1, -(1 << 63), 1234567890123456789]

# Rows of RAW, worked out in Python's integers from the definition in docs/ids.md, and never to change.
GOLDEN = [
    (IdMap.hashed(10), [5, 6, 6, 2, 9, 5, 2, 4, 1, 5, 7, 7, 2]),
    (IdMap.hashed(1000, salt=7), [530, 581, 201, 793, 71, 371, 0, 239, 761, 871, 684, 904, 207]),
    (
        IdMap.hashed(1 << 40, salt=7),
        [
            582882240137, 639513391669, 221128666361, 872907777489, 78295999968, 408617749058, 1010601974,
            263761871827, 837350141772, 958641969176, 752696020588, 994252009697, 228438741555,
        ],
    ),
    (IdMap.pruned([-1, 2, 42, 1 << 32], fallback=3, salt=7), [5, 5, 1, 6, 2, 0, 4, 4, 6, 3, 6, 6, 4]),
    (IdMap.pruned(range(-63, 200, 3), fallback=5, salt=7), [21, 90, 89, 91, 35, 89, 88, 89, 91, 92, 91, 92, 89]),
    (
        IdMap.hashed(60, salt=7).prune(range(0, 60, 2), fallback=4, salt=8).offset(500),
        [532, 517, 506, 531, 502, 511, 500, 507, 531, 526, 530, 527, 506],
    ),
]  # fmt: skip


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def hashed(id: int, rows: int, salt: int = 0) -> int:
    key = mix((salt + 0x9E3779B97F4A7C15) & WORD)
    return (mix((((id & WORD) ^ key) * 0x9E3779B97F4A7C15) & WORD) * rows) >> 64


def pruned(id: int, kept: list[int], fallback: int, salt: int = 0) -> int:
    kept = sorted(kept)
    return kept.index(id) if id in kept else len(kept) + hashed(id, fallback, salt)


def rows_of(map: IdMap, ids: list[int]) -> list[int]:
    """By the kernel of this machine and by the definition, which must agree."""
    ids_N, offsets, held = torch.tensor(ids, dtype=torch.int64), torch.tensor([0, len(ids)]), IdMaps([map], "cpu")
    rows_N = map(ids_N)
    assert torch.equal(rows_N, reference.map_ids(held.fields_FM, held.words, held.counts, ids_N, offsets))
    return rows_N.tolist()


def some_ids(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(-(1 << 63), 1 << 63) >> source.randrange(64) for _ in range(count)]


@pytest.mark.parametrize("salt", [0, 1, -1, 7, 1 << 63, (1 << 64) + 7])
@pytest.mark.parametrize("rows", [1, 2, 10, 1000, (1 << 31) + 1, 1 << 32, (1 << 33) - 1, (1 << 40) - 1, 1 << 40])
def test_a_hash_is_the_documented_one_whatever_rows_salt_and_id(rows, salt):
    ids = RAW + some_ids(300, seed=rows)
    assert rows_of(IdMap.hashed(rows, salt), ids) == [hashed(id, rows, salt) for id in ids]


def test_all_64_bits_of_an_id_and_of_a_salt_matter():
    base = rows_of(IdMap.hashed(1 << 40, 5), [987654321])
    assert all(rows_of(IdMap.hashed(1 << 40, 5), [signed(987654321 ^ (1 << bit))]) != base for bit in range(64))
    assert all(rows_of(IdMap.hashed(1 << 40, 5 ^ (1 << bit)), [987654321]) != base for bit in range(64))


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def test_hashed_rows_are_spread_evenly():
    counts = torch.bincount(IdMap.hashed(100, 3)(torch.arange(100_000) * 64), minlength=100).double()
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 160  # chi squared with 99 degrees: 99 +- 14


@pytest.mark.parametrize("form, kept", [
    ("sorted", [5, -9, 1 << 62, -(1 << 63), (1 << 63) - 1, 77]),
    ("bitmap", [*range(-70, 900, 3), 2000, 2001]),
    ("bitmap", list(range((1 << 63) - 700, 1 << 63))),
    ("bitmap", list(range(-(1 << 63), 513 - (1 << 63)))),
    ("bitmap", list(range(512))),
    ("sorted", [4]),
    ("sorted", []),
])  # fmt: skip
@pytest.mark.parametrize("fallback", [1, 7])
def test_kept_ids_have_their_rank_and_others_a_hashed_row_after_them(form, kept, fallback):
    map = IdMap.pruned(random.Random(3).sample(kept, len(kept)), fallback, salt=11)
    assert map.kept.form == form and map.kept.ids.tolist() == sorted(kept)
    near = [min(max(id + step, -(1 << 63)), (1 << 63) - 1) for id in kept for step in (-1, 0, 1, 64, 512)]
    ids = near + RAW + some_ids(50, seed=1)
    assert rows_of(map, ids) == [pruned(id, kept, fallback, 11) for id in ids]
    assert map.rows == len(kept) + fallback and max(rows_of(map, ids)) < map.rows


@pytest.mark.parametrize("density", [0.5, 0.03])
def test_a_large_bitmap_ranks_like_sorting_does(density):
    generator = torch.Generator().manual_seed(5)
    kept_K = (torch.rand(100_003, generator=generator) < density).nonzero()[:, 0] - 50_000
    map = IdMap.pruned(kept_K, fallback=3)
    assert map.kept.form == "bitmap"
    assert torch.equal(map(kept_K), torch.arange(len(kept_K)))
    assert torch.equal(map.kept.ids, kept_K)


def test_a_bitmap_takes_about_a_bit_an_id_and_sorted_ids_eight_bytes():
    assert IdMap.pruned(torch.arange(0, 1 << 20, 2)).bytes / ((1 << 20) / 8) == 1.0625
    assert IdMap.pruned(torch.arange(0, 1 << 20, 128)).bytes == 8 << 13
    assert IdMap.hashed(7).bytes == IdMap.identity(7).bytes == 0


def test_identity_returns_ids_and_refuses_others():
    assert rows_of(IdMap.identity(5), [4, 0, 3]) == [4, 0, 3]
    for bad in (5, -1, 1 << 62):
        with pytest.raises(IdOutOfRange, check=has(rows=5, position=2, id=bad)):
            IdMap.identity(5)(torch.tensor([1, 2, bad, 3]))


def test_an_offset_moves_rows_but_not_the_allowed_ids():
    assert rows_of(IdMap.identity(5).offset(100), [4, 0]) == [104, 100]
    with pytest.raises(IdOutOfRange, check=has(rows=5, id=5)):
        IdMap.identity(5).offset(100)(torch.tensor([5]))
    assert IdMap.identity(5).offset(100).rows == 105 and IdMap.identity(5).offset(60).offset(40) == IdMap.identity(5).offset(
        100
    )


def test_compositions_apply_in_order():
    ids, kept = RAW + some_ids(99, seed=2), [3, 4, 9, 50]
    both = IdMap.hashed(60, 2).prune(kept, fallback=3, salt=8).offset(1000)
    assert rows_of(both, ids) == [1000 + pruned(hashed(id, 60, 2), kept, 3, 8) for id in ids]
    assert both.rows == 1007 and both.span == 7
    inside = IdMap.identity(60).prune(kept)
    assert rows_of(inside, [3, 59, 50]) == [0, 4, 3]
    with pytest.raises(IdOutOfRange, check=has(rows=60, id=60)):
        inside(torch.tensor([60]))


def test_rows_have_the_shape_of_the_ids_and_narrow_ids_are_widened_with_their_sign():
    map = IdMap.hashed(1000)
    ids = torch.tensor([[1, -5, 7], [0, 2, -(1 << 31)]])
    assert torch.equal(map(ids.int()), map(ids)) and map(ids).shape == (2, 3)
    assert map(ids[:0]).shape == (0, 3)


@pytest.mark.parametrize("map", [
    IdMap.identity(9), IdMap.hashed(1 << 40, -1), IdMap.pruned([1, 5, 1 << 50], 4, salt=3),
    IdMap.hashed(9, 3).prune(range(0, 9, 2)).offset(8), IdMap.pruned(range(3000)),
], ids=str)  # fmt: skip
def test_a_map_survives_json_and_arrays(map):
    text, arrays = json.dumps(map.to_json()), {name: array.clone() for name, array in map.arrays().items()}
    back = IdMap.from_json(json.loads(text), arrays)
    assert back == map and hash(back) == hash(map) and back.rows == map.rows
    assert str(back) == str(map)


def test_maps_that_differ_anywhere_are_not_equal():
    kept = [1, 5, 9]
    maps = [
        IdMap.identity(9), IdMap.identity(10), IdMap.hashed(9), IdMap.hashed(9, 1), IdMap.hashed(9).offset(1),
        IdMap.pruned(kept), IdMap.pruned([1, 5, 8]), IdMap.pruned(kept, 2), IdMap.pruned(kept, 1, 1),
        IdMap.hashed(20).prune(kept), IdMap.pruned(range(64)), IdMap.pruned(range(1, 65)),
    ]  # fmt: skip
    assert all((a == b) == (i == j) for i, a in enumerate(maps) for j, b in enumerate(maps))
    assert len({str(map) for map in maps}) == len(maps)


def test_unreadable_maps_are_refused_by_field():
    map = IdMap.pruned([1, 5, 9], 2)
    with pytest.raises(FormatError, check=has(version=2)):
        IdMap.from_json(map.to_json() | {"version": 2}, map.arrays())
    with pytest.raises(FormatError, check=has(parameter="kept")):
        IdMap.from_json(map.to_json())
    with pytest.raises(FormatError, check=has(parameter="sha256")):
        IdMap.from_json(map.to_json(), {"kept": torch.tensor([1, 5, 8])})
    with pytest.raises(FormatError, check=has(value=["offset", "version"])):
        IdMap.from_json({"version": 1, "offset": 3})
    with pytest.raises(FormatError, check=has(parameter="fields")):
        IdMap.from_json({"version": 1, "hashed": {"salt": 3}})


def test_impossible_maps_are_refused_by_parameter():
    with pytest.raises(BadInput, check=has(parameter="rows", value=0)):
        IdMap.hashed(0)
    with pytest.raises(BadInput, check=has(parameter="rows", value=(1 << 40) + 1)):
        IdMap.hashed(1 << 40).offset(1)
    for ids in ([1, 1.5], ["2"], [2**63]):
        with pytest.raises(BadInput, check=has(parameter="kept")):
            IdMap.pruned(ids)
    with pytest.raises(BadInput, check=has(parameter="kept", value=5)):
        IdMap.pruned([1, 5, 5])
    with pytest.raises(BadInput, check=has(parameter="kept")):
        IdMap.pruned(np.zeros(3, np.float32))
    with pytest.raises(BadInput, check=has(parameter="kept")):
        IdMap.pruned([1]).prune([0])
    with pytest.raises(BadInput, check=has(parameter="first", value=-1)):
        IdMap.identity(3).offset(-1)


def test_kept_ids_may_come_as_tensors_arrays_or_ranges():
    wanted = KeptIds.of([2, 3, 9])
    assert KeptIds.of(torch.tensor([9, 2, 3])) == KeptIds.of(np.array([3, 2, 9], np.int32)) == wanted == KeptIds.of({2, 3, 9})


@pytest.mark.parametrize("map, rows", GOLDEN, ids=[str(map) for map, _ in GOLDEN])
def test_golden_vectors_stay_as_they_are(map, rows):
    assert rows_of(map, RAW) == rows


def test_the_documented_vectors_are_these():
    page = (Path(__file__).parents[2] / "docs" / "ids.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count("|") == len(RAW) + 2]
    shown = {cells[0].strip("`"): [int(cell) for cell in cells[1:]] for cells in lines[2:]}
    assert len(shown) == 5
    for call, rows in shown.items():
        assert (eval(f"IdMap.{call}"), rows) in GOLDEN
