"""A plan as one HTML page: charts of the step, the links, memory and heat, and the reasons for every table.

The page of a plan for 4,096 GPUs and 1,000 tables must open on a phone. Equal ranks are drawn as one bar, or as emptiest, mean
and fullest where few are equal; heat is drawn for the dozen tables that take most of the step; one sortable list has all
tables.
"""

from __future__ import annotations

from collections.abc import Iterable

from thermocline.plan.model import DIRECTIONS, FREE, LINK_CLASSES, Plan, RankPlan, TablePlan
from thermocline.report.axes import Axis
from thermocline.report.charts import Band, Bar, Line, bars, lines
from thermocline.report.markup import Html, element, join
from thermocline.report.numbers import count, seconds, share, size
from thermocline.report.page import facts, figure, figures, page, paragraph, section, table, verdict

from . import explain as E

MOST_HEAT_CHARTS = 12  # tables
DOMINATES = 4  # a value this many times the others is written, not drawn
MOST_CANDIDATES = 16  # bars
MOST_RANKS = 32  # bars, each of which may stand for many equal ranks


def plan_page(plan: Plan) -> str:
    """Draw a plan as one HTML page, with style and charts inside.

    Args:
        plan: The plan.

    Returns:
        The text of the page.

    Example::

        Path("plan.html").write_text(plan_page(Plan.load("plan.json")))
    """
    return page(
        f"Plan for {E.cluster_words(plan.topology.nodes, plan.topology.gpus_per_node)}",
        verdict(E.verdict(plan)),
        paragraph(E.headline(plan)),
        paragraph(f"Limited by {plan.binding}."),
        _facts(plan),
        section("Where the time goes", figures(_step(plan), _candidates(plan), _links(plan), _memory(plan))),
        section("Value of more hardware", _sensitivities(plan)) if plan.sensitivities else "",
        section(E.LEVERS_HEAD, paragraph(_LEVERS_TEXT), table(_LEVERS_HEADS, E.suggestion_rows(plan)))
        if plan.suggestions
        else "",
        section("Candidate plans", table(E.CANDIDATE_HEADS, E.candidate_rows(plan))),
        section("Heat and tiers", paragraph(_HEAT_TEXT), figures(*(_heat(one) for one in E.heaviest(plan, MOST_HEAT_CHARTS)))),
        section("Tables", _groups(plan), _tables(plan)),
        section("Notes", *map(paragraph, plan.notes)) if plan.notes else "",
        foot=_foot(plan),
    )


def _foot(plan: Plan) -> str:
    named = {
        "Made": plan.created, "Objective": plan.objective, "Topology": plan.topology.name,
        "Heat file": plan.heat[:16] or "none",
    }  # fmt: skip
    return " · ".join(f"{name}: {words}" for name, words in named.items() if words)


_LEVERS_TEXT = f"Bytes of all GPUs together, id maps counted; {E.LEVERS_NOTE}."
_LEVERS_HEADS = ("lever", "option of plan make", "saves", "step", "")
_HEAT_TEXT = (
    "Horizontal: the hottest share of a table's rows. Vertical: their share of the lookups. Shaded tiers show where the "
    "rows are: tier 1 on every GPU, tier 2 once per node, tier 3 once in the cluster."
)


def _facts(plan: Plan) -> Html:
    step, fullest = plan.step, plan.fullest_rank.total
    return facts(
        {
            "predicted step" if plan.goal == "train" else "predicted request": seconds(step.total),
            "beyond the dense part": seconds(step.exposed),
            "samples per second": count(round(step.throughput)),
            "fullest GPU, of its budget": f"{size(fullest)}, {share(fullest / plan.budget_of(plan.fullest_rank))}",
            "all GPUs": size(E.total_bytes(plan)),
            "sent between nodes per GPU and step": size(plan.bytes_over("cluster")),
            "busiest GPU over mean": f"{plan.balance:.3f}",
            "tables": count(len(plan.tables)),
        }
    )


def _step(plan: Plan) -> Html:
    step, parts = plan.step, {part: time for part, time in plan.step.parts.items() if time}
    words = []
    dense = parts.get("dense", 0.0)
    if dense > DOMINATES * max([time for part, time in parts.items() if part != "dense"], default=dense):
        words.append(f"The dense part takes another {seconds(parts.pop('dense'))}.")
    if step.hidden:
        words.append(f"The dense part overlaps {' and '.join(step.overlaps)} and hides {seconds(step.hidden)}.")
    drawn = [Bar(part, {"": time}) for part, time in parts.items()]
    return figure("Predicted step, by part", bars("Predicted step, by part", drawn, seconds), " ".join(words))


