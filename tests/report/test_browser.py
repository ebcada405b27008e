"""Pages in a real browser: readable in light and dark, on a phone and on a desk, and without a word in its log."""

from __future__ import annotations

import pytest

from benchmarks.runner.compare import Comparison
from benchmarks.runner.compare_page import compare_page
from benchmarks.runner.show import parse
from examples.demo.report import page_of
from thermocline.heat.curve import Curve
from thermocline.heat.page import heat_page
from thermocline.plan.make import make_plan
from thermocline.plan.report.page import plan_page as plan_page
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology
from thermocline.serve.server.status_page import status_report as serving_page
from thermocline.train.report_page import train_page

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
    tables = TablesConfig(
        batch=512, dense=1e-3, tables=tuple(TableConfig(name=f"t{rows}", rows=rows, dim=32, lookups=5) for rows in sizes)
    )
    topology = Topology.load("hgx-h200", nodes).model_copy(update={"gpus_per_node": cards})
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
    model = {
        "bytes": 4e6,
        "sent": {"node": 3e4, "cluster": 5e4},
        "auc": 0.75,
        "served_auc": 0.75,
        "hit_rate": 0.5,
        "seconds": 3.0,
    }
    arm = {"dlrm": model, "sequence": {**model, "bytes": 1e6}}
    found = {
        "heat": {"lookups": 10**6, "hottest 1%": 0.6, "seconds": 1.0},
        "train": {"fp32": arm, "planned": arm, "seconds": 9.0},
        "serve": {"fp32": {"lookups/s": 4e5}, "planned": {"lookups/s": 5e5}, "seconds": 2.0},
    }
    window = shown("demo", page_of(found, heat_of(5), plan_of(7, 2, 2), plan_of(1, 2, 2, ["item"])), width, dark)
    assert "lookups per second, served" in window.run(VISIBLE, "td:first-child")
    assert len(window.run(VISIBLE, "svg")) == 4 and "item" in window.run(VISIBLE, "input + .scroll td:first-child")


def results(name, times, cases, **changes):
    """A file of results, some cases `times` as slow as in the first."""
    rows = [
        {
            "case": f"cpu/{case}/zipf/int8/forward/1", "ours": 2.0 * (times if number % 3 else 1.004),
            "peer": "fbgemm", "peer_value": 3.0, "unit": "ms", "ratio": 1.5, "asked": 1.0, "ok": True, "spread": 0.02,
        }
        for number, case in enumerate(cases)
    ]  # fmt: skip
    machine, versions = {"cpu": "made-up", "cores": 2}, {"torch": "2.13.0", "numba": "0.62"}
    found = {"bench": "kernels", "machine": machine, "versions": versions, "commit": "0123abc", "date": "2026-01-02T03:04:05Z"}
    return parse({**found, "rows": rows, **changes}, f"results/{name}.json")


@pytest.mark.parametrize("width, dark", WINDOWS)
def test_a_comparison_of_results_shows_every_case_and_what_changed(shown, hostile, width, dark):
    cases = [f"{number}x1M" for number in range(40)] + [name for name in hostile if name.isprintable()]
    reports = [results("before", 1.0, cases), results("after", 1.7, cases[:-1]), results("gpu", 0.5, cases, machine="another")]
    window = shown("compare", compare_page(Comparison.of(reports)), width, dark)
    assert {f"cpu/{case}/zipf/int8/forward/1" for case in cases} <= set(window.run(VISIBLE, "input + .scroll td:first-child"))
    assert {"after against before", "gpu against before", "All cases"} <= set(window.run(VISIBLE, "h2"))
    assert window.run(VISIBLE, "figcaption b") == [
        "Cases by change",
        "Most for the worse",
        "Cases by change",
        "Most for the better",
    ]
    assert any("another machine" in words for words in window.run(VISIBLE, "p"))
    assert {"0.59x", "1.00x", "2.00x"} <= set(window.run(VISIBLE, "td.n"))


