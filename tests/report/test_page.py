"""Pages as text: well-formed, self-contained, and complete."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from thermocline import __version__
from thermocline.heat.page import heat_page
from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import FREE, Sensitivity
from thermocline.plan.report import explain as E
from thermocline.plan.report.explain import explain
from thermocline.plan.report.page import MOST_HEAT_CHARTS, MOST_RANKS, plan_page
from thermocline.report.charts import Bar, bars
from thermocline.report.numbers import Number, count, seconds, share, size
from thermocline.report.page import facts, figures, page, paragraph, section, table
from thermocline.rows.memory import MemoryUsage
from thermocline.train.report_page import train_page


def parsed(written):
    """The page as a tree, without references to other files."""
    assert written.startswith("<!DOCTYPE html>\n")
    assert not re.search(r"https?:|//cdn|@import|url\(|\bsrc=|\bhref=", written)
    return ElementTree.fromstring(written.encode())


def cells(tree, heading="Tables"):
    """The rows of the last table in a section, as text."""
    found = next(part for part in tree.iter("section") if part[0].text == heading)
    return [["".join(cell.itertext()) for cell in row] for row in found.findall(".//tbody")[-1]]


def test_a_page_has_its_parts_in_order_and_escapes_text():
    tree = parsed(page("A & B", paragraph("1 < 2"), section("One", facts({"rows": count(123_456)})), "loose", foot="end"))
    body = tree.find("body")
    assert [part.tag for part in body] == ["h1", "p", "section", "footer", "script"]
    assert body[0].text == "A & B" and body[1].text == "1 < 2" and body.find(".//dd").text == "123k"


def test_numbers_stand_to_the_right_and_sort_by_value():
    tree = ElementTree.fromstring(table(("name", "bytes"), [("a", size(3 << 20)), ("b", "none"), ("c", 7)], search="find"))
    assert [head.get("class") for head in tree.iter("th")] == [None, "n"]
    assert [[cell.get("data-v") for cell in row] for row in tree.find(".//tbody")] == [
        [None, "3.14573e+06"], [None, "-1e300"], [None, "7"],
    ]  # fmt: skip
    assert len(tree.findall(".//th/button")) == 2 and tree.find("input").get("placeholder") == "find"
    assert ElementTree.fromstring(table(("name",), [])).find(".//input") is None


def test_two_and_four_figures_stand_in_pairs():
    assert [figures(*[section("x")] * number).split('"')[1] for number in (1, 2, 3, 4, 6)] == [
        "figures", "figures two", "figures", "figures two", "figures",
    ]  # fmt: skip


@pytest.mark.parametrize("tables, nodes, cards", [(1, 1, 1), (7, 2, 4), (26, 4, 8)])
def test_a_plan_page_shows_every_table_and_why(plan_of, tables, nodes, cards):
    plan = plan_of(tables, nodes, cards)
    tree = parsed(plan_page(plan))
    rows = cells(tree)
    assert {row[0] for row in rows} == {one.name for one in plan.tables}
    by_name = {row[0]: row for row in rows}
    for one in plan.tables:
        assert by_name[one.name][-1] == one.binding
        assert by_name[one.name][-3] == (one.runner_up.name if one.runner_up else "none")
    titles = [chart[0].text for chart in tree.iter("svg")]
    assert titles[:4] == [
        "Predicted step, by part",
        "Predicted step of each candidate, beyond the dense part",
        "Bytes sent per GPU and step",
        "Bytes per GPU",
    ]
    assert len(titles) == 4 + min(tables, MOST_HEAT_CHARTS)
    assert [row[0] for row in cells(tree, "Value of more hardware")] == [each.what for each in plan.sensitivities]
    assert [row[1] for row in cells(tree, "Candidate plans")][-1] == "does not fit"


def test_a_plan_without_links_heat_and_alternatives_is_a_page(plan_of):
    plan = plan_of(3, 1, 1)
    silent = [table.model_copy(update={"curve": (), "runner_up": None}) for table in plan.tables]
    bare = {"tables": silent, "traffic": (), "sensitivities": (), "candidates": plan.candidates[:1], "notes": ()}
    plan = plan.model_copy(update=bare)
    tree = parsed(plan_page(plan))
    assert [part[0].text for part in tree.iter("section")] == [
        "Where the time goes",
        "Candidate plans",
        "Heat and tiers",
        "Tables",
    ]
    assert "No link carries anything." in "".join(tree.itertext())
    assert "Bytes sent per GPU and step\n  nothing" in explain(plan)


def test_a_plan_of_4096_gpus_and_1000_tables_is_a_page_below_2_mb(plan_of):
    plan = plan_of(1000, 512, 8)
    written = plan_page(plan)
    assert len(written.encode()) < 1 << 21
    tree = parsed(written)
    assert len(cells(tree)) == 1000
    memory = next(chart for chart in tree.iter("svg") if chart[0].text == "Bytes per GPU")
    assert len(plan.ranks) > MOST_RANKS
    assert [label.text for label in memory.iter("text")][:6:2] == ["emptiest", "mean", "fullest"]


@pytest.mark.parametrize("tables", [0, 1, 9, 30])
def test_a_heat_page_shows_every_table(heat_of, tables):
    heat = heat_of(tables)
    tree = parsed(heat_page(heat))
    assert {row[0] for row in cells(tree, "All tables")} == set(heat.tables)
    headings = [part[0].text for part in tree.iter("section")]
    assert headings == ["All tables", *sorted(heat.tables, key=lambda name: -heat[name].distinct)[:12]]


def test_a_sketch_without_heavy_hitters_has_a_page(heat_of):
    none = np.zeros(0, np.int64)
    sketch = next(each for each in heat_of(9).tables.values() if not each.exact)
    shown = heat_page(HeatProfile({sketch.name: dataclasses.replace(sketch, ids_H=none, counts_H=none)}))
    assert sketch.name in [part[0].text for part in parsed(shown).iter("section")]


def test_a_table_without_lookups_is_listed_and_not_drawn(heat_of):
    heat = heat_of(1)
    none = np.zeros(0, np.int64)
    empty = dataclasses.replace(
        heat["C0"], name="empty", lookups=0, distinct=0, ids_H=none, counts_H=none, batches=(), slices=()
    )
    tree = parsed(heat_page(dataclasses.replace(heat, tables={"empty": empty})))
    assert cells(tree, "All tables")[0][:2] == ["empty", "0"] and tree.find(".//svg") is None


def test_hostile_names_are_shown_as_they_are(plan_of, heat_of, hostile):
    for written in (plan_page(plan_of(len(hostile), 2, 4, hostile)), heat_page(heat_of(len(hostile), hostile))):
        tree = parsed(written)
        assert len(tree.findall(".//script")) == 1
        shown = "".join(tree.itertext())
        assert all(name in shown for name in hostile if name.isprintable())


def test_shares_on_a_heat_page_are_those_of_the_profile(heat_of):
    heat = heat_of(5)
    for row in cells(parsed(heat_page(heat)), "All tables"):
        assert row[4:7] == [str(share(heat[row[0]].hottest(part))) for part in (0.001, 0.01, 0.1)]


def test_a_page_ends_with_date_version_and_machine():
    (foot,) = parsed(page("A", foot="end")).iter("footer")
    assert foot.text.startswith("end · Written 20") and f"thermocline {__version__} on " in foot.text and "cores" in foot.text


def test_wins_and_losses_are_coloured_differently():
    drawn = table(("case", "change"), [("a", Number(1.1, "1.10x", True)), ("b", Number(0.91, "0.91x", False)), ("c", count(1))])
    classes = [cell.get("class") for cell in parsed(page("A", drawn)).iter("td")]
    assert classes == [None, "n good", None, "n bad", None, "n"]


def test_more_gpus_are_valued_in_samples_and_memory_in_the_step(plan_of):
    plan = plan_of(3, 2, 4)
    memory = Sensitivity(what="1 GiB more per GPU", time=plan.step.total * 1.1, saves=0.0, detail="noise")
    node = Sensitivity(what="one more node", time=plan.step.total * 1.01, saves=plan.step.total / 3, detail="more samples")
    assert E.step_then(plan, memory).value == pytest.approx(plan.step.total - memory.saves)
    assert E.value_words(plan, node) == "1.50x samples per second"
    assert E.step_then(plan, node).value == node.time


def test_what_limits_no_table_is_said_once(plan_of):
    plan = plan_of(11, 2, 4)
    free = [one.model_copy(update={"binding": FREE}) for one in plan.tables]
    drawn = plan_page(plan.model_copy(update={"tables": tuple(free)}))
    assert drawn.count(FREE.partition(": ")[2]) == 1


def test_names_that_would_be_cut_to_the_same_label_differ():
    names = [f"whole tables to 10%, without copies, {end}" for end in ("flat", "flat, refined", "per node")]
    drawn = bars("Plans", [Bar(name, {"step": 1.0}) for name in names], seconds)
    labels = re.findall(r"<text[^>]*>([^<]*…[^<]*)<", drawn)
    assert len(labels) == len(set(labels)) == 3


@pytest.mark.parametrize("state", [0, 400])
def test_a_training_page_compares_like_with_like(state):
    parts = {"codes": 1600, "metadata": 400} | ({"optimizer state": state} if state else {})
    result = {"auc": 0.75, "train_loss": 0.4, "samples": 9, "rows": 100, "memory": parts, "stats": {}, "seconds": 1.0}
    drawn = train_page("DLRM", {"dim": 16, "precision": "int8", "cache": 0.05}, result, [], [], 1)
    usage = MemoryUsage({"optimizer state": 0, **parts}, 6400)
    assert f"{usage.ratio:.2f}x" in drawn and f"{usage.ratio_with_state:.2f}x" in drawn
