"""Heat profiles as values: files, merges, curves."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from support import has
from thermocline.errors import BadInput, FormatError
from thermocline.heat import HeatProfile, TableHeat, heat_file, merge
from thermocline.heat.cardinality import ERROR, estimate, registers_of
from thermocline.heat.curve import Curve
from thermocline.heat.profile import BatchRepeats, LogSlice, hottest_first, merge_tables


def exact(ids_N, name="item", samples=None):
    """The heat of some ids, one a sample, as numpy counts them."""
    ids_H, counts_H = np.unique(np.asarray(ids_N, np.int64), return_counts=True)
    order = np.lexsort((ids_H, -counts_H))
    count = len(ids_N)
    return TableHeat(
        name, count if samples is None else samples, count, len(ids_H), True, ids_H[order], counts_H[order].astype(np.int64),
        np.array([1]), np.array([count]), batches=(BatchRepeats(7, count, count // 3),),
        slices=(LogSlice(count, 0.0, 0.0, True),),
    )  # fmt: skip


def sketched(ids_N, most, name="item"):
    """The hottest `most` ids of a log, with all that a sketch promises of the others."""
    whole = exact(ids_N, name)
    slack = int(whole.counts_H[most]) if len(whole.counts_H) > most else 0
    registers = registers_of(whole.ids_H)
    return TableHeat(
        name, whole.samples, whole.lookups, max(estimate(registers), most), False, whole.ids_H[:most], whole.counts_H[:most],
        whole.lengths_L, whole.bags_L, slack=slack, registers=registers,
    )  # fmt: skip


def same(one: TableHeat, other: TableHeat) -> bool:
    plain = ("name", "samples", "lookups", "distinct", "exact", "missing", "batches", "slices", "slack")
    arrays = ("ids_H", "counts_H", "lengths_L", "bags_L", "registers")
    return all(getattr(one, name) == getattr(other, name) for name in plain) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays
    )


LOGS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), max_size=40), min_size=1, max_size=4)


@given(LOGS)
def test_a_merge_of_exact_parts_is_the_profile_of_the_whole(logs):
    merged = merge_tables([exact(log) for log in logs])
    whole = exact([id for log in logs for id in log])
    for name in ("samples", "lookups", "distinct", "exact", "slack"):
        assert getattr(merged, name) == getattr(whole, name)
    for name in ("ids_H", "counts_H", "lengths_L", "bags_L"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(whole, name))
    assert merged.batches[0].lookups == whole.lookups


@given(LOGS.filter(lambda logs: len(logs) >= 3))
def test_merging_is_associative_and_counts_do_not_depend_on_order(logs):
    a, b, c = [exact(log) for log in logs[:3]]
    assert same(merge_tables([a, b, c]), merge_tables([merge_tables([a, b]), c]))
    assert same(merge_tables([a, b, c]), merge_tables([a, merge_tables([b, c])]))
    np.testing.assert_array_equal(merge_tables([a, b, c]).ids_H, merge_tables([c, a, b]).ids_H)


@pytest.mark.parametrize("first_exact", [True, False])
def test_a_merge_of_sketches_keeps_its_promises(first_exact):
    random = np.random.default_rng(5)
    logs = [random.zipf(1.3, 4_001) % 1_501, random.zipf(1.4, 3_003) % 1_999 + 3]
    parts = [exact(logs[0]) if first_exact else sketched(logs[0], 60), sketched(logs[1], 50)]
    merged, whole = merge_tables(parts), exact(np.concatenate(logs))
    true = dict(zip(whole.ids_H.tolist(), whole.counts_H.tolist(), strict=True))
    kept = dict(zip(merged.ids_H.tolist(), merged.counts_H.tolist(), strict=True))
    assert not merged.exact and merged.lookups == whole.lookups
    assert all(kept.get(id, 0) <= count <= kept.get(id, 0) + merged.slack for id, count in true.items())
    assert abs(merged.distinct - whole.distinct) <= 2 * ERROR * whole.distinct
    assert len(merged.ids_H) == max(len(part.ids_H) for part in parts)


def test_what_a_merge_of_sketches_cuts_is_within_its_slack():
    parts = [sketched(np.repeat(np.arange(first, first + 6), [50, 50, 50, 50, 50, 1]), 5) for first in (0, 100)]
    merged = merge_tables(parts)
    assert len(merged.ids_H) == 5 and merged.slack == 50 + 1 + 1


def test_counts_above_16_bits_are_sorted_too():
    counts_H = np.array([70_000, 3, 65_535, 10**12, 65_536, 3, 10**12, 65_534])
    ids_H, sorted_H = hottest_first(np.arange(7, -1, -1), counts_H)
    assert sorted_H.tolist() == sorted(counts_H.tolist(), reverse=True)
    assert ids_H.tolist() == [1, 4, 7, 3, 5, 0, 2, 6]


def test_parts_of_other_tables_are_refused_by_name():
    with pytest.raises(BadInput, check=has(parameter="parts")):
        merge([HeatProfile({"item": exact([1])}), HeatProfile({"user": exact([1], "user")})])
    with pytest.raises(BadInput, check=has(parameter="parts")):
        merge([])


def test_a_heat_file_comes_back_as_it_was_with_the_sha256_of_its_content(tmp_path):
    path = tmp_path / "heat.tc"
    empty = exact([], "a table / with: any name")
    profile = HeatProfile({"item": exact([3, 1, 3, -5]), "s": sketched(np.arange(99) // 7, 5, "s"), empty.name: empty}, "a log")
    profile.save(path)
    back = HeatProfile.load(path)
    assert list(back.tables) == list(profile.tables) and (back.source, back.created) == ("a log", profile.created)
    assert all(same(back[name], profile[name]) for name in profile.tables)
    assert [each.name for each in tmp_path.iterdir()] == ["heat.tc"]
    for name, created in (("without time.tc", ""), ("old.tc", profile.created)):  # as version 0.1 wrote them
        arrays, text = heat_file._parts(replace(profile, created=created))
        heat_file.write_arrays(tmp_path / name, arrays, {"thermocline.heat": text})
    content = hashlib.sha256((tmp_path / "without time.tc").read_bytes()).hexdigest()
    assert profile.sha256 == back.sha256 == content
    assert replace(profile, created="2001-02-03T04:05:06+00:00").sha256 == profile.sha256
    assert replace(profile, source="another log").sha256 != profile.sha256
    old = HeatProfile.load(tmp_path / "old.tc")
    assert old.is_named_by(hashlib.sha256((tmp_path / "old.tc").read_bytes()).hexdigest()), (
        "plans of version 0.1 named the whole file"
    )
    with safe_open(path, "np") as file:
        assert json.loads(file.metadata()["thermocline.heat"])["version"] == 1


def test_files_that_are_not_heat_are_refused(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(BadInput, check=has(path=str(tmp_path / "none.tc"))):
        HeatProfile.load(tmp_path / "none.tc")
    (tmp_path / "text.tc").write_text("id,count\n1,2\n")
    with pytest.raises(FormatError, check=has(path=str(tmp_path / "text.tc"))):
        HeatProfile.load(tmp_path / "text.tc")
    save_file({"x": np.zeros(3)}, tmp_path / "other.tc")
    with pytest.raises(FormatError, check=has(path=str(tmp_path / "other.tc"))):
        HeatProfile.load(tmp_path / "other.tc")
    save_file({"x": np.zeros(3)}, tmp_path / "later.tc", {"thermocline.heat": '{"version": 99}'})
    with pytest.raises(FormatError, check=has(version=99)):
        HeatProfile.load(tmp_path / "later.tc")
    for number, text in enumerate(['{"version": 1}', "no JSON", '{"version": 1, "tables": [{"name": "a"}]}']):
        save_file({"x": np.zeros(3)}, tmp_path / f"{number}.tc", {"thermocline.heat": text})
        with pytest.raises(FormatError, check=has(path=str(tmp_path / f"{number}.tc"))):
            HeatProfile.load(tmp_path / f"{number}.tc")


def test_an_unknown_table_is_named_with_those_there_are():
    with pytest.raises(BadInput, check=has(table="itm", available=["item"])):
        _ = HeatProfile({"item": exact([1])})["itm"]


@pytest.mark.parametrize("count", [0, 1, 100, 12_345, 400_003])
def test_cardinality_is_estimated_within_its_error(count):
    registers = registers_of(np.arange(count) * 7 - 3 * count)
    assert abs(estimate(registers) - count) <= 1.5 * ERROR * count
    np.testing.assert_array_equal(np.maximum(registers, registers_of(np.arange(count) * 7 - 3 * count)), registers)


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.3])
def test_the_tail_of_a_sketched_curve_adds_up_and_is_near_the_truth(exponent):
    rows, heavy = 100_003, 1_000
    counts_R = np.maximum(1, 3e5 * np.arange(1, rows + 1) ** -exponent).astype(np.int64)
    curve = Curve.with_tail(counts_R[:heavy], rows, int(counts_R.sum()))
    assert curve.rows == rows and curve.lookups == pytest.approx(counts_R.sum())
    assert (np.diff(curve.share_K) <= 1e-9 * curve.share_K[:-1]).all()
    reach_K = np.cumsum(curve.rows_K).astype(int)
    true_K = np.cumsum(counts_R)[reach_K - 1] / counts_R.sum()
    assert np.abs(np.cumsum(curve.lookups_K) / curve.lookups - true_K).max() < 0.03


@pytest.mark.parametrize("rows, lookups", [(10, 60), (10, 1_000), (3, 55), (3, 70), (1_000, 1_500), (1_000, 200)])
def test_a_tail_that_cannot_fall_is_flat_and_one_without_rows_is_none(rows, lookups):
    curve = Curve.with_tail(np.array([30, 20, 5]), rows, lookups)
    assert curve.rows == max(3, rows)
    assert curve.lookups == pytest.approx(lookups)
    assert (np.diff(curve.share_K) <= 1e-9).all()


def test_profiles_are_read_without_what_counts_logs():
    code = "import sys, thermocline.heat.heat_file; sys.exit(bool({'numba', 'pyarrow', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_shares_are_read_off_the_curve():
    heat = exact([1] * 50 + [2] * 30 + list(range(3, 23)))
    assert heat.hottest(0.0) == 0.5
    assert heat.hottest(0.1) == pytest.approx(0.8)
    assert heat.hottest(1.0) == pytest.approx(1.0)
    assert heat.repeats == {7: pytest.approx(1 / 3, abs=0.01)} and heat.per_sample == 1.0 and heat.kept == {}


@pytest.mark.parametrize("rows", [0, 1, 63, 5_003])
def test_ids_are_sorted_by_falling_count_and_then_by_id(rows):
    random = np.random.default_rng(rows)
    ids_H, counts_H = random.integers(-(2**62), 2**62, rows), random.zipf(1.2, rows).clip(max=10**9)
    order = np.lexsort((ids_H, -counts_H))
    sorted_ids_H, sorted_counts_H = hottest_first(ids_H, counts_H)
    np.testing.assert_array_equal(sorted_ids_H, ids_H[order])
    np.testing.assert_array_equal(sorted_counts_H, counts_H[order])
