"""`thermocline train sequence` as a user meets it, with two processes under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from support import has
from thermocline import BadInput
from thermocline.cli import main
from thermocline.train import init_ranks

SMALL = ["--users", 200, "--items", 320, "--dim", 8, "--batch", 32, "--epochs", 1, "--negatives", 8, "--length", 9]
ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def run(command, arguments):
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT, timeout=600)


def test_from_a_log_to_a_checked_run_on_two_ranks(tmp_path):
    log, heat, tables, cluster, plan, out = (
        tmp_path / name for name in ("log.parquet", "heat.tc", "tables.yaml", "cluster.yaml", "plan.json", "run.json")
    )
    table = {"name": "item", "rows": 320, "dim": 8, "pooling": "none", "lookups": 18, "precision": "int8", "cache": 0}
    tables.write_text(yaml.safe_dump({"batch": 32, "tables": [table]}))
    link, card = {"bandwidth": "1GB/s", "latency": "10us"}, {"memory": "1GB", "bandwidth": "10GB/s"}
    cluster.write_text(yaml.safe_dump({"nodes": 1, "cards_per_node": 2, "card": card, "links": {"node": link}}))
    before = (
        ["data", "sequences", "-o", log, "--users", 200, "--items", 320],
        ["heat", "profile", log, "--columns", "item", "--batch", 32, "-o", heat],
        ["plan", "make", "--tables", tables, "--topology", cluster, "--heat", heat, "-o", plan],
    )
    code = f"import runpy, sys\nfor line in {[list(map(str, each)) for each in before]}:\n" + (
        "    sys.argv = ['thermocline', *line]\n    try: runpy.run_module('thermocline', run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code, line\n"
    )
    made = run([sys.executable, "-c", code], [])
    assert made.returncode == 0, made.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thermocline"]
    spread = ["--data", log, "--plan", plan, "--heat", heat, "--run-json", out, *SMALL[4:], "--json", "-"]
    done = run(torchrun, ["train", "sequence", *spread])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # of the first rank alone
    assert answer["cards"] == 2 and answer["rows"] == 320 and 0 < answer["hit_rate"] < 1
    measured = json.loads(out.read_text())
    assert len(measured["cards"]) == 2 and measured["steps"] == -(-answer["samples"] // 64)


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["--plan", "p.json", "--precision", "int8"], "--precision"),
        (["--heat", "heat.tc"], "--plan"),
        (["--run-json", "run.json"], "--plan"),
    ],
)
def test_bad_input_is_one_paragraph_and_code_2(arguments, what, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thermocline", "train", "sequence", *map(str, [*SMALL, *arguments])])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and what in capsys.readouterr().err


def test_processes_without_a_plan_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BadInput, check=has(parameter="plan")), init_ranks(None, None, "cpu"):
        pass
