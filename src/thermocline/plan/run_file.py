"""run.json: what a run measured, in the terms of its plan, so that both can be compared number by number.

Memory is in bytes of each rank by part. Traffic is the bytes and messages that one rank sends in one step, by link class and
direction, as a mean over ranks and steps. Times are seconds of one step by part, each part alone, and of the whole step with
overlap. The file says `cards` and `card` where the code says `ranks` and `rank`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from .fields import Amount, Bytes, Count
from .io import Problems, check, did_you_mean, read_file
from .model import MEMORY_PARTS, STEP_PARTS, Direction, LinkClass, Plan
from .topology import STRICT


class MeasuredRank(BaseModel):
    """Bytes of one rank."""

    model_config = STRICT
    rank: int = Field(ge=0, validation_alias="card", serialization_alias="card", description="global rank")
    bytes: dict[str, Bytes] = Field(description=f"by part: {', '.join(MEMORY_PARTS)}")
    host: Bytes = Field(default=0, description="bytes of its tables in host memory")

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class MeasuredTraffic(BaseModel):
    """Bytes that one rank sends in one step over one class of links, in one direction."""

    model_config = STRICT
    link: LinkClass = Field(description="card (stays on the GPU), host, node or cluster")
    direction: Direction = Field(description="ids, rows, gradients or sync")
    bytes: Amount = Field(description="mean over ranks and steps")
    messages: Amount = Field(default=0.0, description="mean over ranks and steps")


class MeasuredRun(BaseModel):
    """A run on all ranks of a plan."""

    model_config = STRICT
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

    @model_validator(mode="after")
    def _validate(self) -> MeasuredRun:
        return check(self, self._contradictions())

    def _contradictions(self) -> Problems:
        ranks: dict[int, int] = {}
        for at, rank in enumerate(self.ranks):
            if (first := ranks.setdefault(rank.rank, at)) != at:
                yield ("cards", at, "card"), f"rank {rank.rank} is in cards[{first}] too; list every rank once"
            yield from ((("cards", at, "bytes", *at_part), text) for at_part, text in _unknown(rank.bytes, MEMORY_PARTS))
        pairs: dict[tuple[str, str], int] = {}
        for at, line in enumerate(self.traffic):
            if (first := pairs.setdefault((line.link, line.direction), at)) != at:
                yield (
                    ("traffic", at),
                    f"{line.direction} over {line.link} links are in traffic[{first}] too; list their sum once",
                )
        yield from ((("parts", *at_part), text) for at_part, text in _unknown(self.parts, STEP_PARTS))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MeasuredRun:
        """Load a run.json. A wrong field raises FormatError with its line."""
        return read_file(cls, path)


def fingerprint(plan: Plan) -> str:
    """The sha256 of the content of a plan, independent of the layout of its file."""
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _unknown(parts: dict[str, int] | dict[str, float], known: tuple[str, ...]) -> Problems:
    for name in parts:
        if name not in known:
            yield (name,), f"there is no such part{did_you_mean(name, known)}; the parts are {', '.join(known)}"
