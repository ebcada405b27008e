"""Long and hostile streams of ids: what is counted does not drift, hot rows stay, and chosen ids slow nothing down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thermocline.ids.elastic import KeyTable
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.ids.growth import opened
from thermocline.kernels.elastic import cpu
from thermocline.kernels.elastic.fields import BARRIER, STEPS, WINDOW
from thermocline.kernels.elastic.reference import as_bytes, bucket_of
from thermocline.kernels.ids.reference import hash_ids

RULES = (
    ElasticRows(321, 1, 1, half_life=3), ElasticRows(321, 2, 1, "lru", ttl=17), ElasticRows(641, 1, 1, ttl=9, grow_from=40),
    ElasticRows(330, 1, 10, half_life=2, max_age=6.0, admit_chance=0.5),
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_counter_drifts_in_a_long_turnover(rule: ElasticRows):
    table, draw, lookups, missed = KeyTable(rule, 1), torch.Generator().manual_seed(1), 0, 0
    bytes_then, pinned = table.bytes, torch.tensor([-1, -2])
    table.pin(pinned)
    table.counts[STEPS] = (1 << 30) - 500 - ((1 << 30) - 500) % rule.half_life  # steps begin anew on the way
    for step in range(2000):
        if rule.max_age is not None:
            table.advance(0.5 * step)
        ids_N = torch.randint(3 * step, 3 * step + 300, (40,), generator=draw) * 7919
        rows_N, moved = table.step(ids_N, protect=step % 5 == 4)
        lookups, missed = lookups + 40, missed + int((rows_N >= rule.own).sum())
        assert torch.equal(table.find(moved.came_K)[0], moved.rows_K)
        gone_E = moved.went_E[~torch.isin(moved.went_E, moved.came_K)]
        assert len(table.find(gone_E)[1]) == len(gone_E)
    state, ids = table.state(), table.keys[table.occupied()]
    assert state["used"] == table.used == len(ids.unique()) == state["admitted"] - state["evicted"]
    assert (state["lookups"], state["shared_lookups"]) == (lookups, missed) and state["evicted"] >= state["expired"]
    assert state["evicted"] > 1000 and not len(table.find(pinned)[1])
    assert torch.equal(bucket_of(hash_ids(ids, table.rules.key), rule.own), table.occupied() // 64)
    steps = int(table.counts[STEPS])
    assert int(table.counts[BARRIER]) <= steps < 1 << 30 and int(table.last.max()) <= steps
    assert 0 <= int(table.counts[WINDOW]) < table.rules.width and table.bytes == bytes_then
    assert not rule.grows or int(table.open) >= opened(int(state["used"]), rule.own)


@pytest.mark.parametrize("grow_from", [None, 700])
@pytest.mark.parametrize("evict", ["lfu", "lru"])
def test_a_storm_of_ten_times_the_rows_fills_them_once(evict: str, grow_from: int | None):
    table, hot = KeyTable(ElasticRows(1016, evict=evict, grow_from=grow_from), 1), torch.arange(300)
    for _ in range(3):
        table.step(hot.repeat(3), protect=False)
    kept = hot[table.find(hot)[0] < 1000]
    assert len(kept) > 290
    storm = torch.arange(10_000, 20_160)
    _, moved = table.step(torch.cat([storm, kept]), protect=False)
    state = table.state()
    assert not table.find(kept)[1].numel(), "rows of the batch itself were taken"
    assert len(moved.came_K) <= 1000 and state["refused"] == len(storm) - len(moved.came_K) == state["waiting"]
    if evict == "lfu":
        table.step(storm + 50_000, protect=False)
        assert not table.find(kept)[1].numel()


def _keys_compared(ids_N: Tensor, rule: ElasticRows) -> int:
    """Keys that a lookup of ids compares, known and unknown ones: those with the tag of the id, in its bucket."""
    table = KeyTable(rule, 1)
    table.step(ids_N, protect=False)
    hashes_N = hash_ids(ids_N, table.rules.key)
    bucket_N, tags = bucket_of(hashes_N, rule.own), as_bytes(table.tags).view(-1, 64)
    return int((tags[bucket_N] == (hashes_N & 255).clamp(min=1).byte()[:, None]).sum())


def test_ids_that_fall_into_one_bucket_compare_as_many_keys_as_others():
    rule, many = ElasticRows(6416), torch.arange(200_000)
    bucket_N = bucket_of(hash_ids(many, 1), rule.own)
    flood, calm = many[bucket_N == 3][:1500], many[:1500]
    assert len(flood) == 1500 and _keys_compared(flood, rule) < 2 * _keys_compared(calm, rule)


def test_ids_of_one_bucket_and_one_tag_compare_with_its_64_rows_at_most():
    rule, many = ElasticRows(656), torch.arange(1_500_000)
    hashes_N = hash_ids(many, 1)
    flood = many[(bucket_of(hashes_N, rule.own) == 3) & ((hashes_N & 255) == 9)]
    assert len(flood) > 400 and _keys_compared(flood, rule) == 64 * len(flood)
    table = KeyTable(rule, 1)
    rows_N, _ = table.step(flood, protect=False)
    assert int((rows_N < rule.own).sum()) == 64 and torch.equal(cpu.find(table.arrays, table.rules, flood)[0], rows_N)
