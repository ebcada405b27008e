"""The levers benchmark: maps of equal bytes, arms that are what their names say, and rows judged against the right peer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.levers import benchmark as levers
from benchmarks.levers import rows as levers_rows
from benchmarks.levers.arms import ARMS, CUTS, FULL, ZEROED, LeverArm, RawLog, choose, raw_log, row_bytes
from benchmarks.runner import record, show
from benchmarks.runner.noninferiority import BETTER, EQUAL, REJECTED
from benchmarks.runner.paired import RunResult
from thermocline.train import DLRMSettings

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
LOG = DLRMSettings(samples=1501, rows=5003)
TINY = levers.LeversPlan(LOG, dims=(8,), seeds=2, filter="sized-1in8")


@pytest.fixture(scope="module")
def raw() -> RawLog:
    return raw_log(LOG)


def bytes_of(arm: LeverArm, raw: RawLog, dim: int = 16) -> int:
    maps = choose(arm, raw.heat, dim, seed=0).maps
    rows = max(each.rows for each in maps) if arm.one_table else sum(each.rows for each in maps)
    return rows * row_bytes(dim) + sum(each.bytes for each in maps)


# -- arms --


@pytest.mark.parametrize("cut", CUTS)
def test_arms_of_one_cut_take_no_more_bytes_than_the_uniform_one(raw: RawLog, cut: int) -> None:
    uniform = bytes_of(LeverArm("uniform", cut), raw)
    found = {arm.lever: bytes_of(arm, raw) / uniform for arm in ARMS if arm.cut == cut}
    assert set(found) == {"uniform", "capped", "hashed", "sized", "onehash"}
    assert all(ratio <= 1 for ratio in found.values())
    assert found["sized"] > 0.9 and found["hashed"] > 0.9


def test_predicted_bytes_of_a_lever_match_its_maps_except_smaller_bitmaps(raw: RawLog) -> None:
    for arm in (LeverArm("sized", 8), LeverArm("hashed", 2), LeverArm("pruned-once")):
        predicted = choose(arm, raw.heat, 16, 0).predicted["predicted_bytes"]
        assert bytes_of(arm, raw) <= predicted <= bytes_of(arm, raw) * 1.12


def test_every_id_of_the_training_part_has_a_row_of_its_own_in_full(raw: RawLog) -> None:
    for table, each in zip(raw.heat, choose(FULL, raw.heat, 16, 0).maps, strict=True):
        assert sorted(each(torch.from_numpy(table.ids_H)).tolist()) == list(range(table.distinct))
        assert each(torch.tensor([10**12])).item() == table.distinct == each.rows - 1


def test_unified_is_full_with_rows_one_after_the_other(raw: RawLog) -> None:
    full, unified = (choose(arm, raw.heat, 16, 0).maps for arm in (FULL, LeverArm("unified")))
    taken = torch.cat([each(torch.from_numpy(t.ids_H)) for t, each in zip(raw.heat, unified, strict=True)])
    assert len(taken.unique()) == len(taken)
    assert unified[-1].rows == sum(each.rows for each in full)


def test_pruning_keeps_what_was_seen_twice_and_blind_pruning_as_many(raw: RawLog) -> None:
    once, blind = (choose(LeverArm(f"pruned-{how}"), raw.heat, 16, 0).maps for how in ("once", "blind"))
    assert [each.span for each in once] == [each.span for each in blind]
    table, kept = raw.heat[2], once[2]
    rows_H = kept(torch.from_numpy(table.ids_H)).numpy()
    assert ((rows_H == kept.rows - 1) == (table.counts_H == 1)).all()
    assert not torch.equal(kept(torch.from_numpy(table.ids_H)), blind[2](torch.from_numpy(table.ids_H)))


def test_sized_tables_keep_the_hottest_ids_apart(raw: RawLog) -> None:
    for table, each in zip(raw.heat, choose(LeverArm("sized", 8), raw.heat, 16, 0).maps, strict=True):
        if each.kept is not None:
            assert np.isin(each.kept.ids.numpy(), table.ids_H[: each.kept.count]).all()


def test_another_seed_is_another_hash_with_the_same_sizes(raw: RawLog) -> None:
    one, other = (choose(LeverArm("uniform", 2), raw.heat, 16, seed).maps[2] for seed in (0, 1))
    ids_H = torch.from_numpy(raw.heat[2].ids_H)
    assert one.rows == other.rows and not torch.equal(one(ids_H), other(ids_H))


def test_a_filter_brings_the_arms_it_is_compared_with() -> None:
    assert [arm.name for arm in TINY.arms()] == ["full", "uniform-1in8", "sized-1in8"]
    assert [arm.name for arm in replace(TINY, filter="zeroed").arms()] == ["full", "zeroed-89%"]
    assert len(replace(TINY, filter=None).jobs()) == 2 * (len(ARMS) - 1)


def test_every_asked_case_is_an_arm_that_runs() -> None:
    asked = show.load_asked(ASKED)["levers"]
    names = {arm.name: arm for arm in ARMS}
    for case, word in asked.items():
        arm = names[case.split("/")[2]]
        assert word in (BETTER, EQUAL, REJECTED) and (word != BETTER or arm.uniform)


# -- runs --


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    runs = tmp_path_factory.mktemp("levers") / "tiny.runs.jsonl"
    yield levers.run(TINY, runs), runs


def test_a_record_has_what_the_table_and_bench_show_need(measured: tuple[dict[str, Any], Path]) -> None:
    found, _ = measured
    *arms, _, _ = found["rows"]
    case = "synthetic-5003-rows-1501-samples/D8/"
    assert [row["case"] for row in arms] == [case + name for name in ("full", "uniform-1in8", "sized-1in8")]
    full, uniform, sized = arms
    assert sized["peer_value"] == full["ours"] and sized["against_uniform"]["uniform_auc"] == uniform["ours"]
    assert sized["bytes"] <= uniform["bytes"] and sized["predicted_bytes"] == pytest.approx(sized["bytes"], rel=0.12)
    assert 0 < sized["harm"] < 1 and sized["memory_ratio_with_state"] > 7
    assert len(show.parse(json.loads(json.dumps(found, allow_nan=False)), "test").rows) == 5
    assert levers_rows.table(found).row_count == 5 and levers_rows.table(found, only_short=True).row_count == 0


def test_finished_runs_are_not_repeated(measured: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found, runs = measured
    monkeypatch.setattr(levers, "run_job", lambda job: pytest.fail(f"{job.key} ran again"))
    assert levers.run(TINY, runs)["rows"] == found["rows"]


def test_a_unified_table_learns_the_same_to_the_bit(measured: tuple[dict[str, Any], Path]) -> None:
    found = levers.run(replace(TINY, filter="unified", seeds=1))
    full, unified = found["rows"][:2]
    assert unified["ours"] == full["ours"] == json.loads(measured[1].read_text().splitlines()[0])["measures"]["trained"]["auc"]


def test_features_of_one_table_take_one_launch_each_way_and_no_more_bytes() -> None:
    apart, collection, unified = levers.ways_to_keep([5, 1, 300, 17], 4).values()
    assert (apart.launches, collection.launches, unified.launches) == (8, 2, 2)
    assert unified.bytes <= collection.bytes <= apart.bytes and unified.bytes >= 323 * (16 + 4)


def test_the_verb_goes_on_from_its_runs(measured: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    found, runs = measured
    (tmp_path / "two.runs.jsonl").write_text(runs.read_text())
    command = [sys.executable, "-m", "benchmarks", "levers", "--samples", "1501", "--rows", "5003", "--dim", "8"]
    options = ["--seeds", "2", "--filter", "sized-1in8", "--json", str(tmp_path / "two.json")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert "sized-1in8" in done.stdout and "2 of 10" in done.stdout
    assert json.loads((tmp_path / "two.json").read_text())["rows"] == found["rows"]


# -- rows --


def made_up(arm: str, seed: int, auc: float, **measures: float) -> RunResult:
    told = {when: {"auc": value, "logloss": 0.5} for when, value in {"trained": auc, **measures}.items()}
    return RunResult("log", arm, 16, seed, told, stats={"bytes": 100, "map_bytes": 0}, rows=100, seconds=1.0, commit="1")


def test_better_is_asked_against_the_uniform_cut_and_all_else_against_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"log/D16/sized-1in8": BETTER, "log/D16/zeroed-89%": REJECTED, "log/D16/unified": EQUAL}
    monkeypatch.setattr(record, "read_asked", lambda bench: asked)
    arms = [FULL, ZEROED, LeverArm("uniform", 8), LeverArm("sized", 8), LeverArm("unified")]

    def rows(sized: float, zeroed: float) -> list[dict[str, Any]]:
        results = []
        for seed in range(10):
            luck = seed * 1e-3
            results.append(made_up("full", seed, 0.7 + luck, zeroed=zeroed + luck))
            results += [made_up("uniform-1in8", seed, 0.68 + luck), made_up("unified", seed, 0.7 + luck)]
            results.append(made_up("sized-1in8", seed, sized + luck))
        recorder = record.Recorder("levers", lambda line: None)
        levers_rows.write(recorder, "log", arms, results)
        return recorder.rows

    good = rows(sized=0.69, zeroed=0.65)
    assert all(row["ok"] for row in good)
    assert good[3]["verdict"] == REJECTED  # against full it still loses
    assert good[3]["against_uniform"]["auc_difference"][0] == pytest.approx(0.01)
    assert [row["ok"] for row in rows(sized=0.67, zeroed=0.7)] == [True, False, True, False, True]
