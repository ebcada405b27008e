"""A plan in words and sums: what `plan show` prints, and what its JSON adds to the plan.

Ten tables can be told one by one. A thousand cannot: then tables that were treated alike are told together, and only the few
that take most of the step are named. The HTML page (`page.py`) uses the same words and lists them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from thermocline.plan.model import LINK_CLASSES, Alternative, Plan, TablePlan, Tier
from thermocline.report.numbers import Number, count, seconds, share, signed, size

NAMED = 10  # so many tables are told one by one
WHERE = {1: "on every card", 2: "once a node", 3: "once in the cluster"}
CANDIDATE_HEADS = ("plan", "step", "to this plan", "fullest card", "")
GROUP_HEADS = ("chosen", "tables", "rows", "bytes", "time")
LEVERS_HEAD = "What levers would save"
LEVERS_WORDS = "they change what a model learns, so none is done unasked"
EQUAL = 1e-6  # of the step: what differs by less is as good
LINK_WORDS = {"card": "inside a card", "host": "card to host", "node": "inside a node", "cluster": "between nodes"}


def explain(plan: Plan) -> str:
    """The plan as plain text."""
    sent = [(LINK_WORDS[link], size(number)) for link, number in link_sums(plan).items()]
    more = [(each.what, buys(each.saves), each.detail) for each in plan.marginals]
    parts = [
        [headline(plan), f"Bound by: {plan.binding}."],
        _listed("Predicted step, by part", step_rows(plan)),
        _listed("Bytes a card sends in a step", sent),
        _listed("Memory of cards", memory_rows(plan)),
        _listed("What more would buy", more),
        *([_listed(f"{LEVERS_HEAD} ({LEVERS_WORDS})", offer_rows(plan))] if plan.offers else []),
        _listed("Plans tried", [CANDIDATE_HEADS, *candidate_rows(plan)]),
    ]
    if len(plan.tables) > NAMED:
        parts.append(_listed("Tables, by what was chosen", [GROUP_HEADS, *group_rows(plan)]))
        parts.append([f"The {NAMED} tables that take most of the step, of {count(len(plan.tables))}"])
    else:
        parts.append(["Tables"])
    parts += [_told(plan, table) for table in heaviest(plan, NAMED)]
    if plan.notes:
        parts.append(["Notes", *(f"  {note}" for note in plan.notes)])
    return "\n\n".join("\n".join(_printable(line) for line in lines) for lines in parts) + "\n"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan and the sums that one would otherwise work out from it."""
    sums = {
        "tables": len(plan.tables),
        "rows": sum(table.rows for table in plan.tables),
        "bytes": {"all cards": total_bytes(plan), "fullest card": plan.fullest.total, "budget": plan.budget},
        "bytes_sent": link_sums(plan),
        "step": {"total": plan.step.total, "exposed": plan.step.exposed, "hidden": plan.step.hidden},
        "tables_by_choice": {
            words: {"tables": len(alike), "rows": sum(t.rows for t in alike), "bytes": sum(map(table_bytes, alike))}
            for words, alike in groups(plan).items()
        },
        "runner_up_costs": {table.name: runner_up_cost(plan, table.runner_up) for table in plan.tables},
    }
    return {"plan": plan.model_dump(mode="json"), "sums": sums}


def headline(plan: Plan) -> str:
    """The plan in two sentences."""
    rows, cluster = sum(table.rows for table in plan.tables), plan.topology
    what = "A training step" if plan.goal == "train" else "A request"
    tables = "1 table" if len(plan.tables) == 1 else f"{count(len(plan.tables))} tables"
    return (
        f"{tables} with {count(rows)} rows on {cards_words(cluster.nodes, cluster.cards_per_node)}. "
        f"{what} should take {seconds(plan.step.total)}, {seconds(plan.step.exposed)} of it beyond the dense part: "
        f"{count(round(plan.step.throughput))} samples a second."
    )


def cards_words(nodes: int, cards: int) -> str:
    return f"{count(nodes)} {'node' if nodes == 1 else 'nodes'} of {count(cards)} {'card' if cards == 1 else 'cards'}"


