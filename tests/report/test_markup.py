"""Markup, numbers and axes: what pages and charts are made of."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.report.axes import Axis, from_zero
from thermocline.report.markup import Html, element, text
from thermocline.report.numbers import brief, count, seconds, share, signed, size


@given(st.text(st.characters(codec=None)))
def test_any_text_can_be_read_by_an_xml_parser_and_what_can_be_seen_is_kept(words):
    found = ElementTree.fromstring(element("p", words, title=words).encode())
    if words.isprintable():
        assert (found.text or "", found.get("title")) == (words, words)


def test_only_markup_passes_unescaped():
    assert text("<b>&\"'") == "&lt;b&gt;&amp;&quot;&#x27;"
    assert element("p", element("b", "1 < 2"), class_="a", stroke_width=2, left_out=None) == (
        '<p class="a" stroke-width="2"><b>1 &lt; 2</b></p>'
    )
    assert isinstance(element("br"), Html) and element("br") == "<br/>"
    assert element("td") == "<td></td>", "HTML reads <td/> as a cell that has only begun"


@pytest.mark.parametrize(
    "shown, wanted",
    [
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1.5 * 2**30), "1.50 GiB"),
        (size(3 * 2**60), "3072 PiB"),
        (seconds(0), "0 s"),
        (seconds(0.00321), "3.21 ms"),
        (seconds(9.9996e-4), "1.00 ms"),
        (seconds(1e-12), "0.00100 ns"),
        (seconds(-0.5), "-500 ms"),
        (count(9999), "9,999"),
        (count(0.25), "0.250"),
        (count(12_345), "12,345"),
        (count(123_456), "123k"),
        (count(10_000_000_000), "10.0B"),
        (share(0), "0%"),
        (share(1), "100%"),
        (share(0.4321), "43.2%"),
        (share(1.2e-6), "0.000120%"),
        (signed(seconds(0.002)), "+2.00 ms"),
        (signed(seconds(-0.002)), "−2.00 ms"),  # noqa: RUF001
    ],
)
def test_numbers_have_three_digits_and_a_unit(shown, wanted):
    assert str(shown) == wanted


@pytest.mark.parametrize(
    "number, wanted",
    [
        (seconds(0.004), "4 ms"),
        (share(0.2), "20%"),
        (share(1e-5), "0.001%"),
        (size(2.5 * 2**30), "2.5 GiB"),
        (count(100), "100"),
    ],
)
def test_round_numbers_are_written_without_idle_zeros(number, wanted):
    assert brief(number) == wanted


FINITE = st.floats(1e-200, 1e200)


@given(FINITE, FINITE, st.booleans(), st.integers(3, 8))
def test_ticks_lie_between_the_ends_and_are_few(one, other, log, most):
    low, high = sorted((one, other))
    if low * (1 + 1e-6) >= high:
        return
    axis = Axis(low, high, log=log)
    ticks = axis.ticks(most)
    assert len(ticks) <= most + 2
    assert ticks == sorted(set(ticks)) and all(math.isfinite(tick) for tick in ticks)
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert axis.at(low) == 0 and axis.at(high) == 1


def test_ticks_are_round_in_the_unit_that_is_shown():
    assert [brief(size(tick)) for tick in from_zero([7.3 * 2**30], show=size).ticks()] == [
        "0 B", "2 GiB", "4 GiB", "6 GiB", "8 GiB",
    ]  # fmt: skip
    assert [brief(share(tick)) for tick in Axis(1e-8, 1.0, log=True).ticks(5)] == [
        "0.000001%",
        "0.0001%",
        "0.01%",
        "1%",
        "100%",
    ]


def test_less_than_two_decades_have_ticks_between_them():
    assert Axis(0.05, 1.0, log=True).ticks() == pytest.approx([0.05, 0.1, 0.2, 0.5, 1.0])


def test_a_logarithmic_axis_spends_its_width_on_decades_and_keeps_to_its_ends():
    axis = Axis(0.001, 1.0, log=True)
    assert axis.at(0.01) == pytest.approx(1 / 3) and axis.at(0) == 0 and axis.at(7) == 1
    assert Axis(0, 10).at(2.5) == 0.25


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_an_axis_of_nothing_still_has_a_length(values):
    assert from_zero(values).high == 1.0
