"""The benchmark of plans, small: its rows, its asked cases, and the replay of a made-up log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plan import balance
from benchmarks.plan import benchmark as plan
from benchmarks.plan import scale as plan_scale

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"


def test_a_quick_run_plans_and_says_that_there_are_no_logs(tmp_path):
    measured = plan.run(tmp_path / "nowhere", quick=True)
    rows = {row["case"]: row for row in measured["rows"]}
    assert set(rows) == {"scale/40x10M/512x8/seconds", "scale/40x10M/512x8/memory"}
    assert rows["scale/40x10M/512x8/seconds"]["candidates"]["row-wise"] > 0
    assert "no logs" in measured["notes"][0]


def test_a_model_has_the_rows_it_was_asked_for():
    tables, heat = plan_scale.model(50, 1e7)
    assert sum(table.rows for table in tables.tables) == pytest.approx(1e7, rel=0.01)
    assert all(heat[table.name].rows == table.rows for table in tables.tables)


def test_what_is_asked_of_balance_are_logs_that_are_replayed():
    cases = [entry["case"].split("/") for entry in json.loads(ASKED.read_text())["plan"]]
    logs = {case[1].split(".")[0] for case in cases if case[0] == "balance"}
    assert logs == set(balance.LOGS)
    assert {case[3] for case in cases if case[0] == "balance"} == set(balance.ASKED)


def test_a_log_that_does_not_drift_is_even_later_too():
    rng = np.random.default_rng(0)
    tables = [rng.permutation(3001)[np.minimum(rng.zipf(1.3, 700_000), 3001) - 1], rng.integers(0, 40, 700_000)]
    found = balance.Replay(balance.LookupLog("made up", tables), 8).measure()
    assert found.windows > 4 and found.predicted < 1.01 and found.later < 1.05 and found.replanned < 1.05


def test_counting_every_lookup_finds_an_unknown_hot_row():
    rng = np.random.default_rng(1)
    calm, stormy = rng.integers(0, 5000, 400_000), rng.integers(0, 5000, 400_000)
    stormy[rng.random(400_000) < 0.3] = 4999
    log = balance.LookupLog("storm", [np.concatenate([calm, stormy])])
    assert balance.Replay(log, 8).measure().later < 1.05
    assert balance.Replay(log, 8).measure(once=False).later > 2


def test_a_log_too_short_for_a_window_has_a_prediction_and_no_replay():
    found = balance.Replay(balance.LookupLog("short", [np.arange(9000) % 700]), 32).measure()
    assert np.isnan(found.later) and np.isnan(found.replanned) and found.predicted < 1.1
