"""The story that the demo tells, in six stages.

    log      a click log in Criteo's columns, or the one that the caller has
    heat     how often each of its rows is looked up
    plan     2 nodes of 2 cards, by the planner: rows in int8 and int4 with a cache of the hot ones, copied where copies pay,
             gradients in bf16; and next to it the baseline that everybody starts from: fp32 rows, each on one card
    train    a DLRM and a sequence model, by both plans, on 4 processes under torchrun, and what they learned as checkpoints
    serve    both checkpoints over 4 cards, asked over gRPC by tritonclient
    report   one table, one page

Sizes are such that all of it takes a few minutes on two cores. No number here is a benchmark: `benchmarks/results` has those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.plan.make import make_plan
from thermocline.plan.model import Plan, TablePlan, Tier
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

from .query_server import ask
from .report import fp32_rows, lines_of, page_of
from .stages import Found, ReportProgress, Say, Stages

NODES, CARDS = 2, 2
ARMS = ("fp32", "planned")
STAGES = 6
CACHE = 0.05  # of the rows of a table, in fp32 slots: the hottest


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `data` is a log of the caller's own."""

    data: str | None = None
    samples: int = 120_000
    rows: int = 60_000
    dim: int = 64
    batch: int = 128  # samples of a card and step
    users: int = 3_000
    items: int = 4_000
    sequence_dim: int = 32
    sequence_batch: int = 32
    asked: float = 3.0  # seconds of asking each server

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", str(Path(self.data).resolve()))

    @property
    def log(self) -> str:
        return self.data or "clicks.parquet"


# For the tests: every stage, and nothing that anybody would believe.
SMALL = Sizes(samples=4_000, rows=3_000, batch=64, users=300, items=300, asked=0.3)


def tell(folder: Path, sizes: Sizes, say: Say, report: ReportProgress) -> Found:
    """All stages; what each found, and where the page is."""
    folder = folder.resolve()
    stages = Stages(folder, asdict(sizes), say, report, STAGES)
    found: Found = {}
    work: dict[str, tuple[str, Callable[[], Found]]] = {
        "log": ("a log", lambda: _log(stages, sizes)),
        "heat": ("how hot its rows are", lambda: _heat(stages, sizes)),
        "plan": (f"a plan for {NODES} nodes x {CARDS} cards", lambda: _plan(stages, sizes)),
        "train": (f"two models, two plans, on {NODES * CARDS} processes", lambda: _train(stages, sizes)),
        "serve": (f"their tables over {NODES * CARDS} cards", lambda: _serve(stages, sizes)),
    }
    for name, (what, do) in work.items():
        found[name] = stages.do(name, what, do)
    page = folder / "report.html"
    plans = (Plan.load(folder / f"{model}planned.json") for model in ("", "sequence_"))
    page.write_text(page_of(found, HeatProfile.load(folder / "heat.tc"), *plans), encoding="utf-8")
    say(f"[{STAGES}/{STAGES}] the report: {page}")
    return {**found, "table": lines_of(found), "report": str(page)}


def _log(stages: Stages, sizes: Sizes) -> Found:
    if sizes.data is None:
        stages.call("data", "synth", "-o", sizes.log, "--samples", sizes.samples, "--rows", sizes.rows)
    return {"file": sizes.log}


def _heat(stages: Stages, sizes: Sizes) -> Found:
    counted = ("--batch", sizes.batch, "--cards-per-node", CARDS)
    stages.call("heat", "profile", sizes.log, "-o", "heat.tc", *counted)
    heat = HeatProfile.load(stages.folder / "heat.tc")
    lookups = sum(table.lookups for table in heat.tables.values())
    hot = sum(table.hottest(0.01) * table.lookups for table in heat.tables.values())
    return {"tables": len(heat.tables), "lookups": lookups, "rows": _rows(heat), "hottest 1%": hot / max(1, lookups)}


def _rows(heat: HeatProfile) -> int:
    return sum(table.distinct for table in heat.tables.values())


def _plan(stages: Stages, sizes: Sizes) -> Found:
    folder = stages.folder
    heat = HeatProfile.load(folder / "heat.tc")
    clicks = _both_plans(folder, "", click_tables(heat, sizes), heat)
    stages.python(["-m", "thermocline.demo.worker", "heat", json.dumps(asdict(sizes))])
    sequence = _both_plans(folder, "sequence_", item_table(sizes), HeatProfile.load(folder / "sequence_heat.tc"))
    found = {"dlrm": _told(clicks), "sequence": _told(sequence)}
    stages.say(f"      $ thermocline plan show {folder / 'planned.json'}")
    for model, told in found.items():
        stages.say(
            f"      {model}: {told['rows']:,} rows, {told['fp32 rows']:,} of them in fp32 too, {told['copied rows']:,} on "
            f"every card or node, which take {told['their lookups']:.0%} of the lookups"
        )
    return found


