"""Charts: well-formed, inside their frame, and saying what they show."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import WIDTH, Band, Bar, Line, bars, columns, lines, picture, shorten, width_of
from thermocline.report.numbers import count, seconds, share, size

UP = Axis(0.0, 1.0, "lookups", share)
VALUES = st.floats(0, 1e18)


def parsed(chart):
    """The chart as a tree, after what must be true of all of them."""
    assert not re.search(r"\b(nan|inf)\b", chart, re.IGNORECASE)
    tree = ElementTree.fromstring(chart)
    assert tree.get("role") == "img" and tree[0].tag == "title" and tree[1].tag == "desc"
    left, top, width, height = map(float, tree.get("viewBox", "").split())
    for mark in tree.iter("rect"):
        x, y, wide, tall = (float(mark.get(name, "")) for name in ("x", "y", "width", "height"))
        assert wide >= 0 and tall >= 0
        assert left - 0.1 <= x and x + wide <= left + width + 0.1
        assert top - 0.1 <= y and y + tall <= top + height + 0.1
    return tree


def texts(tree):
    return [label.text for label in tree.iter("text")]


def test_a_line_over_bands_says_where_they_begin_and_end():
    bands = [Band("tier 1", 0.001, 0.01, "9 rows", 2), Band("tier 2", 0.01, 1.0, "990 rows", 1)]
    points = [(0.001, 0.1), (0.01, 0.5), (1.0, 1.0)]
    tree = parsed(lines("Heat", [Line("lookups", points)], Axis(0.001, 1.0, "rows", share, log=True), UP, bands))
    drawn = [mark for mark in tree.iter("rect") if "band" in mark.get("class", "")]
    assert [mark.get("class") for mark in drawn] == ["band c2", "band c1"]
    assert float(drawn[1].get("width")) == pytest.approx(2 * float(drawn[0].get("width")), abs=0.2)
    assert {"tier 1", "tier 2", "tier 1: 9 rows", "tier 2: 990 rows", "0.1%", "1%", "10%", "100%", "rows"} <= set(texts(tree))
    places = [tuple(map(float, place.split(","))) for place in tree.find("polyline").get("points").split()]
    assert places == sorted(places) and [y for _, y in places] == sorted((y for _, y in places), reverse=True)


@pytest.mark.parametrize("points", [[], [(0.5, 0.5)], [(k / 999, (k / 999) ** 2) for k in range(1000)]])
def test_lines_of_no_one_and_many_points_are_drawn(points):
    tree = parsed(lines("Title", [Line("one", points), Line("two", points[:1])], Axis(0, 1), UP))
    assert len(tree.findall("circle")) == (len(points) == 1) + (len(points) > 0)
    assert {"one", "two"} <= set(texts(tree)), "two lines need a legend"


@given(st.lists(st.dictionaries(st.sampled_from(["codes", "cache", "maps"]), VALUES), max_size=40), st.none() | VALUES)
def test_bars_of_any_size_stay_in_their_frame(parts, limit):
    drawn = [Bar(f"card {number}", each) for number, each in enumerate(parts)]
    tree = parsed(bars("Bytes", drawn, size, ("budget", limit) if limit is not None else None))
    marks = [mark for mark in tree.iter("rect") if mark.find("title") is not None]
    assert len(marks) == sum(map(len, parts))


def test_the_parts_of_a_bar_stand_end_to_end_and_keep_their_colours():
    tree = parsed(bars("Step", [Bar("a", {"x": 1.0, "y": 3.0}), Bar("b", {"y": 4.0})], seconds))
    first, second, third = (mark for mark in tree.iter("rect") if mark.find("title") is not None)
    assert float(first.get("x")) + float(first.get("width")) == pytest.approx(float(second.get("x")), abs=0.2)
    assert float(second.get("width")) == pytest.approx(3 * float(first.get("width")), abs=0.3)
    assert second.get("class") == third.get("class") != first.get("class")
    assert first.find("title").text == "a, x: 1.00 s"


@given(st.lists(VALUES, max_size=70))
def test_columns_are_as_tall_as_their_values(values):
    tree = parsed(columns("Lengths", [str(number) for number in range(len(values))], values, from_zero(values), "ids"))
    tall = [float(mark.get("height")) for mark in tree.iter("rect")]
    highest = from_zero(values).high
    assert tall == pytest.approx([160 * value / highest for value in values], abs=0.06)


def test_names_under_columns_leave_room_for_each_other():
    tree = parsed(columns("Lengths", [f"length {number}" for number in range(50)], [1.0] * 50, from_zero([1.0])))
    named = [label for label in tree.iter("text") if (label.text or "").startswith("length")]
    places = [float(label.get("x")) for label in named]
    assert len(named) > 2 and all(b - a > width_of("length 9") for a, b in pairwise(places))


def test_numbers_that_are_none_are_ours_to_find_before_a_reader_does():
    with pytest.raises(AssertionError):
        lines("Title", [Line("one", [(0.1, math.nan), (0.2, 0.3)])], Axis(0, 1), UP)
    with pytest.raises(AssertionError):
        bars("Title", [Bar("a", {"x": math.inf})], count)


def test_hostile_names_are_text_everywhere(hostile):
    across = Axis(1, 5, show=count)
    for name in hostile:
        for chart in (
            lines(name, [Line(name, [(1, 0.5), (2, 0.6)], marks=True)], across, UP, [Band(name, 1, 5, name)]),
            lines(name, [Line(name, []), Line(name, [])], across, UP),
            bars(name, [Bar(name, {name: 1.0, "x": 2.0})], count, (name, 3.0)),
            columns(name, [name], [1.0], UP, name),
        ):
            tree = parsed(chart)
            assert {node.tag for node in tree.iter()} <= {"svg", "title", "desc", "rect", "line", "text", "polyline", "circle"}


def test_a_label_is_cut_to_its_width_and_says_so(hostile):
    assert shorten("short", WIDTH) == "short"
    for name in hostile:
        cut = shorten(name, 60)
        assert width_of(cut) <= 60 and (cut == name or cut.endswith("…"))


def test_a_picture_is_a_file_of_its_own_with_its_colours_written_out():
    shown = picture(lines("Heat & more", [Line("a", [(0.1, 0.2), (1.0, 0.9)]), Line("b", [(0.5, 0.5)])], Axis(0.0, 1.0), UP))
    tree = ElementTree.fromstring(shown)
    assert tree.tag == "{http://www.w3.org/2000/svg}svg" and shown._repr_svg_() == shown
    assert "var(" not in shown and "@media" not in shown and ".c1 { color: #eda63a; }" in shown
