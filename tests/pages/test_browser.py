"""Pages in a real browser: readable in light and dark, on a phone and on a desk, and without a word in its log."""

from __future__ import annotations

import pytest

from thermocline.demo.report import page_of
from thermocline.heat.curve import Curve
from thermocline.heat.page import heat_page
from thermocline.plan.make import make_plan
from thermocline.plan.page import page as plan_page
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.topology import Topology

WINDOWS = [(390, False), (390, True), (1200, False), (1200, True)]  # width in CSS pixels, dark

# Names of things that are on the page: shown, not empty, and not of a size that nobody can see.
VISIBLE = """
return [...document.querySelectorAll(arguments[0])].filter(one => {
  const box = one.getBoundingClientRect();
  return one.checkVisibility() && box.width > 0 && box.height > 0;
}).map(one => one.textContent);
"""
# What reaches past the window, other than inside a box that can be scrolled.
BEYOND = """
return [...document.querySelectorAll("body *")].filter(one =>
  !one.closest(".scroll") && one.getBoundingClientRect().right > innerWidth + 1
).map(one => one.outerHTML.slice(0, 80));
"""
# The contrast between a text and what it stands on (WCAG), the least of all kinds of text.
CONTRAST = """
const light = colour => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
return Math.min(...[["p", "body"], ["dt", "dl > div"], ["th", "th"], ["td", "td:first-child"], ["figcaption", "figure"]].map(
  ([text, ground]) => ratio(
    light(getComputedStyle(document.querySelector(text)).color),
    light(getComputedStyle(document.querySelector(ground)).backgroundColor))));
"""


@pytest.fixture
def shown(browser, tmp_path, screenshots):
    """Open a page in a window and check what must be true of all of them."""

    def show(name, written, width, dark):
        file = tmp_path / f"{name}.html"
        file.write_text(written, encoding="utf-8")
        browser.open(file, width, dark)
        assert browser.run("return innerWidth") == width
        assert browser.run("return document.documentElement.scrollWidth") <= width, browser.run(BEYOND)
        assert browser.run(BEYOND) == []
        assert browser.run(CONTRAST) >= 4.5
        assert browser.run("return performance.getEntriesByType('resource').length") == 0
        picture = browser.screenshot(screenshots / f"{name}_{width}_{'dark' if dark else 'light'}.png")
        assert picture.stat().st_size > 10_000
        assert browser.log() == []
        return browser

    return show


@pytest.mark.parametrize("width, dark", WINDOWS)
@pytest.mark.parametrize("tables, nodes, cards", [(7, 2, 4), (26, 4, 8)])
def test_a_plan_page_shows_every_table(shown, plan_of, hostile, tables, nodes, cards, width, dark):
    plan = plan_of(tables, nodes, cards, hostile)
    window = shown(f"plan_{nodes}x{cards}", plan_page(plan), width, dark)
    names = window.run(VISIBLE, "td:first-child")
    assert {one.name for one in plan.tables if one.name.isprintable()} <= set(names)
    assert len(window.run(VISIBLE, "svg")) == 4 + min(tables, 12)


@pytest.mark.parametrize("width, dark", WINDOWS)
def test_a_heat_page_shows_every_table(shown, heat_of, hostile, width, dark):
    heat = heat_of(9, hostile)
    window = shown("heat", heat_page(heat), width, dark)
    assert {name for name in heat.tables if name.isprintable()} <= set(window.run(VISIBLE, "td:first-child"))
    assert set(window.run(VISIBLE, "figcaption b")) == {"Heat", "Ids a sample", "Repeats", "Drift"}


@pytest.mark.parametrize("nodes, cards", [(2, 4), (4, 8), (512, 8)])
def test_a_plan_that_was_really_made_shows_every_table(shown, nodes, cards):
    sizes = [30_000_003 // 3**number + 9 for number in range(5)]
    tables = Tables(
        batch=512, dense=1e-3, tables=tuple(TableFile(name=f"t{rows}", rows=rows, dim=32, lookups=5) for rows in sizes)
    )
    topology = Topology.load("hgx-h200", nodes).model_copy(update={"cards_per_node": cards})
    plan = make_plan(tables, {table.name: Curve.zipf(table.rows, 1.05, 1e9) for table in tables.tables}, topology)
    window = shown(f"made_{nodes}x{cards}", plan_page(plan), 390, dark=nodes == 4)
    assert {f"t{rows}" for rows in sizes} <= set(window.run(VISIBLE, "input + .scroll td:first-child"))
    assert len(window.run(VISIBLE, "svg")) == 4 + len(sizes)


def test_light_and_dark_differ_in_paper_ink_and_marks(shown, plan_of):
    written, looks = plan_page(plan_of(7, 2, 4)), {}
    for dark in (False, True):
        window = shown("scheme", written, 1200, dark)
        looks[dark] = window.run(
            "const look = name => getComputedStyle(document.querySelector(name));"
            "return [look('body').backgroundColor, look('body').color, look('rect.c0').fill, look('svg text').fill]"
        )
    assert all(light != dark for light, dark in zip(looks[False], looks[True], strict=True))


def test_a_thousand_tables_can_be_searched_and_sorted(shown, plan_of):
    window = shown("plan_512x8", plan_page(plan_of(1000, 512, 8)), 1200, False)
    assert len(window.run(VISIBLE, "input + .scroll td:first-child")) == 1000
    type_in = "const box = document.querySelector('input'); box.value = arguments[0]; box.dispatchEvent(new Event('input'))"
    window.run(type_in, "c77")
    found = window.run(VISIBLE, "input + .scroll td:first-child")
    assert found == ["C77", *(f"C77{k}" for k in range(10))]
    press = "[...document.querySelectorAll('th button')].find(one => one.textContent === arguments[0]).click()"
    window.run(press, "rows")
    assert window.run(VISIBLE, "input + .scroll td:first-child") == found, "numbers fall at first"
    window.run(press, "rows")
    assert window.run(VISIBLE, "input + .scroll td:first-child") == found[::-1], "and rise at the next press"
    window.run(press, "table")
    assert window.run("return document.querySelector('[aria-sort]').textContent") == "table"
    assert window.log() == []


@pytest.mark.parametrize("width, dark", [(390, True), (1200, False)])
def test_the_page_of_the_demo_sets_ours_next_to_the_baseline(shown, heat_of, plan_of, width, dark):
    model = {"bytes": 4e6, "sent": {"node": 3e4, "cluster": 5e4}, "auc": 0.75, "hit_rate": 0.5, "seconds": 3.0}
    arm = {"dlrm": model, "sequence": {**model, "bytes": 1e6}}
    found = {
        "heat": {"lookups": 10**6, "hottest 1%": 0.6, "seconds": 1.0},
        "train": {"fp32": arm, "planned": arm, "seconds": 9.0},
        "serve": {"fp32": {"lookups/s": 4e5}, "planned": {"lookups/s": 5e5}, "seconds": 2.0},
    }
    window = shown("demo", page_of(found, heat_of(5), plan_of(7, 2, 2)), width, dark)
    assert "lookups a second, served" in window.run(VISIBLE, "td:first-child")
    assert len(window.run(VISIBLE, "svg")) == 4
