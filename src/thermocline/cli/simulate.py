"""`thermocline simulate`: what the cards of a plan would send, counted without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thermocline.errors import BadInput

from .options import Debug, Json, Quiet
from .output import console, progress_bar, write_json

if TYPE_CHECKING:
    from thermocline.distributed.simulate.log import Log
    from thermocline.distributed.simulate.simulator import Simulated
    from thermocline.heat.profile import HeatProfile
    from thermocline.plan.model import Plan

EXAMPLE = "Example:  thermocline simulate --plan plan.json --heat heat.tc --log clicks.parquet --steps 4 --json simulated.json"


def simulate(
    plan: Annotated[Path, typer.Option("--plan", metavar="PLAN", help="A plan.json.")],
    log: Annotated[list[Path], typer.Option("--log", metavar="FILE", help="A log with a column for each feature; repeatable.")],
    heat: Annotated[
        Path | None, typer.Option("--heat", metavar="FILE.tc", help="The heat file the plan was made with.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of all cards.")] = 3,
    scale: Annotated[
        int | None, typer.Option("--scale", min=1, metavar="NODES", help="Instead: plan and simulate 1, 2, 4, ... nodes.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="With --scale: a page of charts.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Count the bytes that every card of a plan would send, exactly, and predict how long a step takes.

    Samples go to cards in the order of the log, a batch for each card and step; a log that ends begins anew.
    """
    from thermocline.distributed.simulate.log import Log
    from thermocline.heat.profile import HeatProfile
    from thermocline.plan.model import Plan

    if report is not None and (scale is None or not report.resolve().parent.is_dir()):
        raise BadInput(f"the page '{report}' is of --scale NODES, and goes into a folder that exists")
    given, known = Plan.load(plan), None if heat is None else HeatProfile.load(heat)
    if known is not None and given.heat and known.sha256 != given.heat:
        raise BadInput(f"the plan was made with heat {given.heat[:12]}, and '{heat}' is {known.sha256[:12]}; give that file")
    read = Log(log, given)
    if scale is not None:
        _scale(given, known, read, scale, steps, report, json, quiet)
        return
    from thermocline.distributed.simulate.simulator import simulate as count

    found = count(given, known, read.steps(given, steps))
    if json:
        write_json(found.to_json() | {"rounds": read.rounds(given, steps)}, json)
    if json != "-" and not quiet:
        lines = [*_lines(found, read.rounds(given, steps)), *_notes(given, read.taken / (steps * given.topology.world_size))]
        console().print("\n".join(lines), markup=False, soft_wrap=True)


def _notes(plan: Plan, lookups: float) -> list[str]:
    """Where log and plan are of different batches, so that nobody takes it for an error of the plan."""
    planned = sum(table.lookups for table in plan.tables)
    if 0.8 * planned <= lookups <= 1.25 * planned:
        return []
    return [
        f"the log has {lookups:,.0f} lookups a card and step, and the plan is for {planned:,.0f}: the two columns are not of "
        "the same batches; give a log whose samples are those of training, or plan for it"
    ]


def _scale(
    plan: Plan, heat: HeatProfile | None, log: Log, most: int, steps: int, report: Path | None, json: str | None, quiet: bool
) -> None:
    from thermocline.distributed.simulate.scale import scale, scale_page
    from thermocline.plan.units import show_bytes, show_seconds

    if heat is None:
        raise BadInput("--scale makes new plans, which needs heat; give the heat file, as in --heat heat.tc")
    with progress_bar(quiet) as tell:
        points = scale(plan, heat, log, most, steps, tell)
    if report is not None:
        report.write_text(scale_page(plan, points, ", ".join(file.path.name for file in log.files)), encoding="utf-8")
    if json:
        write_json({"batch": plan.batch, "steps": steps, "points": points}, json)
    if json != "-" and not quiet:
        console().print(
            f"{'cards':>6} {'node':>10} {'cluster':>10} {'exposed':>10} {'step':>10}   a card and step", markup=False
        )
        for each in points:
            words = each.get("refused") or " ".join(
                f"{word:>10}"
                for word in (
                    *(show_bytes(each["bytes"][link]) for link in ("node", "cluster")),
                    *(show_seconds(each[part]) for part in ("exposed", "step")),
                )
            )
            console().print(f"{each['cards']:>6} {words}", markup=False, soft_wrap=True)


def _lines(found: Simulated, rounds: float) -> list[str]:
    from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, LinkClass
    from thermocline.plan.units import show_bytes, show_seconds

    cluster, plan = found.plan.topology, found.plan
    lines = [f"{cluster.nodes} x {cluster.gpus_per_node} cards, {found.steps} steps of {plan.batch:,} samples a card"]
    if rounds > 1:
        lines.append(f"the log was read {rounds:.1f} times: with fresh samples there would be more distinct rows")
    lines.append(f"{'a card sends in a step':32} {'simulated':>12} {'planned':>12}")
    ways: list[tuple[LinkClass, Direction]] = [(link, direction) for link in LINK_CLASSES for direction in DIRECTIONS]
    for link, direction in ways:
        mine, theirs = found.bytes_over(link, direction), plan.bytes_over(link, direction)
        if mine or theirs:
            lines.append(f"  {link + ', ' + direction:30} {show_bytes(mine):>12} {show_bytes(theirs):>12}")
    lines.append(f"  the busiest card sends {found.uneven:.3f} times the mean")
    lines.append(f"{'a step takes':32} {show_seconds(found.step):>12} {show_seconds(plan.step.total):>12}")
    for part, seconds in found.seconds.items():
        lines.append(f"  {part:30} {show_seconds(seconds):>12} {show_seconds(plan.step.parts.get(part, 0.0)):>12}")
    return lines
