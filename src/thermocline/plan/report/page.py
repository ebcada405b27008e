"""A plan as one HTML page: the pictures that show at a glance why it is as it is, and the reasons for every table.

A plan for 4,096 cards and 1,000 tables must stay a page that opens on a phone: equal cards are drawn as one, and as the
emptiest, the mean and the fullest where few are equal; heat is drawn for the dozen tables that take most of the step; and one
list, which can be searched and sorted, has them all.
"""

from __future__ import annotations

from collections.abc import Iterable

from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, CardPlan, Plan, TablePlan
from thermocline.report.axes import Axis
from thermocline.report.charts import Band, Bar, Line, bars, lines
from thermocline.report.markup import Html, element, join
from thermocline.report.numbers import count, seconds, share, size
from thermocline.report.page import facts, figure, figures, paragraph, section, table
from thermocline.report.page import page as whole_page

from .explain import (
    CANDIDATE_HEADS,
    GROUP_HEADS,
    LEVERS_HEAD,
    LEVERS_WORDS,
    LINK_WORDS,
    NAMED,
    buys,
    candidate_rows,
    cards_words,
    chosen,
    cost_words,
    group_rows,
    headline,
    heaviest,
    lever_words,
    offer_rows,
    runner_up_cost,
    table_bytes,
    table_time,
    tier_words,
    total_bytes,
    wire_words,
)

DRAWN = 12  # tables whose heat is drawn
DWARFS = 4  # what is so many times the others is said, not drawn
TRIED = 16  # plans whose steps are drawn
CARDS = 32  # bars of cards, each of which may stand for many equal ones


def page(plan: Plan) -> str:
    """The whole page."""
    return whole_page(
        f"Plan for {cards_words(plan.topology.nodes, plan.topology.cards_per_node)}",
        paragraph(headline(plan)),
        paragraph(f"Bound by: {plan.binding}."),
        _facts(plan),
        section("Where the step goes", figures(_step(plan), _candidates(plan), _links(plan), _memory(plan))),
        section("What more would buy", _marginals(plan)) if plan.marginals else "",
        section(LEVERS_HEAD, paragraph(_OFFER_WORDS), table(_OFFER_HEADS, offer_rows(plan))) if plan.offers else "",
        section("Plans tried", table(CANDIDATE_HEADS, candidate_rows(plan))),
        section("Heat and tiers", paragraph(_HEAT_WORDS), figures(*(_heat(one) for one in heaviest(plan, DRAWN)))),
        section("Tables", _groups(plan), _tables(plan)),
        section("Notes", *map(paragraph, plan.notes)) if plan.notes else "",
        foot=_foot(plan),
    )


def _foot(plan: Plan) -> str:
    """Where the plan comes from."""
    said = {"Made": plan.created, "For": plan.objective, "Topology": plan.topology.name, "Heat file": plan.heat[:16] or "none"}
    return " · ".join(f"{name}: {words}" for name, words in said.items() if words)


_OFFER_WORDS = f"Bytes of all cards together, id maps counted: {LEVERS_WORDS}."
_OFFER_HEADS = ("lever", "option of plan make", "saves", "the step", "")
_HEAT_WORDS = (
    "Across: the hottest share of a table's rows. Up: the share of lookups that they take. The shaded tiers say where those "
    "rows are: tier 1 on every card, tier 2 once a node, tier 3 once in the cluster."
)


def _facts(plan: Plan) -> Html:
    step, cluster = plan.step, plan.bytes_over("cluster")
    return facts(
        {
            "predicted step" if plan.goal == "train" else "predicted request": seconds(step.total),
            "beyond the dense part": seconds(step.exposed),
            "samples a second": count(round(step.throughput)),
            "fullest card, of its budget": f"{size(plan.fullest.total)}, {share(plan.fullest.total / plan.budget)}",
            "all cards": size(total_bytes(plan)),
            "sent between nodes, a card and step": size(cluster),
            "busiest card to the mean": f"{plan.balance:.3f}",
            "tables": count(len(plan.tables)),
        }
    )


def _step(plan: Plan) -> Html:
    step, parts = plan.step, {part: time for part, time in plan.step.parts.items() if time}
    words = []
    # Beside a dense part that is far longer than the others, they would be slivers: say it instead.
    dense = parts.get("dense", 0.0)
    if dense > DWARFS * max([time for part, time in parts.items() if part != "dense"], default=dense):
        words.append(f"Besides the dense part, {seconds(parts.pop('dense'))}.")
    if step.hidden:
        words.append(f"While the dense part computes, {' and '.join(step.overlaps)} run: {seconds(step.hidden)} are hidden.")
    drawn = [Bar(part, {"": time}) for part, time in parts.items()]
    return figure("Predicted step, by part", bars("Predicted step, by part", drawn, seconds), " ".join(words))


