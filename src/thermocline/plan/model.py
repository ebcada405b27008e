"""A plan: what was decided for every table, why, and what it should cost. Kept as plan.json.

A plan holds counts and thresholds, never lists of rows: tier 1 is the so many hottest rows of the heat file that `heat` names
by its sha256 (ties by id), tier 2 the rows after them, tier 3 the rest. Every rank builds the maps of its own part from that.
Where levers left fewer rows, a row is as hot as its ids together, after the id map that the levers' numbers describe.
All numbers are bytes and seconds; traffic is what one card sends in one step (it receives as much), the mean over cards.

Everything that `plan show` says is in here, so that a plan can be explained where neither heat nor tables are at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from thermocline.errors import FormatError

from .tables import Optimizer, Pooling
from .topology import STRICT, Topology

VERSION: Literal[1] = 1

Goal = Literal["train", "serve"]
Placement = Literal["tiers", "replicated", "card"]  # `tiers` with rows in tier 3 alone is plain row-wise sharding
Exchange = Literal["none", "flat", "node"]  # each card asks for the rows it needs, or each node does once
PooledBy = Literal["asker", "owner"]  # rows travel and are pooled where they were asked for, or sums travel
LinkClass = Literal["card", "host", "node", "cluster"]
Direction = Literal["ids", "rows", "gradients", "sync"]

LINK_CLASSES: tuple[LinkClass, ...] = ("card", "host", "node", "cluster")
DIRECTIONS: tuple[Direction, ...] = ("ids", "rows", "gradients", "sync")
MEMORY_PARTS = ("tables", "optimizer state", "cache", "maps", "buffers")
STEP_PARTS = ("lookup", "rows", "gradients", "update", "ids", "sync", "dense")


class Traffic(BaseModel):
    """Bytes that one card sends in one step, by link class and direction; `card` is what stays on the card itself."""

    model_config = STRICT
    link: LinkClass
    direction: Direction
    bytes: float
    messages: float = 0.0


class Tier(BaseModel):
    """The rows of one tier: how many, how hot, in which precision."""

    model_config = STRICT
    tier: Literal[1, 2, 3]
    rows: int
    threshold: float  # lookups of its coldest row, as the heat file counts them; 0 if the tier reaches rows never seen
    lookups: float  # its share of the table's lookups
    precision: str
    cached: int = 0  # rows of it (not counting copies) that have an fp32 slot
    near: int = 0  # and that have an int8 slot


class Lever(BaseModel):
    """What was done to a table before it was placed, and the id map that does it, by its numbers.

    The last of `prune` and `hash` is the map: the `kept` hottest ids of the heat file (ties by id, counts of all `features`
    added up) have rows of their own, all others are hashed to `shared` rows. `unify` then moves rows up by `offset`.
    """

    model_config = STRICT
    kind: Literal["hash", "prune", "unify"]
    features: tuple[str, ...]  # whose ids it maps
    rows: int  # before; of `unify`, of its part of the table
    kept: int = 0
    shared: int = 0
    salt: int = 0
    offset: int = 0
    map: int = 0  # bytes of the map, on every card
    saved: int = 0  # bytes on all cards, with the copies that the coldest rows of the table have, less the maps
    detail: str = ""


class Alternative(BaseModel):
    """What could have been done instead, and what the whole step would then take."""

    model_config = STRICT
    name: str
    feasible: bool
    time: float | None  # of a step (or of a request), seconds; None if it does not fit
    bytes: int  # on the fullest card
    detail: str = ""


class TablePlan(BaseModel):
    """What was decided for one table."""

    model_config = STRICT
    name: str
    rows: int
    dim: int
    pooling: Pooling
    features: tuple[str, ...]
    lookups: float  # a card and step
    precision: str  # of most rows
    cache: float  # share of the rows in fp32 slots, and in int8 slots
    near: float
    residency: Literal["card", "host"] = "card"
    placement: Placement
    card: int | None = None  # where `placement` is "card"
    tiers: tuple[Tier, ...]  # those that have rows
    exchange: Exchange
    pooled_by: PooledBy
    wire_rows: str  # "int8": as stored; "fp32": sums or full rows
    wire_gradients: str
    levers: tuple[Lever, ...] = ()
    bytes: dict[str, int]  # MEMORY_PARTS, all cards together, copies counted
    traffic: tuple[Traffic, ...]
    time: dict[str, float]  # STEP_PARTS without dense, before anything overlaps
    runner_up: Alternative | None
    binding: str  # the constraint that kept the choice from being a faster one
    curve: tuple[tuple[float, float], ...]  # (rows, their share of the lookups), hottest first: a few points for pictures


class CardPlan(BaseModel):
    """Bytes of `count` equal cards from number `first` on."""

    model_config = STRICT
    first: int
    count: int
    bytes: dict[str, int]  # MEMORY_PARTS
    host: int = 0  # bytes of tables in host memory
    tables: tuple[str, ...] = ()  # whole tables that lie on each of them

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class StepPlan(BaseModel):
    """The predicted step (or request): its parts, and how much of them waits behind the dense part."""

    model_config = STRICT
    parts: dict[str, float]  # STEP_PARTS
    overlaps: tuple[str, ...]  # parts that run while the dense part computes
    hidden: float  # seconds of those that the dense part covers
    total: float  # sum of the parts less what is hidden
    throughput: float  # samples a second of the whole cluster

    @property
    def exposed(self) -> float:
        """What the step takes beyond its dense part."""
        return self.total - self.parts["dense"]


class Marginal(BaseModel):
    """What a little more would buy."""

    model_config = STRICT
    what: str  # "1 GiB more a card", "one card more a node", "one node more"
    time: float | None  # of a step then
    saves: float | None  # seconds a step (a sample of the whole cluster, where cards are added)
    detail: str = ""


class Offer(BaseModel):
    """What a lever that was not asked for would do. Levers change what a model learns, so a plan only says it."""

    model_config = STRICT
    what: str
    option: str  # of `plan make`
    bytes: int  # saved on all cards, as `Lever.saved`
    time: float | None  # of a step then; None if the plan would no longer fit
    saves: float | None  # seconds a step; below 0 where it takes longer
    detail: str = ""


class Plan(BaseModel):
    """The decisions for all tables."""

    model_config = STRICT
    version: Literal[1] = VERSION
    created: str = ""
    goal: Goal
    objective: str  # in words
    heat: str  # sha256 of the heat file; "" if the plan was made without one
    topology: Topology
    budget: int  # bytes that tables may fill on a card
    batch: int
    dense: float
    optimizer: Optimizer
    gradients: Literal["fp32", "bf16"]
    tables: tuple[TablePlan, ...]
    cards: tuple[CardPlan, ...]
    traffic: tuple[Traffic, ...]
    step: StepPlan
    balance: float  # predicted maximum over mean of the lookups that cards serve
    binding: str
    marginals: tuple[Marginal, ...]
    offers: tuple[Offer, ...] = ()  # levers that were not asked for
    candidates: tuple[Alternative, ...]  # best first; the first is this plan
    notes: tuple[str, ...] = ()

    @property
    def fullest(self) -> CardPlan:
        return max(self.cards, key=lambda card: card.total)

    def table(self, name: str) -> TablePlan:
        return next(table for table in self.tables if table.name == name)

    def bytes_over(self, link: LinkClass, direction: Direction | None = None) -> float:
        """Bytes a card sends over a class of links in a step, in one direction or in all."""
        return sum(t.bytes for t in self.traffic if t.link == link and direction in (None, t.direction))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; a file that is none is a FormatError that names the field."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise FormatError(
                f"{path}, line {error.lineno}: not JSON ({error.msg}); a plan is what `plan make` writes"
            ) from None
        version = found.get("version") if isinstance(found, dict) else None
        if version != VERSION:
            raise FormatError(f"{path} is a plan of version {version}, this program reads version {VERSION}: make it again")
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise FormatError(f"{path}, field {field}: {first['msg']}; make the plan again with `plan make`") from None
