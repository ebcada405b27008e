"""`python -m benchmarks sweep`: a small run on a CPU, wrong results, rows over all workloads, kernel intervals."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.kernels import fbgemm_contender
from benchmarks.kernels.contender import WrongResult
from benchmarks.runner import show
from benchmarks.runner.record import Recorder
from benchmarks.sweep import benchmark as sweep
from benchmarks.sweep import race, summary
from benchmarks.sweep.contender import check_lookup, check_step
from benchmarks.sweep.family import TINY, SweepWorkload, draw
from benchmarks.sweep.ids import BatchStream
from benchmarks.sweep.kernel_time import Interval, segments
from benchmarks.sweep.thermocline_tables import CollectionTables
from thermocline.errors import BadInput

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"


def fbgemm_is(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM is absent, or its tables are a collection of ours."""

    def versions() -> dict[str, str]:
        if missing:
            raise ImportError("No module named 'fbgemm_gpu'")
        return {"fbgemm": "fake"}

    def fake(workload: SweepWorkload, device: str, precision: str, lookups: int | None = None) -> CollectionTables:
        tables = CollectionTables(workload, device, precision, lookups=lookups)
        tables.label, tables.converted = f"fbgemm {precision}", ["ids int64"]
        return tables

    monkeypatch.setattr(fbgemm_contender, "versions", versions)
    monkeypatch.setattr(race, "FbgemmTables", fake)


def quick_run(workloads: int = 2, **options: Any) -> dict[str, Any]:
    threads = torch.get_num_threads()
    try:
        return sweep.run("cpu", 1, workloads, threads=1, seconds=0.1, quick=True, **options)
    finally:
        torch.set_num_threads(threads)


