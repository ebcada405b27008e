"""The demo: stages that are done once, children that end with it, and the whole pipeline at a small size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from examples.demo import pipeline
from examples.demo.report import lines_of
from examples.demo.stages import Stages, environment
from examples.demo.worker import _sequence
from thermocline.data.synthetic import SyntheticLog, table_rows
from thermocline.errors import ThermoclineError
from thermocline.heat.profiler import profile_batches
from thermocline.plan.model import Plan


def stages(folder, said, reported=None, settings=None):
    reported = [] if reported is None else reported
    return Stages(folder, settings or {"rows": 7}, said.append, lambda *one: reported.append(one), 2)


def test_a_stage_that_ended_is_not_done_again_and_one_that_did_not_is(tmp_path):
    said, done = [], []

    def fails():
        done.append("second")
        raise KeyboardInterrupt

    first = stages(tmp_path, said)
    assert first.do("one", "the first", lambda: {"a": 1})["a"] == 1
    with pytest.raises(KeyboardInterrupt):
        first.do("two", "the second", fails)
    again = stages(tmp_path, said)
    assert again.do("one", "the first", lambda: done.append("first"))["a"] == 1
    assert again.do("two", "the second", lambda: {"b": 2})["b"] == 2
    assert done == ["second"]
    assert said == ["[1/2] the first", "[2/2] the second", "[1/2] the first: kept", "[2/2] the second"]


def test_other_settings_begin_anew(tmp_path):
    assert stages(tmp_path, []).do("one", "it", lambda: {"a": 1})["a"] == 1
    assert stages(tmp_path, [], settings={"rows": 8}).do("one", "it", lambda: {"a": 2})["a"] == 2


def test_a_child_reports_progress_and_what_else_it_says_is_kept(tmp_path):
    reported = []
    code = "from examples.demo.stages import show_progress; show_progress(1, 3, 'rows'); print('hello')"
    stages(tmp_path, [], reported).python(["-c", code])
    assert reported == [(1, 3, "rows")]
    assert "hello\n" in (tmp_path / "log.txt").read_text()


def test_a_child_that_fails_is_one_paragraph_with_its_last_line(tmp_path):
    with pytest.raises(ThermoclineError) as failed:
        stages(tmp_path, []).python(["-c", "raise ValueError('no rows')"])
    assert "ValueError: no rows" in str(failed.value) and str(tmp_path / "log.txt") in str(failed.value)


def test_children_end_with_the_demo(tmp_path):
    """Interrupted while a child sleeps: the child is gone soon after."""
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = (
        "import signal\nfrom pathlib import Path\nfrom examples.demo.__main__ import _sigterm_as_interrupt\n"
        "from examples.demo.stages import Stages\n"
        f"s = Stages(Path({str(tmp_path)!r}), {{}}, print, print, 1)\n"
        f"with _sigterm_as_interrupt():\n    s.python(['-c', {child!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_table_sets_ours_next_to_the_baseline():
    def run(size, auc, sent):
        model = {"bytes": size, "sent": {"node": sent, "cluster": sent}, "auc": auc, "served_auc": auc, "hit_rate": auc}
        return {"dlrm": model, "sequence": model}

    found = {
        "train": {"fp32": run(4000, 0.75, 300.0), "planned": run(1000, 0.7498, 100.0)},
        "serve": {"fp32": {"lookups/s": 100.0}, "planned": {"lookups/s": 150.0}},
    }
    told = {what.strip(): rest for what, *rest in lines_of(found)}
    assert told["tables of the DLRM, all ranks"][-1] == "4.0x less"
    assert told["DLRM, test AUC"] == ["0.7500", "0.7498", "-0.0002"]
    assert told["sent per rank and step, DLRM"][-1] == "3.0x less"
    assert told["lookups per second, served"] == ["100", "150", "1.50x faster"]


def model(auc):
    return {"auc": auc, "served_auc": auc, "hit_rate": 0.3, "bytes": 9e5, "sent": {"node": 4e4, "cluster": 2e4}, "seconds": 1.0}


def test_log_heat_plans_and_page_are_made_for_real_around_what_is_trained(tmp_path, monkeypatch):
    trained = {arm: {"dlrm": model(auc), "sequence": model(auc)} for arm, auc in (("fp32", 0.71), ("planned", 0.7))}
    monkeypatch.setattr(pipeline, "_train", lambda stages, sizes: trained)
    monkeypatch.setattr(pipeline, "_serve", lambda stages, sizes: {arm: {"lookups/s": 1e5} for arm in trained})
    said = []
    found = pipeline.run_demo(tmp_path, pipeline.SMALL, said.append, lambda *_: None)
    assert said[0] == "[1/6] a log"
    plain, planned = (Plan.load(tmp_path / f"{name}.json") for name in ("fp32", "planned"))
    assert {table.precision for table in plain.tables} == {"fp32"} and {
        tier.tier for t in plain.tables for tier in t.tiers
    } == {3}
    assert {table.precision for table in planned.tables} <= {"int8", "int4"} and planned.gradients == "bf16"
    assert planned.topology.world_size == 4 and planned.heat == plain.heat
    assert {table.cache for table in planned.tables} == {0.05} and {table.cache for table in plain.tables} == {0.0}
    assert sum(tier.cached for table in planned.tables for tier in table.tiers) == found["plan"]["dlrm"]["fp32 rows"] > 0
    assert "0.7100" in (tmp_path / "report.html").read_text() and found["report"].endswith("report.html")
    assert any("kept" in line for line in said) is False
    pipeline.run_demo(tmp_path, pipeline.SMALL, said.append, lambda *_: None)
    assert sum("kept" in line for line in said) == 5


def test_full_size_plan_copies_rows_of_the_dlrm_but_not_of_the_sequence_model():
    """Whether copies pay is the planner's to say: the waits that keep the few items equal take longer than fetching them."""
    sizes = pipeline.DemoSizes()
    log = SyntheticLog(table_rows(sizes.rows), sizes.samples)
    batches = ({f"C{n + 1}": ids_B for n, ids_B in enumerate(part.ids_BF.T.numpy())} for part in log.batches(sizes.batch))
    clicks = profile_batches(batches, samples=sizes.samples)
    seen = _sequence(asdict(sizes)).log()
    items = profile_batches([{seen.column: seen.training_items()}])
    copied = []
    for tables, heat in ((pipeline.click_tables(clicks, sizes), clicks), (pipeline.item_table(sizes), items)):
        plan = pipeline.plan_within_fp32_memory(tables, heat)
        copied.append(sum(tier.rows for table in plan.tables for tier in table.tiers if tier.tier < 3))
        assert copied[-1] < 0.2 * sum(table.rows for table in plan.tables)
    assert copied[0] > 100 and copied[1] == 0


@pytest.mark.slow
@pytest.mark.skipif("THERMOCLINE_DEMO" not in os.environ, reason="starts a dozen processes; set THERMOCLINE_DEMO=1 to run it")
def test_the_whole_pipeline_small(tmp_path):
    command = [sys.executable, "-m", "examples.demo", "--small", "-o", "out", "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["serve"]["planned"]["equal"] and found["serve"]["fp32"]["equal"]
    assert found["train"]["planned"]["dlrm"]["auc"] > 0.5
    again = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)  # nothing is done again
    assert json.loads(again.stdout)["train"] == found["train"]
