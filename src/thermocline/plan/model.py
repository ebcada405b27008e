"""The plan: what was decided for every table, why, and the predicted cost. Stored as plan.json (docs/planning_files.md).

A plan holds counts and thresholds, never lists of rows: tier 1 is the first N rows of the heat file (named by its sha256),
hottest first, ties by id; tier 2 are the next rows, tier 3 the rest. Where levers reduced the rows, the heat of a row is the
sum over its ids. Numbers are bytes and seconds; traffic is what one rank sends in one step, as a mean over ranks. The file
says `cards`, `card`, `marginals` and `offers` where the code says ranks, GPU, sensitivities and suggestions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from thermocline import formats as F
from thermocline.errors import FormatError, write_text

from .io import FileModel, Problems, parse_json, read_text
from .tables import Optimizer, Pooling
from .topology import Topology

VERSION: Literal[1] = 1

Goal = Literal["train", "serve"]
PlacementKind = Literal["tiers", "replicated", "card"]  # `tiers` with rows in tier 3 only is row-wise sharding
Exchange = Literal["none", "flat", "node"]  # every rank requests the rows it needs, or every node does so once
WirePrecision = Literal["fp32", "bf16", "int8"]  # of gradients and pooled sums in messages
PooledBy = Literal["asker", "owner"]  # rows travel and are pooled by the requesting rank, or pooled sums travel
LinkClass = Literal["card", "host", "node", "cluster"]
Direction = Literal["ids", "rows", "gradients", "sync"]

LINK_CLASSES: tuple[LinkClass, ...] = ("card", "host", "node", "cluster")
DIRECTIONS: tuple[Direction, ...] = ("ids", "rows", "gradients", "sync")
MEMORY_PARTS = ("tables", "optimizer state", "cache", "maps", "buffers")
STEP_PARTS = ("lookup", "rows", "gradients", "update", "ids", "sync", "dense")


class Traffic(FileModel):
    """Bytes that one rank sends in one step, by link class and direction; link `card` is what stays on the GPU."""

    link: LinkClass
    direction: Direction
    bytes: float
    messages: float = 0.0


class Tier(FileModel):
    """The rows of one tier: their number, heat and precision.

    Attributes:
        tier: 1 for a copy on every rank, 2 for a copy in every node, 3 for one copy.
        rows: number of rows.
        threshold: lookups of its coldest row in the heat file; 0 if the tier contains rows never seen.
        lookups: share of the table's lookups.
        precision: precision of the rows.
        cached: rows (copies not counted) with an fp32 slot.
        near: rows with an int8 slot.

    Example::

        [(tier.tier, tier.rows) for tier in plan.table("item").tiers]
    """

    tier: Literal[1, 2, 3]
    rows: int = Field(ge=0)
    threshold: float
    lookups: float
    precision: str
    cached: int = Field(default=0, ge=0)
    near: int = Field(default=0, ge=0)

    def _contradictions(self) -> Problems:
        if max(self.cached, self.near) > self.rows:
            yield ("cached",), f"the tier has {self.rows} rows, and {self.cached} cached, {self.near} near ones"


class Lever(FileModel):
    """A reduction of the rows of a table before placement, and the id map that does it.

    The last `prune` or `hash` is the map: the `kept` hottest ids of the heat file (ties by id, counts of all `features` summed)
    have rows of their own, all other ids are hashed to `shared` rows. `unify` then adds `offset` to the rows.
    """

    kind: Literal["hash", "prune", "unify"]
    features: tuple[str, ...]  # features whose ids are mapped
    rows: int  # rows before; for `unify`, rows of its part of the table
    kept: int = 0
    shared: int = 0
    salt: int = 0
    offset: int = 0
    map: int = 0  # bytes of the map, on every rank
    saved: int = 0  # bytes on all ranks, copies of the coldest rows included, less the maps
    detail: str = ""


class Alternative(FileModel):
    """Another choice, and the predicted time of the whole step with it."""

    name: str
    feasible: bool
    time: float | None  # seconds of a step (or request); None if it does not fit
    bytes: int  # on the fullest rank
    detail: str = ""


class TablePlan(FileModel):
    """The decisions for one table.

    Attributes:
        name: name of the table.
        rows: number of rows, after levers.
        dim: columns of a row.
        pooling: pooling of the rows of a sample.
        features: features that look up the table.
        lookups: lookups per rank and step.
        precision: precision of most rows.
        cache: share of the rows in fp32 slots.
        near: share of the rows in int8 slots.
        residency: memory of the rows: "card" or "host".
        placement: how rows are spread over ranks.
        rank: the rank that holds the table, if `placement` is "card".
        tiers: tiers with rows.
        exchange: how ranks exchange rows.
        pooled_by: the side that pools: the rank that looks up, or the owner of the rows.
        wire_rows: precision of exchanged rows: "int8" as stored, "fp32" for full rows; of sums "fp32", "bf16" or "int8".
        wire_gradients: precision of exchanged gradients.
        levers: reductions of the rows that were applied.
        bytes: bytes by part, all ranks and copies together.
        traffic: bytes sent per rank and step, by link class and direction.
        time: seconds by part of the step, without dense layers and before overlap.
        runner_up: the second-best choice, if there is one.
        binding: the constraint that ruled out a faster choice.
        curve: (rows, their share of the lookups), hottest first: points for charts.

    Example::

        table = thermocline.Plan.load("plan.json").table("item")
        table.precision, table.placement
    """

    name: str
    rows: int
    dim: int
    pooling: Pooling
    features: tuple[str, ...]
    lookups: float
    precision: str
    cache: float
    near: float
    residency: Literal["card", "host"] = "card"
    placement: PlacementKind
    rank: int | None = Field(default=None, validation_alias="card", serialization_alias="card")
    tiers: tuple[Tier, ...]
    exchange: Exchange
    pooled_by: PooledBy
    wire_rows: str
    wire_gradients: str
    levers: tuple[Lever, ...] = ()
    bytes: dict[str, int]
    traffic: tuple[Traffic, ...]
    time: dict[str, float]
    runner_up: Alternative | None
    binding: str
    curve: tuple[tuple[float, float], ...]

    def _contradictions(self) -> Problems:
        if self.rows < 1 or not 1 <= self.dim <= F.MAX_DIM:
            yield ("rows",), f"the table is {self.rows} x {self.dim}; rows are 1 or more, columns 1 to {F.MAX_DIM}"
        if self.placement == "card" and self.rank is None:
            yield ("card",), "a table on one GPU names it"
        if not self.tiers:
            yield ("tiers",), "the table has no tier"
        if self.placement == "tiers" and sum(tier.rows for tier in self.tiers) != self.rows:
            yield ("tiers",), f"the tiers have {sum(tier.rows for tier in self.tiers)} rows, and the table {self.rows}"


class RankPlan(FileModel):
    """Bytes of `count` equal ranks, from rank `first` on."""

    first: int
    count: int = Field(ge=1)
    bytes: dict[str, int]  # by MEMORY_PARTS
    host: int = 0  # bytes of tables in host memory
    tables: tuple[str, ...] = ()  # unsplit tables on each of these ranks

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class StepPlan(FileModel):
    """The predicted step (or request) by part, and the time hidden behind the dense part."""

    parts: dict[str, float]  # by STEP_PARTS
    overlaps: tuple[str, ...]  # parts that run during the dense part
    hidden: float  # seconds of `overlaps` that the dense part covers
    total: float = Field(gt=0)  # sum of the parts, less `hidden`
    throughput: float  # samples per second of the whole cluster

    def _contradictions(self) -> Problems:
        if "dense" not in self.parts:
            yield ("parts",), "the step has no part 'dense'"

    @property
    def exposed(self) -> float:
        """Seconds of the step beyond its dense part."""
        return self.total - self.parts["dense"]


FREE = "nothing: more memory or a longer dense part would not change the choice"  # what limits a table


class Sensitivity(FileModel):
    """The effect of a little more memory or hardware."""

    what: str  # such as "1 GiB more per GPU"
    time: float | None  # seconds of the step then
    saves: float | None  # seconds per step (where GPUs are added: for the same number of samples)
    detail: str = ""


class Suggestion(FileModel):
    """The effect of a lever that was not requested. Levers change what a model learns, so a plan only reports it."""

    what: str
    option: str  # of `plan make`
    bytes: int  # saved on all ranks, as `Lever.saved`
    time: float | None  # seconds of the step then; None if the plan no longer fits
    saves: float | None  # seconds per step; negative if the step is longer
    detail: str = ""


class Plan(FileModel):
    """The decisions for all tables, with predicted memory, traffic and time.

    Attributes:
        version: version of the file format.
        created: time of the plan.
        goal: "train" or "serve".
        objective: what the plan minimizes, in words.
        heat: sha256 of the heat file; "" if the plan was made without one.
        topology: the cluster.
        budget: bytes per GPU that tables may fill.
        batch: samples per GPU and step.
        dense: seconds of the dense layers in a step.
        optimizer: optimizer of the rows.
        gradients: precision of gradients on the wire.
        sums: precision of pooled sums on the wire.
        tables: the decisions for each table.
        ranks: rows, bytes and lookups of each rank.
        traffic: bytes sent per rank and step, by link class and direction.
        step: predicted seconds of a step, by part.
        balance: predicted maximum over mean of the lookups that ranks serve.
        binding: the constraint that limits the plan.
        sensitivities: the value of more hardware.
        suggestions: what each unused lever would save.
        candidates: candidate plans, best first; the first is this plan.
        notes: remarks for the reader.

    Example::

        plan = thermocline.make_plan("tables.yaml", "heat.tc", "hgx-h200")
        plan.save("plan.json")
        Plan.load("plan.json").step.total  # seconds
    """

    version: Literal[1] = VERSION
    created: str = ""
    goal: Goal
    objective: str
    heat: str
    topology: Topology
    budget: int = Field(gt=0)
    batch: int
    dense: float
    optimizer: Optimizer
    gradients: WirePrecision
    sums: WirePrecision = "fp32"
    tables: tuple[TablePlan, ...]
    ranks: tuple[RankPlan, ...] = Field(validation_alias="cards", serialization_alias="cards")
    traffic: tuple[Traffic, ...]
    step: StepPlan
    balance: float
    binding: str
    sensitivities: tuple[Sensitivity, ...] = Field(validation_alias="marginals", serialization_alias="marginals")
    suggestions: tuple[Suggestion, ...] = Field(default=(), validation_alias="offers", serialization_alias="offers")
    candidates: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()

    def _contradictions(self) -> Problems:
        size = self.topology.world_size
        for number, table in enumerate(self.tables):
            if table.rank is not None and not 0 <= table.rank < size:
                yield ("tables", number, "card"), f"the table is on GPU {table.rank}, and there are {size}"
        if len({table.name for table in self.tables}) < len(self.tables):
            yield ("tables",), "two tables have the same name"

    @property
    def fullest_rank(self) -> RankPlan:
        """The rank with most bytes, as a share of its budget."""
        return max(self.ranks, key=lambda rank: rank.total / self.budget_of(rank))

    def budget_of(self, rank: RankPlan) -> int:
        """The bytes that tables may fill on a rank: the budget, or the memory of its GPU where that is less."""
        return self.topology.room_of_nodes(self.budget)[rank.first // self.topology.gpus_per_node]

    def table(self, name: str) -> TablePlan:
        """The decisions for one table, by name."""
        return next(table for table in self.tables if table.name == name)

    def bytes_over(self, link: LinkClass, direction: Direction | None = None) -> float:
        """Bytes that a rank sends over a class of links in a step, in one direction or in all."""
        return sum(t.bytes for t in self.traffic if t.link == link and direction in (None, t.direction))

    def save(self, path: str | Path) -> None:
        """Write plan.json."""
        write_text(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Load a plan.json.

        Raises:
            FormatError: The file is not a plan of this version; fields `path` and `line` or `parameter`.
        """
        name = str(path)
        found = parse_json(read_text(path), name)
        version = found.get("version") if isinstance(found, dict) else None
        if version != VERSION:
            message = f"{path} is a plan of version {str(version)[:40]}, this program reads version {VERSION}"
            raise FormatError(f"{message}: make the plan again", path=name, parameter="version", value=version)
        if found.get("cards") == []:
            raise FormatError(f"{path}, field cards: the plan is for no GPU; make it again", path=name, parameter="cards")
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            message = f"{path}, field {field}: {first['msg']}; make the plan again with `thermocline plan make`"
            raise FormatError(message, path=name, parameter=field) from None
