"""The exchange of GPUs trains what the exchange of CPUs trains, bit for bit, and reads sizes from the device once a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import TABLES, heat_of, plan_of, table_plan, with_slots
from device_side_ranks import device_side

from thermocline import formats as F
from thermocline.distributed.exchange.batch_table import BatchTable, BatchTableLayout
from thermocline.errors import BadOffsets
from thermocline.kernels.gpu.errors import ErrorBuffer, reporting_to
from thermocline.nn.inputs import JaggedIds

HEAT = heat_of()
THIRD = dict.fromkeys(TABLES, (0, 0))
MIXED = {"user": (13, 30), "item": (0, 61), "shop": (5, 11)}
EXCHANGES = {"user": "flat", "item": "node", "shop": "node"}
SOME = {"user": (13, 0), "item": (7, 0), "shop": (0, 0)}
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def planned(nodes, cards, tiers, precision="int8", exchange=None, slots=None, pooled_by="asker", wire="fp32"):
    tables = [table_plan(name, *tiers[name], precision, (exchange or {}).get(name, "flat")) for name in TABLES]
    tables = [with_slots(table, slots) if slots else table for table in tables]
    how = {"pooled_by": pooled_by, "wire_rows": wire, "wire_gradients": wire}
    return plan_of(nodes, cards, [table.model_copy(update=how) for table in tables], HEAT)


CASES = {
    "tiers 1 and 3": (planned(1, 2, SOME, "int4"), {}),
    "two nodes": (planned(2, 1, MIXED, exchange=EXCHANGES), {}),
    "caches": (planned(2, 1, MIXED, "int4", slots={1: (3, 0), 2: (5, 0), 3: (6, 2)}), {"policy": "adaptive"}),
    "owners pool": (planned(1, 2, SOME, pooled_by="owner"), {}),
    "int8 on the wire": (planned(1, 2, SOME, pooled_by="owner", wire="int8"), {}),
    "ahead": (planned(1, 2, THIRD), {"ahead": "three"}),
}


def compare(mine, theirs):
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            compare(mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)):
        for one, other in zip(mine, theirs, strict=True):
            compare(one, other)
    else:
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("name", CASES)
def test_the_exchange_of_gpus_trains_what_that_of_cpus_trains(on_ranks, name):
    plan, settings = CASES[name]
    given = plan, HEAT, {"precision": plan.tables[0].precision, "exact": True, **settings}, 2
    found, wanted = (on_ranks(name, plan.topology.world_size, *given) for name in ("device_side_ranks.train", "train"))
    compare(found, wanted)


@pytest.mark.parametrize("pooled_by", ["asker", "owner"])
def test_errors_of_kernels_reach_all_ranks_with_the_headers(on_ranks, pooled_by):
    told = on_ranks("device_side_ranks.fail", 2, planned(1, 2, THIRD, pooled_by=pooled_by), HEAT)
    assert "'item'" in told[1][1] and "61" in told[1][1] and "rank 1 stopped" in told[0][1]
    assert all("BadGradient" in each[4] or "rank 1 stopped" in each[4] for each in told), told
    assert not any(each[step] for each in told for step in (0, 2, 3, 5, 6)), told


@pytest.mark.parametrize("tiers", [THIRD, SOME], ids=["tier 3", "tiers 1 and 3"])
def test_a_step_asks_the_device_for_nothing_but_sizes(on_ranks, tiers):
    for forward, backward, steps in on_ranks("device_side_ranks.waits", 2, planned(1, 2, tiers), HEAT):
        assert not forward and not backward and steps == 2


@pytest.mark.parametrize("offsets", [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 2, 9, 3, 5], [0, 1, -2, 3, 5], [0, 4, 3, 4, 5]])
def test_wrong_offsets_are_reported_before_any_operator_meets_them(offsets):
    """A GPU that finds lengths below 0, or that do not add up, in `repeat_interleave` stops the process."""
    cpu, ids_N = torch.device("cpu"), torch.arange(5)
    layout = BatchTableLayout([("user", "user"), ("item", "item")], [(10, 0, 4), (10, 10, 4)], cpu)
    bags, errors = JaggedIds(ids_N, torch.tensor(offsets), None, 2), ErrorBuffer(cpu)
    with device_side(), reporting_to(errors):
        BatchTable(layout, bags, ids_N, F.MODES.index("sum"), later=True)
    with pytest.raises(BadOffsets):
        errors.raise_pending()


ORDERED = {
    "tier 3": (planned(1, 2, THIRD), {}),
    "two nodes": (planned(2, 1, MIXED, exchange=EXCHANGES), {}),
    "owners pool": (planned(1, 2, SOME, pooled_by="owner"), {}),
    "replicas": (planned(1, 2, SOME), {"replicas": 2}),
    "four ranks": (planned(2, 2, MIXED, exchange=EXCHANGES), {}),
}


@pytest.mark.parametrize("name", ORDERED)
def test_collectives_of_a_stream_are_launched_in_one_order_on_all_ranks(on_ranks, name):
    """As NCCL needs them: by one thread, between all communicators in one order, whatever the batches of the ranks."""
    plan, settings = ORDERED[name]
    ranks = plan.topology.world_size * settings.get("replicas", 1)
    given = plan, HEAT, {"precision": "int8", "exact": True, **settings}, 3
    found = on_ranks("device_side_ranks.like_nccl", ranks, *given)
    compare([trained for trained, _, _ in found], on_ranks("train", ranks, *given))
    orders = [order for _, order, _ in found]
    for mine in orders:
        for theirs in orders:
            shared = {group for group, _, _ in mine} & {group for group, _, _ in theirs}
            one, other = ([each for each in order if each[0] in shared] for order in (mine, theirs))
            assert one == other, "in another order, or of another type"
    assert all(waits and any(launched for *_, launched in order) for _, order, waits in found)
