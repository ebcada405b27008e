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


PRECISIONS = [("int8", 0.05), ("fp32", None), ("int4", "64KiB"), ({"fp32": 0.02, "int2": 0.98}, None)]


@pytest.mark.parametrize("optimizer", [tc.SGD(lr=0.1), tc.RowwiseAdagrad(lr=0.1), tc.Adam(lr=0.1)])
@pytest.mark.parametrize("precision, cache", PRECISIONS)
def test_an_elastic_table_takes_the_bytes_of_its_budget(precision, cache, optimizer):
    config = tc.RowConfig(precision, cache=cache, optimizer=optimizer)
    rows = config.rows_within("3MiB", 24)
    bag = tc.EmbeddingBag(rows, 24, mode="sum", rows=config, ids=tc.IdMap.elastic(rows))
    assert 0.97 * (3 << 20) < bag.memory().total <= 3 << 20


@pytest.mark.parametrize("budget", ["100B", 1000, "1 GB"])
def test_a_budget_without_room_for_a_row_is_refused(budget):
    with pytest.raises(tc.BadInput, check=lambda error: error.parameter == "budget"):
        tc.RowConfig("int8").rows_within(budget, 64)
