"""The JSON that all benchmarks share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runner import record, show

FIELDS = {"case", "ours", "peer", "peer_value", "unit", "ratio", "asked", "ok", "spread"}


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> record.Recorder:
    (tmp_path / "benchmarks").mkdir()
    asked = {"made-up": [{"case": "cpu/a", "asked": 1.5, "issue": "rows"}]}
    (tmp_path / "benchmarks" / "asked.json").write_text(json.dumps(asked))
    monkeypatch.chdir(tmp_path)
    return record.Recorder("made-up", lambda line: None)


def test_a_record_is_what_show_reads(recorder: record.Recorder) -> None:
    recorder.add("cpu/a", 1.0, "ms", peer="them", peer_value=2.0, ratio=2.0, spread=0.1, extra=[1, 2])
    recorder.add("cpu/b", 1.0, "GB/s")
    recorder.fail("cpu/c", "it broke")
    written = json.loads(json.dumps(recorder.record, allow_nan=False))
    assert {"bench", "machine", "versions", "commit", "date", "rows"} <= set(written)
    assert all(set(row) >= FIELDS for row in written["rows"])
    assert len(show.parse(written, "test").rows) == 3


def test_a_row_holds_if_it_reaches_what_is_asked(recorder: record.Recorder) -> None:
    assert recorder.add("cpu/a", 1.0, "ms", peer="them", peer_value=1.5, ratio=1.5)["ok"] is True
    assert recorder.add("cpu/a", 1.0, "ms", peer="them", peer_value=1.4, ratio=1.4)["ok"] is False
    assert recorder.add("cpu/a", 1.0, "ms")["ok"] is False
    assert recorder.add("cpu/unasked", 1.0, "ms", peer="them", peer_value=0.1, ratio=0.1)["ok"] is True


def test_a_failed_row_does_not_hold_even_where_nothing_is_asked(recorder: record.Recorder) -> None:
    row = recorder.fail("cpu/unasked", "first line\nsecond line " + "x" * 1000)
    assert row["ok"] is False
    assert "\n" not in row["error"] and len(row["error"]) <= 300


def test_a_run_that_is_not_judged_asks_nothing(recorder: record.Recorder) -> None:
    quick = record.Recorder("made-up", lambda line: None, judged=False)
    assert quick.add("cpu/a", 1.0, "ms", peer="them", peer_value=0.1, ratio=0.1)["asked"] is None


def test_the_record_is_saved_after_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "partial.json"
    monkeypatch.setenv(record.PARTIAL, str(target))
    recorder = record.Recorder("made-up", lambda line: None)
    for count in (1, 2):
        recorder.add(f"cpu/{count}", 1.0, "ms")
        assert len(json.loads(target.read_text())["rows"]) == count


def test_the_summary_names_every_row_and_counts_the_short_ones(recorder: record.Recorder) -> None:
    recorder.add("cpu/a", 1.0, "ms", peer="them", peer_value=0.5, ratio=0.5)
    recorder.add("cpu/b", 1.0, "ms")
    recorder.fail("cpu/c", "it broke")
    text = record.summary(recorder.record)
    assert all(case in text for case in ("cpu/a", "cpu/b", "cpu/c"))
    assert text.endswith("3 rows, 1 of them asked for, 2 short")
