"""Hit rate against cache size as one SVG file: a chart for each log, a line for each policy."""

from __future__ import annotations

from html import escape
from typing import Any

from benchmarks.runner.record import Row
from benchmarks.tables.hits import OPTIMUM
from thermocline.report.axes import Axis
from thermocline.report.charts import Line, lines, picture
from thermocline.report.numbers import share

_WIDE, _HIGH, _TITLE = 500, 400, 30


def draw(measured: dict[str, Any]) -> str:
    """The picture of a record of the hits benchmark."""
    logs: dict[str, list[Row]] = {}
    for row in measured["rows"]:
        if row["peer"] == OPTIMUM:
            logs.setdefault(row["case"].split("/")[0], []).append(row)
    width = len(logs) * _WIDE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HIGH}" font-family="sans-serif">'
    parts = [head, f'<rect width="{width}" height="{_HIGH}" fill="white"/>']
    for number, (name, rows) in enumerate(logs.items()):
        chart = picture(_chart(name, rows), _WIDE - 20).replace("<svg ", f'<svg x="{number * _WIDE}" y="{_TITLE}" ', 1)
        parts += [f'<text x="{number * _WIDE + 12}" y="22" font-size="14">{escape(name)}</text>', chart]
    return "\n".join([*parts, "</svg>", ""])


def _chart(name: str, rows: list[Row]) -> Any:
    curves: dict[str, dict[float, float]] = {OPTIMUM: {}}
    for row in rows:
        _, policy, size = row["case"].split("/")
        cached = float(size.rstrip("%")) / 100
        curves[OPTIMUM][cached] = row["peer_value"]
        curves.setdefault(policy, {})[cached] = row["ours"]
    sizes = list(curves[OPTIMUM])
    across = Axis(min(sizes), max(sizes), "share of the rows in the cache", share, log=True)
    drawn = [Line(policy, sorted(rates.items()), marks=True) for policy, rates in curves.items()]
    return lines(f"{name}: share of lookups that hit", drawn, across, Axis(0.0, 1.0, "hit rate", share))
