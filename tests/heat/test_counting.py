"""Counting in one pass and bounded memory, against counts made the slow way."""

from __future__ import annotations

from collections import Counter as Slow
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import has
from thermocline.errors import BadInput
from thermocline.heat import profiler as profiling
from thermocline.heat.cardinality import ERROR
from thermocline.heat.counter import SMALLEST, IdCounter, make_room, reserved
from thermocline.heat.hash_counter import COUNT, ID, MOST, SLACK, USED
from thermocline.heat.log_columns import LogIds
from thermocline.heat.profile import HOT
from thermocline.heat.profiler import REST, Profiler, ProfilerSettings, profile_batches

BATCH, CARDS = 7, 3
ANY_ID = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 9)
SAMPLES = st.lists(st.lists(ANY_ID, max_size=4), min_size=1, max_size=150)


def bags_of(samples):
    ids_N = np.array([id for sample in samples for id in sample], np.int64)
    return LogIds(ids_N, np.cumsum([0, *map(len, samples)]).astype(np.int64))


def repeats(samples, size):
    groups = [[id for sample in samples[i : i + size] for id in sample] for i in range(0, len(samples), size)]
    return sum(len(ids) - len(set(ids)) for ids in groups)


def kept(samples, size, part):
    """Lookups of each slice in the hot set of the one before; rows that tie for the last places share them."""
    slices = [Slow(id for sample in samples[i : i + size] for id in sample) for i in range(0, len(samples), size)]
    found = [0.0]
    for before, now in pairwise(slices):
        places = max(1, int(part * len(before) + 0.5)) if before else 0
        inside = 0.0
        for count in sorted(set(before.values()), reverse=True):
            tied = [id for id in before if before[id] == count]
            inside += sum(now[id] for id in tied) * min(1.0, places / len(tied))
            places = max(0, places - len(tied))
        found.append(inside)
    return found


@given(SAMPLES, st.integers(1, 60))
def test_an_exact_profile_is_what_the_slow_way_finds(samples, cut):
    profiler = Profiler(["item"], ProfilerSettings(batch=BATCH, cards_per_node=CARDS), len(samples))
    for i in range(0, len(samples), cut):
        profiler.add({"item": bags_of(samples[i : i + cut])})
    heat = profiler.result("test")["item"]
    counts = Slow(id for sample in samples for id in sample)
    assert heat.exact and heat.slack == 0 and heat.samples == len(samples) and heat.lookups == counts.total()
    assert list(zip(heat.ids_H.tolist(), heat.counts_H.tolist(), strict=True)) == sorted(
        counts.items(), key=lambda pair: (-pair[1], pair[0])
    )
    assert dict(zip(heat.lengths_L.tolist(), heat.bags_L.tolist(), strict=True)) == Slow(map(len, samples))
    assert [tuple(b) for b in heat.batches] == [(size, heat.lookups, repeats(samples, size)) for size in (BATCH, BATCH * CARDS)]
    size = -(-len(samples) // 8)
    for part, name in zip(HOT, ("kept_1", "kept_5"), strict=True):
        expected = kept(samples, size, part)
        assert [getattr(each, name) for each in heat.slices if each.lookups] == pytest.approx(
            [value for i, value in enumerate(expected) if any(samples[i * size : (i + 1) * size])]
        )


def test_growth_and_one_id_a_sample_change_nothing():
    ids_N = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 5_003)[np.random.default_rng(2).zipf(1.2, 40_009) % 5_003]
    heat = profile_batches(({"user": part} for part in np.array_split(ids_N, 11)), batch=64)["user"]
    ids_H, counts_H = np.unique(ids_N, return_counts=True)
    assert len(ids_H) > SMALLEST and heat.exact
    assert dict(zip(heat.ids_H.tolist(), heat.counts_H.tolist(), strict=True)) == dict(
        zip(ids_H.tolist(), counts_H.tolist(), strict=True)
    )
    assert heat.batches[0].repeats == sum(len(p) - len(set(p.tolist())) for p in np.split(ids_N, range(64, len(ids_N), 64)))


