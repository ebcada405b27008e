"""`thermocline heat` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from forked import thermocline
from thermocline.heat import HeatProfile
from thermocline.heat.log_files import profile_files

from .test_files import equal, log

INTERRUPT = """
import signal
from thermocline.heat import log_reader, profiler
log_reader.LARGEST_CHUNK = 1 << 10
add = profiler.Profiler.add
def add_and_interrupt(self, chunk):
    add(self, chunk)
    if self.done > 2000:
        signal.raise_signal(signal.SIGINT)
profiler.Profiler.add = add_and_interrupt
"""


def heat(*arguments, before=""):
    return thermocline("heat", *arguments, before=before)


@pytest.fixture
def logs(tmp_path):
    return [log(tmp_path / f"{seed}.parquet", seed=seed) for seed in range(2)]


def test_from_logs_to_a_profile_to_a_comparison(tmp_path, logs):
    parts = [tmp_path / "a.tc", tmp_path / "b.tc"]
    for path, part in zip(logs, parts, strict=True):
        done = heat("profile", path, "--columns", "user,bag", "-o", part, "--quiet")
        assert (done.returncode, done.stdout) == (0, "")
    merged = heat("merge", *parts, "-o", tmp_path / "c.tc")
    assert merged.returncode == 0 and "2 parts" in merged.stdout
    whole = profile_files(logs, ["user", "bag"])
    assert HeatProfile.load(tmp_path / "c.tc")["bag"].counts_H.tolist() == whole["bag"].counts_H.tolist()
    shown = heat("show", tmp_path / "c.tc")
    assert all(text in shown.stdout for text in ("user", "bag", f"{whole['bag'].lookups:,}", "in 16,384", "█"))
    page = tmp_path / "heat.html"
    assert heat("show", tmp_path / "c.tc", "--report", page, "--quiet").stdout == ""
    assert all(text in page.read_text() for text in ("<svg", "user", "bag"))
    numbers = json.loads(heat("show", tmp_path / "c.tc", "--json", "-").stdout)
    assert [table["name"] for table in numbers["tables"]] == ["user", "bag"]
    assert numbers["sha256"] == HeatProfile.load(tmp_path / "c.tc").sha256
    changed = json.loads(heat("diff", *parts, "--json", "-").stdout)
    assert {change["table"] for change in changed} == {"user", "bag"} and all(change["lost"] >= 0 for change in changed)
    assert "lost" in heat("diff", *parts).stdout


def test_ctrl_c_exits_with_130_and_the_same_command_continues(tmp_path, logs):
    command = ["profile", *logs, "--columns", "user", "-o", tmp_path / "heat.tc", "--json", tmp_path / "heat.json"]
    stopped = heat(*command, before=INTERRUPT)
    assert stopped.returncode == 130 and "of 10,006 samples" in stopped.stderr
    assert not (tmp_path / "heat.tc").exists() and (tmp_path / "heat.tc.partial").exists()
    assert heat(*command).returncode == 0
    assert equal(HeatProfile.load(tmp_path / "heat.tc"), profile_files(logs, ["user"]))
    assert not (tmp_path / "heat.tc.partial").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--columns", "itm"], "user, bag, rating"),
        (["--columns", "C3..D5"], "C1..C26"),
        (["--columns", "user", "--memory", "12 parsecs"], "12 parsecs"),
        (["--columns", "user", "--memory", "64MiB"], "417 MiB"),
        (["--columns", "user", "--memory", "1073741824"], "2GiB"),
        (["--columns", "user", "--batch", str(10**20)], "1,099,511,627,776"),
    ],
)
def test_bad_input_is_one_paragraph_and_code_2(tmp_path, logs, options, message):
    done = heat("profile", logs[0], *options, "-o", tmp_path / "heat.tc")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "heat.tc").exists()


def test_tables_that_only_one_profile_has_are_named(tmp_path, logs):
    for columns in (["user"], ["user", "bag"]):
        profile_files(logs, columns).save(tmp_path / f"{len(columns)}.tc")
    assert "bag" in heat("diff", tmp_path / "1.tc", tmp_path / "2.tc").stdout
    assert re.search("1 part$", heat("merge", tmp_path / "1.tc", "-o", tmp_path / "3.tc").stdout.splitlines()[0].rstrip())


def test_profiles_without_a_common_table_are_not_compared(tmp_path, logs):
    for name in ("user", "bag"):
        profile_files(logs, [name]).save(tmp_path / f"{name}.tc")
    done = heat("diff", tmp_path / "user.tc", tmp_path / "bag.tc")
    assert done.returncode == 2 and "user" in done.stderr and "bag" in done.stderr
    done = heat("merge", tmp_path / "user.tc", tmp_path / "bag.tc", "-o", tmp_path / "c.tc")
    assert done.returncode == 2 and "user" in done.stderr and "bag" in done.stderr


def test_a_profile_that_does_not_fit_stays_below_its_memory(tmp_path):
    rows = 4_000_037
    parquet.write_table(pyarrow.table({"id": np.arange(rows) * 7919}), tmp_path / "log.parquet", use_dictionary=False)
    # Not ru_maxrss, which a process inherits from the one that started it.
    code = """
import atexit
atexit.register(lambda: print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]))
from thermocline.cli import main
main()
"""
    options = ["heat", "profile", tmp_path / "log.parquet", "--columns", "id", "--memory", "512MiB", "-o", tmp_path / "heat.tc"]
    done = subprocess.run([sys.executable, "-c", code, *options, "--quiet"], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) < 512 << 10  # KiB
    table = HeatProfile.load(tmp_path / "heat.tc")["id"]
    assert not table.exact and table.lookups == rows and abs(table.distinct - rows) < 2 * table.error * rows
