"""Logs of text: ids that are words, other delimiters, and a few bad lines among many."""

from __future__ import annotations

import json

import pyarrow
import pytest
from pyarrow import parquet

from support import has
from thermocline.errors import FormatError
from thermocline.heat import log_files, profile_files
from thermocline.heat.log_columns import id_of_text
from thermocline.heat.log_reader import LogFile, open_logs

from .test_cli import heat

LINES = [f"{number % 7},item-{number % 11},{number / 3:.2f}" for number in range(1003)]


def write(path, lines=LINES, head="user,item,price", end="\n"):
    path.write_text(end.join([head, *lines]) + end)
    return path


def test_the_hash_of_text_is_pinned():
    assert id_of_text("item-1") == 8406168460641299428
    assert id_of_text("") == -5426141060434712860
    assert id_of_text("große 42") == -6186104808677383620


def test_text_ids_are_counted_by_their_hash(tmp_path):
    found = profile_files([write(tmp_path / "log.csv")], ["user", "item"])
    assert (found["user"].distinct, found["item"].distinct, found["item"].lookups) == (7, 11, 1003)
    assert set(found["item"].ids_H.tolist()) == {id_of_text(f"item-{number}") for number in range(11)}
    assert set(found["user"].ids_H.tolist()) == set(range(7))


def test_parquet_and_csv_give_text_the_same_ids(tmp_path):
    texts = [line.split(",")[1] for line in LINES]
    bags = [[text, "all"] for text in texts]
    coded = pyarrow.array(texts).dictionary_encode()
    parquet.write_table(pyarrow.table({"item": texts, "bag": bags, "coded": coded}), tmp_path / "log.parquet")
    found = profile_files([tmp_path / "log.parquet"], ["item", "bag", "coded"])
    plain = profile_files([write(tmp_path / "log.csv")], ["item"])
    assert found["item"].ids_H.tolist() == found["coded"].ids_H.tolist() == plain["item"].ids_H.tolist()
    assert found["bag"].ids_H[0] == id_of_text("all") and found["bag"].lookups == 2 * 1003


@pytest.mark.parametrize("name, sign", [("log.csv", ";"), ("log.tsv", "\t"), ("log.txt", ","), ("log", "\t")])
def test_a_header_is_recognized_with_any_delimiter(tmp_path, name, sign):
    lines = [line.replace(",", sign) for line in LINES]
    path = write(tmp_path / name, lines, "user,item,price".replace(",", sign))
    assert LogFile(path).names == ("user", "item", "price")
    assert profile_files([path], ["user"])["user"].distinct == 7


def test_missing_text_is_missing(tmp_path):
    found = profile_files([write(tmp_path / "log.csv", ["1,a,2", "2,,3", "3,b,4"])], ["item"])
    assert (found["item"].lookups, found["item"].missing) == (2, 1)


@pytest.mark.parametrize("skip_bad", [0, 9])
@pytest.mark.parametrize("word", ["NULL", "NA", "nan", ""])
def test_many_missing_numbers_leave_a_column_of_numbers(tmp_path, word, skip_bad):
    path = write(tmp_path / "log.csv", [f"{number},{word if number % 3 else number % 5},1" for number in range(90)])
    found = profile_files([path], ["item"], skip_bad=skip_bad)["item"]
    assert sorted(found.ids_H.tolist()) == [0, 1, 2, 3, 4] and found.missing == 60


@pytest.mark.parametrize("skip_bad", [0, 9])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_empty_lines_are_neither_samples_nor_bad(tmp_path, monkeypatch, end, skip_bad):
    path = write(tmp_path / "log.csv", ["", "1,2,3", "", "", "4,5,6", "", ""], f"{end}{end}user,item,price", end)
    file = open_logs([path], ["user"], skip_bad)[0][0]
    assert (file.samples, file.skipped) == (2, 0)
    assert profile_files([path], ["user"], skip_bad=skip_bad)["user"].samples == 2


@pytest.mark.parametrize("skip_bad", [0, 9])
def test_unsigned_numbers_of_csv_keep_their_64_bits(tmp_path, skip_bad):
    path = write(tmp_path / "log.csv", [f"{(1 << 64) - 1},7,1", f"{1 << 63},7,1", "5,7,1"])
    found = profile_files([path], ["user"], skip_bad=skip_bad)["user"]
    assert sorted(found.ids_H.tolist()) == [-(1 << 63), -1, 5]


