"""Compares the predictions of a plan with a measured run, number by number, each with a tolerance.

A line is good if it differs from the prediction by at most its tolerance (memory 2%, traffic 5%, time 25%). The tolerance of a
part below 1% of its total is that of a part of 1%, because the relative error of a negligible part means nothing. Ranks that
the plan holds equal are one group of lines, compared with the rank that is furthest off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from thermocline.errors import BadInput
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, MEMORY_PARTS, STEP_PARTS, Plan, RankPlan
from thermocline.plan.run_file import MeasuredRank, MeasuredRun, fingerprint
from thermocline.plan.units import show_bytes, show_seconds

Kind = Literal["memory", "traffic", "time"]

TOLERANCES: dict[Kind, float] = {"memory": 0.02, "traffic": 0.05, "time": 0.25}
_SMALL = 0.01  # of the total


@dataclass(frozen=True)
class ComparisonLine:
    """One number, predicted and measured: bytes, bytes a step, or seconds."""

    kind: Kind
    what: str
    predicted: float
    measured: float
    total: float  # the predicted sum that contains the number, or the number itself

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.kind]

    @property
    def off(self) -> float | None:
        """The relative error of the prediction; None where nothing was predicted."""
        return self.measured / self.predicted - 1 if self.predicted else None

    @property
    def ok(self) -> bool:
        return abs(self.measured - self.predicted) <= self.tolerance * max(self.predicted, _SMALL * self.total)


@dataclass(frozen=True)
class RunComparison:
    """The comparison of a plan with a run."""

    lines: tuple[ComparisonLine, ...]

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.lines)

    def __str__(self) -> str:
        """A line for each number, and a summary."""
        shown = [("", "", "predicted", "measured", "error", "tolerance"), *map(_cells, self.lines)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        text = ["  ".join(_aligned(cells, widths)).rstrip() for cells in shown]
        bad = sum(not line.ok for line in self.lines)
        return "\n".join([*text, f"{len(self.lines) - bad} within tolerance, {bad} not"])

    def to_json(self) -> dict[str, Any]:
        """The comparison for `json.dumps`."""
        lines = [
            {"kind": line.kind, "what": line.what, "predicted": line.predicted, "measured": line.measured}
            | {"whole": line.total, "tolerance": line.tolerance, "off": line.off, "ok": line.ok}
            for line in self.lines
        ]
        return {"ok": self.ok, "lines": lines}


def _cells(line: ComparisonLine) -> tuple[str, ...]:
    show = show_seconds if line.kind == "time" else show_bytes
    off = "-" if line.off is None else f"{line.off:+.1%}"
    tolerance = f"within {line.tolerance:.0%}" if line.ok else f"NOT within {line.tolerance:.0%}"
    return line.kind, line.what, show(line.predicted), show(line.measured), off, tolerance


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    """Words left-aligned, numbers right-aligned."""
    words = (0, 1, 5)
    return [cell.ljust(w) if at in words else cell.rjust(w) for at, (cell, w) in enumerate(zip(cells, widths, strict=True))]


def check_run(plan: Plan, run: MeasuredRun) -> RunComparison:
    """Compare a measured run with its plan.

    Raises:
        BadInput: The run used another plan, another number of ranks, or another batch.

    Example::

        comparison = check_run(Plan.load("plan.json"), MeasuredRun.load("run.json"))
        assert comparison.ok, str(comparison)
    """
    _check_same(plan, run)
    return RunComparison((*_memory(plan, run), *_traffic(plan, run), *_time(plan, run)))


def _check_same(plan: Plan, run: MeasuredRun) -> None:
    expected = fingerprint(plan)
    if run.plan and run.plan != expected:
        raise BadInput(
            f"the run used plan {run.plan[:12]}, and this plan is {expected[:12]}; give the plan of the run",
            parameter="plan",
            value=run.plan,
        )
    ranks = sorted(rank.rank for rank in run.ranks)
    if ranks != list(range(plan.topology.world_size)):
        raise BadInput(
            f"the run measured {len(ranks)} ranks and the plan is for {plan.topology.world_size} (ranks 0 to "
            f"{plan.topology.world_size - 1}); compare a run on all ranks of the plan",
            parameter="ranks",
            value=ranks,
        )
    if run.batch != plan.batch:
        raise BadInput(
            f"the run had {run.batch} samples per rank and step, the plan is for {plan.batch}; plan for batch {run.batch}",
            parameter="batch",
            value=run.batch,
        )


def _memory(plan: Plan, run: MeasuredRun) -> Iterator[ComparisonLine]:
    by_number = {rank.rank: rank for rank in run.ranks}
    for group in plan.ranks:
        ranks = [by_number[number] for number in range(group.first, group.first + group.count)]
        worst = max(ranks, key=lambda rank: abs(rank.total - group.total))
        yield from _rank_memory(group, worst)


def _rank_memory(group: RankPlan, rank: MeasuredRank) -> Iterator[ComparisonLine]:
    last = group.first + group.count - 1
    which = f"rank {rank.rank}" if group.count == 1 else f"rank {rank.rank}, furthest off of {group.first} to {last}"
    yield ComparisonLine("memory", f"{which}: all", group.total, rank.total, group.total)
    for part in MEMORY_PARTS:
        predicted, measured = group.bytes.get(part, 0), rank.bytes.get(part, 0)
        if predicted or measured:
            yield ComparisonLine("memory", f"{which}: {part}", predicted, measured, group.total)
    if group.host or rank.host:
        yield ComparisonLine("memory", f"{which}: in host memory", group.host, rank.host, group.host or group.total)


def _traffic(plan: Plan, run: MeasuredRun) -> Iterator[ComparisonLine]:
    measured = {(line.link, line.direction): line.bytes for line in run.traffic}
    for link in LINK_CLASSES:
        total = plan.bytes_over(link)
        found = sum(measured.get((link, direction), 0.0) for direction in DIRECTIONS)
        if not total and not found:
            continue
        yield ComparisonLine("traffic", f"{link}: all", total, found, total)
        for direction in DIRECTIONS:
            predicted, bytes_ = plan.bytes_over(link, direction), measured.get((link, direction), 0.0)
            if predicted or bytes_:
                yield ComparisonLine("traffic", f"{link}: {direction}", predicted, bytes_, total)


def _time(plan: Plan, run: MeasuredRun) -> Iterator[ComparisonLine]:
    yield ComparisonLine("time", "step", plan.step.total, run.step, plan.step.total)
    for part in STEP_PARTS:
        if part in run.parts:  # a run without timed parts is compared by the whole step only
            yield ComparisonLine("time", f"step: {part}", plan.step.parts.get(part, 0.0), run.parts[part], plan.step.total)
