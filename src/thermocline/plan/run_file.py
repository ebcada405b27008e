"""run.json: what a run measured, in the terms of its plan, and the comparison of both (docs/planning_files.md).

A line of the comparison is good if it differs from the prediction by at most its tolerance. The tolerance of a part below 1%
of its total is that of a part of 1%. Equal ranks are one group of lines, compared with the rank that is furthest off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from thermocline.errors import BadInput, did_you_mean, write_text
from thermocline.report.numbers import Number

from .fields import Amount, Bytes, Count
from .io import FileModel, Problems, read_file
from .model import DIRECTIONS, LINK_CLASSES, MEMORY_PARTS, STEP_PARTS, Direction, LinkClass, Plan
from .report.explain import aligned
from .units import show_bytes, show_seconds


class MeasuredRank(FileModel):
    """Bytes of one rank."""

    rank: int = Field(ge=0, validation_alias="card", serialization_alias="card", description="global rank")
    bytes: dict[str, Bytes] = Field(description=f"by part: {', '.join(MEMORY_PARTS)}")
    host: Bytes = Field(default=0, description="bytes of its tables in host memory")

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class MeasuredTraffic(FileModel):
    """Bytes that one rank sends in one step over one class of links, in one direction."""

    link: LinkClass = Field(description="card (stays on the GPU), host, node or cluster")
    direction: Direction = Field(description="ids, rows, gradients or sync")
    bytes: Amount = Field(description="mean over ranks and steps")
    messages: Amount = Field(default=0.0, description="mean over ranks and steps")


class MeasuredRun(FileModel):
    """A run on all ranks of a plan.

    Example::

        sharding.run(batch=2048, seconds=0.012).save("run.json")
        MeasuredRun.load("run.json").step  # seconds
    """

    version: Literal[1] = Field(default=1, description="version of this file format; 1")
    plan: str = Field(default="", description="fingerprint of the plan of the run; default: unknown")
    created: str = Field(default="", description="time of the run")
    steps: Count = Field(description="measured steps, 1 or more")
    batch: Count = Field(description="samples per rank and step, 1 or more")
    ranks: tuple[MeasuredRank, ...] = Field(
        validation_alias="cards", serialization_alias="cards", description="every rank once"
    )
    traffic: tuple[MeasuredTraffic, ...] = Field(default=(), description="by link class and direction, each pair once")
    parts: dict[str, Amount] = Field(default={}, description=f"seconds of a step by part: {', '.join(STEP_PARTS)}")
    step: Amount = Field(description="seconds of a whole step")

    def _contradictions(self) -> Problems:
        ranks: dict[int, int] = {}
        for at, rank in enumerate(self.ranks):
            if (first := ranks.setdefault(rank.rank, at)) != at:
                yield ("cards", at, "card"), f"rank {rank.rank} is in cards[{first}] too; list every rank once"
            yield from ((("cards", at, "bytes", *at_part), text) for at_part, text in _unknown(rank.bytes, MEMORY_PARTS))
        pairs: dict[tuple[str, str], int] = {}
        for at, line in enumerate(self.traffic):
            if (first := pairs.setdefault((line.link, line.direction), at)) != at:
                over = f"{line.direction} over {line.link} links"
                yield ("traffic", at), f"{over} are in traffic[{first}] too; list their sum once"
        yield from ((("parts", *at_part), text) for at_part, text in _unknown(self.parts, STEP_PARTS))

    def save(self, path: str | Path) -> None:
        write_text(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> MeasuredRun:
        """Load a run.json. A wrong field raises FormatError with its line."""
        return read_file(cls, path)


def fingerprint(plan: Plan) -> str:
    """Compute the sha256 of the content of a plan, which does not depend on the layout of its file.

    Args:
        plan: The plan.

    Returns:
        The sha256 in hexadecimal.

    Example::

        fingerprint(plan) == MeasuredRun.load("run.json").plan
    """
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _unknown(parts: dict[str, int] | dict[str, float], known: tuple[str, ...]) -> Problems:
    for name in parts:
        if name not in known:
            yield (name,), f"there is no such part{did_you_mean(name, known)}; the parts are {', '.join(known)}"


# -- comparison with a plan --

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
    """The comparison of a plan with a run; `str` shows it as a table.

    Attributes:
        lines: A comparison of each predicted number.

    Example::

        comparison = check_run(Plan.load("plan.json"), MeasuredRun.load("run.json"))
        [line.what for line in comparison.lines if not line.ok]
    """

    lines: tuple[ComparisonLine, ...]

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.lines)

    def __str__(self) -> str:
        """A line for each number, and a summary."""
        head = ("", "", "predicted", "measured", "error", "tolerance")
        bad = sum(not line.ok for line in self.lines)
        return "\n".join([*aligned([head, *map(_cells, self.lines)]), f"{len(self.lines) - bad} within tolerance, {bad} not"])

    def to_json(self) -> dict[str, Any]:
        """The comparison for `json.dumps`."""
        lines = [
            {"kind": line.kind, "what": line.what, "predicted": line.predicted, "measured": line.measured}
            | {"whole": line.total, "tolerance": line.tolerance, "off": line.off, "ok": line.ok}
            for line in self.lines
        ]
        return {"ok": self.ok, "lines": lines}


def _cells(line: ComparisonLine) -> tuple[object, ...]:
    show = show_seconds if line.kind == "time" else show_bytes
    off = Number(line.off or 0.0, "-" if line.off is None else f"{line.off:+.1%}")
    numbers = [Number(value, show(value)) for value in (line.predicted, line.measured)]
    return line.kind, line.what, *numbers, off, f"{'' if line.ok else 'NOT '}within {line.tolerance:.0%}"


def check_run(plan: Plan, run: MeasuredRun) -> RunComparison:
    """Compare a measured run with its plan.

    Args:
        plan: The plan.
        run: A run of this plan.

    Returns:
        The comparison.

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
        message = f"the run used plan {run.plan[:12]}, and this plan is {expected[:12]}; give the plan of the run"
        raise BadInput(message, parameter="plan", value=run.plan)
    ranks = sorted(rank.rank for rank in run.ranks)
    if ranks != list(range(plan.topology.world_size)):
        message = (
            f"the run measured {len(ranks)} ranks and the plan is for {plan.topology.world_size} (ranks 0 to "
            f"{plan.topology.world_size - 1}); compare a run on all ranks of the plan"
        )
        raise BadInput(message, parameter="ranks", value=ranks)
    if run.batch != plan.batch:
        message = f"the run had {run.batch} samples per rank and step, the plan is for {plan.batch}; plan for batch {run.batch}"
        raise BadInput(message, parameter="batch", value=run.batch)


