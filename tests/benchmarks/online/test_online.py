"""The online benchmark: logs in the order of time, arms of equal bytes, and rows judged against the right peer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from benchmarks.online import benchmark as online
from benchmarks.online import logs, tables
from benchmarks.online.tables import ARMS, CEILING, OnlineTables
from benchmarks.runner.noninferiority import BETTER, PASSES, REJECTED
from benchmarks.runner.paired import RunResult
from benchmarks.runner.record import Recorder
from support import has
from thermocline.errors import BadInput

HOURS, CLICKS = 20, 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """News whose items live for some hours, in the form of the shared log."""
    draw, path, count = np.random.default_rng(1), tmp_path_factory.mktemp("logs"), HOURS * CLICKS
    hour_N = np.repeat(np.arange(HOURS), CLICKS)
    columns = {name: draw.integers(0, 3, count) for name in logs._CONTEXT}
    columns |= {"item": 100 * hour_N + draw.integers(0, 300, count), "user": draw.integers(0, 5000, count)}
    columns |= {"ts_ms": 3_600_000 * hour_N + np.tile(np.arange(CLICKS), HOURS), "session": np.arange(count) // 3}
    parquet.write_table(pyarrow.table(columns), path / logs.FILES["globo"])
    return path


def settings(folder: Path) -> online.OnlineSettings:
    return online.OnlineSettings("globo", folder, **online.RECIPES["globo"] | {"batch": 64})


def test_a_sample_has_the_past_of_its_session_and_a_negative_beside_it(folder: Path) -> None:
    log = logs.read("globo", folder)
    assert log is not None and log.large == ["user", "item"] and len(log.periods) == HOURS + 1
    batch = next(log.batches(3, 2 * CLICKS, seed=0))
    first = int(log.periods[3])
    items, (history, offsets) = batch.ids["item"][0], batch.ids["history"]
    assert torch.equal(items[::2], torch.tensor(log.columns["item"][first : first + CLICKS]))
    assert batch.label_B.tolist() == [1.0, 0.0] * CLICKS
    for n in range(0, CLICKS, 7):
        click = first + n
        begin = click // 3 * 3
        past = log.columns["item"][begin:click][::-1].tolist()
        for sample in (2 * n, 2 * n + 1):
            assert history[offsets[sample] : offsets[sample + 1]].tolist() == past
    active = set(log.columns["item"][: log.periods[4]].tolist())
    assert set(items[1::2].tolist()) <= active
    again, other = next(log.batches(3, 2 * CLICKS, seed=0)), next(log.batches(3, 2 * CLICKS, seed=1))
    assert torch.equal(items, again.ids["item"][0]) and not torch.equal(items, other.ids["item"][0])


def test_bounded_arms_take_the_bytes_they_are_given(folder: Path) -> None:
    log = logs.read("globo", folder)
    assert log is not None
    made = {arm.name: OnlineTables(arm, log, settings(folder), 300) for arm in ARMS if not arm.name.startswith("mch")}
    small = sum(made["hashed"].rows.arena.tables[n].rows for n, t in enumerate(log.tables) if t not in log.large) * 68
    given = sum(len(log.distinct[table]) * 68 for table in log.large) / 8
    for name, each in made.items():
        if name != CEILING.name:
            assert 0.8 * given < each.bytes - small < 1.05 * given + 2000, name
    assert {t.name for t in made["static"].rows.tables} == set(log.tables)


def test_a_run_predicts_before_it_trains_and_is_reproducible(folder: Path) -> None:
    plan = online.OnlinePlan(folder, ("globo", "criteo"), seeds=1, filter="elastic")
    jobs = [job for job in plan.jobs() if job.arm.name == "elastic"]
    assert len(jobs) == 1 and jobs[0].settings.half_life == 5
    runs = [online.run_job(jobs[0]) for _ in range(2)]
    assert runs[0]["measures"] == runs[1]["measures"] and runs[0]["stats"]["samples"] == 2 * CLICKS * (HOURS - 2)
    assert 0.0 < runs[0]["stats"]["shared"] < 1.0


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, check=has(parameter="data")):
        online.OnlinePlan(tmp_path).jobs()


def test_arms_are_judged_by_their_paired_differences() -> None:
    auc = {"unbounded": 0.80, "hashed": 0.78, "elastic": 0.7999, "elastic-int8": 0.79}
    arms = [arm for arm in ARMS if arm.name in auc]
    runs = [
        RunResult(
            "globo: x", arm.name, 16, seed, {"trained": {"auc": auc[arm.name] + 1e-5 * (seed % 3), "logloss": 0.5}},
            stats={"bytes": 1.0, "shared": 0.0, "samples": 9.0},
        )
        for seed in range(10)
        for arm in arms
    ]  # fmt: skip
    recorder = Recorder("online", lambda line: None, save=lambda record: None)
    online.write(recorder, "globo", arms, runs)
    rows = {row["case"]: row for row in recorder.rows}
    assert rows["globo/elastic"]["verdict"] == PASSES and rows["globo/elastic"]["ok"]
    assert rows["globo/elastic-int8"]["verdict"] == REJECTED and not rows["globo/elastic-int8"]["ok"]
    assert rows["globo/elastic-vs-hashed"]["verdict"] == BETTER and rows["globo/elastic-vs-hashed"]["ok"]
    assert rows["globo/elastic-int8-vs-elastic"]["verdict"] == REJECTED
    assert online.table(recorder.record).row_count == len(rows)


@pytest.mark.skipif(not tables.has_torchrec(), reason="TorchRec is not installed")
def test_torchrec_gives_rows_after_its_interval() -> None:
    from benchmarks.online.torchrec_ids import Remapped

    remap = Remapped("mch-lfu", 100 * 92, 68, interval=2, batch=20)
    ids = torch.arange(10) * 7
    shared = [int((remap([ids], True)[0][0] == 99).sum()) for _ in range(3)]
    assert remap.rows == 100 and shared[0] == 10 and shared[-1] == 0 and remap.bytes == 100 * 24 + 8
