"""Plans on the command line and as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import has
from thermocline.cli import app
from thermocline.errors import BadInput, FormatError
from thermocline.plan.model import Plan


def run(*arguments):
    from typer.testing import CliRunner

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path):
    (tmp_path / "tables.yaml").write_text(
        "version: 1\nbatch: 512\ndense: 2ms\ntables:\n  - {name: item, rows: 100000, dim: 64, lookups: 5}\n", encoding="utf-8"
    )
    return tmp_path


def test_plan_make_show_and_check_commands(files):
    made = run(
        "plan", "make", "--tables", files / "tables.yaml", "--zipf", "1.1", "--topology", "hgx-h200", "--nodes", 2,
        "-o", files / "plan.json", "--report", files / "plan.html", "--json", files / "out.json",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "item" in made.output and "item" in (files / "plan.html").read_text()
    assert json.loads((files / "out.json").read_text())["sums"]["tables"] == 1
    shown = run("plan", "show", files / "plan.json", "--json", "-")
    assert json.loads(shown.output)["plan"]["tables"][0]["name"] == "item"
    plan = Plan.load(files / "plan.json")
    (files / "run.json").write_text(json.dumps(perfect_run(plan)))
    assert run("plan", "check", files / "plan.json", files / "run.json").exit_code == 0
    (files / "run.json").write_text(json.dumps(perfect_run(plan) | {"step": 2 * plan.step.total}))
    assert run("plan", "check", files / "plan.json", files / "run.json").exit_code == 1


def perfect_run(plan):
    """A run that measures exactly the predictions."""
    numbers = [(n, card) for card in plan.ranks for n in range(card.first, card.first + card.count)]
    return {
        "version": 1, "batch": plan.batch, "steps": 10, "step": plan.step.total, "parts": plan.step.parts,
        "cards": [{"card": n, "bytes": card.bytes} for n, card in numbers],
        "traffic": [{"link": t.link, "direction": t.direction, "bytes": t.bytes} for t in plan.traffic],
    }  # fmt: skip


def test_plan_make_requires_heat_or_zipf(files):
    done = run("plan", "make", "--tables", files / "tables.yaml", "--topology", "hgx-h200", "-o", files / "plan.json")
    assert isinstance(done.exception, BadInput) and done.exception.parameter == "heat"


def test_files_that_are_not_plans_are_refused(tmp_path):
    for text, fields in (("{", {"line": 1}), ("{}", {"parameter": "version"}), ('{"version": 1}', {"parameter": "goal"})):
        Path(tmp_path / "plan.json").write_text(text)
        with pytest.raises(FormatError, check=has(**fields)):
            Plan.load(tmp_path / "plan.json")
