"""Results of the demo as one table and one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thermocline.heat import HeatProfile
from thermocline.plan import Plan, TablePlan
from thermocline.report.axes import Axis
from thermocline.report.charts import Bar, Line, bars, lines
from thermocline.report.markup import Html
from thermocline.report.numbers import Number, count, share, size
from thermocline.report.page import facts, figure, figures, page, paragraph, section, table

BASE, OURS = "fp32", "planned"
HEADS = ("", "fp32, row-wise", "Thermocline", "")

Found = Mapping[str, Any]


def lines_of(found: Found) -> list[tuple[str, str, str, str]]:
    """Lines of the table: quantity, baseline, Thermocline, comparison."""
    base, ours = found["train"][BASE], found["train"][OURS]
    rows = [
        ("tables of the DLRM, all ranks", base["dlrm"]["bytes"], ours["dlrm"]["bytes"], _bytes, _less),
        ("table of the sequence model", base["sequence"]["bytes"], ours["sequence"]["bytes"], _bytes, _less),
        ("DLRM, test AUC", base["dlrm"]["auc"], ours["dlrm"]["auc"], _four, _difference),
        ("  as served, without a cache", base["dlrm"]["served_auc"], ours["dlrm"]["served_auc"], _four, _difference),
        ("sequence model, HitRate@10", base["sequence"]["hit_rate"], ours["sequence"]["hit_rate"], _four, _difference),
        ("sent per rank and step, DLRM", _sent(base["dlrm"]), _sent(ours["dlrm"]), _bytes, _less),
        (
            "  between nodes",
            base["dlrm"]["sent"].get("cluster", 0.0),
            ours["dlrm"]["sent"].get("cluster", 0.0),
            _bytes,
            _less,
        ),
        ("sent per rank and step, sequences", _sent(base["sequence"]), _sent(ours["sequence"]), _bytes, _less),
        ("lookups per second, served", found["serve"][BASE]["lookups/s"], found["serve"][OURS]["lookups/s"], _integer, _times),
    ]
    return [(what, show(one), show(other), compare(one, other)) for what, one, other, show, compare in rows]


def _sent(run: Found) -> float:
    return float(sum(run["sent"].values()))


def _bytes(value: float) -> str:
    return str(size(round(value)))


def _four(value: float) -> str:
    return f"{value:.4f}"


def _integer(value: float) -> str:
    return f"{value:,.0f}"


def _less(before: float, after: float) -> str:
    if not before or not after:
        return ""
    return f"{before / after:.1f}x less" if before >= after else f"{after / before:.1f}x more"


def _times(before: float, after: float) -> str:
    if not before or not after:
        return ""
    return f"{after / before:.2f}x faster" if after >= before else f"{before / after:.2f}x slower"


def _difference(before: float, after: float) -> str:
    return f"{after - before:+.4f}"


def page_of(found: Found, heat: HeatProfile, plan: Plan, sequence: Plan) -> str:
    """The page: both models, the heat of the click log, and the plans of both models."""
    told = lines_of(found)
    tables = [*plan.tables, *sequence.tables]
    hot = found["heat"]["hottest 1%"]
    return page(
        "Thermocline: from a log to a server",
        paragraph(
            f"A click log with {count(found['heat']['lookups'])} lookups was profiled: the hottest 1% of its rows take "
            f"{share(hot)} of them. Two models were trained on four processes by a plan for {plan.topology.nodes} nodes of "
            f"{plan.topology.gpus_per_node} GPUs and by a baseline (fp32 rows, each on one GPU), and served from four shards. "
            "The plan stores rows in int8 and int4, the hottest 5% of each table in fp32 slots too, and copies a row where its "
            "heat pays for that; servers round cached rows. Everything ran once on this machine with one seed: small "
            "differences of AUC and HitRate may be chance. Lookups per second are the best of a few short measurements. The "
            "plan assumes a network of 1 Gbit/s. The numbers show how the parts behave, not how fast a cluster is."
        ),
        facts({what: f"{ours}, {compared}" for what, _, ours, compared in told if compared and not what.startswith(" ")}),
        section("Comparison with the baseline", table(HEADS, [(what, *map(_right, rest)) for what, *rest in told])),
        section("Why it works", figures(_heat_figure(heat), _tiers_figure(tables))),
        section("Savings", figures(_bars(found, "memory"), _bars(found, "sent"))),
        section("The plan, table by table", _plan_table(tables)),
        foot=_times_of(found),
    )


def _heat_figure(heat: HeatProfile) -> Html:
    largest = sorted(heat.tables.values(), key=lambda one: -one.distinct)[:4]
    parts = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    drawn = [Line(one.name, [(part, one.hottest(part)) for part in parts]) for one in largest]
    chart = lines("Heat", drawn, Axis(0.001, 1.0, "hottest rows", share, log=True), Axis(0.0, 1.0, "lookups taken", share))
    return figure("Few rows take most lookups", chart, "The four largest tables of the log.")


def _tiers_figure(tables: Sequence[TablePlan]) -> Html:
    largest = sorted(tables, key=lambda one: -one.rows)[:6]
    names = {1: "on every GPU", 2: "once per node", 3: "once in the cluster"}
    drawn = [Bar(one.name, {names[tier.tier]: tier.lookups for tier in one.tiers}) for one in largest]
    return figure(
        "Where lookups are answered", bars("Tiers", drawn, share), "By the tier of their row; the six largest tables."
    )


def _bars(found: Found, what: str) -> Html:
    value: Callable[[Found], float] = _sent if what == "sent" else lambda run: float(run["bytes"])
    names = {BASE: "fp32", OURS: "ours"}
    drawn = [
        Bar(f"{model}, {names[arm]}", {"bytes": value(found["train"][arm][key])})
        for key, model in (("dlrm", "DLRM"), ("sequence", "sequences"))
        for arm in (BASE, OURS)
    ]
    title = "Bytes sent per rank and step" if what == "sent" else "Memory of the tables, all ranks"
    return figure(title, bars(title, drawn, lambda number: size(round(number))))


def _plan_table(tables: Sequence[TablePlan]) -> Html:
    rows = [
        (
            one.name, count(one.rows), one.precision, count(fp32_rows(one)),
            *(count(_in_tier(one, tier)) for tier in (1, 2, 3)), one.binding,
        )
        for one in sorted(tables, key=lambda one: -one.rows)
    ]  # fmt: skip
    return table(
        ("table", "rows", "precision", "in fp32 too", "on every GPU", "once per node", "once in the cluster", "bound by"),
        rows,
        search="search tables",
    )


def _right(cell: str) -> Number:
    """A formatted number, aligned to the right."""
    return Number(0.0, cell)


def fp32_rows(one: TablePlan) -> int:
    """Rows of a table in fp32: in slots, or in an fp32 tier."""
    return sum(tier.rows if tier.precision == "fp32" else tier.cached for tier in one.tiers)


def _in_tier(one: TablePlan, number: int) -> int:
    return sum(tier.rows for tier in one.tiers if tier.tier == number)


def _times_of(found: Found) -> str:
    return "Seconds: " + ", ".join(f"{name} {part['seconds']:.0f}" for name, part in found.items() if "seconds" in part) + "."
