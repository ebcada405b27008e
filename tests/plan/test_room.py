"""A plan fits into as many bytes as it says it takes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from thermocline.errors import BadInput
from thermocline.heat.profiler import profile_batches
from thermocline.plan.make import make_plain, make_plan
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.topology import Topology

CLUSTERS = [(1, 1), (1, 3), (2, 2), (3, 2)]


def given(rows, batch, nodes, cards):
    heat = profile_batches([{"item": np.random.default_rng(rows).zipf(1.3, 4099) % rows}], batch=batch, cards_per_node=cards)
    item = TableFile(name="item", rows=rows, dim=5, pooling="none", precision="fp32", cache=0.0)
    where = Topology.load("hgx-h200", nodes=nodes).model_copy(update={"cards_per_node": cards})
    return Tables(batch=batch, dense=1e-4, tables=(item,)), heat, where


@pytest.mark.parametrize("nodes, cards", CLUSTERS)
@pytest.mark.parametrize("rows", [1, 63, 1000, 4099])
def test_a_plan_fits_into_the_bytes_that_a_plain_one_says_it_takes(rows, nodes, cards):
    for batch in (7, 64, 331):
        asked = given(rows, batch, nodes, cards)
        room = make_plain("row-wise", *asked).fullest.total
        made = make_plan(*asked, budget=room)
        assert made.fullest.total <= room
        assert make_plan(*asked, budget=made.fullest.total).fullest.total <= made.fullest.total


def test_what_is_missing_is_a_byte_at_least():
    asked = given(63, 7, 2, 2)
    least = min(made.bytes for made in make_plan(*asked).candidates)
    for fewer in range(1, least):  # a search may find a little less than all plans that were told
        try:
            make_plan(*asked, budget=least - fewer)
        except BadInput as error:
            assert re.search(r": [1-9]\d* B too much", str(error)), error
            break
    else:
        pytest.fail("tables fit into one byte")
