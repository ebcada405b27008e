"""Raw ids to rows."""

from __future__ import annotations

import pytest
import torch

from thermocline import BadInput
from thermocline.data.id_rows import MappedRows, Vocabulary, hashed_rows
from thermocline.ids.idmap import IdMap


def test_a_vocabulary_numbers_ids_by_first_appearance_and_keeps_row_0_for_others():
    raw = torch.tensor([[70, 5], [10, 5], [70, 9], [40, 2]])
    words = Vocabulary([raw[:3], raw[2:]], 2)
    assert words.rows == (4, 4)
    assert words(raw).tolist() == [[1, 1], [2, 1], [1, 2], [3, 3]]
    assert words(torch.tensor([[41, 2], [10, 10]])).tolist() == [[0, 3], [2, 0]]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_vocabulary_equals_a_dictionary(chunk):
    raw = torch.randint(0, 300, (1000, 3), generator=torch.Generator().manual_seed(1)) ** 3
    words = Vocabulary(raw.split(chunk), 3)
    for feature in range(3):
        known = {}
        expected = [known.setdefault(id, len(known) + 1) for id in raw[:, feature].tolist()]
        assert words(raw)[:, feature].tolist() == expected
        assert words.rows[feature] == len(known) + 1


def test_a_vocabulary_of_nothing_knows_nothing():
    words = Vocabulary([], 2)
    assert words.rows == (1, 1) and words(torch.tensor([[3, 4]])).tolist() == [[0, 0]]


def test_hashed_rows_are_spread_over_each_table():
    rows = (1, 10, 1000)
    found = hashed_rows(rows, salt=4)(torch.arange(20_000)[:, None].expand(-1, 3))
    for feature, count in enumerate(rows):
        counts = torch.bincount(found[:, feature], minlength=count)
        assert len(counts) == count
        assert ((counts - 20_000 / count).abs() < 6 * (20_000 / count) ** 0.5 + 1).all()


def test_the_salt_and_the_table_change_the_hash():
    raw = torch.arange(100)[:, None].expand(-1, 2)
    one, other = hashed_rows((50, 50), 1)(raw), hashed_rows((50, 50), 2)(raw)
    assert not torch.equal(one, other) and not torch.equal(one[:, 0], one[:, 1])


def test_a_hash_to_no_rows_is_refused():
    with pytest.raises(BadInput):
        hashed_rows((5, 0))


def test_each_feature_has_a_map_of_its_own():
    raw = torch.tensor([[3, 70], [900, 5], [4, 70]])
    mapped = MappedRows([IdMap.pruned([900, 3]), IdMap.identity(71).offset(10)])
    assert mapped.rows == (3, 81)
    assert mapped(raw).tolist() == [[0, 80], [1, 15], [2, 80]]
