"""Lookup counts inside ids arrive as powers of two, for any rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from thermocline.distributed.exchange.context import decode_counts, encode_counts, sum_counts
from thermocline.kernels.cache.reference import MAX_WEIGHT, weight
from thermocline.plan.cost.memory import SMALL, id_bytes

WIRES = {4: torch.int32, 8: torch.int64}


@given(st.sampled_from([SMALL, 3 * SMALL, 1 << 40]), st.data())
def test_rows_and_weights_come_back(rows, data):
    row = data.draw(st.lists(st.one_of(st.integers(0, rows - 1), st.just(rows - 1)), min_size=1, max_size=9))
    lookups = torch.tensor(data.draw(st.lists(st.integers(1, 5 * MAX_WEIGHT), min_size=len(row), max_size=len(row))))
    wire = WIRES[id_bytes(rows)]
    ids = encode_counts(torch.tensor(row), lookups, wire)
    assert ids.dtype == wire and bool((ids >= 0).all())
    rows_N, heard_N = decode_counts(ids, True)
    assert rows_N.tolist() == row and heard_N.tolist() == weight(lookups).tolist()
    assert decode_counts(encode_counts(torch.tensor(row), None, wire), False)[0].tolist() == row


def test_ids_take_four_bytes_up_to_a_number_of_rows():
    assert (id_bytes(1), id_bytes(SMALL), id_bytes(SMALL + 1)) == (4, 4, 8)


def test_lookups_of_several_cards_are_added_up():
    rows_M = torch.tensor([7, 3, 7, 9, 3, 7])
    assert sum_counts(torch.tensor([3, 7, 9]), rows_M, torch.tensor([1, 2, 4, 8, 16, 32])).tolist() == [18, 37, 8]
    assert sum_counts(torch.tensor([3, 7, 9]), rows_M, None) is None
