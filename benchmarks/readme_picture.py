"""Draws `docs/pictures/memory_accuracy.svg`, the picture of the README, from the newest accuracy results on the Criteo sample.

    python benchmarks/readme_picture.py            draws it
    python benchmarks/readme_picture.py --check    leaves with 1 if the picture is not what it would draw (a test does this)

Memory against accuracy: each way to keep rows is a point, with the 95% interval over paired seeds; the band is what the rule of
the accuracy benchmark lets pass. The vertical axis is linear near zero and logarithmic beyond, so that controls fit on it.
Colours follow the reader's light or dark page.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PICTURE = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures" / "memory_accuracy.svg"
DIM = 64
MARGIN = 5  # in 1e-4 of AUC

# Arms that are drawn: how people call them, and where the name stands.
NAMES = {
    "plain": ("fp32, nn.EmbeddingBag", "right"),
    "int8-stochastic-5%": ("int8, 5% cached", "above"),
    "int4-stochastic-1%": ("int4, 1% cached", "left"),
    "tiers-1%-5%-int2": ("1% fp32, 5% int8, 94% int2", "above-left"),
    "int4-nearest-0%": ("control: int4, rounded to nearest", "left"),
    "zeroed-89%": ("control: 89% of the rows zeroed", "below-left"),
}
PLACES = {
    "right": (10, 4, "start"), "left": (-10, 4, "end"), "above": (0, -20, "middle"), "above-left": (20, -20, "end"),
    "below-left": (8, 20, "end"),
}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP = 640, 230, 58, 62
ACROSS, UP = (1, 2, 3, 4, 6, 8, 10), (5, 0, -5, -20, -50, -100)
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2a33 }
.quiet { fill: #5b6b76; font-size: 12px } .head { font-weight: 600; font-size: 15px }
.paper { fill: #ffffff } .rule { stroke: #d9dfe3 } .band { fill: #1a7f5a; opacity: .10 }
.good { fill: #1a7f5a; stroke: #1a7f5a } .bad { fill: #c0392b; stroke: #c0392b }
line.good, line.bad { stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9aa7b1 } .paper { fill: #11181e } .rule { stroke: #35414a } .band { fill: #3fb98a }
  .good { fill: #4cc79a; stroke: #4cc79a } .bad { fill: #f0776a; stroke: #f0776a }
}
"""


def main(arguments: list[str]) -> int:
    drawn = draw(json.loads(max(RESULTS.glob("accuracy_criteo_*.json")).read_text(encoding="utf-8")))
    if "--check" in arguments:
        return 0 if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn else 1
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


def draw(found: dict[str, Any]) -> str:
    rows = {row["case"].rsplit("/", 1)[1]: row for row in found["rows"] if f"/D{DIM}/" in row["case"]}
    seeds = min(row["seeds"] for name, row in rows.items() if name in NAMES)
    width, height = WIDTH + LEFT + 16, HEIGHT + TOP + 48
    box = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = f"AUC of a DLRM on the Criteo sample, D={DIM}, against memory of its tables"
    about = f"difference to fp32 in 1e-4, mean and 95% interval of {seeds} or more paired seeds; "
    about += "the band is what the rule lets pass"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
        f"<title>{head}</title><style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
        f'<text x="12" y="24" class="head">{head}</text><text x="12" y="43" class="quiet">{about}</text>',
        f'<g transform="translate({LEFT},{TOP})">', *_frame(), *(part for name in NAMES for part in _mark(name, rows[name])),
        "</g></svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _frame() -> Iterator[str]:
    yield f'<rect class="band" y="{_up(MARGIN):.1f}" width="{WIDTH}" height="{_up(-MARGIN) - _up(MARGIN):.1f}"/>'
    for tick in UP:
        y = _up(tick)
        yield f'<line class="rule" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="quiet" x="-8" y="{y + 4:.1f}" text-anchor="end">{f"{tick:+d}" if tick else "0"}</text>'
    for tick in ACROSS:
        yield f'<text class="quiet" x="{_across(tick):.1f}" y="{HEIGHT + 18}" text-anchor="middle">{tick}x</text>'
    yield f'<text class="quiet" x="{WIDTH}" y="{HEIGHT + 36}" text-anchor="end">times less memory than fp32 rows</text>'


def _mark(name: str, row: dict[str, Any]) -> Iterator[str]:
    mean, low, high = (None if value is None else 1e4 * value for value in row["auc_difference"])
    words, place = NAMES[name]
    x, y, kind = _across(row["memory_ratio"]), _up(mean), "bad" if words.startswith("control") else "good"
    if low is not None and high is not None:
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_up(low):.1f}" y2="{_up(high):.1f}"/>'
    yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{words}: {mean:+.1f}</title></circle>'
    dx, dy, anchor = PLACES[place]
    yield f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}">{words}</text>'


def _across(ratio: float) -> float:
    return WIDTH * math.log(ratio / 0.9) / math.log(ACROSS[-1] * 1.05 / 0.9)


def _up(difference: float | None) -> float:
    assert difference is not None
    high, low = (math.asinh(tick / MARGIN) for tick in (9, UP[-1]))
    return HEIGHT * (high - min(max(math.asinh(difference / MARGIN), low), high)) / (high - low)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
