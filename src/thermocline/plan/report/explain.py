"""A plan as text: what `plan show` prints, and the sums that its JSON adds to the plan. The HTML page uses the same words."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from thermocline.plan.model import FREE, LINK_CLASSES, Alternative, Plan, Sensitivity, TablePlan, Tier
from thermocline.report.numbers import Number, count, seconds, share, signed, size

MOST_DESCRIBED = 10  # tables described one by one
TIER_PLACES = {1: "on every GPU", 2: "once per node", 3: "once in the cluster"}
CANDIDATE_HEADS = ("plan", "step", "vs. this plan", "fullest GPU", "")
GROUP_HEADS = ("choice", "tables", "rows", "bytes", "time")
LEVERS_HEAD = "Savings by levers"
LEVERS_NOTE = "levers change what a model learns, so none is applied unless requested"
FREE_NOTE = f'Limited by "nothing" means that {FREE.partition(": ")[2]}.'
EQUAL = 1e-6  # of the step: a smaller difference counts as none
LINK_NAMES = {"card": "within a GPU", "host": "GPU to host", "node": "within a node", "cluster": "between nodes"}


def explain(plan: Plan, width: int | None = None) -> str:
    """Describe a plan as plain text: the step by part, traffic, memory, alternatives, and the reasons for each table.

    Args:
        plan: The plan.
        width: Wrap lines at this many columns; by default, lines are as long as they need to be.

    Returns:
        The text.

    Example::

        print(explain(Plan.load("plan.json")))
    """
    sent = [(LINK_NAMES[link], size(number)) for link, number in link_sums(plan).items()]
    more = [(each.what, value_words(plan, each), each.detail) for each in plan.sensitivities]
    parts = [
        [verdict(plan), headline(plan), backend_words(plan), f"Limited by {plan.binding}."],
        _section("Predicted step, by part", step_rows(plan), width),
        _section("Bytes sent per GPU and step", sent, width),
        _section("GPU memory", memory_rows(plan), width),
        _section("Value of more hardware", more, width),
        *([_section(f"{LEVERS_HEAD} ({LEVERS_NOTE})", suggestion_rows(plan), width)] if plan.suggestions else []),
        _section("Candidate plans", [CANDIDATE_HEADS, *candidate_rows(plan)], width),
    ]
    if len(plan.tables) > MOST_DESCRIBED:
        parts.append(_section("Tables, by choice", [GROUP_HEADS, *group_rows(plan)], width))
        parts.append([f"The {MOST_DESCRIBED} of {count(len(plan.tables))} tables that take most of the step"])
    else:
        parts.append(["Tables"])
    parts += [_description(plan, table) for table in heaviest(plan, MOST_DESCRIBED)]
    if any(table.binding == FREE for table in plan.tables):
        parts.append([FREE_NOTE])
    if plan.notes:
        parts.append(["Notes", *(f"  {note}" for note in plan.notes)])
    return "\n\n".join("\n".join(_wrapped(_printable(line), width) for line in lines) for lines in parts) + "\n"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan, and sums over its tables and ranks."""
    sums = {
        "tables": len(plan.tables),
        "rows": sum(table.rows for table in plan.tables),
        "bytes": {"all cards": total_bytes(plan), "fullest card": plan.fullest_rank.total, "budget": plan.budget},
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
    what = "training step" if plan.goal == "train" else "request"
    tables = "1 table" if len(plan.tables) == 1 else f"{count(len(plan.tables))} tables"
    return (
        f"{tables} with {count(rows)} rows on {cluster_words(cluster.nodes, cluster.gpus_per_node)}. "
        f"Predicted {what}: {seconds(plan.step.total)}, of which {seconds(plan.step.exposed)} beyond the dense part; "
        f"{count(round(plan.step.throughput))} samples per second."
    )


def backend_words(plan: Plan) -> str:
    """The backend that the plan is for, and what follows from it."""
    backend, overlaps = plan.topology.backend, plan.topology.overlaps
    how = "run behind the dense part" if overlaps else "do not overlap the dense part"
    return f"Backend: {backend}, under which exchanges {how}."


def cluster_words(nodes: int, gpus: int) -> str:
    each = f"{count(gpus)} {'GPU' if gpus == 1 else 'GPUs'}"
    return f"1 node with {each}" if nodes == 1 else f"{count(nodes)} nodes with {each} each"


def choice_words(table: TablePlan) -> str:
    """The choice for a table, without numbers, so that equal choices have equal words."""
    tiers = [tier.tier for tier in table.tiers]
    if table.placement == "card":
        place = "table-wise"
    elif len(tiers) > 1:
        place = f"tiers {', '.join(map(str, tiers))}"
    else:
        place = {1: "replicated on every GPU", 2: "replicated on every node", 3: "row-wise"}[tiers[0]]
    words = [place, table.precision, "in host memory" if table.residency == "host" else ""]
    words += dict.fromkeys(lever.kind for lever in table.levers)
    if table.exchange != "none":
        exchange = "exchange per node" if table.exchange == "node" else "flat exchange"
        words.append(f"{exchange}, pooled by {'the owner' if table.pooled_by == 'owner' else 'the requesting rank'}")
    return "; ".join(word for word in words if word)


def tier_words(table: TablePlan) -> list[str]:
    """Rows of each tier: their number, place, storage and share of the lookups."""
    if table.placement != "tiers":
        where = TIER_PLACES[1] if table.placement == "replicated" else f"on rank {table.rank}"
        tier = table.tiers[0]
        return [f"all {count(table.rows)} rows {where}, {table.precision}{_slot_words(tier)}"]
    return [
        f"tier {tier.tier}: {count(tier.rows)} rows {TIER_PLACES[tier.tier]}, {tier.precision}{_slot_words(tier)}, "
        f"{share(tier.lookups)} of the lookups"
        for tier in table.tiers
    ]


def _slot_words(tier: Tier) -> str:
    slots = {"fp32": tier.cached, "int8": tier.near}
    return "".join(f", {share(rows / tier.rows)} in {kind} slots" for kind, rows in slots.items() if rows)


def lever_words(table: TablePlan) -> dict[str, str]:
    """The effect of each kind of lever on a table, one line each."""
    words: dict[str, str] = {}
    for kind in dict.fromkeys(lever.kind for lever in table.levers):
        levers = [lever for lever in table.levers if lever.kind == kind]
        if kind == "unify":
            words[kind] = f"{count(len(levers))} tables joined, each with rows of its own"
            continue
        detail = levers[0].detail if len(levers) == 1 else f"in {count(len(levers))} tables"
        saved, rows = sum(lever.saved for lever in levers), sum(lever.rows for lever in levers)
        words[kind] = f"saves {size(saved)} of {count(rows)} rows: {detail}"
    return words


def wire_words(table: TablePlan) -> str:
    """What crosses the links."""
    trains = table.wire_gradients != "none"
    if table.exchange == "none":
        return "sync of replicas only" if table.placement == "replicated" and trains else "nothing"
    moved = f"rows as {table.wire_rows}"
    if table.pooled_by == "owner":
        moved = f"every id, and one sum in {table.wire_rows} per bag and owner"
    return f"{moved}, gradients as {table.wire_gradients}" if trains else moved


def runner_up_cost(plan: Plan, other: Alternative | None) -> float | None:
    """Seconds by which the whole step would be longer; None without a runner-up that fits."""
    return None if other is None or other.time is None else other.time - plan.step.total


def runner_up_words(plan: Plan, other: Alternative | None) -> str:
    if other is None:
        return "none"
    cost = runner_up_cost(plan, other)
    if cost is None:
        return f"{other.name}: does not fit, {size(other.bytes)} on the fullest GPU"
    return f"{other.name}: {cost_words(plan, cost)}"


def cost_words(plan: Plan, cost: float) -> Number | str:
    """The cost of another choice; predictions that agree to six digits are equal."""
    if cost <= EQUAL * plan.step.total:
        return "equally good"
    number = signed(seconds(cost))
    return Number(number.value, f"{number} per step")


def value_words(plan: Plan, given: Sensitivity) -> str:
    """What more hardware saves. More GPUs take more samples per step, so their value is samples per second, not the step."""
    if given.saves is None:
        return "unknown"
    if given.saves > 0 and _adds_gpus(given):
        return f"{plan.step.total / (plan.step.total - given.saves):.2f}x samples per second"
    return f"saves {seconds(given.saves)} per step" if given.saves > 0 else "saves nothing"


def _adds_gpus(given: Sensitivity) -> bool:
    return given.what.startswith("one more ")  # node, GPU


def step_then(plan: Plan, given: Sensitivity) -> Number | str:
    """The step with more hardware: with more memory, this step less what is saved."""
    if given.saves is None or given.time is None:
        return ""
    return seconds(given.time if _adds_gpus(given) else plan.step.total - given.saves)


def binding_words(table: TablePlan) -> str:
    """What limits a table; `FREE_NOTE` explains "nothing" once for all tables."""
    return "nothing" if table.binding == FREE else table.binding


def verdict(plan: Plan) -> str:
    """The plan in one sentence."""
    fullest, step = plan.fullest_rank.total / plan.budget_of(plan.fullest_rank), plan.step
    what = "training step" if plan.goal == "train" else "request"
    rivals = [other.time for other in plan.candidates if other.time is not None and other.time > step.total * (1 + EQUAL)]
    ahead = f", {max(rivals) / step.total:.2f}x faster than the slowest candidate that fits" if rivals else ""
    return (
        f"The tables fit, with {share(fullest)} of the budget on the fullest GPU, and a {what} is predicted to "
        f"take {seconds(step.total)}{ahead}."
    )


def suggestion_rows(plan: Plan) -> list[Sequence[object]]:
    """Levers: effect, option of `plan make`, bytes saved, change of the step, and detail."""
    return [(s.what, s.option, size(s.bytes), _step_change_words(plan, s.saves), s.detail) for s in plan.suggestions]


def _step_change_words(plan: Plan, saves: float | None) -> str:
    if saves is None:
        return "does not fit"
    if abs(saves) <= EQUAL * plan.step.total:
        return "same step"
    return f"{signed(seconds(-saves))} per step"


def heaviest(plan: Plan, most: int) -> list[TablePlan]:
    """The tables that take most of the step, heaviest first."""
    return sorted(plan.tables, key=lambda table: (-table_time(table), -table_bytes(table), table.name))[:most]


def table_time(table: TablePlan) -> float:
    return sum(table.time.values())


def table_bytes(table: TablePlan) -> int:
    return sum(table.bytes.values())


def total_bytes(plan: Plan) -> int:
    return sum(rank.total * rank.count for rank in plan.ranks)


def groups(plan: Plan) -> dict[str, list[TablePlan]]:
    """Tables by their choice, groups that take most of the step first."""
    alike: dict[str, list[TablePlan]] = defaultdict(list)
    for table in plan.tables:
        alike[choice_words(table)].append(table)
    return dict(sorted(alike.items(), key=lambda group: -sum(map(table_time, group[1]))))


def link_sums(plan: Plan) -> dict[str, float]:
    """Bytes sent per rank and step, for the link classes that carry any."""
    return {link: sent for link in LINK_CLASSES if (sent := plan.bytes_over(link))}


def step_rows(plan: Plan) -> list[Sequence[object]]:
    """The parts of the step, the hidden time, and the sum."""
    rows: list[Sequence[object]] = [
        (f"{part} (overlaps dense)" if part in plan.step.overlaps else part, seconds(time))
        for part, time in plan.step.parts.items()
        if time
    ]
    hidden = [("hidden", signed(seconds(-plan.step.hidden)))] if plan.step.hidden else []
    return [*rows, *hidden, ("step", seconds(plan.step.total))]


def memory_rows(plan: Plan) -> list[Sequence[object]]:
    """The fullest rank, the mean and the emptiest, against the budget."""
    ranks = sum(rank.count for rank in plan.ranks)
    room = sum(rank.count * plan.budget_of(rank) for rank in plan.ranks) / ranks
    least = min(plan.ranks, key=lambda rank: rank.total)
    found = {
        f"fullest (rank {plan.fullest_rank.first})": (plan.fullest_rank.total, plan.budget_of(plan.fullest_rank)),
        "mean": (total_bytes(plan) / ranks, room),
        "emptiest": (least.total, plan.budget_of(least)),
    }
    rows: list[Sequence[object]] = [(name, size(held), share(held / of)) for name, (held, of) in found.items()]
    return [*rows, ("budget", size(plan.budget), "")]


def candidate_rows(plan: Plan) -> list[Sequence[object]]:
    """Name, step, ratio to this plan, bytes of the fullest GPU, and detail of each candidate."""
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
    """Choice, tables, rows, bytes and time of each group of tables."""
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


def _description(plan: Plan, table: TablePlan) -> list[str]:
    """One table in a few lines."""
    rows, lookups = f"{count(table.rows)} rows of {table.dim}", f"{count(round(table.lookups))} lookups per GPU and step"
    return [
        f"{table.name}: {rows}, {lookups}, {size(table_bytes(table))}, {seconds(table_time(table))}",
        f"  choice      {choice_words(table)}",
        *(f"              {words}" for words in tier_words(table)),
        f"  sent        {wire_words(table)}",
        *(f"  {kind:<11} {words}" for kind, words in lever_words(table).items()),
        f"  runner-up   {runner_up_words(plan, table.runner_up)}",
        f"  limited by  {binding_words(table)}",
    ]


def aligned(rows: Sequence[Sequence[object]], width: int | None = None) -> list[str]:
    """Rows of cells as lines; columns with numbers are right-aligned.

    Where a line is longer than `width`, the last column, if it has text, goes to lines of its own, and the first is folded.
    """
    lines = _aligned(rows)
    if width is None or max(map(len, lines), default=0) <= width:
        return lines
    details = [""] * len(rows)
    if not any(isinstance(row[-1], Number) for row in rows):
        rows, details = [row[:-1] for row in rows], [str(row[-1]) for row in rows]
    room = width - max(len(line) for line in _aligned([("", *row[1:]) for row in rows]))
    folded: list[Sequence[object]] = []
    under: list[str] = []
    for row, detail in zip(rows, details, strict=True):
        *first, last = textwrap.wrap(str(row[0]), max(room, 12)) or [""]
        folded += [*((part, *[""] * (len(row) - 1)) for part in first), (last, *row[1:])]
        under += [*[""] * len(first), detail]
    return [text for line, detail in zip(_aligned(folded), under, strict=True) for text in (line, *_indented(detail, width))]


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def _wrapped(line: str, width: int | None) -> str:
    """The line, wrapped under the words after its label, which two spaces end."""
    if width is None or len(line) <= width:
        return line
    indent = re.match(r" *(\S.*?  +)?", line)
    assert indent is not None
    under = " " * (indent.end() if indent.end() < width // 2 else 4)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=under, break_on_hyphens=False))


def _aligned(rows: Sequence[Sequence[object]]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    signs = [">" if any(isinstance(cell, Number) for cell in column) else "<" for column in columns]
    widths = [f"{sign}{max(len(str(cell)) for cell in column)}" for sign, column in zip(signs, columns, strict=True)]
    return ["  ".join(format(str(cell), width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _section(heading: str, rows: Sequence[Sequence[object]], width: int | None) -> list[str]:
    return [heading, *(f"  {line}" for line in aligned(rows, width and width - 2) or ["nothing"])]


def _printable(line: str) -> str:
    """Without control characters: names come from files and must not control the terminal."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line)
