"""Training runs: they learn, they are exact, and they can be interrupted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

import thermocline
from benchmarks.accuracy.plain_tables import plain_dlrm
from support import has
from thermocline import BadInput, FormatError
from thermocline.data.click_log import heat_of
from thermocline.data.synthetic import SyntheticLog, table_rows
from thermocline.data.write_log import write_parquet
from thermocline.train import DLRMRun, DLRMSettings, evaluate, loop

SMALL = DLRMSettings(samples=3001, rows=2000, batch=100, dim=8, bottom=(16,), top=(16,), seed=3)


def told(outcome):
    return {name: value for name, value in asdict(outcome).items() if name != "seconds"}


def interrupted(settings, folder, after):
    """Run until `after` steps, then stop as Ctrl-C does."""
    run = DLRMRun(settings, folder)
    with pytest.raises(KeyboardInterrupt):
        run.finish(stop=lambda: run.position.step >= after)


TIERS = {"fp32": 0.02, "int8": 0.05, "int2": 0.93}


@pytest.mark.parametrize("change", [{}, {"precision": "int4"}, {"precision": TIERS, "warm": True}, {"epochs": 2}])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, change):
    settings = replace(SMALL, **change)
    expected = DLRMRun(settings).finish()
    for after in (1, 13, 31):  # 31 steps are an epoch
        interrupted(settings, tmp_path / "run", after)
    resumed = DLRMRun(settings, tmp_path / "run")
    assert resumed.position.step == 31
    assert told(resumed.finish()) == told(expected)


def test_a_budget_chooses_the_precision_of_a_run():
    budget = 40_000
    run = DLRMRun(replace(SMALL, precision="auto", budget=f"{budget}B"))
    memory = run.model.embeddings.memory()
    assert memory.total - memory.parts["optimizer state"] <= budget < memory.fp32
    assert run.finish().stats["admissions"] > 0


def test_a_warm_run_begins_with_the_rows_of_its_log_in_their_slots():
    run, cold = (DLRMRun(replace(SMALL, precision=TIERS, warm=warm)) for warm in (True, False))
    exact = DLRMRun(SMALL).model.embeddings
    tables, heat = run.model.embeddings, heat_of(run.train_log)
    assert tables.memory() == cold.model.embeddings.memory() and tables.stats()["lookups"] == 0
    index = max(range(len(heat)), key=lambda t: len(heat[t]))  # the largest: small ones begin in slots anyway
    row, name = heat[index].argmax(), tables.tables[index].name
    assert torch.equal(tables.get_rows(name)[row], exact.get_rows(name)[row])
    assert not torch.equal(cold.model.embeddings.get_rows(name)[row], exact.get_rows(name)[row])


def test_a_finished_run_tells_its_result_again(tmp_path):
    expected = DLRMRun(SMALL, tmp_path).finish()
    again = DLRMRun(SMALL, tmp_path).finish(progress=lambda *_: pytest.fail("it trained again"))
    assert again == expected


def test_a_run_that_dies_between_saves_repeats_the_steps_since(tmp_path):
    expected = DLRMRun(SMALL).finish()
    run = DLRMRun(SMALL, tmp_path)

    def die(done, total, what):
        if run.position.step == 9:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        run.finish(progress=die, save_seconds=0)
    assert DLRMRun(SMALL, tmp_path).position.step == 8
    assert told(DLRMRun(SMALL, tmp_path).finish()) == told(expected)


def test_a_death_while_saving_leaves_the_save_before(tmp_path, monkeypatch):
    interrupted(SMALL, tmp_path, 5)
    run = DLRMRun(SMALL, tmp_path)

    def cut(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, check=has(errno=28)):
        patch.setattr("thermocline.checkpoint.format.write.write_file", cut)
        run.finish(stop=lambda: run.position.step >= 7)
    assert DLRMRun(SMALL, tmp_path).position.step == 5


def test_another_run_does_not_take_the_folder(tmp_path):
    interrupted(SMALL, tmp_path, 2)
    with pytest.raises(BadInput, check=has(parameter="lr", value=0.5, saved=0.02)):
        DLRMRun(replace(SMALL, lr=0.5), tmp_path)
    thermocline.save(thermocline.EmbeddingBag(7, 4), tmp_path / "bag")
    with pytest.raises(BadInput, check=has(parameter="checkpoint")):
        DLRMRun(SMALL, tmp_path / "bag")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "train.json").write_text("{}")
    with pytest.raises(FormatError, check=has(path=tmp_path / "old" / "train.json")):
        DLRMRun(SMALL, tmp_path / "old")
    with pytest.raises(BadInput, check=has(parameter="model")):
        DLRMRun(SMALL, tmp_path / "plain", model=plain_dlrm(SMALL, SMALL.logs()[0]))


def test_only_the_last_save_is_kept(tmp_path):
    interrupted(SMALL, tmp_path, 2)
    interrupted(SMALL, tmp_path, 4)
    manifest, save = sorted(path.name for path in tmp_path.iterdir())
    assert manifest == "manifest.json" and save.startswith("save-000002-")


def test_it_learns_better_than_its_controls():
    settings = replace(SMALL, samples=30_000, dim=8)
    run = DLRMRun(settings)
    train_log, test_log = settings.logs()
    untrained = evaluate(run.model, test_log, "cpu").auc
    learned = run.finish()
    p = test_log.probability(0, test_log.samples)
    from thermocline.data.metrics import auc

    best = auc(p, test_log.clicks(0, test_log.samples).label_B > 0.5)
    rows = {f"C{i + 1}": count for i, count in enumerate(train_log.rows)}
    for name, count in rows.items():  # every row forgotten: what is left are the dense features
        run.model.embeddings.set_rows(name, torch.arange(count), torch.zeros(count, 8))
    forgotten = evaluate(run.model, test_log, "cpu").auc
    assert untrained < 0.56 < forgotten + 0.05 < learned.auc < best
    assert learned.auc > 0.70 and learned.ne < 0.95


def test_plain_and_our_fp32_tables_learn_the_same():
    settings = replace(SMALL, samples=10_000)
    ours, plain = (DLRMRun(settings, model=model).finish() for model in (None, plain_dlrm(settings, settings.logs()[0])))
    assert ours.auc == pytest.approx(plain.auc, abs=2e-3)
    assert ours.logloss == pytest.approx(plain.logloss, abs=2e-3)


def test_int8_tables_take_less_memory_and_learn_too():
    wide, narrow = (DLRMRun(replace(SMALL, precision=precision)).finish() for precision in ("fp32", "int8"))
    assert narrow.memory["codes"] * 4 == wide.memory["codes"]
    assert narrow.auc == pytest.approx(wide.auc, abs=0.01)


def test_a_file_trains_as_the_log_it_was_written_from(tmp_path):
    log = SyntheticLog(table_rows(1000), 2000, seed=1)
    write_parquet(log, tmp_path / "log.parquet", lambda *_: None)
    outcome = DLRMRun(replace(SMALL, data=tmp_path / "log.parquet")).finish()
    assert outcome.samples == 1600 and 0.4 < outcome.auc < 0.9


def test_progress_counts_samples_of_all_epochs():
    told = []
    DLRMRun(replace(SMALL, epochs=2)).finish(progress=lambda done, total, what: told.append((done, total)))
    assert told[0] == (100, 6002) and told[30] == (3001, 6002) and told[-1] == (6002, 6002)


def test_scalars_reach_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = replace(SMALL, samples=30_000, dim=4, precision="int8", cache=0.1)
    outcome = DLRMRun(settings).finish(logdir=tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"loss", "samples per second", "test/auc", "memory/codes", "tables/hits"} <= set(events.Tags()["scalars"])
    assert events.Scalars("test/auc")[-1].value == pytest.approx(outcome.auc, abs=1e-6)


def test_ids_of_a_file_come_and_go_and_tensorboard_shows_it(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_parquet(SyntheticLog(table_rows(2000), 2000, seed=1), tmp_path / "log.parquet", lambda *_: None)
    settings = replace(SMALL, data=tmp_path / "log.parquet", elastic=60)
    outcome = DLRMRun(settings, tmp_path / "run").finish(logdir=tmp_path / "board")
    assert outcome.rows == 26 * 60 and outcome.stats["ids_evicted"] > 0 and 0.3 < outcome.auc < 0.9
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert {"tables/ids_used", "tables/ids_admitted", "tables/shared_lookups", "tables/ids_waiting"} <= set(
        events.Tags()["scalars"]
    )
    assert told(DLRMRun(settings, tmp_path / "run").finish()) == told(outcome)  # resumed at its end
    for change in ({"data": None}, {"hashed": 50}, {"warm": True}):
        with pytest.raises(BadInput, check=has(parameter="elastic")):
            replace(settings, **change)


def test_the_curve_of_a_run_has_forty_points_and_goes_on_after_a_resume(tmp_path):
    settings = replace(SMALL, samples=12_300)
    whole = DLRMRun(settings)
    whole.finish()
    points = whole.position.curve
    assert [point["step"] for point in points] == list(range(3, 124, 3)), "123 steps"
    assert points[-1]["loss"] < points[0]["loss"]

    interrupted(settings, tmp_path, 50)
    resumed = DLRMRun(settings, tmp_path)
    resumed.finish()
    again = resumed.position.curve
    assert [point["step"] for point in again] == [point["step"] for point in points]
    assert [point["loss"] for point in again[:16]] == pytest.approx([point["loss"] for point in points[:16]], rel=1e-6)


def test_a_long_curve_is_thinned_and_keeps_its_end(monkeypatch):
    monkeypatch.setattr(loop, "MAX_POINTS", 8)
    run = DLRMRun(replace(SMALL, samples=2_000))
    run.finish()
    steps = [point["step"] for point in run.position.curve]
    assert len(steps) < 8 and steps[-1] == 20 and steps == sorted(steps)


@pytest.mark.parametrize("change, what", [({"batch": 0}, "batch"), ({"epochs": 0}, "epochs")])
def test_impossible_settings_are_refused(change, what):
    with pytest.raises(BadInput, check=has(parameter=what)):
        replace(SMALL, **change)


def test_a_log_too_short_to_split_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"label": [1], "C1": [4]}), tmp_path / "one.parquet")
    with pytest.raises(BadInput, check=has(parameter="data", samples=0)):
        DLRMRun(replace(SMALL, data=tmp_path / "one.parquet"))


def test_settings_survive_json(tmp_path):
    interrupted(SMALL, tmp_path, 1)
    assert json.loads((tmp_path / "manifest.json").read_text())["progress"]["settings"]["top"] == [16]
