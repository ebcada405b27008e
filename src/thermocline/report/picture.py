"""A chart as a file of its own, for notebooks and documents: plain SVG with the page's colours inside.

Notebooks show it when it is the last thing in a cell (`_repr_svg_`). What they are converted to may know no variables and no
media queries, so colours are written out, for light paper, which the picture brings along.
"""

from __future__ import annotations

import re
from importlib.resources import files

from .charts import WIDTH
from .markup import Html, element

_MARGIN = 12


class Picture(str):
    """SVG that shows itself in a notebook."""

    def _repr_svg_(self) -> str:
        return str(self)


def picture(chart: Html, wide: int = 480) -> Picture:
    """A chart of `charts.py` as a file, so many pixels wide."""
    found = re.search(r'viewBox="0 0 \d+ (\d+)"', chart)
    assert found, "not a chart"
    high = int(found[1])
    box = f"{-_MARGIN} {-_MARGIN} {WIDTH + 2 * _MARGIN} {high + 2 * _MARGIN}"
    paper = element("rect", x=-_MARGIN, y=-_MARGIN, width=WIDTH + 2 * _MARGIN, height=high + 2 * _MARGIN, style="fill:#ffffff")
    drawn = chart.replace(found[0], f'viewBox="{box}" width="{wide}" xmlns="http://www.w3.org/2000/svg"', 1)
    return Picture(drawn.replace("</desc>", f"</desc>{element('style', Html(_style()))}{paper}", 1))


def _style() -> str:
    """The rules of page.css that charts have, with the values of light pages for its variables."""
    css = (files(__package__) / "page.css").read_text(encoding="utf-8")
    values = dict(re.findall(r"(--\w+): (#\w+);", css[: css.index("@media")]))
    rules = [line for line in css.splitlines() if re.match(r"\.chart (text|rect|\.)|\.ink|\.c\d", line)]
    plain = re.sub(r"var\((--\w+)\)", lambda name: values[name[1]], "\n".join(rules))
    return f".chart {{ font: 12px system-ui, sans-serif; }}\n{plain}"