@pytest.mark.parametrize("width, dark", WINDOWS)
def test_the_page_of_a_run_shows_its_curves_tables_and_settings(shown, hostile, width, dark):
    curve = [
        {
            "step": 10.0 * k, "loss": 0.7 - 0.02 * k, "samples per second": 9000.0 + 100 * (k % 5),
            "tables/lookups": 1000.0 * k, "tables/hits": 700.0 * k, "sent/rows (cluster)": 5e4, "sent/gradients (node)": 9e4,
        }
        for k in range(1, 30)
    ]  # fmt: skip
    memory = {"codes": 320_000, "metadata": 80_000, "cache": 64_000, "maps": 32_104, "optimizer state": 80_000}
    outcome = {
        "auc": 0.7886, "logloss": 0.5385, "ne": 0.9485, "train_loss": 0.2419, "samples": 180_000, "rows": 20_000,
        "memory": memory, "stats": {"lookups": 29_000, "hits": 20_300, "evictions": 0}, "seconds": 29.6,
    }  # fmt: skip
    settings = {"data": hostile[0], "dim": 16, "precision": "int8", "cache": 0.05, "test": hostile[3]}
    epochs = [{"auc": 0.77 + 0.01 * k, "logloss": 0.55, "ne": 0.95, "train_loss": 0.3} for k in range(3)]
    window = shown("training", train_page("DLRM", settings, outcome, curve, epochs, 1), width, dark)
    drawn = {"Training loss", "Speed", "Cache hits", "Sent by the first rank", "Test AUC", "Bytes of the tables"}
    assert drawn <= set(window.run(VISIBLE, "figcaption b"))
    assert "0.7886" in window.run(VISIBLE, "dd") and hostile[0] in window.run(VISIBLE, "td")
    ratios = {"2.58x", "2.36x"}  # 1,280,000 bytes of fp32 rows by 496,104; both with 80,000 bytes of optimizer state
    assert ratios <= set(window.run(VISIBLE, "dd"))


def test_the_page_of_a_run_too_short_for_a_curve_is_whole(shown):
    outcome = {
        "hit_rate": 0.1,
        "ndcg": 0.05,
        "train_loss": 2.0,
        "samples": 3,
        "rows": 7,
        "memory": {"codes": 56},
        "stats": {},
        "seconds": 0.1,
    }
    window = shown("training_short", train_page("sequence model", {"dim": 2}, outcome, [], [outcome], 4), 390, True)
    assert window.run(VISIBLE, "h2") == ["Memory of the tables", "Settings"]
    assert "tables, first rank" in window.run(VISIBLE, "dt")


def serving(cards=4):
    held = [{"number": n, "ready": n != 2, "bytes": 9 << 20, "lookups": 1000 + 10 * n, "pid": 400 + n} for n in range(cards)]
    return {
        "version": "0.1", "state": "shard 2 down", "uptime": 4000.0, "requests_per_second": 812.3, "refused_per_second": 0.0,
        "ids_per_second": 1e6, "p50": 4e-4, "p99": 2e-3, "refused": 7, "history_seconds": 120,
        "rates": [[float(ago), 800.0 + ago % 7] for ago in range(-119, 1)],
        "latency": [[2e-4, 10], [5e-4, 700], [1e-3, 90], [None, 1]],
        "models": [{"name": "<b>shop</b>", "version": "3", "queued": 2, "imbalance": 1.0148, "cards": held}],
        "repository": [{"name": "<b>shop</b>", "version": "3", "state": "ready", "note": ""}],
    }  # fmt: skip


@pytest.mark.parametrize("width, dark", WINDOWS)
def test_the_page_of_a_server_shows_load_latency_and_every_shard(shown, width, dark):
    window = shown("serving", serving_page(serving(), "http://127.0.0.1:8000", "2026-01-02 03:04 UTC"), width, dark)
    assert window.run(VISIBLE, "h2") == ["<b>shop</b>, version 3", "Repository"]
    assert window.run(VISIBLE, "td:first-child") == [f"shard {n}" for n in range(4)] + ["<b>shop</b>"]
    assert window.run(VISIBLE, "figcaption b") == ["Load", "Latency", "Lookups by shard"]
    assert {"812", "400 µs", "2.00 ms", "shard 2 down"} <= set(window.run(VISIBLE, "dd"))
