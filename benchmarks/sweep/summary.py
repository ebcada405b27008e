"""What a sweep says over all its workloads: quantiles of ratios, the worst ten, and a picture.

    cuda/all/int8+5%/lookup-geomean     geometric mean of the ratios to FBGEMM
    cuda/all/int8+5%/lookup-p5          their 5th percentile
    cuda/all/int8+5%/lookup-worst       their minimum
    cuda/all/int8+5%/of-sectors-median  share of the sector limit, over workloads with more than 100,000 lookups; also -p5
    cuda/all/wall-worst                 the smallest ratio of wall times, over all measures

A workload whose tables of ours failed counts with a ratio of 0 in percentiles, and is left out of the geometric mean. A
workload without a peer has no ratio. `merge` makes these rows again for the rows of several runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich import box, markup
from rich.table import Table

from benchmarks.runner.record import Recorder, Row
from benchmarks.runner.timing import quantile
from benchmarks.sweep.limits import SHOWN_FROM
from benchmarks.sweep.race import LOOKUP, MEASURES
from thermocline.errors import BadInput
from thermocline.report.axes import Axis
from thermocline.report.charts import Line, lines, picture
from thermocline.report.numbers import Number

ALL = "all"
WORST = 10
_FAILED = 1e-9  # stands for a ratio of 0
_WIDE, _HIGH, _TITLE = 500, 420, 30

Quantiles = Mapping[str, Callable[[Sequence[float]], float]]


def geometric_mean(values: Sequence[float]) -> float:
    held = [value for value in values if value > _FAILED] or [_FAILED]
    return math.exp(sum(map(math.log, held)) / len(held))


RATIOS: Quantiles = {"geomean": geometric_mean, "p5": lambda values: quantile(values, 0.05), "worst": min}
SHARES: Quantiles = {"median": lambda values: quantile(values, 0.5), "p5": lambda values: quantile(values, 0.05)}


def all_cases(device: str, threads: int | None = None) -> list[str]:
    """The name of every row over all workloads."""
    names = [f"{stored}/{operation}-{which}" for stored, operation in MEASURES for which in RATIOS]
    names += [f"int8+5%/of-sectors-{which}" for which in SHARES] + ["wall-worst"]
    return [_case(device, threads, name) for name in names]


def _case(device: str, threads: int | None, name: str) -> str:
    return "/".join([device, ALL, name] if threads is None else [device, ALL, name, str(threads)])


def of_measure(rows: Iterable[Row], stored: str, operation: str) -> list[Row]:
    """Rows of one measure, one for each workload."""
    parts = ((row, row["case"].split("/")) for row in rows)
    return [row for row, at in parts if at[1] != ALL and at[2:4] == [stored, operation]]


def ratios(rows: Iterable[Row], key: str = "ratio") -> list[float]:
    """Ratios of rows that have one; failed rows count as 0."""
    return [_FAILED if "error" in row else row[key] for row in rows if "error" in row or row.get(key) is not None]


def add_rows(recorder: Recorder, device: str, threads: int | None) -> None:
    """Add the rows over all workloads."""
    rows = list(recorder.rows)
    for stored, operation in MEASURES:
        mine = of_measure(rows, stored, operation)
        if any(row["ratio"] is not None for row in mine):
            _add(recorder, device, threads, f"{stored}/{operation}", RATIOS, ratios(mine), "FBGEMM")
    large = [row for row in of_measure(rows, "int8+5%", LOOKUP) if row.get("lookups", 0) > SHOWN_FROM and "of_sectors" in row]
    if large:
        _add(recorder, device, threads, "int8+5%/of-sectors", SHARES, ratios(large, "of_sectors"), "the sector limit")
    wall = [row["wall_ratio"] for row in rows if row.get("wall_ratio") is not None]
    if wall:
        _add(recorder, device, threads, "wall", {"worst": min}, wall, "FBGEMM, wall time")


def _add(
    recorder: Recorder, device: str, threads: int | None, name: str, which: Quantiles, values: Sequence[float], peer: str
) -> None:
    for words, number in which.items():
        found = round(number(values), 6)
        case = _case(device, threads, f"{name}-{words}")
        recorder.add(case, found, "ratio", f"{peer}, {len(values)} rows", 1.0, found, workloads=len(values))


def merge(records: Sequence[dict[str, Any]], judged: bool = True) -> dict[str, Any]:
    """One record with the workloads of several, all of one device and number of threads."""
    if strange := [record.get("bench") for record in records if record.get("bench") != "sweep"]:
        raise BadInput(f"results of {', '.join(map(str, strange))} cannot be merged; give results of sweep", parameter="merge")
    recorder = Recorder("sweep", lambda line: None, judged=judged)
    first = next(row["case"].split("/") for record in records for row in record["rows"])
    for key in ("machine", "versions", "commit"):
        recorder.record[key] = records[0][key]
    recorder.record["workloads"] = {name: value for record in records for name, value in record["workloads"].items()}
    for record in records:
        recorder.record["notes"] += [note for note in record["notes"] if note not in recorder.record["notes"]]
        recorder.rows.extend(row for row in record["rows"] if row["case"].split("/")[1] != ALL)
    threads = {row["case"].split("/")[-1] for row in recorder.rows if row["case"].startswith("cpu/")}
    add_rows(recorder, first[0], int(threads.pop()) if len(threads) == 1 else None)
    return recorder.record


# -- printing --


def table(record: dict[str, Any], only_short: bool = False) -> Table:
    """Rows over all workloads, the worst ten, and failed ones."""
    rows: list[Row] = record["rows"]
    title = f"sweep · {len(record['workloads'])} workloads · {record['commit'] or 'unknown commit'} · {record['date']}"
    drawn = Table(title=markup.escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("")
    drawn.add_column("case", overflow="fold")
    for name in ("ours", "peer's", "ratio", "wall", "of limit", "asked"):
        drawn.add_column(name, justify="right")
    over_all = [row for row in rows if row["case"].split("/")[1] == ALL]
    single = [row for row in rows if row["case"].split("/")[1] != ALL]
    failed = [row for row in single if "error" in row]
    measured = sorted((row for row in single if row["ratio"] is not None), key=lambda row: float(row["ratio"]))
    for group in (over_all, [] if only_short else measured[:WORST] or single[:WORST], failed):
        for row in group:
            if not (only_short and row["ok"]):
                drawn.add_row(*map(markup.escape, _cells(row)), style=None if row["ok"] else "bold red")
        drawn.add_section()
    return drawn


def _cells(row: Row) -> list[str]:
    if "error" in row:
        return ["FAILED", f"{row['case']}: {row['error']}", "", "", "", "", "", ""]
    values = [row["ours"], row["peer_value"], row["ratio"], row.get("wall_ratio"), row.get("of_limit"), row["asked"]]
    return ["" if row["ok"] else "SHORT", row["case"], *("" if value is None else f"{value:.3g}" for value in values)]


# -- picture --


def draw(record: dict[str, Any]) -> str:
    """Ratios to FBGEMM and shares of the limit, each with its workloads in ascending order."""
    panels = [("ratio to FBGEMM, workloads sorted", "ratio"), ("share of the bytes-bound limit, workloads sorted", "of_limit")]
    width = len(panels) * _WIDE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HIGH}" font-family="sans-serif">'
    parts = [head, f'<rect width="{width}" height="{_HIGH}" fill="white"/>']
    for number, (title, key) in enumerate(panels):
        parts.append(f'<text x="{number * _WIDE + 12}" y="22" font-size="14">{escape(title)}</text>')
        chart = _chart(title, record["rows"], key)
        if chart is not None:
            parts.append(picture(chart, _WIDE - 20).replace("<svg ", f'<svg x="{number * _WIDE}" y="{_TITLE}" ', 1))
    return "\n".join([*parts, "</svg>", ""])


def _chart(title: str, rows: Sequence[Row], key: str) -> Any:
    curves = {}
    for stored, operation in MEASURES:
        values = sorted(float(row[key]) for row in of_measure(rows, stored, operation) if row.get(key))
        if values:
            curves[f"{stored} {operation}"] = [(number + 1.0, value) for number, value in enumerate(values)]
    if not curves:
        return None
    if key == "ratio":
        curves["equal"] = [(1.0, 1.0), (max(len(points) for points in curves.values()) + 0.0, 1.0)]
    every = [value for points in curves.values() for _, value in points]
    up = Axis(min(every) / 1.2, max(every) * 1.2, key.replace("_", " "), _times, log=True)
    most = max(len(points) for points in curves.values())
    return lines(title, [Line(name, points) for name, points in curves.items()], Axis(1.0, most + 1.0, "workload"), up)


def _times(value: float) -> Number:
    return Number(value, f"{value:.3g}x")
