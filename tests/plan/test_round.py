"""The four planning files in sequence: tables and topology give a plan, which is compared with a run."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from thermocline.cli import app
from thermocline.plan.model import Plan
from thermocline.plan.run_file import MeasuredRank, MeasuredRun, MeasuredTraffic, fingerprint

TABLES = """
batch: 512
dense: 2ms
tables:
  - {name: item, rows: 20_000_000, dim: 128, lookups: 50, pooling: none}
  - {name: user, rows: 3_000_000, dim: 64, lookups: 1}
  - {name: country, rows: 200, dim: 16, lookups: 1, precision: fp32}
"""


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "tables.yaml").write_text(TABLES)
    given = ("--tables", tmp_path / "tables.yaml", "--topology", "hgx-h200", "--nodes", 2, "--zipf", 1.05)
    done = command("plan", "make", *given, "-o", tmp_path / "plan.json", "--quiet")
    assert done.exit_code == 0, done.output
    return Plan.load(tmp_path / "plan.json")


def run_as_planned(plan, slower=1.0):
    ranks = [
        MeasuredRank(rank=number, bytes=group.bytes, host=group.host)
        for group in plan.ranks
        for number in range(group.first, group.first + group.count)
    ]
    traffic = [MeasuredTraffic(**line.model_dump()) for line in plan.traffic]
    parts = {part: slower * seconds for part, seconds in plan.step.parts.items()}
    return MeasuredRun(
        plan=fingerprint(plan),
        steps=1,
        batch=plan.batch,
        ranks=ranks,
        traffic=traffic,
        parts=parts,
        step=slower * plan.step.total,
    )


def test_plan_check_passes_a_run_as_planned_and_fails_a_slow_one(plan, tmp_path):
    for slower, code in ((1.0, 0), (1.2, 0), (1.3, 1)):
        run_as_planned(plan, slower).save(tmp_path / "run.json")
        done = command("plan", "check", tmp_path / "plan.json", tmp_path / "run.json", "--json", "-")
        found = json.loads(done.output)
        assert (done.exit_code, found["ok"]) == (code, code == 0)
        assert {line["kind"] for line in found["lines"] if not line["ok"]} == ({"time"} if code else set())


def test_the_plan_counts_every_rank_once(plan):
    numbers = [number for group in plan.ranks for number in range(group.first, group.first + group.count)]
    assert numbers == list(range(16))


def test_fingerprint_survives_the_plan_file(plan, tmp_path):
    (tmp_path / "again.json").write_text(json.dumps(json.loads((tmp_path / "plan.json").read_text())))
    assert fingerprint(Plan.load(tmp_path / "again.json")) == fingerprint(plan)
