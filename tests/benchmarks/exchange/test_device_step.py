"""The sharded step of one rank is measured, and a trace marks where its host reads sizes."""

from __future__ import annotations

import json
import queue

from benchmarks.exchange import device_step
from benchmarks.kernels.cases import Shape


def test_a_rank_that_exchanges_with_itself_is_measured_and_traced(tmp_path, monkeypatch):
    monkeypatch.setattr(device_step, "WARM", 1)
    monkeypatch.setattr(device_step, "STEPS", 2)
    shape, results = Shape("small", tables=2, rows=99, dim=8, batch=6, pooling=3), queue.SimpleQueue()
    device_step._rank(0, shape, "zipf", 1, "cpu", True, tmp_path / "trace.json", str(tmp_path / "store"), results)
    found = device_step.StepTimes(*results.get())
    assert len(found.steps) == 2 and found.host > 0
    assert sum(event.get("name") == "step" for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 3
