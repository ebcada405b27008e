"""`python -m benchmarks plan`: how large a cluster is planned in what time, and how even and how good plans are.

    scale/1000x10B/512x8/seconds   1,000 tables, 10 billion rows, 4,096 cards; made, explained and written, on two cores
    scale/1000x10B/512x8/memory    the same: the peak of its process
    scale/growth/tables            time with 1,000 tables against four times the time with 250; 1 is linear
    scale/growth/rows              time with 10 billion rows against that with 100 million; 1 is independent of rows
    heat/globo_clicks_first80      profiling a Parquet log while counts are exact, against a bare pyarrow scan and count
    balance/...                    see `balance.py`

The first plan is bound by memory; the plans of the growth rows are not. Growth is in CPU seconds, which depend less on other
load. A row's `ratio` is the target over the measurement, so 1 and more is good, except for `heat`, where it is pyarrow's time
over ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plan import balance
from benchmarks.plan import heat_profile as heat
from benchmarks.runner import isolated_process as child
from benchmarks.runner import record

SECONDS, PEAK = 60.0, 4 << 30
LINEAR, FLAT = 1.5, 1.5
CLUSTER = {"nodes": 512, "budget": "24GiB"}
LARGE: dict[str, Any] = {"tables": 1000, "rows": 1e10, "budget": "6GiB"}  # so little that memory bounds the plan
SAME: dict[str, Any] = {"tables": 1000, "rows": 1e10}  # what growth is measured against: memory bounds none of these
OTHERS = (
    SAME,
    {"tables": 250, "rows": 1e10},
    {"tables": 500, "rows": 1e10},
    {"tables": 1000, "rows": 1e8},
    {"tables": 1000, "rows": 1e9},
)
QUICK = {"tables": 40, "rows": 1e7}
AT_MOST = "asked at most"
HEAT_LOG, HEAT_COLUMNS = "globo_clicks_first80", ("item", "user")

Progress = Callable[[int, int, str], None]


def run(data: Path | None = None, quick: bool = False, progress: Progress = lambda done, total, what: None) -> dict[str, Any]:
    """Measure everything, with the logs of a folder if one is given, and return the record."""
    recorder = record.Recorder("plan", lambda line: None, judged=not quick)
    jobs: list[dict[str, Any]] = [QUICK] if quick else [LARGE, *OTHERS]
    found = []
    for n, job in enumerate(jobs):
        progress(n, len(jobs) + 1, f"{job['tables']:,} tables, {job['rows']:,.0f} rows")
        found.append(child.results("benchmarks.plan.scale", {**CLUSTER, **job}, lambda line: None)[0])
    _scale(recorder, jobs, found)
    progress(len(jobs), len(jobs) + 1, "logs")
    if data is None or not data.is_dir():
        recorder.note(f"no logs: {data} is not a folder; balance and heat were not measured")
    else:
        _heat(recorder, data, quick)
        _balance(recorder, data, quick)
    return recorder.record


def _scale(recorder: record.Recorder, jobs: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for job, result in zip(jobs, found, strict=True):
        name = f"scale/{job['tables']}x{_count(job['rows'])}/512x8" + ("/roomy" if job is SAME else "")
        if "error" in result:
            recorder.fail(f"{name}/seconds", result["error"])
            continue
        _at_most(recorder, f"{name}/seconds", result["with_files"], "s", SECONDS, **result)
        _at_most(recorder, f"{name}/memory", result["peak_bytes"], "bytes", PEAK)
    if len(found) == 1 or any("error" in result for result in found):
        return
    cpu = [result["cpu_seconds"] for result in found[1:]]
    _at_most(recorder, "scale/growth/tables", cpu[0] / (4 * cpu[1]), "of linear", LINEAR, cpu_seconds=[cpu[1], cpu[2], cpu[0]])
    _at_most(recorder, "scale/growth/rows", cpu[0] / cpu[3], "times", FLAT, cpu_seconds=[cpu[3], cpu[4], cpu[0]])


def _at_most(recorder: record.Recorder, case: str, ours: float, unit: str, limit: float, **further: Any) -> None:
    recorder.add(case, ours, unit, AT_MOST, limit, limit / max(ours, 1e-12), **further)


def _count(rows: float) -> str:
    return f"{rows / 1e9:.0f}B" if rows >= 1e9 else f"{rows / 1e6:.0f}M"


def _heat(recorder: record.Recorder, data: Path, quick: bool) -> None:
    path = data / f"{HEAT_LOG}.parquet"
    if path.is_file():
        recorder.add(f"heat/{HEAT_LOG}", **heat.throughput(path, HEAT_COLUMNS, runs=1 if quick else heat.RUNS))


def _balance(recorder: record.Recorder, data: Path, quick: bool) -> None:
    for log in balance.logs(data):
        if quick and len(log.tables[0]) > 200_000:
            continue
        for cards in balance.CARDS:
            replayed = balance.Replay(log, cards)
            measured, raw = replayed.measure(), replayed.measure(once=False)
            for name, limit in balance.ASKED.items():
                value = getattr(measured, name)
                if math.isnan(value):
                    continue
                beside = {"every_lookup": getattr(raw, name), "windows": measured.windows}
                _at_most(recorder, f"balance/{log.name}/{cards}/{name}", value, "max/mean", limit, **beside)
            if math.isnan(measured.later):
                recorder.note(
                    f"{log.name} is too short for {balance.WINDOW:,} lookups on each of {cards} cards in its second half"
                )
