"""Output of the command line: files are checked first, printed results survive a full disk, and tables fit the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
import typer
from pyarrow import parquet
from rich.text import Text

from thermocline.cli import options, output
from thermocline.errors import BadInput, explain_failed_write, write_text
from thermocline.heat import HeatProfile, profile_files
from thermocline.plan import Plan, TablesConfig, Topology, make_plan

# Every file of the process ends at this many bytes, as on a full disk.
SMALL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"

TABLES = """
batch: 1024
tables:
  - {name: user_id, rows: 30000000, dim: 64}
  - {name: query_category_tokens_normalized_and_hashed_v2, rows: 800000, dim: 32}
  - {name: advertiser_campaign_id, rows: 120000, dim: 16}
"""
NAMES = ("user_id", "query_category_tokens_normalized_and_hashed_v2", "advertiser_campaign_id")


def thermocline(*arguments, before="", stdout=subprocess.PIPE, **environment):
    code = f"import sys\n{before}\nsys.argv[0] = 'thermocline'\nfrom thermocline.cli import main\nmain()"
    environment = {**os.environ, "NO_COLOR": "1", **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A log, its heat, tables and a plan."""
    folder, seeds = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    columns = {name: seeds.zipf(1.3, 5000) % 4001 for name in NAMES}
    parquet.write_table(pyarrow.table(columns), folder / "log.parquet")
    heat = profile_files([folder / "log.parquet"], NAMES, output=folder / "heat.tc")
    (folder / "tables.yaml").write_text(TABLES)
    make_plan(TablesConfig.load(folder / "tables.yaml"), heat, Topology.load("hgx-h200", 2)).save(folder / "plan.json")
    return folder


# -- before the work --


def test_a_file_in_a_missing_folder_or_that_is_a_folder_is_refused(tmp_path):
    for target in (tmp_path, tmp_path / "no" / "such.json", tmp_path / "file" / "result.json"):
        (tmp_path / "file").write_text("not a folder")
        with pytest.raises(typer.BadParameter):
            options.check_file(target)
    assert options.check_file(tmp_path / "new.json") == tmp_path / "new.json"
    assert options.check_file("-") == "-" and options.check_file(None) is None


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for target in (tmp_path / "file", tmp_path / "file" / "run1"):
        with pytest.raises(typer.BadParameter):
            options.check_folder(target)
    assert options.check_folder(tmp_path / "new" / "run1") == tmp_path / "new" / "run1"


@pytest.mark.parametrize("check", [options.check_file, options.check_folder])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch, check):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(typer.BadParameter):
        check(tmp_path / "result")


