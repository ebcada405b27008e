"""Scaling: the same tables, budget and batch on 1, 2, 4, ... nodes, each planned and simulated.

The traffic and waits of a rank must grow with the cluster only by the cost of the collectives: latency, and the message sizes
that every pair of ranks exchanges. Both are shown separately from the bytes of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.plan.make import plan_with_heat
from thermocline.plan.model import LINK_CLASSES, Plan
from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import Line, lines
from thermocline.report.numbers import count, seconds, share, size
from thermocline.report.page import figure, figures, page, paragraph, section, table

from .log import SimulationLog
from .result import Simulation
from .simulator import simulate

Report = Callable[[int, int, str], None]
Point = dict[str, Any]
_STEP = ("lookup", "rows", "gradients", "update", "ids", "sync")
_EXPOSED = "with every row stored once the time hardly depends on the nodes; replicas pay where they save more than sync costs"


def scale(plan: Plan, heat: HeatProfile, log: SimulationLog, most: int, steps: int, report: Report) -> list[Point]:
    """A point for 1, 2, 4, ... nodes up to `most`: traffic of a rank and time of a step."""
    nodes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    if most > 1 and plan.topology.links.cluster is None:
        raise BadInput(
            f"the topology of the plan has no links between nodes, but --scale is {most}; plan for several nodes",
            parameter="scale", value=most,
        )  # fmt: skip
    found = []
    for done, many in enumerate(nodes):
        report(done, len(nodes), f"{many} nodes")
        try:
            larger = plan_with_heat(plan, heat, plan.topology.model_copy(update={"nodes": many}))
        except BadInput as error:  # not enough memory
            found.append({"nodes": many, "cards": many * plan.topology.gpus_per_node, "refused": str(error)})
            continue
        found.append(point(simulate(larger, heat, log.steps(larger, steps)), log.rounds(larger, steps)))
    return found


def point(found: Simulation, rounds: float) -> Point:
    """One number of nodes, with values per rank and step."""
    cluster, links = found.plan.topology, LINK_CLASSES
    sizes = found.bytes_CDLK[:, :, :, -1].sum(axis=(0, 1)) / found.ranks / found.steps
    sent = found.bytes_CDLK[:, :, :, :-1].sum(axis=(0, 1, 3)) / found.ranks / found.steps
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
    across = Axis(made[0]["cards"] / 2, made[-1]["cards"] * 2, "ranks", count, log=True)
    name = plan.topology.name or "the plan's cluster"
    traffic = [
        Line(f"{link}, all tables", _line(made, lambda p, at=link: p["bytes"][at]), True) for link in ("node", "cluster")
    ]
    traffic.append(Line("message sizes", _line(made, lambda p: sum(p["sizes"].values())), True))
    times = [Line(part, _line(made, lambda p, at=part: p["seconds"][at]), True) for part in _STEP]
    times.append(Line("latency, included", _line(made, lambda p: p["latency"]), True))
    exposed = [Line("this plan, simulated", _line(made, lambda p: p["exposed"]), True)]
    exposed.append(Line("every row stored once, planned", _line(made, lambda p: _row_wise(p) - p["seconds"]["dense"]), True))
    drawn = [
        figure("Bytes that a rank sends in a step", _chart("Traffic", traffic, across, size), "to other ranks, mean"),
        figure("Parts of a step", _chart("Parts of a step", times, across, seconds), "each without overlap"),
        figure("Time that the dense part does not hide", _chart("Exposed", exposed, across, seconds), _EXPOSED),
        figure("Uneven", _chart("Uneven", [Line("max", _line(made, lambda p: p["uneven"] - 1), True)], across, share),
               "traffic of the busiest rank above the mean"),
    ]  # fmt: skip
    intro = f"{plan.batch:,} samples of {log} per rank and step, planned for each number of ranks, {name}."
    heads = ("ranks", "node", "cluster", "messages", "exposed", "step", "rounds of the log")
    return page(
        "Scaling with the number of ranks", paragraph(intro), figures(*drawn), section("Numbers", table(heads, _rows(points)))
    )


def _row_wise(each: Point) -> float:
    """The step with every row stored once in the cluster."""
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