def little_memory(monkeypatch, kib):
    """Give counters so much memory."""
    monkeypatch.setattr(profiling, "LEAST", 0)
    monkeypatch.setattr(profiling, "PAGE", 0)
    return ProfilerSettings(memory=REST + (kib << 10))


@pytest.mark.parametrize("exponent, seed", [(1.05, 0), (1.3, 1), (1.5, 2)])
def test_a_sketch_holds_what_it_states(monkeypatch, exponent, seed):
    random = np.random.default_rng(seed)
    rows = 60_001
    weights = np.arange(1, rows + 1) ** -exponent
    ids_N = random.permutation(rows)[random.choice(rows, 400_003, p=weights / weights.sum())] - 17
    profiler = Profiler(["item"], little_memory(monkeypatch, 100))
    for part in np.array_split(ids_N, 7):
        profiler.add({"item": LogIds(part)})
    counter = profiler.counters["item"]
    assert counter.sketched and counter.bytes <= 100 << 10
    most, slack = int(counter.tally[MOST]), int(counter.tally[SLACK])
    heat = profiler.result("test")["item"]
    counts = Slow(ids_N.tolist())
    found = dict(zip(heat.ids_H.tolist(), heat.counts_H.tolist(), strict=True))
    assert not heat.exact and heat.lookups == len(ids_N)
    assert slack <= 2 * len(ids_N) / most and heat.slack <= 2 * slack
    assert all(found.get(id, 0) <= count <= found.get(id, 0) + heat.slack for id, count in counts.items())
    assert set(heat.ids_H.tolist()) >= {id for id, count in counts.items() if count > heat.slack}
    assert abs(heat.distinct - len(counts)) <= 2 * ERROR * len(counts)
    curve = heat.curve()
    assert curve.lookups == pytest.approx(len(ids_N)) and curve.rows == heat.distinct


@given(st.lists(st.integers(0, 400), min_size=1, max_size=1_500), st.integers(0, 3))
def test_purges_never_break_the_bounds(ids, spread):
    counter = IdCounter("item", 64, 2)
    ids_N = np.array(ids, np.int64) * 10**spread
    counter.cells = np.zeros((32, 3), np.int64)  # so few that searches go past the last cell
    counter.tally[MOST] = 28
    at, ends_K = 0, np.array([len(ids_N)])
    while (at := counter.count(ids_N, at, ends_K, 0)) < len(ids_N):
        counter.purge(len(counter.cells))
        counter.tally[MOST] = 28
    counter.bags = {1: len(ids_N)}
    held = counter.cells[counter.cells[:, COUNT] > 0, ID]
    assert len(set(held.tolist())) == len(held) == counter.tally[USED]  # none twice: all are found where they are
    heat = counter.result(len(ids_N))
    found = dict(zip(heat.ids_H.tolist(), heat.counts_H.tolist(), strict=True))
    for id, count in Slow(ids_N.tolist()).items():
        assert found.get(id, 0) <= count <= found.get(id, 0) + heat.slack


def test_ids_that_stay_are_found_where_a_purge_has_left_them():
    random = np.random.default_rng(9)
    for _ in range(200):
        counter = IdCounter("item", 64, 2)
        counter.cells = np.zeros((16, 3), np.int64)  # so few that searches go past the last cell
        counter.tally[MOST] = 14
        ids_N = np.repeat(random.integers(0, 10**6, 14), random.integers(1, 9, 14))
        counter.count(ids_N, 0, np.array([len(ids_N)]), 0)
        counter.purge(16)
        stay = counter.cells[counter.cells[:, COUNT] > 0, ID].copy()
        counter.count(stay, 0, np.array([len(stay)]), 0)
        assert counter.tally[USED] == len(stay)  # else some were taken for new


