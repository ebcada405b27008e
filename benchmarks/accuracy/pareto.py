"""Memory against accuracy as an SVG file: a panel for each dimension.

Horizontal: memory ratio to fp32 rows, logarithmic. Vertical: AUC difference to fp32 in 1e-4, linear within about the margin of
the rule and logarithmic beyond (asinh), because losses range from 1 to 300. The line is the Pareto front. The charts of
`thermocline.report` have neither error bars nor labels of points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from benchmarks.runner.noninferiority import MARGIN, PASSES
from benchmarks.runner.record import Row

_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 360, 70, 50
_TICKS = (-300, -100, -50, -20, -10, -5, 0, 5, 10, 20, 50)
_RATIOS = (1, 2, 3, 4, 6, 8, 12, 16)
_GOOD, _BAD, _GREY = "#1a7f5a", "#c0392b", "#888888"


def draw(record: dict[str, Any]) -> str:
    """The picture of a record of the accuracy benchmark."""
    panels: dict[str, list[Row]] = {}
    for row in record["rows"]:
        if row.get("auc_difference") and row["auc_difference"][0] is not None:
            panels.setdefault(row["case"].rsplit("/", 1)[0], []).append(row)
    height = len(panels) * (_HEIGHT + 2 * _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _LEFT}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, rows) in enumerate(panels.items()):
        parts += [f'<g transform="translate({_LEFT},{_TOP + number * (_HEIGHT + 2 * _TOP)})">', *_panel(name, rows), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other point beats in both coordinates, from left to right."""
    kept: list[tuple[float, float]] = []
    for across, up in sorted(points, reverse=True):
        if not kept or up > kept[-1][1]:
            kept.append((across, up))
    return kept[::-1]


def _panel(name: str, rows: Sequence[Row]) -> Iterable[str]:
    yield _text(0, -28, f"{name}: AUC lost to fp32 (1e-4) against memory ratio", "start", "black", 14)
    yield _text(0, -12, "green: passes, red: rejected; bars: 95% interval; line: Pareto front; band: the rule's margin")
    yield f'<rect y="{_up(MARGIN):.1f}" width="{_WIDTH}" height="{_up(-MARGIN) - _up(MARGIN):.1f}" fill="#eef6f2"/>'
    for tick in _TICKS:
        y = _up(tick * 1e-4)
        yield f'<line x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GREY if tick == 0 else "#dddddd"}"/>'
        yield _text(-8, y + 4, f"{tick:+d}" if tick else "0", "end")
    for ratio in _RATIOS:
        x = _across(ratio)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y2="{_HEIGHT}" stroke="#eeeeee"/>'
        yield _text(x, _HEIGHT + 16, f"{ratio}x", "middle")
    places = [(row["memory_ratio"], row["auc_difference"][0]) for row in rows]
    line = " ".join(f"{_across(x):.1f},{_up(y):.1f}" for x, y in front([(1.0, 0.0), *places]))
    yield f'<polyline points="{line}" fill="none" stroke="{_GREY}" stroke-dasharray="4 3"/>'
    for row in rows:
        yield from _mark(row)
    yield from _names(rows)


def _mark(row: Row) -> Iterable[str]:
    mean, low, high = row["auc_difference"]
    x, y, colour = _across(row["memory_ratio"]), _up(mean), _colour(row)
    if low is not None and high is not None:
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_up(low):.1f}" y2="{_up(high):.1f}" stroke="{colour}"/>'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _names(rows: Iterable[Row]) -> Iterable[str]:
    """The name of each arm beside its mark, moved down to avoid overlaps."""
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: _up(row["auc_difference"][0])):
        x, y = _across(row["memory_ratio"]) + 7, _up(row["auc_difference"][0]) - 5
        while any(abs(x - other_x) < 105 and abs(y - other_y) < 11 for other_x, other_y in taken):
            y += 1
        taken.append((x, y))
        yield _text(x, y, row["case"].rsplit("/", 1)[1], "start", _colour(row), 11)


def _colour(row: Row) -> str:
    return _GOOD if row["verdict"] == PASSES else _BAD


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#444444", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}">{escape(text)}</text>'


def _across(ratio: float) -> float:
    return _WIDTH * math.log(max(ratio, 0.9) / 0.9) / math.log(_RATIOS[-1] / 0.9)


def _up(difference: float) -> float:
    top, bottom = (math.asinh(tick * 1e-4 / MARGIN) for tick in (_TICKS[-1], _TICKS[0]))
    return _HEIGHT * (top - min(max(math.asinh(difference / MARGIN), bottom), top)) / (top - bottom)