def _parts(
    kind: Kind, of: str, names: Sequence[str], predicted: Mapping[Any, float], measured: Mapping[Any, float]
) -> Iterator[ComparisonLine]:
    """The sum of the parts, and each part with something predicted or measured."""
    total = sum(predicted.values())
    yield ComparisonLine(kind, f"{of}: all", total, sum(measured.values()), total)
    for name in names:
        if predicted.get(name) or measured.get(name):
            yield ComparisonLine(kind, f"{of}: {name}", predicted.get(name, 0), measured.get(name, 0), total)


def _memory(plan: Plan, run: MeasuredRun) -> Iterator[ComparisonLine]:
    by_number = {rank.rank: rank for rank in run.ranks}
    for group in plan.ranks:
        last = group.first + group.count - 1
        ranks = [by_number[number] for number in range(group.first, last + 1)]
        rank = max(ranks, key=lambda rank: abs(rank.total - group.total))
        which = f"rank {rank.rank}" if group.count == 1 else f"rank {rank.rank}, furthest off of {group.first} to {last}"
        yield from _parts("memory", which, MEMORY_PARTS, group.bytes, rank.bytes)
        if group.host or rank.host:
            yield ComparisonLine("memory", f"{which}: in host memory", group.host, rank.host, group.host or group.total)


def _traffic(plan: Plan, run: MeasuredRun) -> Iterator[ComparisonLine]:
    measured = {(line.link, line.direction): line.bytes for line in run.traffic}
    for link in LINK_CLASSES:
        predicted = {direction: plan.bytes_over(link, direction) for direction in DIRECTIONS}
        found = {direction: measured.get((link, direction), 0.0) for direction in DIRECTIONS}
        if any(predicted.values()) or any(found.values()):
            yield from _parts("traffic", link, DIRECTIONS, predicted, found)


def _time(plan: Plan, run: MeasuredRun) -> Iterator[ComparisonLine]:
    yield ComparisonLine("time", "step", plan.step.total, run.step, plan.step.total)
    for part in STEP_PARTS:
        if part in run.parts:  # a run without timed parts is compared by the whole step only
            yield ComparisonLine("time", f"step: {part}", plan.step.parts.get(part, 0.0), run.parts[part], plan.step.total)
