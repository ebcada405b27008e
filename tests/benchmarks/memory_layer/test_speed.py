"""`python -m benchmarks memory_layer`: its checks, a small run on a CPU, and rows from results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.memory_layer import benchmark as bench
from benchmarks.memory_layer import speed
from benchmarks.memory_layer.gpt import GPT
from benchmarks.runner import isolated_process as child
from benchmarks.runner import record, show

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
SMALL = {"rows": 4000, "dim": 8, "precision": "int8", "cache": 0.05}


def in_this_process(module: str, job: dict[str, Any], tell: Any, limit_s: float) -> list[dict[str, Any]]:
    less = {"settle": 2, "rounds": 2, "calls": 4, "steps": 4}
    return json.loads(json.dumps(list(speed.measure({**json.loads(json.dumps(job)), **less}))))


def test_every_asked_case_is_one_that_the_bench_measures():
    names = bench.all_cases()
    assert set(show.load_asked(ASKED)["memory_layer"]) <= set(names) and len(names) == len(set(names))


def test_a_small_run_measures_every_case(monkeypatch):
    monkeypatch.setattr(child, "results", in_this_process)
    found = bench.run("cpu", quick=True)
    rows = {row["case"]: row for row in found["rows"]}
    assert sorted(rows) == sorted(bench.all_cases()) and all(row["ok"] for row in rows.values())
    host = rows["cuda/100M/int8+5%/host"]
    assert host["peer_value"] == rows["cuda/gpt124m/none"]["ours"] and host["added"][1] < host["added"][0] < host["added"][2]
    assert host["tokens_per_s"] > 0 and 0 < host["hit_rate"] < 1 and host["codes_bytes"] == 4000 * 8
    assert rows["cuda/decode/int4+1%/64"]["tokens_us"] > 0
    assert not show.parse(found, "test").short()


def test_a_process_that_fails_leaves_rows_that_say_so():
    recorder = record.Recorder("memory_layer", lambda line: None)
    usual, large = bench.arms()
    bench.add_rows(recorder, usual, {"process": {"error": "out of memory"}}, first=True)
    bench.add_rows(recorder, large, {bench.NONE: {"ms": 1.0, "spread": 0.0, "rounds": [1.0]}}, first=False)
    errors = {row["case"]: row.get("error") for row in recorder.rows}
    assert errors["cuda/100M/int8+5%/host"] == "out of memory" and errors["cuda/320M/int4+0.5%/host"]
    assert not any(row["ok"] for row in recorder.rows if row["asked"] is not None)


def test_a_step_is_judged_by_the_rounds_of_both():
    recorder = record.Recorder("memory_layer", lambda line: None)
    usual, _ = bench.arms()
    none = {"ms": 10.0, "spread": 0.0, "rounds": [10.0, 20.0, 10.0], "tokens_per_s": 1.0}
    ours = {"ms": 10.1, "spread": 0.0, "rounds": [10.1, 20.2, 10.1], "tokens_per_s": 1.0}
    bench.add_rows(recorder, usual[:1], {bench.NONE: none, usual[0]["name"]: ours}, first=True)
    row = next(row for row in recorder.rows if row["case"] == "cuda/100M/int8+5%/host")
    assert row["ratio"] == pytest.approx(1 / 1.01) and row["ok"] and row["added"][0] == pytest.approx(0.01)


@pytest.mark.parametrize("broken", ["rows", "vectors", "training"])
def test_a_wrong_arm_is_not_timed(broken, monkeypatch):
    if broken == "rows":
        monkeypatch.setattr(speed.reference, "ngram_rows", lambda *_: torch.zeros(64, 9, 16, dtype=torch.int64))
    if broken == "vectors":
        monkeypatch.setattr(speed.NGramEmbedding, "forward", lambda self, rows, _=None: torch.zeros(64, 9, 128))
    if broken == "training":
        monkeypatch.setattr(
            speed.NGramEmbedding, "prefetched", lambda self, batches, at_once: ((b, b.flip(0)) for b in batches)
        )
    with pytest.raises(speed.WrongMemory):
        speed.check(SMALL, bench.QUICK_SHAPE, "cpu")


def test_the_network_is_a_gpt_of_124m_parameters_and_looks_at_no_later_token():
    with torch.device("meta"):
        model = GPT(bench.SHAPE, 0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124e6, rel=0.01)
    torch.manual_seed(0)
    small, vectors = GPT(bench.QUICK_SHAPE, 4, gate=True), torch.randn(1, 8, 4, requires_grad=True)
    nn.init.normal_(small.blocks[1].out.weight)
    tokens, targets = torch.randint(101, (1, 8)), torch.full((1, 8), -100)
    targets[0, 3] = 5  # the loss at one place alone
    small(tokens, targets, vectors).backward()
    assert vectors.grad[0, 4:].count_nonzero() == 0 and vectors.grad[0, :4].count_nonzero() == 16
