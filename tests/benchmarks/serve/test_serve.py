"""The benchmark of serving, small: every part gives rows that can be read, and wrong answers are not timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.plan.balance import LookupLog
from benchmarks.serve import balance as serve_balance
from benchmarks.serve import benchmark as serve
from benchmarks.serve import levers as serve_levers
from benchmarks.serve import parity as serve_parity
from thermocline.serve.tables.row_split import TableSplit
from thermocline.train import DLRMRun


def rows_of(part: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = serve.run("cpu", None, part, quick=True)["rows"]
    return rows


def test_every_part_gives_rows_that_can_be_read() -> None:
    record = {"rows": [row for part in ("26x100k/zipf/int8/4", "64/4", "start/cpu/int8") for row in rows_of(part)]}
    cases = [row["case"] for row in record["rows"]]
    for case in (
        "parity/cpu/26x100k/zipf/int8/4/allocations",
        "group/cpu/64/4/p50",
        "start/cpu/int8/4",
    ):
        assert case in cases
    assert all("error" not in row and row["ours"] > 0 and row["ratio"] > 0 for row in record["rows"])


def test_a_lookup_that_differs_from_the_plain_one_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = serve_parity._look_up
    monkeypatch.setattr(serve_parity, "_look_up", lambda *args: right(*args) + 1)
    record = serve.run("cpu", None, "parity/cpu/26x100k/zipf/int8/2", quick=True)
    assert [row["error"] for row in record["rows"]] == ["WrongResult: one card differs from a plain lookup"]


def test_lookups_are_counted_for_the_card_that_is_read() -> None:
    split = TableSplit(80, 8, "ranges", per=10, copied_H=np.array([3]))
    rows = np.array([0, 1, 12, 79, 3, 3, 3, 3])
    assert serve_balance.served(split, rows).tolist() == [2, 1, 0, 0, 1, 1, 1, 2]


def test_heat_evens_out_what_a_hash_does_not() -> None:
    random = np.random.default_rng(1)
    rows: Any = np.minimum(random.zipf(1.3, 400_000) - 1, 4999)
    log = LookupLog("made", [rows])
    splits, extra = serve_balance.by_heat(log, log.tables)
    assert extra <= serve_balance.EXTRA
    worst = max(serve_balance.windows(splits, log.tables))
    plain = serve_balance.split_tables(serve_balance._shapes(log), serve_balance.CARDS, "hash")
    assert worst < 1.05 < max(serve_balance.windows(plain, log.tables))


def test_levers_make_tables_smaller_and_leave_the_model_as_it_was() -> None:
    settings = serve_levers.QUICK
    run = DLRMRun(settings)
    run.finish()
    batch = next(settings.logs()[1].batches(61))
    scores, rows = {}, {}
    for arm in serve_levers.ARMS:
        made: Any = serve_levers.made_smaller(arm, run.model, settings)
        with torch.no_grad():
            scores[arm.name] = made.eval()(batch.dense_BI, batch.ids_BF)
        rows[arm.name] = sum(table.rows for table in made.embeddings.tables)
    with torch.no_grad():
        assert torch.equal(scores["fp32"], run.model.eval()(batch.dense_BI, batch.ids_BF))
    assert torch.equal(scores["unified"], scores["fp32"]) and not torch.equal(scores["int4"], scores["fp32"])
    torch.testing.assert_close(scores["all"], scores["fp32"], rtol=0, atol=0.3)
    assert rows["all"] == rows["pruned"] < rows["unified"] == rows["fp32"]
