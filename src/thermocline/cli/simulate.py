"""`thermocline simulate`: the traffic of a plan, counted without its GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thermocline.errors import BadInput, write_text

from .options import Debug, Json, Quiet, check_file
from .output import console, deliver, progress_bar

if TYPE_CHECKING:
    from thermocline.distributed import Simulation, SimulationLog
    from thermocline.heat.profile import HeatProfile
    from thermocline.plan.model import Plan

EXAMPLE = "Example:  thermocline simulate --plan plan.json --heat heat.tc --log clicks.parquet --steps 4 --json simulated.json"


def simulate(
    plan: Annotated[Path, typer.Option("--plan", metavar="PLAN", help="Plan file (plan.json).")],
    log: Annotated[list[Path], typer.Option("--log", metavar="FILE", help="Log with a column per feature; repeatable.")],
    heat: Annotated[Path | None, typer.Option("--heat", metavar="FILE.tc", help="Heat file of the plan.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps to simulate.")] = 3,
    scale: Annotated[
        int | None, typer.Option("--scale", min=1, metavar="NODES", help="Plan and simulate 1, 2, 4, ... nodes instead.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", callback=check_file, help="With --scale: page of charts to write."),
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Count the exact bytes that every rank of a plan would send, and predict the time of a step.

    Ranks take samples in the order of the log, one batch per rank and step; a short log is repeated.
    """
    from thermocline.distributed import SimulationLog
    from thermocline.distributed.planned_tables import check_heat
    from thermocline.heat.profile import HeatProfile
    from thermocline.plan.model import Plan

    if report is not None and scale is None:
        raise BadInput(f"--report '{report}' needs --scale NODES", parameter="report")
    given, profile = Plan.load(plan), None if heat is None else HeatProfile.load(heat)
    check_heat(given, profile)
    read = SimulationLog(log, given)
    if scale is not None:
        _scale(given, profile, read, (scale, steps), report, json, quiet)
        return
    from thermocline.distributed import simulate as count

    found = count(given, profile, read.steps(given, steps))
    with deliver(found.to_json() | {"rounds": read.rounds(given, steps)}, json, quiet) as shown:
        if shown:
            lines = [
                *_lines(found, read.rounds(given, steps)),
                *_notes(given, read.taken / (steps * given.topology.world_size)),
            ]
            console().print("\n".join(lines), markup=False, soft_wrap=True)


def _notes(plan: Plan, lookups: float) -> list[str]:
    """A note if log and plan have different batches, which is not an error of the plan."""
    planned = sum(table.lookups for table in plan.tables)
    if 0.8 * planned <= lookups <= 1.25 * planned:
        return []
    return [
        f"the log has {lookups:,.0f} lookups per rank and step, but the plan is for {planned:,.0f}: the two columns have "
        "different batches; give a log with the samples of training, or plan for this log"
    ]


def _scale(
    plan: Plan, heat: HeatProfile | None, log: SimulationLog, sizes: tuple[int, int], report: Path | None, json: str | None,
    quiet: bool,
) -> None:  # fmt: skip
    from thermocline.distributed.simulation.scale import scale, scale_page
    from thermocline.plan.units import show_bytes, show_seconds

    if heat is None:
        raise BadInput("--scale makes new plans, which need a heat file; give it, as in --heat heat.tc", parameter="heat")
    most, steps = sizes
    with progress_bar(quiet) as progress:
        points = scale(plan, heat, log, most, steps, progress)
    with deliver({"batch": plan.batch, "steps": steps, "points": points}, json, quiet) as shown:
        if shown:
            heads = f"{'ranks':>6} {'node':>10} {'cluster':>10} {'exposed':>10} {'step':>10}   per rank and step"
            console().print(heads, markup=False)
            for each in points:
                words = each.get("refused")
                if not words:
                    sent, times = (show_bytes(each["bytes"][link]) for link in ("node", "cluster")), ("exposed", "step")
                    words = " ".join(f"{word:>10}" for word in (*sent, *(show_seconds(each[part]) for part in times)))
                console().print(f"{each['cards']:>6} {words}", markup=False, soft_wrap=True)
        if report is not None:
            write_text(report, scale_page(plan, points, ", ".join(file.path.name for file in log.files)))


def _lines(found: Simulation, rounds: float) -> list[str]:
    from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, LinkClass
    from thermocline.plan.units import show_bytes, show_seconds

    cluster, plan = found.plan.topology, found.plan
    lines = [f"{cluster.nodes} x {cluster.gpus_per_node} ranks, {found.steps} steps of {plan.batch:,} samples per rank"]
    if rounds > 1:
        lines.append(f"the log was read {rounds:.1f} times: new samples would have more distinct rows")
    lines.append(f"{'sent per rank and step':32} {'simulated':>12} {'planned':>12}")
    ways: list[tuple[LinkClass, Direction]] = [(link, direction) for link in LINK_CLASSES for direction in DIRECTIONS]
    for link, direction in ways:
        mine, theirs = found.bytes_over(link, direction), plan.bytes_over(link, direction)
        if mine or theirs:
            lines.append(f"  {link + ', ' + direction:30} {show_bytes(mine):>12} {show_bytes(theirs):>12}")
    lines.append(f"  the busiest rank sends {found.uneven:.3f} times the mean")
    lines.append(f"{'time of a step':32} {show_seconds(found.step):>12} {show_seconds(plan.step.total):>12}")
    for part, seconds in found.seconds.items():
        lines.append(f"  {part:30} {show_seconds(seconds):>12} {show_seconds(plan.step.parts.get(part, 0.0)):>12}")
    return lines