def printed(record: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - ends with the test
    console.print(summary.table(record))
    return console.export_text()


def test_asked_cases_are_those_that_a_sweep_sums_up() -> None:
    cases = [*summary.all_cases("cuda"), *summary.all_cases("cpu", 1), *summary.all_cases("cpu", 2)]
    assert set(show.load_asked(ASKED)["sweep"]) <= set(cases) and len(cases) == len(set(cases))


def test_without_fbgemm_ours_is_timed_alone_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fbgemm_is(missing=True, monkeypatch=monkeypatch)
    record = quick_run()
    assert any("FBGEMM was not measured" in note for note in record["notes"])
    names = list(record["workloads"])
    assert [row["case"] for row in record["rows"][:4]] == [f"cpu/{names[0]}/{s}/{o}/1" for s, o in race.MEASURES]
    assert len(record["rows"]) == 8 and all(row["ours"] > 0 and row["ratio"] is None for row in record["rows"])
    row = record["rows"][2]
    assert row["limit_ms"] > 0 and row["of_sectors"] > 0 and row["settled_steps"] == 8 and row["wall_ms"] == row["ours"]
    assert not show.parse(json.loads(json.dumps(record)), "test").short()
    assert names[0] in printed(record)
    ElementTree.fromstring(summary.draw(record))


def test_with_a_peer_every_measure_has_a_ratio_and_quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    fbgemm_is(missing=False, monkeypatch=monkeypatch)
    record = quick_run()
    rows = {row["case"]: row for row in record["rows"]}
    single = [row for case, row in rows.items() if "/all/" not in case]
    assert all(row["ratio"] > 0 and row["wall_ratio"] > 0 and row["converted"] == ["ids int64"] for row in single)
    assert {row["peer"] for row in single} == {"fbgemm fp32", "fbgemm fp32 step", "fbgemm int8", "fbgemm int4"}
    wanted = [case for case in summary.all_cases("cpu", 1) if "sectors" not in case]  # no workload is large
    assert [case for case in rows if "/all/" in case] == wanted
    ElementTree.fromstring(summary.draw(record))


def test_no_workload_starts_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fbgemm_is(missing=True, monkeypatch=monkeypatch)
    record = quick_run(workloads=3, limit_s=-1.0)
    assert not record["rows"] and any("workloads 0 to 2 of seed 1" in note for note in record["notes"])


def test_wrong_tables_are_failed_rows_and_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fbgemm_is(missing=False, monkeypatch=monkeypatch)
    right = CollectionTables.lookup
    monkeypatch.setattr(
        CollectionTables, "lookup", lambda self, args: right(self, args) * (1.01 if self.label.startswith("ours int8") else 1)
    )
    record = quick_run(workloads=1)
    rows = {tuple(row["case"].split("/")[2:4]): row for row in record["rows"] if "/all/" not in row["case"]}
    assert "error" in rows["int8+5%", "lookup"] and "error" in rows["int8+5%", "step"]
    assert "error" not in rows["fp32", "lookup"] and "error" not in rows["int4+1%", "lookup"]
    assert "FAILED" in printed(record)


def test_a_peer_that_fails_leaves_ours_alone_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fbgemm_is(missing=False, monkeypatch=monkeypatch)

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(race, "FbgemmTables", fail)
    rows = quick_run(workloads=1)["rows"]
    assert len(rows) == 4 and all(row["ours"] > 0 and "no such kernel" in row["peer_error"] for row in rows)


def test_wall_times_stand_for_kernel_times_where_the_profiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no stretches of work")

    monkeypatch.setattr(race, "kernel_times", fail)
    settings = race.SweepSettings("cpu", 1.0, 1.0, False)
    one = race.WorkloadRace(Recorder("sweep", lambda line: None), draw(TINY, 1, 0), settings)
    settings.device = "cuda"
    further: dict[str, Any] = {}
    assert one._kernels({}, {"ours": 2.0}, further) == {"ours": 2.0} and "no stretches" in further["kernel_error"]


@pytest.mark.parametrize("number", range(6))
def test_a_wrong_row_gradient_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = draw(TINY, 9, number)

    def build(job: SweepWorkload) -> CollectionTables:
        return CollectionTables(job, "cpu", "fp32", lookups=BatchStream(job, "cpu").most_ids)

    check_lookup(build(workload), workload, "cpu")
    check_step(build, workload, "cpu")
    right = CollectionTables.prepare
    monkeypatch.setattr(CollectionTables, "prepare", lambda self, batch: right(self, batch._replace(ids=batch.ids * 0)))
    with pytest.raises(WrongResult):
        check_step(build, workload, "cpu")


# -- rows over all workloads --


def fill(recorder: Recorder, ratios: list[float | None], seed: int = 1) -> None:
    recorder.record.setdefault("workloads", {})
    for number, ratio in enumerate(ratios):
        name = f"{seed}.{number:02}"
        recorder.record["workloads"][name] = {}
        for stored, operation in race.MEASURES:
            case = f"cuda/{name}/{stored}/{operation}"
            if ratio is None:
                recorder.fail(case, "wrong")
            else:
                further = {"wall_ratio": ratio / 2, "of_sectors": ratio / 4, "lookups": 200_000 if number else 1}
                recorder.add(case, 1.0, "ms", "fbgemm", ratio, ratio, **further)


def test_quantiles_are_over_all_workloads_and_are_judged() -> None:
    recorder = Recorder("sweep", lambda line: None)
    fill(recorder, [1.0, 2.0, 4.0])
    summary.add_rows(recorder, "cuda", None)
    rows = {row["case"]: row for row in recorder.rows}
    found = {case: row["ratio"] for case, row in rows.items() if "/all/" in case}
    assert list(found) == summary.all_cases("cuda")
    names = [f"cuda/all/int8+5%/lookup-{which}" for which in ("geomean", "p5", "worst")]
    assert [found[name] for name in names] == pytest.approx([2.0, 1.1, 1.0])
    assert found["cuda/all/int8+5%/of-sectors-median"] == pytest.approx(0.75), "without the small workload"
    assert found["cuda/all/wall-worst"] == 0.5 and not rows["cuda/all/wall-worst"]["ok"]
    assert rows[names[0]]["asked"] == 1.6 and rows[names[0]]["ok"]


def test_a_failed_workload_makes_the_worst_ratio_zero() -> None:
    recorder = Recorder("sweep", lambda line: None)
    fill(recorder, [2.0, None])
    summary.add_rows(recorder, "cuda", None)
    found = {row["case"]: row for row in recorder.rows}
    assert found["cuda/all/fp32/lookup-worst"]["ratio"] == 0 and not found["cuda/all/fp32/lookup-worst"]["ok"]
    assert found["cuda/all/fp32/lookup-geomean"]["ratio"] == 2.0


def test_runs_of_several_seeds_are_summed_up_together() -> None:
    records = []
    for seed, ratio in ((1, 1.0), (2, 4.0)):
        recorder = Recorder("sweep", lambda line: None)
        fill(recorder, [ratio], seed)
        summary.add_rows(recorder, "cuda", None)
        records.append(recorder.record)
    merged = summary.merge(records)
    found = {row["case"]: row["ratio"] for row in merged["rows"] if "/all/" in row["case"]}
    assert found["cuda/all/fp32/lookup-geomean"] == pytest.approx(2.0) and len(merged["workloads"]) == 2
    assert len([row for row in merged["rows"] if "/all/" not in row["case"]]) == 8


def test_the_command_merges_files_and_draws_a_picture(tmp_path: Path) -> None:
    recorder = Recorder("sweep", lambda line: None)
    fill(recorder, [1.0, 2.0])
    summary.add_rows(recorder, "cuda", None)
    (tmp_path / "a.json").write_text(json.dumps(recorder.record))
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["sweep", "--merge", str(tmp_path / "a.json"), "--json", str(out), "--quiet"])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["rows"] == recorder.rows
    ElementTree.fromstring(out.with_suffix(".svg").read_text())
    recorder.record["bench"] = "kernels"
    with pytest.raises(BadInput) as raised:
        summary.merge([recorder.record])
    assert raised.value.parameter == "merge"


def test_busy_time_counts_parallel_work_once() -> None:
    work = [
        Interval(0, 5, "before"),
        Interval(10, 12, "void spin_kernel(long)"),
        Interval(20, 30, "a"),
        Interval(25, 40, "b, on another stream"),
        Interval(26, 28, "c"),
        Interval(50, 55, "d"),
        Interval(60, 61, "void spin_kernel(long)"),
        Interval(62, 64, "e"),
    ]
    assert segments(work[::-1]) == [25, 2]
