"""`plan show` in the terminal, and its JSON."""

from __future__ import annotations

import json

from thermocline.plan.model import Plan
from thermocline.plan.report.explain import NAMED, as_json, chosen, explain
from thermocline.plan.report.page import plan_page


def test_a_small_plan_is_told_table_by_table_with_reasons(plan_of):
    plan = plan_of(7, 2, 4)
    told = explain(plan)
    for table in plan.tables:
        assert f"\n{table.name}: " in told
    for words in ("6.00 ms", "2.00 ms of it beyond the dense part", "runner-up   row-wise: +300 µs a step", "runner-up   none"):
        assert words in told
    for words in (plan.binding, "the budget of a card", "1 GiB more a card", "worth 90.0 µs a step", "does not fit", "612 GiB"):
        assert words in told
    assert "tier 1: 80,000 rows on every card, fp32, 22.0% of the lookups" in told
    assert "tier 2: 1.33M rows once a node, int8, 5.00% in fp32 slots, 19.0% of the lookups" in told
    assert "sent        rows as int8, gradients as fp32" in told
    assert "prune       saves 12.3 GiB of 200M rows: seen once" in told


def test_a_runner_up_that_costs_nothing_is_equally_good(plan_of):
    plan = plan_of(1, 2, 4)
    (table,) = plan.tables
    for cost, words in (
        (-2.12e-9, "row-wise: equally good"),
        (0.0, "row-wise: equally good"),
        (1e-6, "row-wise: +1.00 µs a step"),
    ):
        other = table.runner_up.model_copy(update={"time": plan.step.total + cost})
        changed = plan.model_copy(update={"tables": (table.model_copy(update={"runner_up": other}),)})
        assert f"runner-up   {words}" in explain(changed) and words.split(": ")[1] in plan_page(changed)


def test_a_thousand_tables_are_told_in_groups_and_the_ten_that_matter(plan_of):
    plan = plan_of(1000, 512, 8)
    told = explain(plan)
    assert len(told.splitlines()) < 150
    assert f"The {NAMED} tables that take most of the step, of 1,000" in told
    named = [table.name for table in plan.tables if f"\n{table.name}: " in told]
    assert named == [f"C{number}" for number in range(NAMED)]
    for words in {chosen(table) for table in plan.tables}:
        assert words in told


def test_names_cannot_tell_the_terminal_what_to_do(plan_of, hostile):
    told = explain(plan_of(len(hostile), 1, 2, hostile))
    assert all(line.isprintable() for line in told.splitlines())
    assert "<script>alert(1)</script>: " in told


def test_the_json_is_the_plan_and_its_sums(plan_of):
    plan = plan_of(26, 4, 8)
    found = json.loads(json.dumps(as_json(plan), allow_nan=False))
    assert Plan.model_validate(found["plan"]) == plan
    sums = found["sums"]
    assert sums["tables"] == 26 and sums["bytes"]["fullest card"] == plan.fullest_rank.total
    assert sums["bytes_sent"] == {"node": 85.5e6, "cluster": 85.5e6 * 0.31}
    assert sum(group["tables"] for group in sums["tables_by_choice"].values()) == 26
    assert sums["runner_up_costs"]["C0"] == 6.3e-3 - plan.step.total and sums["runner_up_costs"]["C4"] is None
