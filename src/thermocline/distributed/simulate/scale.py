"""The same tables, budget and batch on 1, 2, 4, ... nodes: each planned anew, and simulated.

What a card sends, and waits for, must not grow with the cluster but by what the collectives themselves cost: their latency, and
the sizes that every card tells every other. Both stand apart here from the bytes of rows, so that this can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import LINK_CLASSES, Plan
from thermocline.plan.replan_inputs import plan_with_heat
from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import Line, lines
from thermocline.report.numbers import count, seconds, share, size
from thermocline.report.page import figure, figures, page, paragraph, section, table

from .log import Log
from .simulator import Simulated, simulate

Report = Callable[[int, int, str], None]
Point = dict[str, Any]
_STEP = ("lookup", "rows", "gradients", "update", "ids", "sync")


_EXPOSED = "every row once is as planned about the same on any number of nodes; copies are where they save more than sync takes"


def scale(plan: Plan, heat: HeatProfile, log: Log, most: int, steps: int, report: Report) -> list[Point]:
    """A point for 1, 2, 4, ... nodes up to `most`: what one card sends in a step, and how long the step takes."""
    nodes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    if most > 1 and plan.topology.links.cluster is None:
        raise BadInput(
            f"the plan's topology has no links between nodes, and {most} are asked for; plan for a topology with them"
        )
    found = []
    for done, many in enumerate(nodes):
        report(done, len(nodes), f"{many} nodes")
        try:
            larger = plan_with_heat(plan, heat, plan.topology.model_copy(update={"nodes": many}))
        except BadInput as error:  # too little memory
            found.append({"nodes": many, "cards": many * plan.topology.gpus_per_node, "refused": str(error)})
            continue
        found.append(point(simulate(larger, heat, log.steps(larger, steps)), log.rounds(larger, steps)))
    return found


def point(found: Simulated, rounds: float) -> Point:
    """One number of nodes, in numbers of a card and step."""
    cluster, links = found.plan.topology, LINK_CLASSES
    sizes = found.bytes_CDLK[:, :, :, -1].sum(axis=(0, 1)) / found.cards / found.steps
    sent = found.bytes_CDLK[:, :, :, :-1].sum(axis=(0, 1, 3)) / found.cards / found.steps
    return {
        "nodes": cluster.nodes,
        "cards": cluster.world_size,
        "bytes": {link: float(sent[at]) for at, link in enumerate(links) if link in ("node", "cluster")},
        "sizes": {link: float(sizes[at]) for at, link in enumerate(links) if link in ("node", "cluster")},
        "messages": {link: found.messages_over(link) for link in links if link in ("node", "cluster")},
        "uneven": found.uneven,
        "seconds": found.seconds,
        "latency": found.latency,
        "step": found.step,
        "exposed": found.step - found.seconds["dense"],
        "planned": {
            "step": found.plan.step.total,
            "exchange": {t.name: t.exchange for t in found.plan.tables},
            "others": {other.name: other.time for other in found.plan.candidates[1:]},
        },
        "tiers": {t.name: {tier.tier: tier.rows for tier in t.tiers} for t in found.plan.tables},
        "rounds": rounds,
    }


def scale_page(plan: Plan, points: list[Point], log: str) -> str:
    """The points as one HTML page."""
    made = [each for each in points if "refused" not in each]
    across = Axis(made[0]["cards"] / 2, made[-1]["cards"] * 2, "cards", count, log=True)
    name = plan.topology.name or "the plan's cluster"
    traffic = [
        Line(f"{link}, all tables", _line(made, lambda p, at=link: p["bytes"][at]), True) for link in ("node", "cluster")
    ]
    traffic.append(Line("sizes, told before exchanges", _line(made, lambda p: sum(p["sizes"].values())), True))
    times = [Line(part, _line(made, lambda p, at=part: p["seconds"][at]), True) for part in _STEP]
    times.append(Line("of these latency", _line(made, lambda p: p["latency"]), True))
    exposed = [Line("this plan, simulated", _line(made, lambda p: p["exposed"]), True)]
    exposed.append(Line("every row once, as planned", _line(made, lambda p: _row_wise(p) - p["seconds"]["dense"]), True))
    drawn = [
        figure("Bytes that a card sends in a step", _chart("Traffic", traffic, across, size), "to others, mean over cards"),
        figure("Parts of a step", _chart("Parts of a step", times, across, seconds), "each as long as by itself"),
        figure("What the dense part does not hide", _chart("Exposed", exposed, across, seconds), _EXPOSED),
        figure("Uneven", _chart("Uneven", [Line("max", _line(made, lambda p: p["uneven"] - 1), True)], across, share),
               "how much more than the mean the busiest card sends"),
    ]  # fmt: skip
    said = f"{plan.batch:,} samples a card and step of {log}, planned anew for each number of cards, {name}."
    heads = ("cards", "node", "cluster", "messages", "exposed", "step", "rounds of the log")
    return page("From few cards to many", paragraph(said), figures(*drawn), section("Numbers", table(heads, _rows(points))))


def _row_wise(each: Point) -> float:
    """The step with every row once in the cluster, which takes as long however many cards there are."""
    return float(each["planned"]["others"].get("row-wise") or each["planned"]["step"])


def _chart(title: str, drawn: list[Line], across: Axis, show: Any) -> Any:
    return lines(title, drawn, across, from_zero([y for line in drawn for _, y in line.points], show=show))


def _line(points: list[Point], of: Callable[..., float]) -> list[tuple[float, float]]:
    return [(float(each["cards"]), float(of(each))) for each in points]


def _rows(points: list[Point]) -> Iterator[tuple[object, ...]]:
    for each in points:
        if "refused" in each:
            yield each["cards"], each["refused"], "", "", "", "", ""
        else:
            sent, messages = each["bytes"], float(np.sum(list(each["messages"].values())))
            yield (
                each["cards"], size(sent["node"]), size(sent["cluster"]), count(round(messages)), seconds(each["exposed"]),
                seconds(each["step"]), f"{each['rounds']:.2f}",
            )  # fmt: skip
