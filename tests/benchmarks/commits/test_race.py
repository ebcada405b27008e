"""A race between commits, here of this checkout against itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.commits.__main__ import ROOT, main
from benchmarks.commits.cases import HOST_STEP, SERVED, Case, all_cases


def test_a_checkout_has_the_bits_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "race.json"
    main(["--old", str(ROOT), "--quick", "--filter", "26x100k/zipf/int8", "--json", str(target), "--threads", "1"])
    rows = json.loads(target.read_text())["rows"]
    assert [row["case"].rsplit("/", 1)[1] for row in rows] == ["step", "lookup"]
    assert all(row["same_bits"] and row["ours"] > 0 and row["peer"] == "old" for row in rows)
    assert capsys.readouterr().out.splitlines()[-1].startswith("worst: cpu/26x100k")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_have_distinct_names_and_survive_json(device: str) -> None:
    cases = list(all_cases(device, quick=False))
    assert len({case.name for case in cases}) == len(cases)
    assert [Case.from_json(json.loads(json.dumps(case.to_json()))) for case in cases] == cases


def test_tables_on_the_device_are_not_shared_with_tables_in_host_memory() -> None:
    cases = [case for case in all_cases("cuda", quick=True) if case.shape.name == "A" and case.precision == "int8"]
    places = {case.operation: case.stored for case in cases}
    assert places["step"] == places["lookup"] != places[HOST_STEP]
    assert places[SERVED] not in (places[HOST_STEP], places["step"])
