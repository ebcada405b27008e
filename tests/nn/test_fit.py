"""Tables that do not fit are refused before they are made, with both numbers and what would fit."""

from __future__ import annotations

import pytest

import thermocline as tc
from support import mentions
from thermocline.nn import config


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cache", [0.0, 1.0, "1B", "1000TiB"])
def test_a_table_that_does_not_fit_is_refused_with_both_numbers(cache):
    with pytest.raises(tc.BadInput) as caught:
        tc.Embedding(10**12, 64, rows=tc.RowConfig("fp32", cache=cache))
    assert caught.value.needed > 256 * 10**12 and 0 < caught.value.available < 10**12
    assert "precision=" not in str(caught.value)


@pytest.mark.parametrize("cache", [1.0, "1B", "1MiB"])
def test_a_table_that_does_not_fit_comes_with_precisions_that_would(monkeypatch, cache):
    monkeypatch.setattr(config, "free_bytes", lambda _: 75_000)
    with pytest.raises(tc.BadInput, check=mentions("precision='int4', cache=0.01")) as caught:
        tc.Embedding(1000, 64, rows=tc.RowConfig("fp32", cache=cache))
    assert caught.value.available == 75_000
    tc.Embedding(1000, 64, rows=tc.RowConfig("int4", cache=0.01))


def test_tables_that_slots_and_maps_make_larger_are_not_called_smaller():
    assert "x larger than fp32 rows" in str(tc.Embedding(10, 4, rows=tc.RowConfig(cache=1.0)).memory())
    assert "x smaller than fp32 rows" in str(tc.Embedding(10_000, 64).memory())
