"""`KeyTable` against a model in plain Python: dicts of ids, exact integers, no shared code but the constants."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import has
from thermocline import BadInput, FormatError, IdMap
from thermocline.ids.capacity import take_over
from thermocline.ids.elastic import KeyTable
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import SaltedHash
from thermocline.kernels.elastic.fields import STEPS

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


class Model:
    """The same rules over dicts: `rows` from row to [id, heat, last step]."""

    def __init__(self, policy: ElasticRows) -> None:
        self.policy, self.key = policy, SaltedHash(1, policy.salt).key
        self.rows: dict[int, list[int]] = {}
        self.cells: Counter[tuple[int, int, int]] = Counter()
        self.steps = self.window = 0
        self.width = 32 * -(-policy.own // 64)
        begin = policy.rows if policy.grow_from is None else policy.grow_from
        self.open = min(64, -(-64 * (begin - policy.others) // policy.own))

    def row(self, place: int) -> int:
        """Chunks of a table that grows have a row of each bucket."""
        buckets = 0 if self.policy.grow_from is None else self.policy.own // 64
        return place % 64 * buckets + place // 64 if place < 64 * buckets else place

    def hash(self, id: int) -> int:
        return _mix(((id & WORD) ^ self.key) * GOLDEN & WORD)

    def bucket(self, id: int) -> int:
        return ((self.hash(id) * self.policy.own) >> 64) // 64

    def score(self, row: int) -> int:
        _, heat, last = self.rows[row]
        return heat >> (self.steps // self.policy.half_life - last // self.policy.half_life)

    def step(self, ids: list[int]) -> None:
        self.steps += 1
        where = {entry[0]: row for row, entry in self.rows.items()}
        batch = Counter(ids)
        for id in batch.keys() & where.keys():
            heat = min(255, self.score(where[id]) + batch[id])
            self.rows[where[id]] = [id, heat, self.steps]
        new = {id: count for id, count in batch.items() if id not in where}
        places = {
            id: [(self.bucket(id), d, _mix((self.hash(id) + (d + 1) * GOLDEN) & WORD) * 32 >> 64) for d in range(4)]
            for id in new
        }
        found = {id: min(255, count + min(self.cells[cell] for cell in places[id])) for id, count in new.items()}
        for id, estimate in found.items():
            for cell in places[id]:
                self.cells[cell] = max(self.cells[cell], estimate)
        self.window += sum(new.values())
        while self.window >= self.width:
            self.window -= self.width
            self.cells = Counter({cell: count >> 1 for cell, count in self.cells.items()})
        for id in sorted(new, key=lambda id: (-found[id], self.hash(id))):
            if found[id] >= self.policy.admit_after:
                self.place(id, found[id])
        while self.open < 64 and 4 * 64 * len(self.rows) > 3 * self.open * self.policy.own:
            self.open += 1

    def place(self, id: int, heat: int) -> None:
        begin = 64 * self.bucket(id)
        bucket = range(begin, min(begin + self.open, self.policy.own))
        free = [row for row in bucket if row not in self.rows]
        if not free:
            cold = [row for row in bucket if self.rows[row][2] < self.steps]
            lru = self.policy.evict == "lru"
            free = sorted(cold, key=lambda row: (0 if lru else self.score(row), self.rows[row][2], row))[:1]
            if not free or (not lru and self.score(free[0]) > heat):
                return
        self.rows[free[0]] = [id, heat, self.steps]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([2, 30, 66, 150]), evict=st.sampled_from(["lfu", "lru"]), after=st.integers(1, 3),
    half_life=st.integers(1, 4), salt=st.integers(-3, 3), grow_from=st.sampled_from([None, 2, 20]),
    batches=st.lists(st.lists(st.integers(-60, 200), max_size=90), min_size=1, max_size=9),
)  # fmt: skip
def test_a_table_holds_the_ids_and_heat_of_the_model(
    rows: int, evict: str, after: int, half_life: int, salt: int, grow_from: int | None, batches: list[list[int]]
):
    policy = ElasticRows(rows, after, 1, evict, half_life, None, salt, grow_from=grow_from and min(grow_from, rows))
    table, model = KeyTable(policy, SaltedHash(1, salt).key), Model(policy)
    for batch in batches:
        rows_N, _ = table.step(torch.tensor(batch, dtype=torch.int64), protect=False)
        model.step(batch)
        occupied = table.occupied().tolist()
        heat = table.heat.view(torch.uint8)
        assert {row: [int(table.keys[row]), int(heat[row]), int(table.last[row])] for row in occupied} == model.rows
        where = {entry[0]: model.row(place) for place, entry in model.rows.items()}
        assert rows_N.tolist() == [where.get(id, policy.own) for id in batch]
    state = table.state()
    assert state["admitted"] - state["evicted"] == state["used"] == len(model.rows)
    assert state["rows"] == sum(min(model.open, policy.own - begin) for begin in range(0, policy.own, 64))


def test_no_row_is_taken_from_a_protected_step():
    table = KeyTable(ElasticRows(65, 1, 1), 1)
    table.step(torch.arange(64), protect=False)
    table.step(torch.arange(100, 300), protect=True)
    assert set(table.keys.tolist()) == set(range(64)) and table.state()["refused"] == 200
    table.step(torch.arange(100, 300), protect=False)
    assert table.state()["evicted"] == 64


def test_a_storm_of_new_ids_ends_and_keeps_hot_rows():
    table, hot = KeyTable(ElasticRows(1016), 1), torch.arange(300)
    for _ in range(3):
        table.step(hot.repeat(2), protect=False)
    table.step(torch.arange(10_000, 20_000), protect=False)
    assert not table.find(hot)[1].numel() and table.state()["used"] == 1000


def test_cold_ids_make_room_once_their_counts_are_halved():
    table = KeyTable(ElasticRows(65, 1, 1, half_life=4), 1)
    table.step(torch.arange(64).repeat(3), protect=False)
    table.step(torch.tensor([900]), protect=False)
    assert table.find(torch.tensor([900]))[1].numel()
    for _ in range(6):
        table.step(torch.tensor([900]), protect=False)
    assert not table.find(torch.tensor([900]))[1].numel()


def test_ids_outlive_their_time_to_live_by_at_most_an_eighth():
    table = KeyTable(ElasticRows(65, 1, 1, ttl=16), 1)
    table.step(torch.arange(10), protect=False)
    table.pin(torch.tensor([3]))
    went: list[int] = []
    while not went:
        went = table.step(torch.tensor([50]), protect=False)[1].went_E.tolist()
    assert 17 < table.state()["steps"] <= 19 and table.occupied().numel() == 2
    assert table.state()["expired"] == 9


def test_ids_leave_after_their_time_in_the_log_and_an_eighth_at_most():
    table, left = KeyTable(ElasticRows(1016, max_age=80.0), 1), {}
    with pytest.raises(BadInput, check=has(parameter="max_age")):
        table.step(torch.arange(3), protect=False)
    used: dict[int, float] = {}
    generator = torch.Generator().manual_seed(3)
    for tick in range(900):
        now = 0.9 * tick
        left |= {id: now for id in table.advance(now).went_E.tolist()}
        ids = torch.randint(tick, tick + 40, (3,), generator=generator)
        if tick % 7 < 5:  # a step is no time
            table.step(ids, protect=False)
            used |= {id: now for id in ids.tolist()}
    assert len(left) > 500 and table.state()["expired"] == table.state()["evicted"] == len(left)
    assert all(80.0 <= now - used[id] <= 80.0 * 9 / 8 + 2 for id, now in left.items() if used[id] < now)
    assert {id for id, now in used.items() if now < 0.9 * 900 - 95} <= left.keys()
    table.advance(-5.0)  # earlier times change nothing
    with pytest.raises(BadInput, check=has(parameter="now")):
        table.advance(float("nan"))
    other = KeyTable(ElasticRows(80, max_age=80.0), 1)
    take_over(other, table)
    assert other.clock is not None and (other.clock == table.clock).all()


@pytest.mark.parametrize("times, share", [(1, 0.25), (4, 1 - 0.75**4), (300, 1.0)])
def test_a_chance_admits_its_share_of_new_ids(times: int, share: float):
    table, again = (KeyTable(ElasticRows(40_000, admit_chance=0.25), 1) for _ in range(2))
    ids = (torch.arange(4000) * 7919).repeat(times)
    table.step(ids, protect=False)
    again.step(ids.flip(0), protect=False)
    assert abs(table.state()["admitted"] / 4000 - share) < 0.03 and torch.equal(table.keys, again.keys)
    for _ in range(3):
        table.step(torch.arange(4000) * 7919, protect=False)
    assert abs(table.state()["admitted"] / 4000 - (1 - (1 - share) * 0.75**3)) < 0.03  # each step draws anew


def test_pinned_ids_stay_until_they_are_unpinned():
    table = KeyTable(ElasticRows(65, 1, 1, evict="lru"), 1)
    table.pin(torch.tensor([7, 8]))
    for step in range(5):
        table.step(torch.arange(1000 * step, 1000 * step + 300) + 9, protect=False)
    assert not table.find(torch.tensor([7, 8]))[1].numel() and table.state()["pinned"] == 2
    table.unpin(torch.tensor([7, 8]))
    for step in range(5, 9):
        table.step(torch.arange(1000 * step, 1000 * step + 300) + 9, protect=False)
    assert table.find(torch.tensor([7, 8]))[1].numel() == 2


@pytest.mark.parametrize("steps", [0, 1])
def test_too_many_pinned_ids_change_nothing(steps: int):
    table = KeyTable(ElasticRows(65, 1, 1), 1)
    for _ in range(steps):
        table.step(torch.arange(5), protect=False)
    before = [tensor.clone() for tensor in table.tensors().values()]
    with pytest.raises(BadInput, check=has(parameter="ids", value=70)):
        table.pin(torch.arange(100, 170))
    assert all(torch.equal(*pair) for pair in zip(before, table.tensors().values(), strict=True))


def test_a_smaller_table_takes_over_the_hottest_ids_and_says_where_rows_went():
    saved, table = KeyTable(ElasticRows(1016), 5), KeyTable(ElasticRows(80), 5)
    saved.step(torch.arange(500), protect=False)
    saved.step(torch.arange(40).repeat(5), protect=False)
    saved.pin(torch.tensor([499]))
    remap = take_over(table, saved)
    kept = set(table.keys[table.occupied()].tolist())
    assert kept >= {*range(40), 499} and len(kept) == 64 and table.state()["dropped"] == 436
    rows = saved.find(torch.tensor([7, 499]))[0]
    assert torch.equal(remap[rows], table.find(torch.tensor([7, 499]))[0]) and remap[1000:].tolist() == list(range(64, 80))


def test_steps_are_counted_past_31_bits():
    tables = [KeyTable(ElasticRows(65, 1, 1, half_life=3), 1) for _ in range(2)]
    tables[1].counts[STEPS] = (1 << 30) - 4 - ((1 << 30) - 4) % 3
    for step in range(20):
        for table in tables:
            table.step(torch.arange(step * 9, step * 9 + 30), protect=False)
    assert torch.equal(tables[0].keys, tables[1].keys) and int(tables[1].counts[STEPS]) < 1 << 30


@pytest.mark.parametrize(
    "arguments, parameter",
    [
        ({"rows": 0}, "rows"), ({"rows": 16}, "rows"), ({"rows": 100, "shared": -1}, "shared"),
        ({"rows": 100, "admit_after": 0}, "admit_after"), ({"rows": 100, "admit_after": 256}, "admit_after"),
        ({"rows": 100, "ttl": 0}, "ttl"), ({"rows": 100, "half_life": 0}, "half_life"), ({"rows": 100, "evict": 1}, "evict"),
        ({"rows": 100, "salt": "x"}, "salt"), ({"rows": 100, "init": -1.0}, "init"), ({"rows": True}, "rows"),
        ({"rows": 1, "shared": 0}, "rows"), ({"rows": 100, "admit_chance": 0.0}, "admit_chance"),
        ({"rows": 100, "admit_chance": 1.5}, "admit_chance"), ({"rows": 100, "max_age": 0}, "max_age"),
        ({"rows": 100, "max_age": float("nan")}, "max_age"), ({"rows": 100, "max_age": True}, "max_age"),
        ({"rows": 100, "grow_from": 16}, "grow_from"), ({"rows": 100, "grow_from": 101}, "grow_from"),
    ],
)  # fmt: skip
def test_wrong_rules_are_refused_by_name(arguments: dict[str, Any], parameter: str):
    with pytest.raises(BadInput, check=has(parameter=parameter)):
        IdMap.elastic(**arguments)


def test_an_elastic_map_is_a_value_and_survives_json():
    map = IdMap.elastic(1000, admit_after=2, ttl=50, init=0.5).offset(7)
    assert IdMap.from_json(map.to_json()) == map != IdMap.elastic(1000).offset(7) and map.rows == 1007
    with pytest.raises(FormatError):
        IdMap.from_json({"version": 1, "elastic": {"rows": 1000, "later": 1}})


def test_an_elastic_map_has_no_rows_outside_of_its_module():
    with pytest.raises(BadInput, check=has(parameter="ids")):
        IdMap.elastic(100)(torch.tensor([1]))
    with pytest.raises(BadInput, check=has(parameter="ids")):
        IdMaps([IdMap.elastic(100)], "cpu")
    with pytest.raises(BadInput, check=has(parameter="kept")):
        IdMap.elastic(100).prune([1])
