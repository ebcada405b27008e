"""`python -m benchmarks hits`: the optimum against all possible choices, the replay against the cache's own counts."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from benchmarks.runner import show
from benchmarks.tables import hits, hits_plot
from benchmarks.tables.hits import Lookups, next_use, optimum, replay
from support import has
from thermocline import BadInput, FormatError
from thermocline import formats as F

REAL = Path(os.environ.get("THERMOCLINE_DATA", Path(__file__).parents[4] / "shared" / "data"))


def best_of_all(rows: list[int], slots: int) -> int:
    """Hits of the best cache by trying everything: after each lookup any cached row may make room, or the new one stay out."""

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(rows):
            return 0
        row = rows[place]
        if row in held:
            return 1 + best(place + 1, held)
        ways = [held] if len(held) == slots else [held | {row}]
        ways += [(held - {victim}) | {row} for victim in held]
        return max(best(place + 1, way) for way in ways)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_that_of_trying_everything(seed: int) -> None:
    draw = random.Random(seed)
    rows = [draw.randrange(6) for _ in range(15)]
    for slots in (1, 2, 3):
        assert optimum(next_use(np.array(rows)), slots) == best_of_all(rows, slots)


def test_the_optimum_with_a_slot_for_every_row_misses_each_row_once() -> None:
    rows_N = np.array([3, 1, 3, 3, 2, 1, 2, 3])
    assert next_use(rows_N).tolist() == [2, 5, 3, 7, 6, 8, 8, 8]
    assert optimum(next_use(rows_N), 3) == 8 - 3
    assert optimum(next_use(rows_N), 0) == 0


@pytest.fixture
def log() -> Lookups:
    generator = torch.Generator().manual_seed(3)
    tables = (301, 77)
    rows = [(torch.rand(20_011, generator=generator) ** 4 * count).long() for count in tables]
    return Lookups("made_up", torch.stack(rows, 1), tables)


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
def test_a_replay_hits_less_than_the_optimum_and_more_than_chance(log: Lookups, policy: str) -> None:
    slots = int(0.1 * sum(log.tables))
    best = optimum(next_use(hits.flat(log)), slots)
    assert 2 * 0.1 * log.rows_BF.numel() < replay(log, 0.1, policy).hits < best


def test_a_cache_for_all_rows_misses_only_rows_that_no_step_has_seen(log: Lookups) -> None:
    seen: set[tuple[int, int]] = set()
    misses = 0
    for rows_BF in log.rows_BF.split(hits.LOOKUPS // 2):
        pairs = [(table, row) for table in (0, 1) for row in rows_BF[:, table].tolist()]
        misses += sum(pair not in seen for pair in pairs)
        seen.update(pairs)
    assert replay(log, 1.0, "lru").hits == log.rows_BF.numel() - misses


def rates(log: Lookups, share: float) -> dict[str, float]:
    return {policy: replay(log, share, policy).hits / log.rows_BF.numel() for policy in F.POLICIES[: F.FIXED]}


@pytest.mark.parametrize("better", ["lru", "lfu"])
def test_the_adaptive_policy_does_about_as_the_better_of_the_two(better: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "LOOKUPS", 256)
    generator = torch.Generator().manual_seed(7)
    drawn_BF = (torch.rand(200_000, 1, generator=generator) ** 4 * 20_000).long()
    if better == "lru":  # the hot rows of one moment are cold a little later
        drawn_BF = (drawn_BF + torch.arange(200_000)[:, None] // 20) % 20_000
    found = rates(Lookups("made up", drawn_BF, (20_000,)), 0.05)
    assert found[better] > found["lfu" if better == "lru" else "lru"] + 0.09, found
    assert found["adaptive"] > found[better] - 0.02, found


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no folder of real logs at {REAL} (THERMOCLINE_DATA names it)")
@pytest.mark.parametrize("name, samples", [("criteo_kaggle_uniform_0p3pct", 30_000), ("globo_clicks_first80", 300_000)])
def test_the_adaptive_policy_is_within_a_point_of_the_better_on_a_real_log(name: str, samples: int) -> None:
    log = hits.read(REAL / f"{name}.parquet")
    found = rates(log._replace(rows_BF=log.rows_BF[:samples]), 0.05)
    assert found["adaptive"] > max(found["lru"], found["lfu"]) - 0.01, found


def write_log(path: Path, **columns: list[int | None]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_file_is_replayed_and_drawn(tmp_path: Path) -> None:
    draw = random.Random(5)
    items = [int(200 * draw.random() ** 3) for _ in range(5001)]
    users: list[int | None] = [draw.choice([None, 5, 9, 1 << 30]) for _ in range(5001)]
    path = write_log(tmp_path / "clicks.parquet", item=items, user=users)
    assert hits.read(path).tables == (len(set(items)), 4)
    found = hits.run([path])
    assert [row["case"] for row in found["rows"]] == [
        f"clicks/{policy}/{share}" for share in ("1%", "5%", "10%") for policy in (*F.POLICIES[: F.FIXED], "adaptive-held")
    ]
    assert all(0 < row["ours"] <= row["peer_value"] < 1 and 0 < row["moves"] < 1 for row in found["rows"] if "moves" in row)
    assert not show.parse(found, "test").short()
    drawn = ElementTree.fromstring(hits_plot.draw(found))
    assert len(drawn.findall(".//{*}polyline")) == 4
    assert len(drawn.findall(".//{*}circle")) == 12


def test_files_without_ids_are_refused_by_name(tmp_path: Path) -> None:
    path = write_log(tmp_path / "other.parquet", label=[1, 0])
    with pytest.raises(FormatError, check=has(path=path, columns=["label"])):
        hits.read(path)
    with pytest.raises(BadInput, check=has(parameter="data")):
        hits.read(tmp_path / "nowhere.parquet")
