"""What a run measured, as it writes it into run.json: the other side of a plan's predictions.

Numbers are in the plan's own terms, so that they can be put side by side: bytes of each card by part; bytes and messages that
one card sends in one step, by link class and direction, the mean over cards and steps; seconds of one step by part, the mean
over steps, each part as long as it took by itself, and the whole step as long as it took with what overlaps.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from .fields import Amount, Bytes, Count
from .io import Problems, check, nearest, read_file
from .model import MEMORY_PARTS, STEP_PARTS, Direction, LinkClass, Plan
from .topology import STRICT


class CardRun(BaseModel):
    """Bytes of one card."""

    model_config = STRICT
    card: int = Field(ge=0, description="its rank")
    bytes: dict[str, Bytes] = Field(description=f"by part: {', '.join(MEMORY_PARTS)}")
    host: Bytes = Field(default=0, description="bytes of its tables in host memory")

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class TrafficRun(BaseModel):
    """Bytes that one card sends in one step over one class of links, in one direction."""

    model_config = STRICT
    link: LinkClass = Field(description="card (what stays there), host, node or cluster")
    direction: Direction = Field(description="ids, rows, gradients or sync")
    bytes: Amount = Field(description="mean over cards and steps")
    messages: Amount = Field(default=0.0, description="mean over cards and steps")


class Run(BaseModel):
    """A run on all cards of a plan."""

    model_config = STRICT
    version: Literal[1] = Field(default=1, description="of this file format; 1")
    plan: str = Field(default="", description="fingerprint of the plan that was carried out; unknown if left away")
    created: str = Field(default="", description="when")
    steps: Count = Field(description="that were measured, 1 or more")
    batch: Count = Field(description="samples a card and step, 1 or more")
    cards: tuple[CardRun, ...] = Field(description="every card, each once")
    traffic: tuple[TrafficRun, ...] = Field(default=(), description="by link class and direction, each pair once")
    parts: dict[str, Amount] = Field(default={}, description=f"seconds of a step by part: {', '.join(STEP_PARTS)}")
    step: Amount = Field(description="seconds of a whole step")

    @model_validator(mode="after")
    def _agrees(self) -> Run:
        return check(self, self._contradictions())

    def _contradictions(self) -> Problems:
        cards: dict[int, int] = {}
        for at, card in enumerate(self.cards):
            if (first := cards.setdefault(card.card, at)) != at:
                yield ("cards", at, "card"), f"card {card.card} is in cards[{first}] too; every card is measured once"
            yield from ((("cards", at, "bytes", *place), says) for place, says in _unknown(card.bytes, MEMORY_PARTS))
        pairs: dict[tuple[str, str], int] = {}
        for at, line in enumerate(self.traffic):
            if (first := pairs.setdefault((line.link, line.direction), at)) != at:
                yield (
                    ("traffic", at),
                    f"{line.direction} over {line.link} links are in traffic[{first}] too; give their sum once",
                )
        yield from ((("parts", *place), says) for place, says in _unknown(self.parts, STEP_PARTS))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """A run file."""
        return read_file(cls, path)


def fingerprint(plan: Plan) -> str:
    """The sha256 of what a plan says, however its file is laid out."""
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _unknown(parts: dict[str, int] | dict[str, float], known: tuple[str, ...]) -> Problems:
    for name in parts:
        if name not in known:
            yield (name,), f"there is no such part{nearest(name, known)}; there are {', '.join(known)}"
