"""`plan show` in the terminal, and its JSON."""

from __future__ import annotations

import json

from thermocline.plan.model import Plan
from thermocline.plan.report.explain import MOST_DESCRIBED, as_json, choice_words, explain
from thermocline.plan.report.page import plan_page


def test_a_small_plan_is_explained_table_by_table(plan_of):
    plan = plan_of(7, 2, 4)
    text = explain(plan)
    for table in plan.tables:
        assert f"\n{table.name}: " in text
    for words in ("6.00 ms", "2.00 ms beyond the dense part", "runner-up   row-wise: +300 µs per step", "runner-up   none"):
        assert words in text
    for words in (plan.binding, "1 GiB more a card", "saves 90.0 µs per step", "does not fit", "612 GiB"):
        assert words in text
    assert "tier 1: 80,000 rows on every GPU, fp32, 22.0% of the lookups" in text
    assert "tier 2: 1.33M rows once per node, int8, 5.00% in fp32 slots, 19.0% of the lookups" in text
    assert "sent        rows as int8, gradients as fp32" in text
    assert "prune       saves 12.3 GiB of 200M rows: seen once" in text


def test_a_runner_up_that_costs_nothing_is_equally_good(plan_of):
    plan = plan_of(1, 2, 4)
    (table,) = plan.tables
    for cost, words in (
        (-2.12e-9, "row-wise: equally good"),
        (0.0, "row-wise: equally good"),
        (1e-6, "row-wise: +1.00 µs per step"),
    ):
        other = table.runner_up.model_copy(update={"time": plan.step.total + cost})
        changed = plan.model_copy(update={"tables": (table.model_copy(update={"runner_up": other}),)})
        assert f"runner-up   {words}" in explain(changed) and words.split(": ")[1] in plan_page(changed)


def test_a_thousand_tables_are_grouped_and_the_ten_heaviest_described(plan_of):
    plan = plan_of(1000, 512, 8)
    text = explain(plan)
    assert len(text.splitlines()) < 150
    assert f"The {MOST_DESCRIBED} of 1,000 tables" in text
    named = [table.name for table in plan.tables if f"\n{table.name}: " in text]
    assert named == [f"C{number}" for number in range(MOST_DESCRIBED)]
    for words in {choice_words(table) for table in plan.tables}:
        assert words in text


def test_names_cannot_control_the_terminal(plan_of, hostile):
    text = explain(plan_of(len(hostile), 1, 2, hostile))
    assert all(line.isprintable() for line in text.splitlines())
    assert "<script>alert(1)</script>: " in text


def test_the_json_is_the_plan_and_its_sums(plan_of):
    plan = plan_of(26, 4, 8)
    found = json.loads(json.dumps(as_json(plan), allow_nan=False))
    assert Plan.model_validate(found["plan"]) == plan
    sums = found["sums"]
    assert sums["tables"] == 26 and sums["bytes"]["fullest card"] == plan.fullest_rank.total
    assert sums["bytes_sent"] == {"node": 85.5e6, "cluster": 85.5e6 * 0.31}
    assert sum(group["tables"] for group in sums["tables_by_choice"].values()) == 26
    assert sums["runner_up_costs"]["C0"] == 6.3e-3 - plan.step.total and sums["runner_up_costs"]["C4"] is None