def _told(plan: Plan) -> Found:
    """A plan in four numbers."""
    copied = [(table, tier) for table in plan.tables for tier in table.tiers if tier.tier < 3]
    return {
        "rows": sum(table.rows for table in plan.tables),
        "fp32 rows": sum(map(fp32_rows, plan.tables)),
        "copied rows": sum(tier.rows for _, tier in copied),
        "their lookups": sum(tier.lookups * table.lookups for table, tier in copied)
        / max(1.0, sum(table.lookups for table in plan.tables)),
    }


def click_tables(heat: HeatProfile, sizes: Sizes) -> TablesConfig:
    """One row more than ids: what the log to judge on has and the log to train on has not."""
    tables = (
        TableConfig(name=t.name, rows=t.distinct + 1, dim=sizes.dim, cache=CACHE, precision=_cold(t.distinct))
        for t in heat.tables.values()
    )
    return TablesConfig(batch=sizes.batch, tables=tuple(tables))


def _cold(rows: int) -> str:
    """Large tables are cold: most of their rows are seen a few times, and int4 is enough for them."""
    return "int4" if rows > 5_000 else "int8"


def item_table(sizes: Sizes) -> TablesConfig:
    item = TableConfig(
        name="item", rows=sizes.items, dim=sizes.sequence_dim, pooling="none", lookups=100, precision="int8", cache=CACHE,
        features=("item",),
    )  # fmt: skip
    return TablesConfig(batch=sizes.sequence_batch, tables=(item,))


def _both_plans(folder: Path, prefix: str, tables: TablesConfig, heat: HeatProfile) -> Plan:
    """The planner's plan, in the room that fp32 rows take; and the baseline."""
    plan = plan_in_the_same_room(tables, heat)
    plan.save(folder / f"{prefix}planned.json")
    plain = plan.model_copy(update={"gradients": "fp32", "tables": tuple(map(_row_wise, plan.tables))})
    plain.save(folder / f"{prefix}fp32.json")
    return plan


def plan_in_the_same_room(tables: TablesConfig, heat: HeatProfile) -> Plan:
    """In all the memory of a card every table this small would be on every card, and there would be nothing to see."""
    cluster = _cluster()
    budget = sum(table.rows * table.dim * 4 for table in tables.tables) / cluster.world_size
    while True:
        try:
            return make_plan(tables, heat, cluster, budget=round(budget), gradients="bf16")
        except BadInput:  # id maps and buffers need room too; of very small tables, more than the rows
            if budget > cluster.gpu.memory:
                raise
            budget *= 1.25


def _row_wise(table: TablePlan) -> TablePlan:
    """The same table in fp32, each row on one card of the cluster."""
    tier = Tier(tier=3, rows=table.rows, threshold=0.0, lookups=1.0, precision="fp32")
    plain = {
        "precision": "fp32",
        "cache": 0.0,
        "wire_rows": "fp32",
        "wire_gradients": "fp32",
        "exchange": "flat",
        "pooled_by": "asker",
    }
    return table.model_copy(update={**plain, "placement": "tiers", "tiers": (tier,), "bytes": {}, "traffic": (), "time": {}})


def _cluster() -> Topology:
    """Two machines of two cards, on a network of 1 Gbit/s: batches are small here, and so is the network."""
    links = Links(node=Link(bandwidth=5e9, latency=1e-5), cluster=Link(bandwidth=125e6, latency=3e-5))
    gpu = GpuSpec(memory=8_000_000_000, bandwidth=50e9)
    return Topology(name="two nodes of two cards", nodes=NODES, gpus_per_node=CARDS, gpu=gpu, links=links)


def _train(stages: Stages, sizes: Sizes) -> Found:
    """All four runs in one launch: four processes that load torch take longer than a run."""
    stages.python(["-m", "thermocline.demo.worker", "warm", json.dumps(asdict(sizes))])
    count = str(NODES * CARDS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m", "thermocline.demo.worker"]
    stages.say(f"      $ torchrun --nproc-per-node {count} ... (dlrm and sequence model, each by both plans)")
    stages.python([*launch, "train", json.dumps(asdict(sizes))])
    return {arm: json.loads((stages.folder / f"trained_{arm}.json").read_text()) for arm in ARMS}


def _serve(stages: Stages, sizes: Sizes) -> Found:
    for arm in ARMS:
        stages.say(f"      $ thermocline serve run checkpoint_{arm} --shards {NODES * CARDS}")
    found: Found = {**ask({arm: stages.folder / f"checkpoint_{arm}" for arm in ARMS}, NODES * CARDS, sizes.asked)}
    return found
