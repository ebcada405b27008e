"""Reading click logs: the same samples from text, compressed text and Parquet, in any batches, from any start."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from support import has
from thermocline import BadInput, FormatError
from thermocline.data.click_files import ClickColumns, ClickFile, open_log
from thermocline.data.click_log import Clicks, rebatch
from thermocline.heat import profile_files
from thermocline.heat.log_columns import id_of_text

SAMPLES = 1003
REAL = Path(os.environ.get("THERMOCLINE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def made_up():
    """Labels, dense counts (-1 stands for missing, -2 occurs) and categories (0 stands for missing)."""
    generator = np.random.default_rng(5)
    label = generator.integers(0, 2, SAMPLES)
    dense = generator.integers(-2, 300, (SAMPLES, 13))
    ids = generator.integers(0, 40, (SAMPLES, 26)) * 0x06F00D01 % 2**32
    return label, dense, ids


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    label, dense, ids = made_up()
    lines = [
        "\t".join([str(y), *("" if x == -1 else str(x) for x in i), *("" if c == 0 else f"{c:08x}" for c in cs)])
        for y, i, cs in zip(label, dense, ids, strict=True)
    ]
    text = "\n".join(lines) + "\n"
    (folder / "log.tsv").write_text(text)
    (folder / "log.txt.gz").write_bytes(gzip.compress(text.encode()))
    columns = {"label": pyarrow.array(label.astype(np.uint8))}
    columns |= {f"I{i + 1}": pyarrow.array(dense[:, i], pyarrow.int32(), mask=dense[:, i] == -1) for i in range(13)}
    columns |= {f"C{i + 1}": pyarrow.array(ids[:, i].astype(np.uint32)) for i in range(26)}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "log.parquet", row_group_size=100)
    return folder


NAMES = ["log.tsv", "log.txt.gz", "log.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_every_form_gives_the_same_samples(files, name):
    label, dense, ids = made_up()
    file = ClickFile(files / name)
    clicks = Clicks.cat(list(file.chunks()))
    assert file.samples == SAMPLES
    assert clicks.label_B.tolist() == label.tolist()
    assert clicks.ids_BF.tolist() == ids.tolist()
    expected = torch.tensor([[math.log(1 + max(x, 0)) for x in row] for row in dense])
    torch.testing.assert_close(clicks.dense_BI, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first, count", [(0, 1), (99, 2), (100, 100), (563, None), (1002, 5), (1003, None)])
def test_a_stretch_of_a_file_is_that_stretch(files, name, first, count):
    everything = Clicks.cat(list(ClickFile(files / name).chunks()))
    parts = list(ClickFile(files / name).chunks(first, count))
    expected = everything.narrow(first, SAMPLES if count is None else count)
    assert sum(len(part.label_B) for part in parts) == len(expected.label_B)
    for part, whole in zip(Clicks.cat(parts), expected, strict=True) if parts else ():
        assert torch.equal(part, whole)


def test_a_resumed_stream_goes_on_where_it_stopped(files):
    train, test = open_log(files / "log.parquet")
    assert (train.samples, test.samples) == (802, 201)
    whole = list(train.batches(63))
    assert [len(batch.label_B) for batch in whole] == [63] * 12 + [46]
    for resumed, expected in zip(train.batches(63, first=5), whole[5:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))


def test_the_test_part_is_what_comes_after_the_training_part(files):
    label, _, _ = made_up()
    train, test = open_log(files / "log.tsv", hashed=50)
    assert train.rows == (50,) * 26
    labels = [batch.label_B for part in (train, test) for batch in part.batches(100)]
    assert torch.cat(labels).tolist() == label.tolist()


def test_two_files_are_not_split(files):
    train, test = open_log(files / "log.tsv", files / "log.parquet")
    assert (train.samples, test.samples) == (SAMPLES, SAMPLES)
    for a, b in zip(train.batches(200), test.batches(200), strict=True):
        assert torch.equal(a.ids_BF, b.ids_BF)


def test_rebatching_keeps_order_and_loses_nothing():
    chunks = [Clicks(torch.arange(n) + s, torch.empty(n, 0), torch.empty(n, 1)) for s, n in ((0, 3), (3, 0), (3, 10), (13, 1))]
    batches = [batch.label_B.tolist() for batch in rebatch(chunks, 4)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]


@pytest.mark.parametrize(
    "line",
    [
        "1\t2\t3",
        "1" + "\t5" * 13 + "\tffff" * 25 + "\txyz",
        "1" + "\t5" * 13 + "\tffff" * 25 + "\t123456789",
        "1" + "\tfive" * 13 + "\tffff" * 26,
        "3" + "\t5" * 13 + "\tffff" * 26,
    ],
)
def test_a_text_that_is_no_log_is_refused(tmp_path, line):
    (tmp_path / "bad.tsv").write_text(line + "\n")
    with pytest.raises(FormatError, check=has(path=str(tmp_path / "bad.tsv"))):
        list(ClickFile(tmp_path / "bad.tsv").chunks())


def test_files_that_are_no_logs_are_refused(tmp_path):
    with pytest.raises(BadInput, check=has(path=str(tmp_path / "nothing.parquet"))):
        ClickFile(tmp_path / "nothing.parquet")
    (tmp_path / "text.parquet").write_text("not Parquet at all, but long enough to look inside")
    with pytest.raises(FormatError, check=has(path=str(tmp_path / "text.parquet"))):
        ClickFile(tmp_path / "text.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(FormatError, check=has(columns=["a"])):
        ClickFile(tmp_path / "other.parquet")


def test_pairs_are_split_by_pair_and_shuffled_by_seed(tmp_path):
    generator = np.random.default_rng(3)
    pair = generator.permutation(40 * 50)[:1500]
    rating = generator.integers(1, 6, 1500)
    columns = {"user": pair // 50 + 1, "item": pair % 50 + 1, "rating": rating}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
    train, test = open_log(tmp_path / "pairs.parquet", seed=1)
    assert train.samples + test.samples == 1500 and 1150 < train.samples < 1250
    assert train.dense == 0 and len(train.rows) == 2
    epochs = [torch.cat([batch.ids_BF for batch in train.batches(100, epoch)]) for epoch in (0, 0, 1)]
    assert torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], epochs[2])
    other, same_test = open_log(tmp_path / "pairs.parquet", seed=2)
    assert not torch.equal(next(iter(train.batches(500))).ids_BF, next(iter(other.batches(500))).ids_BF)
    assert torch.equal(next(iter(test.batches(500))).ids_BF, next(iter(same_test.batches(500))).ids_BF)
    with pytest.raises(BadInput, check=has(path=str(tmp_path / "pairs.parquet"))):
        open_log(tmp_path / "pairs.parquet", hashed=10)
    clicks = sum(batch.label_B.sum().item() for log in (train, test) for batch in log.batches(500))
    assert clicks == (rating >= 4).sum()


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no folder of real logs at {REAL} (THERMOCLINE_DATA names it)")
def test_the_real_logs_are_what_their_publishers_say():
    criteo = Clicks.cat(list(ClickFile(REAL / "criteo_kaggle_head10k.parquet").chunks()))
    assert criteo.dense_BI.shape == (10_000, 13) and criteo.ids_BF.shape == (10_000, 26)
    assert criteo.dense_BI.min() == 0 and criteo.dense_BI.isfinite().all()
    train, test = open_log(REAL / "movielens1m_pairs.parquet")
    assert train.samples + test.samples == 1_000_209 and abs(train.samples / 1_000_209 - 0.8) < 0.002
    assert train.rows[0] == 6041 and 3650 < train.rows[1] <= 3707


def test_csv_with_a_header_is_read_as_parquet_is(tmp_path):
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    table = pyarrow.table({"label": [0, 1, 1], "I1": [3, None, 5], "C1": [7, None, 9], "C2": [1, 2, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "log.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "log.csv")
    from_parquet, from_csv = (next(ClickFile(tmp_path / name).chunks()) for name in ("log.parquet", "log.csv"))
    assert all(map(torch.equal, from_parquet, from_csv))


def write_clicks(path, head="clicked;shop;price;at", lines=("1;tea;2.5;7.0", "0;rum;;8.0", "1;;3;", "0;tea;-4;7.0")):
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


ANY = ClickColumns("clicked", ("price",), ("shop", "at"))


def test_any_columns_of_csv_are_a_click_log(tmp_path):
    clicks = Clicks.cat(list(ClickFile(write_clicks(tmp_path / "log.csv"), ANY).chunks()))
    tea, rum = id_of_text("tea"), id_of_text("rum")
    assert clicks.label_B.tolist() == [1, 0, 1, 0]
    assert clicks.ids_BF.tolist() == [[tea, 7], [rum, 8], [0, 0], [tea, 7]]
    torch.testing.assert_close(clicks.dense_BI[:, 0], torch.tensor([3.5, 1, 4, 1]).log())


def test_parquet_has_the_ids_of_csv_and_of_a_heat_profile(tmp_path):
    table = {"clicked": [True, False, True], "shop": ["tea", None, "0f"], "at": [7.0, math.nan, -3.0], "price": [1, None, 2]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "log.parquet")
    clicks = Clicks.cat(list(ClickFile(tmp_path / "log.parquet", ANY).chunks()))
    assert clicks.ids_BF.tolist() == [[id_of_text("tea"), 7], [0, 0], [id_of_text("0f"), -3]]
    heat = profile_files([tmp_path / "log.parquet"], ["shop", "at", "clicked"])
    assert set(heat["shop"].ids_H.tolist()) == set(clicks.ids_BF[[0, 2], 0].tolist()) and heat["shop"].missing == 1
    assert set(heat["at"].ids_H.tolist()) == {7, -3} and heat["at"].missing == 1
    assert set(heat["clicked"].ids_H.tolist()) == {0, 1}


def test_a_threshold_makes_a_label_of_a_rating(tmp_path):
    path = write_clicks(tmp_path / "log.csv", lines=["5;a;1;1", "4;b;1;1", "3.5;c;1;1"])
    columns = ClickColumns("clicked>=4", (), ("shop",))
    assert next(ClickFile(path, columns).chunks()).label_B.tolist() == [1, 1, 0]
    with pytest.raises(FormatError, check=has(column="clicked", value=5)):
        next(ClickFile(path, ClickColumns("clicked", (), ("shop",))).chunks())
    with pytest.raises(BadInput, check=has(parameter="label")):
        ClickFile(path, ClickColumns("clicked>=high", (), ("shop",)))


def test_bad_lines_of_a_click_log_are_skipped_up_to_a_number(tmp_path):
    lines = ["1;tea;2.5;7", "0;rum", "x;tea;1;7", "0;tea;much;7", "0;tea;2;7.5", "0;tea;1;8"]
    path = write_clicks(tmp_path / "log.csv", lines=lines)
    file = ClickFile(path, ANY, skip_bad=4)
    assert (file.samples, file.skipped) == (2, 4)
    assert next(file.chunks()).ids_BF[:, 1].tolist() == [7, 8]
    with pytest.raises(FormatError, check=has(parameter="skip_bad", needed=4)):
        ClickFile(path, ANY, skip_bad=3)
    with pytest.raises(FormatError, check=has(path=str(path))):
        list(ClickFile(path, ANY).chunks())


@pytest.mark.parametrize(
    "columns, kind, fields",
    [
        (ClickColumns("click", (), ("shop",)), FormatError, {"parameter": "label"}),
        (ClickColumns("clicked", ("cost",), ("shop",)), FormatError, {"parameter": "dense"}),
        (ClickColumns("clicked", (), ("shop", "where")), FormatError, {"parameter": "ids"}),
        (ClickColumns("clicked", ("price",), ("price",)), BadInput, {"parameter": "ids", "value": ["price"]}),
        (ClickColumns("clicked"), FormatError, {"columns": ["at", "clicked", "price", "shop"]}),
    ],
)
def test_columns_that_are_not_there_are_refused_by_name(tmp_path, columns, kind, fields):
    with pytest.raises(kind, check=has(**fields)):
        ClickFile(write_clicks(tmp_path / "log.csv"), columns)


@pytest.mark.parametrize("values", [[[1, 2], [3]], [0.5, 1.0], [math.inf, 1.0], [1e17, 1.0]])
def test_values_that_are_no_single_id_are_refused(tmp_path, values):
    pyarrow.parquet.write_table(pyarrow.table({"label": [0, 1], "C1": values}), tmp_path / "log.parquet")
    with pytest.raises(FormatError, check=has(column="C1")):
        list(ClickFile(tmp_path / "log.parquet").chunks())
