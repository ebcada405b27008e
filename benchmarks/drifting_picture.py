"""Draws `docs/pictures/drifting_ids.svg` with the example of `docs/elastic.md`: `python benchmarks/drifting_picture.py`."""

from __future__ import annotations

import re
from pathlib import Path

from thermocline.report.axes import Axis
from thermocline.report.charts import Line, lines, picture
from thermocline.report.numbers import Number

DOCS = Path(__file__).parents[1] / "docs"
AROUND = 10  # batches of a mean


def main() -> None:
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", (DOCS / "elastic.md").read_text(), re.S) if "curves" in block
    )
    known: dict[str, dict[str, list[float]]] = {}
    exec(code, known)
    drawn = [
        Line(name, [(step, sum(losses[step - AROUND : step]) / AROUND) for step in range(AROUND, len(losses) + 1, AROUND)])
        for name, losses in known["curves"].items()
    ]
    up = Axis(0.5, 0.7, "log loss", lambda value: Number(value, f"{value:.2f}"))
    chart = lines("Log loss on a drifting stream", drawn, Axis(0.0, 300.0, "batches"), up)
    (DOCS / "pictures" / "drifting_ids.svg").write_text(str(picture(chart)), encoding="utf-8")


if __name__ == "__main__":
    main()
