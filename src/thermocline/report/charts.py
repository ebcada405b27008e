"""Charts as plain SVG: lines over shaded bands, stacked bars, columns; in pages, or as files of their own (`picture`).

Charts are drawn for a phone, 360 units wide. A mark has a colour class of the page (`page.css`), which has a dark mode, and a
<title> as a tooltip; each chart has a <title> and a <desc> for screen readers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from .axes import Axis
from .markup import Html, element
from .numbers import Show, brief

WIDTH = 360
COLOURS = 8  # in page.css
_LETTER = 12  # font size of labels, in units
_TOP, _RIGHT, _BELOW = 23, 12, 39  # margins of a plot, for labels
_MARGIN = 12  # around a chart in a file of its own


@dataclass(frozen=True)
class Line:
    """A name and points from left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False  # a dot at each point, which says its numbers


@dataclass(frozen=True)
class Band:
    """A shaded range of the horizontal axis."""

    name: str
    start: float
    end: float
    note: str = ""  # said in the legend, after the name
    colour: int = 0


@dataclass(frozen=True)
class Bar:
    """A name and stacked parts."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def lines(title: str, lines: Sequence[Line], across: Axis, up: Axis, bands: Sequence[Band] = ()) -> Html:
    """Lines over bands. A single line is drawn in ink, several in colours."""
    plot = _Plot(up, 190)
    drawn = [part for band in bands for part in _band(band, plot, across)]
    drawn += plot.rules()
    drawn += plot.names_below([(plot.x(across.at(tick)), brief(across.show(tick))) for tick in across.ticks()], across.label)
    for number, line in enumerate(lines):
        drawn += _line(line, _colour(number) if len(lines) > 1 else "ink", plot, across)
    named = [(f"{band.name}: {band.note}".rstrip(": "), _colour(band.colour)) for band in bands]
    if len(lines) > 1:
        named += [(line.name, _colour(number)) for number, line in enumerate(lines)]
    return _chart(title, ", ".join(line.name for line in lines), drawn, named, plot.bottom + _BELOW)


def columns(title: str, names: Sequence[str], values: Sequence[float], up: Axis, label: str = "") -> Html:
    """A column for each name, from left to right, as in a histogram."""
    plot = _Plot(up, 160)
    middles = [plot.x((number + 0.5) / len(names)) for number in range(len(names))]
    wide = min(0.88 * (plot.x(1) - plot.x(0)) / max(len(names), 1), 56)
    drawn = plot.rules()
    for name, value, middle in zip(names, values, middles, strict=True):
        box = {"x": middle - wide / 2, "y": plot.y(value), "width": wide, "height": plot.bottom - plot.y(value)}
        drawn.append(element("rect", element("title", f"{name}: {up.show(value)}"), **box, class_=_colour(0)))
    drawn += plot.names_below(zip(middles, names, strict=True), label)
    return _chart(title, f"{len(names)} columns", drawn, [], plot.bottom + _BELOW)


def bars(title: str, bars: Sequence[Bar], show: Show, limit: tuple[str, float] | None = None, colour: int = 0) -> Html:
    """Horizontal bars. A part has the same colour in all bars, from `colour` on; `limit` is a vertical line."""
    kinds = dict.fromkeys(part for bar in bars for part in bar.parts)
    colours = {kind: _colour(number) for number, kind in enumerate(kinds, colour)}
    axis = Axis(0.0, max([bar.total for bar in bars] + [limit[1] if limit else 0.0]) or 1.0)
    left = 6 + min(max((width_of(bar.name) for bar in bars), default=0), 160)
    wide = WIDTH - left - max((width_of(str(show(bar.total))) for bar in bars), default=0) - 6
    pitch = 20 if len(bars) <= 16 else 13
    drawn: list[Html] = []
    labels = _labels([bar.name for bar in bars], left - 6)
    for number, bar in enumerate(bars):
        top, reach = number * pitch, left
        baseline = top + pitch / 2 + 4
        drawn.append(_words(left - 6, baseline, labels[number], "end", whole=bar.name))
        for kind, value in bar.parts.items():
            box = {"x": reach, "y": top + pitch * 0.12, "width": wide * axis.at(value), "height": pitch * 0.76}
            tip = element("title", f"{bar.name}, {kind}: {show(value)}")
            drawn.append(element("rect", tip, **box, class_=colours[kind]))
            reach += box["width"]
        drawn.append(_words(WIDTH, baseline, str(show(bar.total)), "end"))
    named = list(colours.items()) if len(kinds) > 1 else []
    height = len(bars) * pitch + 2
    if limit is not None:
        x = left + wide * axis.at(limit[1])
        words = f"{limit[0]}: {show(limit[1])}"
        drawn.append(element("line", element("title", words), x1=x, x2=x, y1=0, y2=height, class_="limit"))
        named.append((words, "limit"))
    return _chart(title, ", ".join(f"{bar.name} {show(bar.total)}" for bar in bars[:16]), drawn, named, height)


@dataclass(frozen=True)
class _Plot:
    """A frame with a vertical axis."""

    up: Axis
    height: float

    @property
    def left(self) -> float:
        return 8 + max((width_of(brief(self.up.show(tick))) for tick in self.up.ticks()), default=0)

    @property
    def bottom(self) -> float:
        return _TOP + self.height

    def x(self, place: float) -> float:
        return self.left + (WIDTH - _RIGHT - self.left) * place

    def y(self, value: float) -> float:
        return self.bottom - self.height * self.up.at(value)

    def rules(self) -> list[Html]:
        drawn = [_words(0, 10, self.up.label)]
        for tick in self.up.ticks():
            y = self.y(tick)
            drawn.append(element("line", x1=self.x(0), x2=self.x(1), y1=y, y2=y, class_="rule"))
            drawn.append(_words(self.left - 5, y + 4, brief(self.up.show(tick)), "end"))
        return drawn

    def names_below(self, names: Iterable[tuple[float, str]], label: str) -> list[Html]:
        """Labels under their positions, without those that would overlap the one before."""
        drawn, free = [_words(WIDTH - _RIGHT, self.bottom + 34, label, "end")], 0.0
        for x, name in names:
            half = width_of(name) / 2
            x = min(x, WIDTH - half)
            if x - half >= free:
                drawn.append(_words(x, self.bottom + 18, name, "middle"))
                free = x + half + 6
        return drawn


def _band(band: Band, plot: _Plot, across: Axis) -> Iterable[Html]:
    start, end = plot.x(across.at(band.start)), plot.x(across.at(band.end))
    tip = element("title", f"{band.name}: {band.note}".rstrip(": "))
    yield element("rect", tip, x=start, y=_TOP, width=end - start, height=plot.height, class_=f"band {_colour(band.colour)}")
    if width_of(band.name) + 6 <= end - start:
        yield _words((start + end) / 2, _TOP + 14, band.name, "middle")


def _line(line: Line, colour: str, plot: _Plot, across: Axis) -> Iterable[Html]:
    places = [(plot.x(across.at(x)), plot.y(y)) for x, y in line.points]
    if len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield element("polyline", element("title", line.name), points=path, class_=f"line {colour}")
    if line.marks or len(places) == 1:
        for (x, y), point in zip(places, line.points, strict=True):
            tip = element("title", f"{line.name}: {across.show(point[0])}, {plot.up.show(point[1])}")
            yield element("circle", tip, cx=x, cy=y, r=3.5, class_=colour)


def _chart(title: str, about: str, drawn: Iterable[Html], named: Iterable[tuple[str, str]], height: float) -> Html:
    """The drawing with its legend below."""
    legend: list[Html] = []
    x, y = 0.0, height + 14
    for name, colour in named:
        name = shorten(name, WIDTH - 16)
        if x and x + 15 + width_of(name) > WIDTH:
            x, y = 0.0, y + 17
        legend.append(element("rect", x=x, y=y - 9, width=10, height=10, rx=2, class_=f"key {colour}"))
        legend.append(_words(x + 15, y, name))
        x += 15 + width_of(name) + 10
    box = f"0 0 {WIDTH} {y + 5 if legend else height:.0f}"
    inside = (element("title", title), element("desc", about), *drawn, *legend)
    return element("svg", *inside, viewBox=box, role="img", class_="chart")


def _colour(number: int) -> str:
    return f"c{number % COLOURS}"


def _words(x: float, y: float, words: str, anchor: str | None = None, whole: str | None = None) -> Html:
    """A label; `whole` is its full text if it was shortened."""
    tip = element("title", whole) if whole not in (None, words) else ""
    return element("text", words, tip, x=x, y=y, text_anchor=anchor)


def width_of(words: str) -> float:
    """The estimated width of a label."""
    return _LETTER * sum(1.0 if unicodedata.east_asian_width(sign) in "WF" else 0.57 for sign in words)


def shorten(words: str, width: float) -> str:
    """As much of a label as fits, with an ellipsis."""
    if width_of(words) <= width:
        return words
    while words and width_of(words) > width - _LETTER:
        words = words[:-1]
    return words.rstrip() + "…"


def _labels(names: Sequence[str], width: float) -> list[str]:
    """Names shortened at their ends, or in the middle where two would read the same."""
    cut = [shorten(name, width) for name in names]
    return [_without_middle(name, width) if cut.count(short) > 1 else short for name, short in zip(names, cut, strict=True)]


def _without_middle(name: str, width: float) -> str:
    left, right = name[: len(name) // 2], name[len(name) // 2 :]
    if width_of(name) <= width:
        return name
    while left and width_of(left + right) > width - _LETTER:
        left, right = (left[:-1], right) if len(left) > len(right) else (left, right[1:])
    return f"{left.rstrip()}…{right.lstrip()}"


class Picture(str):
    """SVG that a notebook displays."""

    def _repr_svg_(self) -> str:
        return str(self)


def picture(chart: Html, wide: int = 480) -> Picture:
    """A chart as an SVG file, `wide` pixels wide, for notebooks and documents.

    Converters may know no CSS variables and no media queries, so colours of the light page are written out.
    """
    found = re.search(r'viewBox="0 0 \d+ (\d+)"', chart)
    assert found, "not a chart"
    high = int(found[1])
    box = f"{-_MARGIN} {-_MARGIN} {WIDTH + 2 * _MARGIN} {high + 2 * _MARGIN}"
    paper = element("rect", x=-_MARGIN, y=-_MARGIN, width=WIDTH + 2 * _MARGIN, height=high + 2 * _MARGIN, style="fill:#ffffff")
    drawn = chart.replace(found[0], f'viewBox="{box}" width="{wide}" xmlns="http://www.w3.org/2000/svg"', 1)
    return Picture(drawn.replace("</desc>", f"</desc>{element('style', Html(_style()))}{paper}", 1))


def _style() -> str:
    """The chart rules of page.css, with the values of light pages for its variables."""
    css = (files(__package__) / "page.css").read_text(encoding="utf-8")
    values = dict(re.findall(r"(--\w+): (#\w+);", css[: css.index("@media")]))
    rules = [line for line in css.splitlines() if re.match(r"\.chart (text|rect|\.)|\.ink|\.c\d", line)]
    plain = re.sub(r"var\((--\w+)\)", lambda name: values[name[1]], "\n".join(rules))
    return f".chart {{ font: 12px system-ui, sans-serif; }}\n{plain}"