def chosen(table: TablePlan) -> str:
    """What was decided for a table, without numbers that differ between tables that were treated alike."""
    tiers = [tier.tier for tier in table.tiers]
    if table.placement == "card":
        place = "whole on one card"
    elif len(tiers) > 1:
        place = f"tiers {', '.join(map(str, tiers))}"
    else:  # rows in one tier alone: replicated, once a node, or row-wise
        place = {1: "a copy on every card", 2: "a copy on every node", 3: "split over all cards"}[tiers[0]]
    words = [place, table.precision, "in host memory" if table.residency == "host" else ""]
    words += dict.fromkeys(lever.kind for lever in table.levers)
    if table.exchange != "none":
        words.append(f"{'exchange by node' if table.exchange == 'node' else 'flat exchange'}, pooled by {table.pooled_by}")
    return "; ".join(word for word in words if word)


def tier_words(table: TablePlan) -> list[str]:
    """How many rows are where, how they are stored, and how much of the lookups they take."""
    if table.placement != "tiers":
        where = WHERE[1] if table.placement == "replicated" else f"on card {table.card}"
        tier = table.tiers[0]
        return [f"all {count(table.rows)} rows {where}, {table.precision}{_slots(tier)}"]
    return [
        f"tier {tier.tier}: {count(tier.rows)} rows {WHERE[tier.tier]}, {tier.precision}{_slots(tier)}, "
        f"{share(tier.lookups)} of the lookups"
        for tier in table.tiers
    ]


def _slots(tier: Tier) -> str:
    """Which of its rows have a place in the cache."""
    slots = {"fp32": tier.cached, "int8": tier.near}
    return "".join(f", {share(rows / tier.rows)} in {kind} slots" for kind, rows in slots.items() if rows)


def lever_words(table: TablePlan) -> dict[str, str]:
    """What each kind of lever did to a table, in one line however many tables it is made of."""
    words: dict[str, str] = {}
    for kind in dict.fromkeys(lever.kind for lever in table.levers):
        levers = [lever for lever in table.levers if lever.kind == kind]
        if kind == "unify":
            words[kind] = f"{count(len(levers))} tables are one, each with rows of its own"
            continue
        said = levers[0].detail if len(levers) == 1 else f"in {count(len(levers))} tables"
        words[kind] = f"saves {size(sum(lever.saved for lever in levers))} of {count(sum(x.rows for x in levers))} rows: {said}"
    return words


def wire_words(table: TablePlan) -> str:
    """What crosses the links."""
    trains = table.wire_gradients != "none"
    if table.exchange == "none":
        return "nothing but the sync of copies" if table.placement == "replicated" and trains else "nothing"
    moved = f"rows as {table.wire_rows}"
    if table.pooled_by == "owner":
        moved = f"every id, one sum a bag and card that owns rows of it as {table.wire_rows}"
    return f"{moved}, gradients as {table.wire_gradients}" if trains else moved


def runner_up_cost(plan: Plan, other: Alternative | None) -> float | None:
    """Seconds by which the whole step would be longer; None where there is no other, or it does not fit."""
    return None if other is None or other.time is None else other.time - plan.step.total


def runner_up_words(plan: Plan, other: Alternative | None) -> str:
    if other is None:
        return "none"
    cost = runner_up_cost(plan, other)
    if cost is None:
        return f"{other.name}: does not fit, {size(other.bytes)} on the fullest card"
    return f"{other.name}: {cost_words(plan, cost)}"


def cost_words(plan: Plan, cost: float) -> Number | str:
    """What another choice costs; predictions that agree to six digits are equal."""
    if cost <= EQUAL * plan.step.total:
        return "equally good"
    number = signed(seconds(cost))
    return Number(number.value, f"{number} a step")


def buys(saves: float | None) -> str:
    """What a marginal gives, in words."""
    if saves is None:
        return "not known"
    return f"worth {seconds(saves)} a step" if saves > 0 else "nothing"


def offer_rows(plan: Plan) -> list[Sequence[object]]:
    """Levers: what, by which option, bytes saved, what it does to the step, and a word more."""
    return [(o.what, o.option, size(o.bytes), _step_words(plan, o.saves), o.detail) for o in plan.offers]


def _step_words(plan: Plan, saves: float | None) -> str:
    if saves is None:
        return "would not fit"
    if abs(saves) <= EQUAL * plan.step.total:
        return "the same step"
    return f"{signed(seconds(-saves))} a step"


