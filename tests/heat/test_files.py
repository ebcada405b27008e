"""Logs in every form, profiled whole, in parts and with interruptions."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from support import has
from thermocline.errors import BadInput, FormatError
from thermocline.heat import HeatProfile, merge, profiler
from thermocline.heat import log_files as files
from thermocline.heat import log_reader as logs
from thermocline.heat.log_files import ProfilingInterrupted, profile_files
from thermocline.heat.profiler import REST, ProfilerSettings
from thermocline.heat.show import compare_profiles, length, numbers, small_curve

from .test_profile import same

DATA = Path(os.environ.get("THERMOCLINE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def write(path, columns, row_group=1_500):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group)
    return path


def log(path, samples=5_003, seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 5, samples)
    values = pyarrow.array(random.zipf(1.3, int(lengths.sum())) % 301)
    bags = pyarrow.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), values)
    return write(path, {"user": random.integers(-50, 2_000, samples), "bag": bags, "rating": random.random(samples)})


def equal(one: HeatProfile, other: HeatProfile) -> bool:
    return list(one.tables) == list(other.tables) and all(same(one[name], other[name]) for name in one.tables)


def test_parquet_with_ids_and_lists_is_counted_as_numpy_does(tmp_path):
    path = log(tmp_path / "log.parquet")
    heat, table = profile_files([path], ["user", "bag"]), parquet.read_table(path)
    for name, values in (("user", table["user"]), ("bag", table["bag"].combine_chunks().flatten())):
        ids_H, counts_H = np.unique(values.to_numpy(), return_counts=True)
        assert dict(zip(heat[name].ids_H.tolist(), heat[name].counts_H.tolist(), strict=True)) == dict(
            zip(ids_H.tolist(), counts_H.tolist(), strict=True)
        )
        assert heat[name].samples == len(table) and len(heat[name].slices) == 8
    lengths = table["bag"].combine_chunks().value_lengths().to_numpy()
    assert heat["bag"].bags_L.tolist() == np.bincount(lengths).tolist()


def test_all_kinds_of_integers_and_lists_are_read(tmp_path):
    values = [[1, 2], None, [], [3, None], [2**40, 7]]
    columns = {
        "small": pyarrow.array([1, 2, 3, 4, 255], pyarrow.uint8()),
        "nulls": pyarrow.array([5, None, 5, None, -6], pyarrow.int32()),
        "huge": pyarrow.array([2**64 - 1, 0, 0, 1, 2**63], pyarrow.uint64()),
        "list": pyarrow.array(values, pyarrow.list_(pyarrow.int64())),
        "large": pyarrow.array(values, pyarrow.large_list(pyarrow.int64())),
        "pair": pyarrow.array([[1, 2], [1, 2], None, [3, None], [9, 9]], pyarrow.list_(pyarrow.int32(), 2)),
        "coded": pyarrow.array([7, 8, 7, 7, None]).dictionary_encode(),
    }
    heat = profile_files([write(tmp_path / "log.parquet", columns)], list(columns))
    assert {name: sorted(table.ids_H.tolist()) for name, table in heat.tables.items()} == {
        "small": [1, 2, 3, 4, 255], "nulls": [-6, 5], "huge": [-(2**63), -1, 0, 1], "list": [1, 2, 3, 7, 2**40],
        "large": [1, 2, 3, 7, 2**40], "pair": [1, 2, 3, 9], "coded": [7, 8],
    }  # fmt: skip
    assert [table.missing for table in heat.tables.values()] == [0, 2, 0, 2, 2, 2, 1]
    assert heat["list"].lengths_L.tolist() == [0, 1, 2] and heat["list"].bags_L.tolist() == [2, 1, 2]
    assert heat["nulls"].lookups == 3 and heat["nulls"].samples == 5 and heat["nulls"].bags_L.tolist() == [2, 3]


def criteo_lines(count, seed=3):
    random = np.random.default_rng(seed)
    ids_BF = random.zipf(1.4, (count, 26)) % 2**32
    for ids_F in ids_BF.tolist():
        cells = ["1", *["3"] * 13, *(f"{id:08x}" if id % 5 else "" for id in ids_F)]
        yield "\t".join(cells), [id if id % 5 else 0 for id in ids_F]


@pytest.mark.parametrize("name, packed", [("day_0.gz", True), ("train.txt", False), ("log.tsv", False)])
def test_criteo_text_is_read_with_missing_as_zero(tmp_path, name, packed):
    lines, ids = zip(*criteo_lines(307), strict=True)
    text = ("\n".join(lines) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if packed else text)
    heat = profile_files([tmp_path / name])
    assert list(heat.tables) == [f"C{i}" for i in range(1, 27)]
    ids_H, counts_H = np.unique(np.array(ids)[:, 2], return_counts=True)
    assert dict(zip(heat["C3"].ids_H.tolist(), heat["C3"].counts_H.tolist(), strict=True)) == dict(
        zip(ids_H.tolist(), counts_H.tolist(), strict=True)
    )


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_csv_has_a_header_and_empty_cells_are_missing(tmp_path, name, end):
    text = ('"user",item,why\n1,-5,x\n2,,y\n1,9,"a, b"' + end).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    heat = profile_files([tmp_path / name], ["item", "user"])
    assert heat["user"].ids_H.tolist() == [1, 2] and heat["user"].samples == 3
    assert heat["item"].ids_H.tolist() == [-5, 9] and heat["item"].missing == 1


def test_a_mark_before_the_first_name_is_no_part_of_it(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbfuser,item\r\n1,2\r\n1,3\r\n")
    assert profile_files([path], ["user"])["user"].counts_H.tolist() == [2]


def test_a_column_that_a_file_has_twice_is_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("user,user,item\n1,2,3\n")
    with pytest.raises(BadInput, check=has(value=["user"])):
        profile_files([path], ["user"])
    assert profile_files([path], ["item"])["item"].lookups == 1


def test_parts_that_end_with_a_batch_merge_to_the_profile_of_the_whole(tmp_path):
    path = log(tmp_path / "log.parquet", 4_000)
    table = parquet.read_table(path)
    settings = ProfilerSettings(batch=50, cards_per_node=4)
    parts = [
        write(tmp_path / f"{i}.parquet", table.slice(start, size))
        for i, (start, size) in enumerate([(0, 1_600), (1_600, 2_400)])
    ]
    whole = profile_files([path], ["user", "bag"], settings=settings)
    merged = merge([profile_files([part], ["user", "bag"], settings=settings) for part in parts])
    together = profile_files(parts, ["user", "bag"], settings=settings)
    assert equal(together, whole)
    for name in whole.tables:
        one, other = merged[name], whole[name]
        assert (one.samples, one.lookups, one.distinct, one.batches) == (
            other.samples,
            other.lookups,
            other.distinct,
            other.batches,
        )
        for array in ("ids_H", "counts_H", "lengths_L", "bags_L"):
            np.testing.assert_array_equal(getattr(one, array), getattr(other, array))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(logs, "LARGEST_CHUNK", 1 << 10)
    monkeypatch.setattr(logs, "BLOCK", 1 << 12)


@pytest.mark.parametrize("form", ["parquet", "csv", "sketched"])
def test_a_profile_that_was_interrupted_is_the_same_as_one_that_was_not(tmp_path, monkeypatch, small_chunks, form):
    settings = ProfilerSettings()
    if form == "csv":
        ids = np.random.default_rng(8).zipf(1.3, 5_003).clip(max=2**62)
        path = tmp_path / "log.csv"
        path.write_text("user,bag\n" + "".join(f"{id},{id % 7}\n" for id in ids.tolist()))
        paths = [path]
    else:
        paths = [log(tmp_path / f"{seed}.parquet", samples, seed) for seed, samples in enumerate([1_501, 1_022, 7_001])]
    if form == "sketched":
        monkeypatch.setattr(profiler, "LEAST", 0)
        monkeypatch.setattr(profiler, "PAGE", 0)
        settings = ProfilerSettings(memory=REST + (100 << 10))
    kind, columns, output = {"settings": settings}, ["user", "bag"], tmp_path / "heat.tc"
    whole = profile_files(paths, columns, **kind)
    assert whole["user"].exact == (form != "sketched")
    chunk, random = 0, np.random.default_rng(5)
    ends = set(random.choice(np.arange(1, 5), 2, replace=False).tolist())

    def stop():
        return chunk in ends

    def count(done, total, what):
        nonlocal chunk
        chunk += 1

    interruptions = 0
    while not output.exists():
        try:
            profile_files(paths, columns, output=output, report=count, stop=stop, **kind)
        except ProfilingInterrupted as kept:
            assert not output.exists() and "samples" in str(kept)
            ends.discard(chunk)
            interruptions += 1
    assert interruptions == 2
    assert equal(HeatProfile.load(output), whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*(path.name for path in paths), "heat.tc"])


def test_a_process_that_dies_goes_on_from_the_last_state_it_kept(tmp_path, monkeypatch, small_chunks):
    monkeypatch.setattr(files, "SAVE_EVERY", 0.0)
    path, output = log(tmp_path / "log.parquet"), tmp_path / "heat.tc"
    seen = []

    failure = RuntimeError("the machine stops")

    def die(done, total, what):
        seen.append(done)
        if done > 2_000 and len(seen) < 6:
            raise failure

    with pytest.raises(RuntimeError, check=lambda error: error is failure):
        profile_files([path], ["user"], output=output, report=die)
    died = seen[-1]
    profile_files([path], ["user"], output=output, report=lambda done, total, what: seen.append(done) or None)
    assert seen[seen.index(died) + 1] == died
    assert equal(HeatProfile.load(output), profile_files([path], ["user"]))


def test_other_columns_begin_anew(tmp_path, small_chunks):
    path, output = log(tmp_path / "log.parquet"), tmp_path / "heat.tc"
    with pytest.raises(ProfilingInterrupted):
        profile_files([path], ["user"], output=output, stop=lambda: True)
    assert equal(profile_files([path], ["bag"], output=output), profile_files([path], ["bag"]))


def test_bad_logs_are_refused_with_the_way_out(tmp_path):
    path = log(tmp_path / "log.parquet")
    columns = ("user", "bag", "rating")
    with pytest.raises(BadInput, check=has(parameter="columns", value=["itm"], available=columns)):
        profile_files([path], ["itm"])
    with pytest.raises(FormatError, check=has(column="rating", value="double")):
        profile_files([path], ["rating"])
    with pytest.raises(BadInput, check=has(parameter="columns", available=columns)):
        profile_files([path])
    with pytest.raises(BadInput, check=has(parameter="columns", value=["user"])):
        profile_files([path], ["user", "user"])
    with pytest.raises(BadInput, check=has(path=str(tmp_path / "none.parquet"))):
        profile_files([tmp_path / "none.parquet"], ["user"])
    with pytest.raises(BadInput, check=has(parameter="paths")):
        profile_files([], ["user"])
    with pytest.raises(BadInput, check=has(parameter="paths")):
        profile_files([write(tmp_path / "empty.parquet", {"user": np.zeros(0, int)})], ["user"])
    for name, content, fields in [
        ("zero.parquet", b"", {"size": 0}),
        ("text.parquet", b"not Parquet at all", {"expected": "parquet"}),
        ("cut.csv.gz", gzip.compress(b"user,item\n" + b"1,2\n" * 99)[:30], {}),
        ("float.csv", b"user,item\n1.5,2\n", {"column": "user", "value": "double"}),
        ("short.tsv", b"1\t2\t3\n", {"expected": "tsv"}),
        (
            "hex.tsv",
            ("1\t" + "\t".join(["1"] * 13 + ["xyz"] * 26) + "\n").encode(),
            {"column": "C1", "expected": "hexadecimal"},
        ),
        (
            "long.tsv",
            ("1\t" + "\t".join(["1"] * 13 + ["123456789"] * 26) + "\n").encode(),
            {"column": "C1", "expected": "hexadecimal"},
        ),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, check=has(path=str(tmp_path / name), **fields)):
            profile_files([tmp_path / name], ["user"] if "csv" in name else [])


def test_a_state_file_that_is_none_is_not_overwritten(tmp_path):
    path, output = log(tmp_path / "log.parquet"), tmp_path / "heat.tc"
    profile_files([path], ["user"]).save(tmp_path / "heat.tc.partial")
    with pytest.raises(FormatError, check=has(path=f"{output}.partial")):
        profile_files([path], ["user"], output=output)


def test_numbers_and_changes_are_those_of_the_counts(tmp_path):
    old = profile_files([write(tmp_path / "old.parquet", {"item": np.repeat(np.arange(100), 100 - np.arange(100))})], ["item"])
    new = profile_files(
        [write(tmp_path / "new.parquet", {"item": np.repeat(np.arange(2, 102), 100 - np.arange(100))})], ["item"]
    )
    first, fifth = compare_profiles(old, new)
    assert (first.rows, first.changed, first.kept) == (1, 1.0, 0.0) and first.lost == first.best == 100 / 5_050
    assert (fifth.rows, fifth.changed) == (5, 2 / 5)
    assert fifth.best == pytest.approx(490 / 5_050) and fifth.lost == pytest.approx((490 - 297) / 5_050)
    table = numbers(old)["tables"][0]
    assert table["lookups"] == sum(table["curve"]["lookups"]) == 5_050 and table["hottest"]["0.1"] == pytest.approx(955 / 5_050)
    assert [length(old["item"], part) for part in (0, 0.5, 1)] == [1, 1, 1]
    assert len(small_curve(old["item"])) == 12 and small_curve(old["item"])[-1] == "█"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real logs are not in {DATA} (THERMOCLINE_DATA names another folder)")
def test_real_clicks_have_the_numbers_that_are_published_with_them():
    heat = profile_files([DATA / "globo_clicks_first80.parquet"], ["item"])["item"]
    assert (heat.lookups, heat.distinct, heat.exact) == (2_390_544, 36_439, True)
    shares = [100 * heat.hottest(part) for part in (0.01, 0.05, 0.1)]
    assert shares == pytest.approx([69.8, 90.0, 94.7], abs=0.06)
    assert 100 * (heat.counts_H == 1).mean() == pytest.approx(54.9, abs=0.06)