def _candidates(plan: Plan) -> Html:
    """What each plan takes beyond the dense part, which is the same for all."""
    dense = plan.step.parts["dense"]
    fit = [Bar(other.name, {"": max(other.time - dense, 0.0)}) for other in plan.candidates if other.time is not None]
    words = ["The first is this plan."]
    if len(fit) > TRIED:
        words.append(f"{len(fit) - TRIED} more are slower.")
    if len(plan.candidates) > len(fit):
        words.append(f"{len(plan.candidates) - len(fit)} do not fit.")
    chart = bars("Predicted step of each plan that was tried, beyond the dense part", fit[:TRIED], seconds)
    return figure("Plans tried: their steps beyond the dense part", chart, " ".join(words))


def _links(plan: Plan) -> Html:
    drawn = []
    for link in LINK_CLASSES:
        sent: dict[str, float] = {direction: plan.bytes_over(link, direction) for direction in DIRECTIONS}
        if any(sent.values()):
            drawn.append(Bar(LINK_WORDS[link], sent))
    words = "" if drawn else "Nothing crosses a link."
    return figure("Bytes a card sends in a step, by link", bars("Bytes a card sends in a step", drawn, size), words)


def _memory(plan: Plan) -> Html:
    """Groups of equal cards, or three lines where there are too many."""
    cards = sum(group.count for group in plan.cards)
    if len(plan.cards) <= CARDS:
        drawn = [Bar(_card_words(group), group.bytes) for group in plan.cards]
    else:
        least = min(plan.cards, key=lambda group: group.total)
        parts = dict.fromkeys(part for group in plan.cards for part in group.bytes)
        mean = {part: sum(group.bytes.get(part, 0) * group.count for group in plan.cards) / cards for part in parts}
        drawn = [Bar("emptiest", least.bytes), Bar("mean", mean), Bar("fullest", plan.fullest.bytes)]
    # Against a budget that is far from reached, the bars would be slivers: say it instead.
    near = plan.budget <= DWARFS * plan.fullest.total
    words = f"{count(cards)} cards" + ("" if near else f", each with a budget of {size(plan.budget)}")
    chart = bars("Bytes on the cards", drawn, size, ("budget", plan.budget) if near else None)
    return figure("Bytes per card", chart, words)


def _card_words(group: CardPlan) -> str:
    last = group.first + group.count - 1
    return f"card {last}" if group.count == 1 else f"cards {group.first} to {last}"


def _marginals(plan: Plan) -> Html:
    rows = [(m.what, buys(m.saves), seconds(m.time) if m.time is not None else "", m.detail) for m in plan.marginals]
    return table(("with", "it buys", "step then", ""), rows)


def _heat(one: TablePlan) -> Html:
    """The heat curve of a table, with its tiers shaded."""
    reached = [(rows / one.rows, taken) for rows, taken in one.curve if rows > 0]
    low = min((x for x, _ in reached), default=1 / one.rows)
    across = Axis(min(low, 0.1), 1.0, "hottest rows, of all", share, log=True)
    bands, before = [], 0.0
    for tier in one.tiers:
        after = before + tier.rows / one.rows
        bands.append(
            Band(
                f"tier {tier.tier}",
                max(before, across.low),
                after,
                f"{count(tier.rows)} rows, {share(tier.lookups)} of lookups",
                3 - tier.tier,
            )
        )
        before = after
    chart = lines(f"Heat of {one.name}", [Line("lookups", reached)], across, Axis(0, 1, "lookups taken", share), bands)
    return figure(one.name, chart, chosen(one))


def _groups(plan: Plan) -> Html:
    """Many tables in a few lines, before all of them."""
    return table(GROUP_HEADS, group_rows(plan)) if len(plan.tables) > NAMED else join()


def _tables(plan: Plan) -> Html:
    heads = ("table", "rows", "dim", "lookups", "bytes", "time", "chosen", "runner-up", "it costs", "bound by")
    return table(heads, (_row(plan, one) for one in heaviest(plan, len(plan.tables))), search="search tables")


def _folded(words: str, more: Iterable[str]) -> Html:
    """Words that open to tell more."""
    return element("details", element("summary", words), *(element("div", line) for line in more))


def _row(plan: Plan, one: TablePlan) -> tuple[object, ...]:
    cost = runner_up_cost(plan, one.runner_up)
    levers = [f"{kind}: {words}" for kind, words in lever_words(one).items()]
    costs: object = "" if one.runner_up is None else "does not fit" if cost is None else cost_words(plan, cost)
    return (
        one.name,
        count(one.rows),
        one.dim,
        count(round(one.lookups)),
        size(table_bytes(one)),
        seconds(table_time(one)),
        _folded(chosen(one), [*tier_words(one), *levers, f"sent: {wire_words(one)}"]),
        one.runner_up.name if one.runner_up else "none",
        costs,
        one.binding,
    )