def test_a_table_that_came_first_gives_way_to_small_ones(monkeypatch):
    random = np.random.default_rng(4)
    settings = little_memory(monkeypatch, 1_000)
    profiler = Profiler(["huge", "small", "tiny"], settings)
    empty = LogIds(np.zeros(0, np.int64), np.zeros(10_001, np.int64))
    profiler.add({"huge": LogIds(random.permutation(10_000)), "small": empty, "tiny": empty})
    assert not profiler.counters["huge"].sketched
    for _ in range(9):
        huge, small = random.integers(0, 10**9, 10_000), random.integers(0, 3_001, 10_000)
        profiler.add({"huge": LogIds(huge), "small": LogIds(small), "tiny": LogIds(small % 5)})
        assert sum(each.bytes for each in profiler.counters.values()) <= 1_000 << 10
    heat = profiler.result("test")
    assert [table.exact for table in heat.tables.values()] == [False, True, True]
    assert heat["small"].distinct == 3_001


def test_the_largest_is_halved_where_a_small_one_needs_its_share():
    counters = [IdCounter(name, 64, 2) for name in ("a", "b", "c", "d")]
    largest = counters[2]
    for ids_N in np.array_split(np.random.default_rng(0).permutation(20_000), 3):
        at = 0
        while (at := largest.count(ids_N, at, np.array([len(ids_N)]), 0)) < len(ids_N):
            largest.grow()
    before = largest.bytes
    memory = int(1.2 * reserved(len(largest.cells))) + 4 * reserved(SMALLEST)
    make_room(counters[0], counters, memory)
    assert len(counters[0].cells) == 4 * SMALLEST and not counters[0].sketched
    assert largest.sketched and largest.bytes < before


def test_batches_come_in_every_form():
    torch = pytest.importorskip("torch")
    forms = {
        "one": np.array([1, 2, 2], np.int32),
        "two": torch.tensor([[1, 2], [3, 3], [1, 1]]),
        "bags": (torch.tensor([5, 6, 5, 5]), torch.tensor([0, 1, 1, 4])),
        "uint64": np.array([2**64 - 1, 0, 1], np.uint64),
    }
    heat = profile_batches([forms, forms], samples=6)
    assert heat["one"].counts_H.tolist() == [4, 2] and heat["two"].counts_H.tolist() == [6, 4, 2]
    assert heat["bags"].ids_H.tolist() == [5, 6] and heat["bags"].lengths_L.tolist() == [0, 1, 3]
    assert heat["uint64"].ids_H.tolist() == [-1, 0, 1]
    assert {table.samples for table in heat.tables.values()} == {6} and heat["two"].per_sample == 2.0


@pytest.mark.parametrize(
    "batches, fields",
    [
        ([], {"parameter": "batches"}),
        ([{"a": np.zeros(3)}], {"table": "a", "value": "float64"}),
        ([{"a": np.zeros((1, 1, 1), int)}], {"table": "a", "value": 3}),
        ([{"a": (np.zeros(3, int), np.array([0, 2]))}], {"table": "a", "value": [0, 2], "needed": 3}),
        ([{"a": (np.zeros(3, int), np.array([0, 3, 2, 3]))}], {"table": "a", "value": [0, 3, 2, 3], "needed": 3}),
        ([{"a": np.zeros(3, int), "b": np.zeros(2, int)}], {"parameter": "batches", "value": {"a": 3, "b": 2}}),
        ([{"a": np.zeros(3, int)}, {"b": np.zeros(3, int)}], {"parameter": "batches", "value": {"b": 3}}),
    ],
)
def test_bad_batches_are_refused_with_their_numbers(batches, fields):
    with pytest.raises(BadInput, check=has(**fields)):
        profile_batches(batches)


@pytest.mark.parametrize("settings", [{"memory": 1 << 20}, {"batch": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(BadInput, check=has(parameter=next(iter(settings)))):
        profile_batches([{"a": np.zeros(3, int)}], **settings)