def test_a_quoted_header_is_a_header(tmp_path):
    path = write(tmp_path / "log.tsv", ["1\t2\t3"], '"user"\t"item"\t"price"')
    assert profile_files([path], ["item"])["item"].ids_H.tolist() == [2]


@pytest.mark.parametrize("name, data", [("log.jsonl", b'{"user": 1}\n'), ("log.csv", "user,item\n1,2\n".encode("utf-16"))])
def test_json_and_other_encodings_are_refused_by_name(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FormatError, check=has(path=str(tmp_path / name))):
        profile_files([tmp_path / name], ["user"])


def test_a_bad_line_is_named_by_its_number(tmp_path):
    with pytest.raises(FormatError, match="#502"):
        profile_files([with_bad(tmp_path / "log.csv")], ["item"])


BAD = ["1,item-3", "x7,item-3,1.0", "1,item-3,1.0,9", f"{1 << 64},item-3,1.0"]


def with_bad(path):
    lines = [*LINES[:500], *BAD[:2], *LINES[500:], *BAD[2:]]
    return write(path, lines)


def test_bad_lines_are_skipped_up_to_a_number(tmp_path):
    whole = profile_files([write(tmp_path / "whole.csv")], ["user", "item"])
    found = profile_files([with_bad(tmp_path / "log.csv")], ["user", "item"], skip_bad=4)
    for name in ("user", "item"):
        assert found[name].samples == 1003 and found[name].ids_H.tolist() == whole[name].ids_H.tolist()
        assert found[name].counts_H.tolist() == whole[name].counts_H.tolist() and found[name].missing == 0
    with pytest.raises(FormatError, check=has(parameter="skip_bad", value=3, needed=4)):
        profile_files([with_bad(tmp_path / "log.csv")], ["user", "item"], skip_bad=3)
    with pytest.raises(FormatError, check=has(path=str(tmp_path / "log.csv"))):
        profile_files([with_bad(tmp_path / "log.csv")], ["user", "item"])


def test_a_value_of_a_column_that_is_not_asked_for_is_never_bad(tmp_path):
    files, _ = open_logs([with_bad(tmp_path / "log.csv")], ["item"], 9)
    assert files[0].skipped == 2


def test_a_resumed_profile_skips_the_same_lines(tmp_path, monkeypatch):
    paths = [with_bad(tmp_path / "a.csv"), with_bad(tmp_path / "b.csv")]
    whole, calls = profile_files(paths, ["user"], skip_bad=8), iter(range(99))
    monkeypatch.setattr("thermocline.heat.log_reader.LARGEST_CHUNK", 300)
    with pytest.raises(log_files.ProfilingInterrupted):
        profile_files(paths, ["user"], skip_bad=8, output=tmp_path / "heat.tc", stop=lambda: next(calls) >= 6)
    resumed = profile_files(paths, ["user"], skip_bad=8, output=tmp_path / "heat.tc")
    assert resumed["user"].samples == 2006 and resumed["user"].counts_H.tolist() == whole["user"].counts_H.tolist()


def test_a_short_line_of_criteo_can_be_skipped(tmp_path):
    line = "\t".join(["0", *["1"] * 13, *["a"] * 26])
    (tmp_path / "day_0").write_text(f"{line}\n1\t2\n{line}\n")
    assert profile_files([tmp_path / "day_0"], ["C1"], skip_bad=1)["C1"].lookups == 2


def test_files_that_disagree_about_text_are_refused(tmp_path):
    paths = [write(tmp_path / "a.csv"), write(tmp_path / "b.csv", ["1,2,3"] * 9)]
    with pytest.raises(FormatError, check=has(column="item", path=str(tmp_path / "a.csv"))):
        profile_files(paths, ["item"])


def test_the_command_reports_skipped_lines(tmp_path):
    path = with_bad(tmp_path / "log.csv")
    command = ["profile", path, "--columns", "user,item", "-o", tmp_path / "heat.tc"]
    refused = heat(*command)
    assert refused.returncode == 2 and "--skip-bad" in refused.stderr
    done = heat(*command, "--skip-bad", 10, "--json", tmp_path / "heat.json")
    assert done.returncode == 0 and "4 bad lines skipped" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "heat.json").read_text())["skipped"] == {str(path): 4}