def test_training_refuses_a_checkpoint_that_is_a_file_before_it_reads_the_log(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = thermocline("train", "dlrm", "--data", tmp_path / "none", "--checkpoint", tmp_path / "file")
    assert done.returncode == 2 and "--checkpoint" in done.stderr


# -- a full disk --


def test_a_failed_write_names_the_file_and_the_bytes(tmp_path):
    with pytest.raises(BadInput) as raised, explain_failed_write(tmp_path / "heat.tc", 1234):
        raise OSError(28, "No space left on device")
    assert raised.value.path == str(tmp_path / "heat.tc")
    assert (raised.value.needed, raised.value.errno) == (1234, 28) and raised.value.available > 0
    assert "1,234" in str(raised.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_text_on_a_full_disk_is_bad_input():
    with pytest.raises(BadInput) as raised:
        write_text("/dev/full", "twelve bytes")
    assert (raised.value.path, raised.value.needed) == ("/dev/full", 12)


def test_a_failed_write_keeps_the_earlier_file(tmp_path):
    (tmp_path / "plan.json").write_text("earlier")
    done = thermocline("data", "synth", "-o", tmp_path / "plan.json", "--samples", 9, before=SMALL_DISK)
    assert done.returncode == 2 and (tmp_path / "plan.json").read_text() == "earlier"
    code = "from thermocline.errors import write_text; import sys; write_text(sys.argv[1], 'x' * 999)"
    done = subprocess.run([sys.executable, "-c", f"{SMALL_DISK}\n{code}", tmp_path / "plan.json"], capture_output=True)
    assert done.returncode == 1 and (tmp_path / "plan.json").read_text() == "earlier"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("write", [write_text, lambda path, text: HeatProfile.load(path.parent / "heat.tc").save(path)])
def test_pipes_devices_and_links_keep_their_place(files, tmp_path, write):
    shutil.copy(files / "heat.tc", tmp_path)
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(tmp_path / "target")
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write(pipe, "text")
    assert pipe.is_fifo() and os.read(reader, 4)
    os.close(reader)
    write(link, "text")
    assert link.is_symlink() and (tmp_path / "target").stat().st_size


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_standard_output_is_one_paragraph(files):
    with open("/dev/full", "w") as full:
        done = thermocline("plan", "show", files / "plan.json", stdout=full)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "unexpected" not in done.stderr


@pytest.mark.parametrize(
    "command, printed",
    [
        (["heat", "show", "heat.tc", "--report", "OUT"], "advertiser_campaign_id"),
        (["heat", "show", "heat.tc", "--json", "OUT"], "advertiser_campaign_id"),
        (["heat", "merge", "heat.tc", "-o", "OUT"], "advertiser_campaign_id"),
        (["plan", "show", "plan.json", "--report", "OUT"], "Candidate plans"),
        (["estimate", "--tables", "tables.yaml", "--json", "OUT"], "advertiser_campaign_id"),
    ],
)
def test_results_are_printed_before_a_disk_is_found_full(files, tmp_path, command, printed):
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    words = [str(files / word) if (files / word).exists() else word for word in words]
    done = thermocline(*words, before=SMALL_DISK)
    assert done.returncode == 2 and printed in done.stdout
    assert str(tmp_path / "out") in done.stderr and re.search(r"\d bytes are needed", done.stderr)
    assert done.stderr.count("\n") == 1


# -- 80 columns --


@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_a_table_keeps_every_cell_and_fits(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", width)
    heads = ("table", *(f"number\n{column}" for column in range(11)), "words")
    names = ("short", "[red]brackets[/]", "a_name_that_is_much_longer_than_a_third_of_the_line_" * 2)
    rows = [(name, *(f"{column * 1_000_003:,}" for column in range(11)), "some words " * 9) for name in names]
    output.print_table(heads, [*rows, ("and 3 more",)], ("table", "words"), title="title", caption="caption")
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(width)
    joined = re.sub(r"\s", "", shown)
    assert all(f"{column * 1_000_003:,}" in shown for column in range(11)) and "[red]brackets[/]" in shown
    assert joined.count("some") == 27 and shown.count("title") == shown.count("caption") == 1


def test_a_narrow_table_is_printed_once(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    output.print_table(("a", "b"), [("1", Text("2", "red"))])
    assert capsys.readouterr().out.split() == ["a", "b", "1", "2"]


@pytest.mark.parametrize(
    "command",
    [
        ["heat", "show", "heat.tc"],
        ["heat", "diff", "heat.tc", "heat.tc"],
        ["estimate", "--tables", "tables.yaml", "--topology", "hgx-h200"],
        ["plan", "show", "plan.json"],
        ["calibrate", "--presets"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_commands_fit_eighty_columns(files, command):
    words = [str(files / word) if (files / word).exists() else word for word in command]
    done = thermocline(*words, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("run: ")]  # commands are copied whole
    assert [line for line in lines if len(line.rstrip()) > 80] == []


def test_a_plan_keeps_its_words_at_any_width(files):
    from thermocline.plan import explain

    plan = Plan.load(files / "plan.json")
    wide, narrow = explain(plan), explain(plan, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert sorted(wide.split()) == sorted(narrow.split())


def test_json_on_standard_output_is_alone(files):
    done = thermocline("heat", "show", files / "heat.tc", "--json", "-", COLUMNS="80")
    assert "tables" in json.loads(done.stdout)
