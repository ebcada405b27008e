"""`thermocline data` and `thermocline train` as a user meets them: processes of their own."""

from __future__ import annotations

import json

import pytest

from forked import thermocline

SMALL = ["--samples", 2000, "--rows", 1000, "--dim", 4, "--batch", 100]


def test_a_synthetic_log_can_be_written_and_trained_on(tmp_path):
    file = tmp_path / "log.parquet"
    made = thermocline("data", "synth", "-o", file, "--samples", 2500, "--rows", 1000, "--json", "-")
    answer = json.loads(made.stdout)
    assert made.returncode == 0 and 0.8 < answer["best"]["auc"] < 0.95 and sum(answer["rows"]) == 1000
    done = thermocline("train", "dlrm", "--data", file, "--precision", "int8", "--json", "-")
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert answer["samples"] == 2000 and answer["settings"]["precision"] == "int8"
    assert {"auc", "logloss", "ne", "memory", "seconds"} <= set(answer)


def test_log_must_be_written_as_parquet(tmp_path):
    for verb in ("synth", "sequences"):
        done = thermocline("data", verb, "-o", tmp_path / "clicks.tsv")
        assert done.returncode == 2 and "clicks.parquet" in done.stderr and not list(tmp_path.iterdir())


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    expected = json.loads(thermocline("train", "dlrm", *SMALL, "--json", "-").stdout)
    interrupt = """
import os, signal
from thermocline.train import loop
step, calls = loop.train_step, []
def counted(*arguments):
    calls.append(1)
    if len(calls) == 7:
        os.kill(os.getpid(), signal.SIGINT)
    return step(*arguments)
loop.train_step = counted
"""
    command = ["train", "dlrm", *SMALL, "--checkpoint", tmp_path / "run", "--json", "-"]
    stopped = thermocline(*command, before=interrupt)
    assert stopped.returncode == 130 and stopped.stdout == "" and "Traceback" not in stopped.stderr
    assert "step 7" in stopped.stderr and str(tmp_path / "run") in stopped.stderr
    apart = thermocline("train", "dlrm", *SMALL, before=interrupt)
    assert apart.returncode == 130 and "--checkpoint FOLDER" in apart.stderr
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["progress"]["run"]["step"] == 7
    seen = thermocline("checkpoint", "inspect", tmp_path / "run")
    assert seen.returncode == 0 and "int8" in seen.stdout and "C26" in seen.stdout
    resumed = json.loads(thermocline(*command).stdout)
    for answer in (expected, resumed):
        del answer["seconds"]
    assert resumed == expected


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["--data", "nowhere.parquet"], "nowhere.parquet"),
        (["--precision", "int7"], "int7"),
        (["--test", "some.parquet"], "some.parquet"),
        (["--precision", "auto"], "2GiB"),
        (["--precision", "auto", "--budget", "1KiB"], "budget"),
        (["--budget", "2GiB"], "2GiB"),
        (["--precision", "auto", "--budget", "2GiB", "--cache", 0.1], "cache"),
    ],
)
def test_bad_input_is_one_paragraph_and_code_2(arguments, what):
    done = thermocline("train", "dlrm", *SMALL, *arguments)
    assert done.returncode == 2
    assert what in done.stderr and done.stderr.startswith("thermocline: ") and done.stderr.count("\n") == 1
