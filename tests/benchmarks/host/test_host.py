"""`python -m benchmarks host`: rows from results, the peer's share of the card, and a small run on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.host import benchmark as host
from benchmarks.host import fbgemm_tables as host_fbgemm
from benchmarks.host.thermocline_tables import HostTables
from benchmarks.kernels.cases import STEP_ROWWISE, A, B, C, Shape, Workload
from benchmarks.runner import isolated_process as child
from benchmarks.runner import lookahead, record, show
from thermocline.rows.arena import Arena

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
TINY = Shape("B", tables=2, rows=1001, dim=8, batch=33, pooling=3)
JOB = Workload(TINY, "int8", STEP_ROWWISE, cache=0.05)
BASE = "cuda/B/zipf/int8+5%"


def test_every_asked_case_is_one_that_the_bench_measures() -> None:
    names = host.all_cases()
    assert set(show.load_asked(ASKED)["host"]) <= set(names)
    assert len(names) == len(set(names))


def test_a_small_run_measures_and_writes_what_show_reads() -> None:
    found = host.run("cpu", [TINY], "int8", judged=False)
    rows = {row["case"]: row for row in found["rows"]}
    assert list(rows) == [case for case in host.all_cases([TINY]) if "link/" not in case]
    row = rows[f"{BASE}/host-zero-copy"]
    assert row["ours"] > 0 and row["card_bytes"] > 0 and 0 < row["hit_rate"] < 1 and "stall_ms" in row
    assert row["useful_bytes_each_way"] == 8 * row["rows_not_cached"] > 0
    assert not show.parse(found, "test").short()
    assert any("FBGEMM was not measured" in note for note in found["notes"])


@pytest.mark.parametrize("shape", [A, B, C])
@pytest.mark.parametrize("arm, of_slot, of_row", [("lru", 528, 8), ("lfu", 520, 16), ("lru-pipelined", 532, 8)])
def test_the_peer_never_has_fewer_bytes_on_the_card_and_at_most_one_set_more(
    shape: Shape, arm: str, of_slot: int, of_row: int
) -> None:
    rows = shape.rows * shape.tables
    slots = host_fbgemm.slots_for(shape, 1_127_000_000, arm)
    more = slots * of_slot + rows * of_row - 1_127_000_000
    assert slots % 32 == 0 and 0 <= more < 32 * of_slot
    factor = (slots - host_fbgemm.WAYS / 2) / rows  # what FBGEMM is told, and how it reads it
    assert (int(rows * factor) + 31) // 32 * 32 == slots


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_prefetch_is_used_counted_and_timed(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Arena, "prefetches", True)
    monkeypatch.setattr(Arena, "prefetch", lambda _, *batches: asked.append(len(batches)))
    monkeypatch.setattr(Arena, "arrive", lambda _: None)
    tables = HostTables(JOB, "cpu", "host")
    tables.at_once = at_once
    found = tables.timed(settle=4, stretches=1)
    # Every batch but the first of a stretch is asked for: 12 steps until it is settled, 40 on the clock.
    assert asked == [at_once] * ((12 - at_once + 40 - at_once) // at_once)
    assert found["a_step"]["lookups"] == JOB.shape.lookups
    tables.at_once = 0
    alone = tables.prefetch_alone(3)
    assert alone["prefetch_ms"] > 0 and alone["prefetch_bytes"] == pytest.approx(found["useful_bytes_each_way"], rel=0.2)


def step(ms: float, **further: Any) -> dict[str, Any]:
    return {"ms": ms, "spread": 0.01, "card_bytes": 100, "useful_bytes_each_way": 40e6, **further}


def rows_of(ours: dict[str, Any], peers: dict[str, Any], staged: float = 0.0) -> dict[str, dict[str, Any]]:
    recorder = record.Recorder("host", lambda line: None)
    link = {"h2d": 50.0, "d2h": 50.0}
    host.add_rows(recorder, Workload(B, "int8", STEP_ROWWISE, cache=0.05, staged=staged), ours, peers, link)
    return {row["case"]: row for row in recorder.rows}


def test_the_better_of_ours_meets_the_best_of_theirs() -> None:
    ours = {
        "int8+5%/zero-copy": step(4.0),
        "int8+5%/prefetch": step(2.0, prefetch_ms=2.0, prefetch_bytes=20e6, prefetch_bytes_both_ways=40e6),
        "int8+5%/device": step(1.5),
    }
    peers = {"lru": step(30.0), "lfu": step(20.0), "lru-pipelined": {"error": "it fell over"}}
    rows = rows_of(ours, peers)
    row = rows[f"{BASE}/host"]
    assert (row["ours"], row["peer_value"], row["ratio"], row["ok"]) == (2.0, 20.0, 10.0, True)
    assert row["peer"] == "fbgemm fp32 lfu" and row["way"] == "int8+5%/prefetch" and row["stall_ms"] == 0.5
    assert row["useful_gbs"] == 20.0 and row["useful_of_link"] == 0.4
    assert rows[f"{BASE}/host-zero-copy"]["ratio"] == 5.0
    share = rows[f"{BASE}/prefetch-of-link"]
    assert (share["ours"], share["ratio"], share["asked"], share["ok"]) == (20.0, 0.4, 0.4, True)


def test_rows_that_linger_have_one_row_of_their_own() -> None:
    ours = {"int8+5%+staged10%/prefetch": step(2.0), "int8+5%/device": step(1.5), "int8+5%/prefetch": step(1.0)}
    rows = rows_of(ours, {"lru": step(30.0), "lfu": step(8.0)}, staged=0.1)
    assert list(rows) == ["cuda/B/zipf/int8+5%+staged10%/host"]
    (row,) = rows.values()
    assert (row["ours"], row["ratio"], row["asked"], row["ok"], row["stall_ms"]) == (2.0, 4.0, 5.0, False, 0.5)


def test_the_peer_is_measured_for_every_number_of_bytes_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def results(module: str, job: dict[str, Any], tell: Any) -> list[dict[str, Any]]:
        if module == host.OURS:
            names = ["int8+5%", "int8+5%+staged10%", "int8+5%+staged25%", "int4+1%"]
            return [step(2.0, name=f"{name}/prefetch", card_bytes=100 + turn) for turn, name in enumerate(names)]
        asked.append(job["card_bytes"])
        found = [{"name": f"{name}/lfu", **step(bytes / 10, card_bytes=bytes)} for name, bytes in job["card_bytes"].items()]
        return [{"name": "versions", "fbgemm": "1"}, *found]

    monkeypatch.setattr(child, "results", results)
    rows = {row["case"]: row for row in host.run("cuda", [B])["rows"]}
    assert asked == [{"int8+5%": 100, "int8+5%+staged10%": 101, "int8+5%+staged25%": 102}]
    values = {case.split("/")[3]: row["peer_value"] for case, row in rows.items() if case.endswith("/host")}
    assert values == {"int8+5%": 10.0, "int8+5%+staged10%": 10.1, "int8+5%+staged25%": 10.2, "int4+1%": 10.0}


def test_what_was_not_measured_falls_short_and_says_why() -> None:
    ours = {"int8+5%/zero-copy": {"error": "no memory"}, "int8+5%/prefetch": {"skipped": "left out"}}
    rows = rows_of(ours, {})
    assert rows[f"{BASE}/host"]["error"] == "no memory" and not rows[f"{BASE}/host"]["ok"]
    assert rows[f"{BASE}/host-prefetch"]["skipped"] == "left out"
    assert not rows[f"{BASE}/prefetch-of-link"]["ok"]


def test_a_process_that_dies_keeps_what_it_told_and_leaves_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = child.results(
        "benchmarks.host.thermocline_tables", {"device": "cpu", "settle": 1, "stretches": 1, "link": True, "jobs": [{}]}, print
    )
    assert found[0] == {"name": "link", "skipped": "there is no link on a CPU"}
    assert "exit code 1" in found[1]["error"] and "shape" in found[1]["error"]


def test_a_stretch_hands_every_step_the_batch_that_follows() -> None:
    numbers, seen = iter(range(100)), []
    taken = lookahead.stretch(lambda this, following: seen.append((this, following)), lambda: next(numbers), "cpu", 8)
    assert seen == [*((n, n + 1) for n in range(15)), (15, None)]
    assert len(taken) == 2, "neither the first four nor the last"
