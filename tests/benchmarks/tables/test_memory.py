"""`python -m benchmarks memory`: bytes counted twice, once by the module and once without its help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.runner import show
from benchmarks.tables import memory
from thermocline import EmbeddingBag, RowConfig

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"


def test_every_asked_case_is_one_that_the_bench_measures() -> None:
    assert set(show.load_asked(ASKED)["memory"]) <= {case for device in ("cpu", "cuda") for case in memory.cases(device)}


def test_a_small_run_has_every_row_and_agrees_with_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DIMS", (64,))
    found = memory.run(["cpu"], rows=(7_001, 2_999))
    assert not show.parse(found, "test").short()
    rows = {row["case"]: row for row in found["rows"]}
    assert list(rows) == memory.cases("cpu")
    assert rows["cpu/D64/int8+5%/ratio"]["ratio"] == pytest.approx(256 / (64 + 4 + 0.05 * (256 + 32) + 1 / 8), rel=2e-3)
    assert all(row["ratio"] > 0.99 for case, row in rows.items() if case.endswith("agrees"))


def test_tensors_are_found_wherever_they_hang_and_shared_ones_count_once() -> None:
    class Holder:
        def __init__(self) -> None:
            self.pairs = {"a": [torch.zeros(5), (torch.zeros(3, dtype=torch.uint8),)]}
            self.back: Holder = self

    module = nn.Linear(4, 4, bias=False)
    module.held, module.again = Holder(), module.weight.data[1:]
    assert memory.tensor_bytes(module) == 64 + 20 + 3


def test_a_tensor_that_memory_forgets_shows() -> None:
    module = EmbeddingBag(1000, 8, rows=RowConfig("int8", cache=0.05))
    honest = memory.tensor_bytes(module)
    assert honest == pytest.approx(module.memory().total, rel=0.01)
    module.arena.forgotten = torch.zeros(1000)
    assert memory.tensor_bytes(module) == honest + 4000
