"""Results side by side: what is called a change, which way it counts, and what is said about it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.runner.compare import Comparison
from benchmarks.runner.show import parse
from support import has
from thermocline.errors import BadInput


def results(name, values, unit="ms", spread=0.02, **changes):
    rows = [
        {
            "case": case, "ours": ours, "peer": "fbgemm", "peer_value": 3.0, "unit": unit,
            "ratio": None if ours is None else 1.5, "asked": None, "ok": True, "spread": spread,
        }
        for case, ours in values.items()
    ]  # fmt: skip
    found = {"bench": "kernels", "machine": "made-up", "versions": {"torch": "2.13"}, "commit": "0123abc", "date": "2026-01-02"}
    return {**found, "rows": rows, **changes}


def compared(*files):
    return Comparison.of([parse(file, f"folder/{number}.json") for number, file in enumerate(files)])


def verdicts(comparison, at=1):
    return {case.name: (case.verdict(at), case.change(at)) for case in comparison.cases}


def test_less_time_is_better_and_so_are_more_lookups_a_second():
    times = verdicts(compared(results("a", {"x": 2.0, "y": 1.0}), results("b", {"x": 1.0, "y": 1.5})))
    assert times == {"x": ("better", 2.0), "y": ("worse", pytest.approx(1 / 1.5))}
    rates = verdicts(compared(results("a", {"x": 2.0}, "samples/s"), results("b", {"x": 1.0}, "samples/s")))
    assert rates == {"x": ("worse", 0.5)}


def test_what_the_spread_explains_is_no_change():
    before, after = results("a", {"x": 1.0}, spread=0.3), results("b", {"x": 1.25})
    assert verdicts(compared(before, after))["x"][0] == "same"
    assert verdicts(compared(results("a", {"x": 1.0}), after))["x"][0] == "worse"


def test_cases_of_one_file_and_missing_values_are_shown_but_not_judged():
    found = compared(results("a", {"x": 1.0, "old": 2.0, "none": None}), results("b", {"x": 1.0, "new": 3.0, "none": 1.0}))
    assert [case.name for case in found.cases] == ["x", "old", "none", "new"]
    assert {name: verdict for name, (verdict, _) in verdicts(found).items()} == {"x": "same", "old": "", "none": "", "new": ""}
    assert found.count(1) == {"better": 0, "same": 1, "worse": 0}


def test_other_machines_and_versions_are_said():
    base = results("a", {"x": 1.0})
    found = compared(base, results("b", {"x": 1.0}, machine="another"), results("c", {"x": 1.0}, versions={"torch": "2.14"}))
    machine, versions = found.notes()
    assert "another machine" in machine and versions == "2 has other versions of torch."


def test_files_with_nothing_in_common_are_refused_with_what_they_have():
    with pytest.raises(BadInput, check=has(parameter="cases")):
        compared(results("a", {"x": 1.0}), results("b", {"y": 1.0, "z": 1.0}, bench="step"))
    with pytest.raises(BadInput, check=has(parameter="files", value=1)):
        compared(results("a", {"x": 1.0}))


def test_the_command_writes_a_page_and_json_and_prints_only_changes_when_quiet(tmp_path):
    for name, values in (("before", {"x/1": 1.0, "x/2": 1.0}), ("after", {"x/1": 1.0, "x/2": 2.0})):
        (tmp_path / f"{name}.json").write_text(json.dumps(results(name, values)))
    files = [str(tmp_path / f"{name}.json") for name in ("before", "after")]
    targets = ["--report", str(tmp_path / "page.html"), "--json", str(tmp_path / "out.json"), "--quiet"]
    done = subprocess.run([sys.executable, "-m", "benchmarks", "compare", *files, *targets], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0.50x worse" in done.stdout and "x/1" not in done.stdout and "after: 0 better, 1 same, 1 worse" in done.stdout
    assert "x/1" in (tmp_path / "page.html").read_text()
    found = json.loads((tmp_path / "out.json").read_text())
    assert [case["verdicts"] for case in found["cases"]] == [["same"], ["worse"]] and found["files"][0]["commit"] == "0123abc"
