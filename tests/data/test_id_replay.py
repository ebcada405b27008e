"""The turnover of ids in a log, against plain counting and against a table that is replayed by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from typer.testing import CliRunner

import thermocline as tc
from support import has
from thermocline import BadInput
from thermocline.cli import app
from thermocline.data.id_replay import measure_turnover

HOURS, CLICKS, BORN = 60, 200, 20


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each hour 20 of 100 ids are replaced; the hot ones are looked up most."""
    draw, path = np.random.default_rng(3), tmp_path_factory.mktemp("log") / "clicks.parquet"
    hour_N = np.repeat(np.arange(HOURS), CLICKS)
    item_N = (BORN * hour_N + (100 * draw.random(len(hour_N)) ** 2).astype(np.int64)) * 7919 - (1 << 40)
    time_N = 1_700_000_000_000 + 3_600_000 * hour_N + np.tile(np.arange(CLICKS), HOURS)
    seen = pyarrow.array([None if n % 7 == 0 else [int(i), int(i)] for n, i in enumerate(item_N)])
    parquet.write_table(pyarrow.table({"item": item_N, "seen": seen, "ts": time_N}), path)
    return path


def test_births_and_deaths_are_those_of_plain_counting(log: Path):
    item_N = parquet.read_table(log)["item"].to_numpy()
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for n, id in enumerate(item_N.tolist()):
        first.setdefault(id, n // CLICKS)
        last[id] = n // CLICKS
    born, died = Counter(first.values()), Counter(last.values())
    (found,) = measure_turnover([log], ["item"], "ts", 50, 0.9, 10**6)
    assert found.hourly and found.width == 1.0 and len(found.periods) == HOURS and found.distinct == len(first)
    assert [(each.start, each.born, each.died) for each in found.periods] == [(h, born[h], died[h]) for h in range(HOURS)]
    assert all(each.lookups == CLICKS for each in found.periods)
    early: set[int] = set()
    seen = []
    for n in range(0, len(item_N), 50):
        seen += [id in early for id in item_N[n : n + 50].tolist()]
        early |= set(item_N[n : n + 50].tolist())
    assert found.again == pytest.approx(np.mean(seen[len(seen) // 2 :]))


def test_the_recommended_table_keeps_what_is_said(log: Path):
    (found,) = measure_turnover([log], ["item"], "ts", 50, 0.9, 10**6)
    assert 0.85 < found.kept <= 1.0 and found.rule["rows"] < 0.5 * found.distinct
    assert [each.rows for each in found.tables] == sorted({each.rows for each in found.tables})
    bag = tc.EmbeddingBag(int(found.rule["rows"]), 4, mode="sum", ids=eval(f"tc.{found.text}"))
    ids = torch.tensor(parquet.read_table(log)["item"].to_numpy()).view(-1, 50)
    half, had, lookups = len(ids) // 2, 0, 0
    for number, batch in enumerate(ids):
        if number >= half:
            had += int((bag.elastic().rows_of(batch) >= 0).sum())
            lookups += 50
        bag(batch[:, None]).sum().backward()
    assert had / lookups / found.again == pytest.approx(found.kept)


def test_lists_nulls_and_the_end_of_a_log_count(log: Path):
    item, seen = measure_turnover([log], ["item", "seen"], None, 50, 0.9, 6000)
    assert not item.hourly and item.lookups == 6000 and seen.lookups == 2 * sum(n % 7 != 0 for n in range(6000, 12_000))
    assert len(item.periods) == 100


def test_a_log_shorter_than_four_batches_is_refused(log: Path):
    with pytest.raises(BadInput, check=has(parameter="batch", available=12_000)):
        measure_turnover([log], ["item"], None, 4096, 0.9, 10**6)


def test_the_command_draws_a_page_and_writes_json(log: Path, tmp_path: Path):
    html, out = tmp_path / "ids.html", tmp_path / "ids.json"
    words = f"heat ids {log} --columns item --time ts --batch 50 --report {html} --json {out}"
    done = CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert done.exit_code == 0 and "IdMap.elastic(" in done.output
    (found,) = json.loads(out.read_text())
    assert found["name"] == "item" and found["text"].startswith("IdMap.elastic(") and len(found["periods"]) == HOURS
    assert "Births and deaths" in html.read_text()