def heaviest(plan: Plan, most: int) -> list[TablePlan]:
    """The tables that take most of the step, from the heaviest."""
    return sorted(plan.tables, key=lambda table: (-table_time(table), -table_bytes(table), table.name))[:most]


def table_time(table: TablePlan) -> float:
    return sum(table.time.values())


def table_bytes(table: TablePlan) -> int:
    return sum(table.bytes.values())


def total_bytes(plan: Plan) -> int:
    return sum(card.total * card.count for card in plan.cards)


def groups(plan: Plan) -> dict[str, list[TablePlan]]:
    """Tables that were treated alike, those that take most of the step first."""
    alike: dict[str, list[TablePlan]] = defaultdict(list)
    for table in plan.tables:
        alike[chosen(table)].append(table)
    return dict(sorted(alike.items(), key=lambda group: -sum(map(table_time, group[1]))))


def link_sums(plan: Plan) -> dict[str, float]:
    """Bytes a card sends in a step, by link class, for those that carry any."""
    return {link: sent for link in LINK_CLASSES if (sent := plan.bytes_over(link))}


def step_rows(plan: Plan) -> list[Sequence[object]]:
    """The parts of the step, what is hidden, and the sum."""
    rows: list[Sequence[object]] = [
        (f"{part} (behind dense)" if part in plan.step.overlaps else part, seconds(time))
        for part, time in plan.step.parts.items()
        if time
    ]
    hidden = [("hidden", signed(seconds(-plan.step.hidden)))] if plan.step.hidden else []
    return [*rows, *hidden, ("step", seconds(plan.step.total))]


def memory_rows(plan: Plan) -> list[Sequence[object]]:
    """The fullest card, the mean and the emptiest, against the budget."""
    cards = sum(card.count for card in plan.cards)
    found = {
        f"fullest (card {plan.fullest.first})": plan.fullest.total,
        "mean": total_bytes(plan) / cards,
        "emptiest": min(card.total for card in plan.cards),
    }
    rows: list[Sequence[object]] = [(name, size(held), share(held / plan.budget)) for name, held in found.items()]
    return [*rows, ("budget", size(plan.budget), "")]


def candidate_rows(plan: Plan) -> list[Sequence[object]]:
    """Name, time, how many times the plan's, bytes on the fullest card, and a word more."""
    return [
        (
            other.name,
            seconds(other.time) if other.time is not None else "does not fit",
            Number(other.time / plan.step.total, f"{other.time / plan.step.total:.2f}x") if other.time is not None else "",
            size(other.bytes),
            other.detail,
        )
        for other in plan.candidates
    ]


def group_rows(plan: Plan) -> list[Sequence[object]]:
    """Tables that were treated alike: how, how many, their rows, bytes and time."""
    return [
        (
            words,
            count(len(alike)),
            count(sum(table.rows for table in alike)),
            size(sum(map(table_bytes, alike))),
            seconds(sum(map(table_time, alike))),
        )
        for words, alike in groups(plan).items()
    ]


def _told(plan: Plan, table: TablePlan) -> list[str]:
    """One table in a few lines."""
    costs = f"{count(round(table.lookups))} lookups a card and step, {size(table_bytes(table))}, {seconds(table_time(table))}"
    return [
        f"{table.name}: {count(table.rows)} rows of {table.dim}, {costs}",
        f"  chosen      {chosen(table)}",
        *(f"              {words}" for words in tier_words(table)),
        f"  sent        {wire_words(table)}",
        *(f"  {kind:<11} {words}" for kind, words in lever_words(table).items()),
        f"  runner-up   {runner_up_words(plan, table.runner_up)}",
        f"  bound by    {table.binding}",
    ]


def _listed(heading: str, rows: Sequence[Sequence[object]]) -> list[str]:
    """A heading and columns as wide as they need; those with numbers stand to the right."""
    signs = [">" if any(isinstance(cell, Number) for cell in column) else "<" for column in zip(*rows, strict=True)]
    columns = [[str(cell) for cell in column] for column in zip(*rows, strict=True)]
    places = [f"{sign}{max(map(len, column))}" for sign, column in zip(signs, columns, strict=True)]
    lines = ["  " + "  ".join(map(format, line, places)).rstrip() for line in zip(*columns, strict=True)]
    return [heading, *(lines or ["  nothing"])]


def _printable(line: str) -> str:
    """Names come from files: none of them may tell the terminal what to do."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line)