def _candidates(plan: Plan) -> Html:
    """The step of each candidate beyond the dense part, which is the same for all."""
    dense = plan.step.parts["dense"]
    fit = [Bar(other.name, {"": max(other.time - dense, 0.0)}) for other in plan.candidates if other.time is not None]
    words = ["The first is this plan."]
    if len(fit) > MOST_CANDIDATES:
        words.append(f"Not drawn: {len(fit) - MOST_CANDIDATES} slower.")
    if len(plan.candidates) > len(fit):
        words.append(f"Too large: {len(plan.candidates) - len(fit)}.")
    chart = bars("Predicted step of each candidate, beyond the dense part", fit[:MOST_CANDIDATES], seconds)
    return figure("Candidate plans: step beyond the dense part", chart, " ".join(words))


def _links(plan: Plan) -> Html:
    drawn = []
    for link in LINK_CLASSES:
        sent: dict[str, float] = {direction: plan.bytes_over(link, direction) for direction in DIRECTIONS}
        if any(sent.values()):
            drawn.append(Bar(E.LINK_NAMES[link], sent))
    words = "" if drawn else "No link carries anything."
    return figure("Bytes sent per GPU and step, by link", bars("Bytes sent per GPU and step", drawn, size), words)


def _memory(plan: Plan) -> Html:
    """Groups of equal ranks, or emptiest, mean and fullest where there are too many."""
    ranks = sum(group.count for group in plan.ranks)
    if len(plan.ranks) <= MOST_RANKS:
        drawn = [Bar(_rank_words(group), group.bytes) for group in plan.ranks]
    else:
        least = min(plan.ranks, key=lambda group: group.total)
        parts = dict.fromkeys(part for group in plan.ranks for part in group.bytes)
        mean = {part: sum(group.bytes.get(part, 0) * group.count for group in plan.ranks) / ranks for part in parts}
        drawn = [Bar("emptiest", least.bytes), Bar("mean", mean), Bar("fullest", plan.fullest_rank.bytes)]
    near = plan.budget <= DOMINATES * plan.fullest_rank.total
    words = f"{count(ranks)} GPUs" + ("" if near else f", each with a budget of {size(plan.budget)}")
    chart = bars("Bytes per GPU", drawn, size, ("budget", plan.budget) if near else None)
    return figure("Bytes per GPU", chart, words)


def _rank_words(group: RankPlan) -> str:
    last = group.first + group.count - 1
    return f"rank {last}" if group.count == 1 else f"ranks {group.first} to {last}"


def _sensitivities(plan: Plan) -> Html:
    rows = [
        (s.what, E.value_words(plan, s), seconds(plan.step.total), E.step_then(plan, s), s.detail) for s in plan.sensitivities
    ]
    return table(("with", "effect", "step now", "step then", ""), rows)


def _heat(one: TablePlan) -> Html:
    """The heat curve of a table, with its tiers shaded."""
    reached = [(rows / one.rows, taken) for rows, taken in one.curve if rows > 0]
    low = min((x for x, _ in reached), default=1 / one.rows)
    across = Axis(min(low, 0.1), 1.0, "hottest rows, of all", share, log=True)
    bands, before = [], 0.0
    for tier in one.tiers:
        after = before + tier.rows / one.rows
        note = f"{count(tier.rows)} rows, {share(tier.lookups)} of lookups"
        bands.append(Band(f"tier {tier.tier}", max(before, across.low), after, note, 3 - tier.tier))
        before = after
    chart = lines(f"Heat of {one.name}", [Line("lookups", reached)], across, Axis(0, 1, "share of lookups", share), bands)
    return figure(one.name, chart, E.choice_words(one))


def _groups(plan: Plan) -> Html:
    return table(E.GROUP_HEADS, E.group_rows(plan)) if len(plan.tables) > E.MOST_DESCRIBED else join()


def _tables(plan: Plan) -> Html:
    heads = ("table", "rows", "dim", "lookups", "bytes", "time", "choice", "runner-up", "its cost", "limited by")
    note = paragraph(E.FREE_NOTE) if any(one.binding == FREE for one in plan.tables) else ""
    return join(note, table(heads, (_row(plan, one) for one in E.heaviest(plan, len(plan.tables))), search="search tables"))


def _folded(words: str, more: Iterable[str]) -> Html:
    """Words that unfold to more lines."""
    return element("details", element("summary", words), *(element("div", line) for line in more))


def _row(plan: Plan, one: TablePlan) -> tuple[object, ...]:
    cost = E.runner_up_cost(plan, one.runner_up)
    levers = [f"{kind}: {words}" for kind, words in E.lever_words(one).items()]
    costs: object = "" if one.runner_up is None else "does not fit" if cost is None else E.cost_words(plan, cost)
    return (
        one.name,
        count(one.rows),
        one.dim,
        count(round(one.lookups)),
        size(E.table_bytes(one)),
        seconds(E.table_time(one)),
        _folded(E.choice_words(one), [*E.tier_words(one), *levers, f"sent: {E.wire_words(one)}"]),
        one.runner_up.name if one.runner_up else "none",
        costs,
        E.binding_words(one),
    )
