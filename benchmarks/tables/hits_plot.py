"""Hit rate against cache size as an SVG file that needs nothing else: a panel for each log, a line for each policy."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.runner.record import Row
from benchmarks.tables.hits import OPTIMUM

_WIDTH, _HEIGHT, _MARGIN = 420, 300, 60
_COLOURS = {"optimum": "#444444", "lfu": "#1a7f5a", "lru": "#2f6db5", "adaptive": "#b5622f"}
_OTHER = "#8a4fa3"


def draw(measured: dict[str, Any]) -> str:
    """The picture of a record of the hits benchmark."""
    logs: dict[str, list[Row]] = {}
    for row in measured["rows"]:
        if row["peer"] == OPTIMUM:
            logs.setdefault(row["case"].split("/")[0], []).append(row)
    width, height = len(logs) * (_WIDTH + 2 * _MARGIN), _HEIGHT + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, rows) in enumerate(logs.items()):
        left = _MARGIN + number * (_WIDTH + 2 * _MARGIN)
        parts += [f'<g transform="translate({left},{_MARGIN})">', *_panel(name, rows), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def curves(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Line -> cache size -> hit rate, the optimum first."""
    lines: dict[str, dict[str, float]] = {"optimum": {}}
    for row in rows:
        _, policy, size = row["case"].split("/")
        lines["optimum"][size] = row["peer_value"]
        lines.setdefault(policy, {})[size] = row["ours"]
    return lines


def _panel(name: str, rows: list[Row]) -> Iterator[str]:
    lines = curves(rows)
    sizes = list(lines["optimum"])
    across = {size: _WIDTH * (k + 0.5) / len(sizes) for k, size in enumerate(sizes)}
    yield _text(0, -30, name, "start", "black", 14)
    yield _text(0, -12, "share of lookups that hit, by the share of rows in the cache")
    for tick in range(0, 101, 20):
        y = _up(tick / 100)
        yield f'<line x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield _text(-8, y + 4, f"{tick}%", "end")
    for size, x in across.items():
        yield _text(x, _HEIGHT + 18, size, "middle")
    for k, (line, rates) in enumerate(lines.items()):
        colour = _COLOURS.get(line, _OTHER)
        points = " ".join(f"{across[size]:.1f},{_up(rate):.1f}" for size, rate in rates.items())
        dashes = ' stroke-dasharray="5 4"' if line == "optimum" else ""
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        for size, rate in rates.items():
            title = f"<title>{escape(line)} {size}: {rate:.1%}</title>"  # shown where the pointer rests
            yield f'<circle cx="{across[size]:.1f}" cy="{_up(rate):.1f}" r="4" fill="{colour}">{title}</circle>'
        yield _text(_WIDTH - 6, _HEIGHT - 10 - 16 * k, line, "end", colour)


def _up(rate: float) -> float:
    return _HEIGHT * (1 - rate)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#444444", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}">{escape(text)}</text>'
