"""A plan's predictions beside what a run measured, line by line, each with how far off it may be.

A line is good if the difference is within its tolerance (memory 2%, traffic 5%, time 25%) of what was predicted. A part that is
less than a hundredth of its whole may be off by as much as a part of one hundredth may: nobody plans by it, and its relative
error says nothing. Cards that the plan has equal are one group of lines, held against the card that is furthest off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from thermocline.errors import BadInput
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, MEMORY_PARTS, STEP_PARTS, CardPlan, Plan
from thermocline.plan.run_file import CardRun, Run, fingerprint
from thermocline.plan.units import show_bytes, show_seconds

Kind = Literal["memory", "traffic", "time"]

TOLERANCES: dict[Kind, float] = {"memory": 0.02, "traffic": 0.05, "time": 0.25}
_SMALL = 0.01  # of the whole


@dataclass(frozen=True)
class Line:
    """One number, predicted and measured: bytes, bytes a step, or seconds."""

    kind: Kind
    what: str
    predicted: float
    measured: float
    whole: float  # the predicted sum that the number is a part of, or the number itself

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.kind]

    @property
    def off(self) -> float | None:
        """How far the measurement is off, relative to the prediction; None where nothing was predicted."""
        return self.measured / self.predicted - 1 if self.predicted else None

    @property
    def ok(self) -> bool:
        return abs(self.measured - self.predicted) <= self.tolerance * max(self.predicted, _SMALL * self.whole)


@dataclass(frozen=True)
class Comparison:
    """All lines of a plan and a run."""

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.lines)

    def __str__(self) -> str:
        """A line for each number, and a closing one."""
        shown = [("", "", "predicted", "measured", "off", "asked"), *map(_cells, self.lines)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        text = ["  ".join(_aligned(cells, widths)).rstrip() for cells in shown]
        bad = sum(not line.ok for line in self.lines)
        return "\n".join([*text, f"{len(self.lines) - bad} as predicted, {bad} not"])

    def to_json(self) -> dict[str, Any]:
        """The same as JSON writes it."""
        lines = [asdict(line) | {"tolerance": line.tolerance, "off": line.off, "ok": line.ok} for line in self.lines]
        return {"ok": self.ok, "lines": lines}


def _cells(line: Line) -> tuple[str, ...]:
    show = show_seconds if line.kind == "time" else show_bytes
    off = "-" if line.off is None else f"{line.off:+.1%}"
    asked = f"within {line.tolerance:.0%}" if line.ok else f"NOT within {line.tolerance:.0%}"
    return line.kind, line.what, show(line.predicted), show(line.measured), off, asked


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    words = (0, 1, 5)
    return [cell.ljust(w) if at in words else cell.rjust(w) for at, (cell, w) in enumerate(zip(cells, widths, strict=True))]


def compare(plan: Plan, run: Run) -> Comparison:
    """Hold a run against its plan."""
    _check_same(plan, run)
    return Comparison((*_memory(plan, run), *_traffic(plan, run), *_time(plan, run)))


def _check_same(plan: Plan, run: Run) -> None:
    """Refuse what cannot be compared."""
    mine = fingerprint(plan)
    if run.plan and run.plan != mine:
        raise BadInput(f"the run carried out plan {run.plan[:12]}, and this plan is {mine[:12]}; give the plan it was run with")
    cards = sorted(card.card for card in run.cards)
    if cards != list(range(plan.topology.cards)):
        raise BadInput(
            f"the run measured {len(cards)} cards and the plan is for {plan.topology.cards} (numbers 0 to "
            f"{plan.topology.cards - 1}); compare a run on all cards of the plan"
        )
    if run.batch != plan.batch:
        raise BadInput(
            f"the run had {run.batch} samples a card and step, the plan is for {plan.batch}; plan for batch {run.batch}"
        )


def _memory(plan: Plan, run: Run) -> Iterator[Line]:
    by_number = {card.card: card for card in run.cards}
    for group in plan.cards:
        cards = [by_number[number] for number in range(group.first, group.first + group.count)]
        worst = max(cards, key=lambda card: abs(card.total - group.total))
        yield from _card(group, worst)


def _card(group: CardPlan, card: CardRun) -> Iterator[Line]:
    last = group.first + group.count - 1
    which = f"card {card.card}" if group.count == 1 else f"card {card.card}, furthest off of {group.first} to {last}"
    yield Line("memory", f"{which}: all", group.total, card.total, group.total)
    for part in MEMORY_PARTS:
        predicted, measured = group.bytes.get(part, 0), card.bytes.get(part, 0)
        if predicted or measured:
            yield Line("memory", f"{which}: {part}", predicted, measured, group.total)
    if group.host or card.host:
        yield Line("memory", f"{which}: in host memory", group.host, card.host, group.host or group.total)


def _traffic(plan: Plan, run: Run) -> Iterator[Line]:
    measured = {(line.link, line.direction): line.bytes for line in run.traffic}
    for link in LINK_CLASSES:
        whole = plan.bytes_over(link)
        found = sum(measured.get((link, direction), 0.0) for direction in DIRECTIONS)
        if not whole and not found:
            continue
        yield Line("traffic", f"{link}: all", whole, found, whole)
        for direction in DIRECTIONS:
            predicted, bytes_ = plan.bytes_over(link, direction), measured.get((link, direction), 0.0)
            if predicted or bytes_:
                yield Line("traffic", f"{link}: {direction}", predicted, bytes_, whole)


def _time(plan: Plan, run: Run) -> Iterator[Line]:
    yield Line("time", "step", plan.step.total, run.step, plan.step.total)
    for part in STEP_PARTS:
        if part in run.parts:  # a run that did not time its parts is held to the whole alone
            yield Line("time", f"step: {part}", plan.step.parts.get(part, 0.0), run.parts[part], plan.step.total)
