"""`python -m benchmarks kernels` from end to end, on tables of a few rows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.kernels import benchmark as kernels
from benchmarks.kernels import cases
from benchmarks.kernels import cpu as kernels_cpu
from benchmarks.kernels import gpu as kernels_gpu
from benchmarks.kernels.worker import WorkerError
from benchmarks.runner import record, show

TINY = cases.Shape("tiny", tables=2, rows=1000, dim=8, batch=32, pooling=3)


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CPU_SHAPES", (TINY,))
    monkeypatch.setattr(cases, "GPU_SHAPES", (TINY,))
    monkeypatch.setattr(cases, "GPU_OTHERS", ())
    monkeypatch.delenv(kernels.PEER_PYTHON, raising=False)


class FakeWorker:
    """Answers as a worker would, with made-up times; fails where it is told to."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.asked = failing, []

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        self.asked.append(do)
        if do == "build":
            if self.failing == f"{request['library']}/{request['job']['precision']}":
                raise WorkerError("it broke")
            return {"labels": [request["library"]]}
        if do == "run":
            return {"ms": [1.0 if request["label"] == "ours" else 3.0] * request["iterations"]}
        return {"versions": {"fbgemm": "made up"}} if do == "hello" else {}

    def close(self) -> None:
        pass


def fake(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
    monkeypatch.setattr(kernels_cpu, "start_ours", lambda threads: FakeWorker(failing))
    monkeypatch.setattr(kernels_cpu, "start_peer", lambda python, threads: FakeWorker(failing))


def test_a_cpu_run_has_a_row_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    saved: list[int] = []
    found = kernels.run("cpu", None, quick=True, peer_python="python", save=lambda record: saved.append(len(record["rows"])))
    wanted = [case for group in cases.cpu_groups() for case in cases.cpu_cases(group)]
    assert sorted(row["case"] for row in found["rows"]) == sorted(wanted)
    assert all(row["ratio"] == 3.0 and row["spread"] == 0.0 and row["ok"] for row in found["rows"])
    assert saved == list(range(1, len(wanted) + 1))
    assert found["versions"]["fbgemm"] == "made up"


def test_a_contender_that_breaks_fails_its_rows_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, failing="fbgemm/int8")
    rows = kernels.run("cpu", None, quick=True, peer_python="python")["rows"]
    short = {row["case"] for row in rows if not row["ok"]}
    assert short == {
        f"cpu/tiny/zipf/int8/{name}/{t}" for name in ("forward", "step-sgd", "step-rowwise_adagrad") for t in (1, 2)
    }
    assert all("it broke" in row["error"] for row in rows if not row["ok"])


def test_a_filter_keeps_the_cases_that_contain_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    rows = kernels.run("cpu", "int8/forward/2", quick=True, peer_python="python")["rows"]
    assert [row["case"] for row in rows] == ["cpu/tiny/zipf/int8/forward/2"]


def test_without_fbgemm_its_rows_are_missing_and_a_note_has_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake(monkeypatch)
    found = kernels.run("cpu", None, quick=True)
    assert all("-vs-torch" in row["case"] for row in found["rows"])
    assert "pip install --no-deps fbgemm-gpu-cpu" in found["notes"][0]


def test_without_peers_ours_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    rows = kernels.run("cpu", None, quick=True, peers=False)["rows"]
    assert len(rows) == len(cases.CPU_THREADS) * len(cases.cpu_groups())
    assert all(row["peer"] is None and row["ratio"] is None and row["ok"] for row in rows)


def test_a_small_run_measures_and_writes_what_show_reads() -> None:
    found = kernels.run("cpu", "vs-torch", quick=True)
    assert [row.get("error") for row in found["rows"]] == [None] * len(found["rows"])
    assert len(found["rows"]) == 6
    assert all(row["ours"] > 0 and row["peer_value"] > 0 for row in found["rows"])
    assert not show.parse(found, "test").short()


def test_the_gpu_plan_runs_where_there_is_no_card() -> None:
    recorder = record.Recorder("kernels", lambda line: None, judged=False)
    kernels_gpu.run(recorder, lambda case: True, True, False, lambda *step: None, device="cpu")
    assert {row["case"] for row in recorder.rows} == {
        group.case("cuda", kind) for group in cases.gpu_groups() for kind in group.kinds
    }
    assert [row.get("error") for row in recorder.rows] == [None] * len(recorder.rows)


def test_a_quick_run_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    assert all(row["asked"] is None for row in kernels.run("cpu", None, quick=True, peer_python="python")["rows"])


def test_the_geometric_mean_needs_all_six_rows() -> None:
    recorder = record.Recorder("kernels", lambda line: None)
    names = [f"cuda/{s}/{k}/fp32/{cases.STEP_ROWWISE}" for s in "ABC" for k in ("zipf", "uniform")]
    for at, case in enumerate(names):
        kernels_gpu.add_geomean(recorder, lambda case: True)
        assert recorder.rows[-1:] == [] or recorder.rows[-1]["case"] != cases.KERNELS.geomean
        recorder.add(case, 1.0, "ms", peer="them", peer_value=1.0 + at, ratio=1.0 + at)
    kernels_gpu.add_geomean(recorder, lambda case: True)
    assert recorder.rows[-1]["case"] == cases.KERNELS.geomean
    assert math.isclose(recorder.rows[-1]["ratio"], math.factorial(6) ** (1 / 6))
    assert recorder.rows[-1]["ok"] is True


def test_the_bytes_of_a_lookup_are_rows_ids_and_output() -> None:
    job = cases.Workload(cases.A, "int8", cases.FORWARD, id_dtype="int32")
    lookups = 26 * 16384
    assert kernels_gpu.bytes_to_move(job) == lookups * (132 + 4) + lookups * 128 * 4
