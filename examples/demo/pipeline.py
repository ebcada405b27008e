"""The demo in six stages.

    log      a synthetic click log with Criteo's columns, or the caller's log
    heat     lookups of each row
    plan     2 nodes of 2 GPUs: int8 and int4 rows with a cache of hot rows, copied where copies pay, gradients in bf16; and a
             baseline with fp32 rows, each on one GPU
    train    a DLRM and a sequence model by both plans, on 4 processes under torchrun
    serve    both checkpoints from 4 shards, queried over gRPC by tritonclient
    report   one table and one HTML page

All of it takes a few minutes on two cores. Its numbers are no benchmarks; `benchmarks/results` has those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from thermocline.errors import BadInput
from thermocline.heat import HeatProfile
from thermocline.plan import GpuSpec, Link, Links, Plan, TableConfig, TablePlan, TablesConfig, Tier, Topology, make_plan

from .query_server import query
from .report import fp32_rows, lines_of, page_of
from .stages import Found, ReportProgress, Say, Stages

NODES, GPUS = 2, 2
ARMS = ("fp32", "planned")
STAGES = 6
CACHE = 0.05  # share of the rows in fp32 slots


@dataclass(frozen=True)
class DemoSizes:
    """DemoSizes of all stages. `data` is the caller's log."""

    data: str | None = None
    samples: int = 120_000
    rows: int = 60_000
    dim: int = 64
    batch: int = 128  # samples per step and rank
    users: int = 3_000
    items: int = 4_000
    sequence_dim: int = 32
    sequence_batch: int = 32
    asked: float = 3.0  # seconds of querying each server

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", str(Path(self.data).resolve()))

    @property
    def log(self) -> str:
        return self.data or "clicks.parquet"


# For tests: every stage, at sizes without meaning.
SMALL = DemoSizes(samples=4_000, rows=3_000, batch=64, users=300, items=300, asked=0.3)


def run_demo(folder: Path, sizes: DemoSizes, say: Say, report: ReportProgress) -> Found:
    """Run all stages; returns the result of each, the table and the path of the page."""
    folder = folder.resolve()
    stages = Stages(folder, asdict(sizes), say, report, STAGES)
    found: Found = {}
    work: dict[str, tuple[str, Callable[[], Found]]] = {
        "log": ("a log", lambda: _log(stages, sizes)),
        "heat": ("its heat", lambda: _heat(stages, sizes)),
        "plan": (f"a plan for {NODES} nodes x {GPUS} GPUs", lambda: _plan(stages, sizes)),
        "train": (f"two models by two plans on {NODES * GPUS} processes", lambda: _train(stages, sizes)),
        "serve": (f"their tables from {NODES * GPUS} shards", lambda: _serve(stages, sizes)),
    }
    for name, (what, do) in work.items():
        found[name] = stages.do(name, what, do)
    page = folder / "report.html"
    plans = (Plan.load(folder / f"{model}planned.json") for model in ("", "sequence_"))
    page.write_text(page_of(found, HeatProfile.load(folder / "heat.tc"), *plans), encoding="utf-8")
    say(f"[{STAGES}/{STAGES}] the report: {page}")
    return {**found, "table": lines_of(found), "report": str(page)}


def _log(stages: Stages, sizes: DemoSizes) -> Found:
    if sizes.data is None:
        stages.call("data", "synth", "-o", sizes.log, "--samples", sizes.samples, "--rows", sizes.rows)
    return {"file": sizes.log}


def _heat(stages: Stages, sizes: DemoSizes) -> Found:
    counted = ("--batch", sizes.batch, "--cards-per-node", GPUS)
    stages.call("heat", "profile", sizes.log, "-o", "heat.tc", *counted)
    heat = HeatProfile.load(stages.folder / "heat.tc")
    lookups = sum(table.lookups for table in heat.tables.values())
    hot = sum(table.hottest(0.01) * table.lookups for table in heat.tables.values())
    return {"tables": len(heat.tables), "lookups": lookups, "rows": _rows(heat), "hottest 1%": hot / max(1, lookups)}


def _rows(heat: HeatProfile) -> int:
    return sum(table.distinct for table in heat.tables.values())


def _plan(stages: Stages, sizes: DemoSizes) -> Found:
    folder = stages.folder
    heat = HeatProfile.load(folder / "heat.tc")
    clicks = _both_plans(folder, "", click_tables(heat, sizes), heat)
    stages.python(["-m", "examples.demo.worker", "heat", json.dumps(asdict(sizes))])
    sequence = _both_plans(folder, "sequence_", item_table(sizes), HeatProfile.load(folder / "sequence_heat.tc"))
    found = {"dlrm": _summary(clicks), "sequence": _summary(sequence)}
    stages.say(f"      $ thermocline plan show {folder / 'planned.json'}")
    for model, numbers in found.items():
        stages.say(
            f"      {model}: {numbers['rows']:,} rows, {numbers['fp32 rows']:,} also in fp32, {numbers['copied rows']:,} "
            f"on every GPU or node, with {numbers['their lookups']:.0%} of the lookups"
        )
    return found


def _summary(plan: Plan) -> Found:
    """A plan in four numbers."""
    copied = [(table, tier) for table in plan.tables for tier in table.tiers if tier.tier < 3]
    return {
        "rows": sum(table.rows for table in plan.tables),
        "fp32 rows": sum(map(fp32_rows, plan.tables)),
        "copied rows": sum(tier.rows for _, tier in copied),
        "their lookups": sum(tier.lookups * table.lookups for table, tier in copied)
        / max(1.0, sum(table.lookups for table in plan.tables)),
    }


def click_tables(heat: HeatProfile, sizes: DemoSizes) -> TablesConfig:
    """One row more than ids, for unknown ids of the test part."""
    tables = (
        TableConfig(name=t.name, rows=t.distinct + 1, dim=sizes.dim, cache=CACHE, precision=_cold(t.distinct))
        for t in heat.tables.values()
    )
    return TablesConfig(batch=sizes.batch, tables=tuple(tables))


def _cold(rows: int) -> str:
    """int4 for large tables, whose rows are mostly cold."""
    return "int4" if rows > 5_000 else "int8"


def item_table(sizes: DemoSizes) -> TablesConfig:
    item = TableConfig(
        name="item", rows=sizes.items, dim=sizes.sequence_dim, pooling="none", lookups=100, precision="int8", cache=CACHE,
        features=("item",),
    )  # fmt: skip
    return TablesConfig(batch=sizes.sequence_batch, tables=(item,))


def _both_plans(folder: Path, prefix: str, tables: TablesConfig, heat: HeatProfile) -> Plan:
    """Save the planner's plan, within the memory of fp32 rows, and the baseline."""
    plan = plan_within_fp32_memory(tables, heat)
    plan.save(folder / f"{prefix}planned.json")
    plain = plan.model_copy(update={"gradients": "fp32", "tables": tuple(map(_row_wise, plan.tables))})
    plain.save(folder / f"{prefix}fp32.json")
    return plan


def plan_within_fp32_memory(tables: TablesConfig, heat: HeatProfile) -> Plan:
    """A plan within the memory of fp32 rows: with all memory of a GPU, every small table would be on every GPU."""
    cluster = _cluster()
    budget = sum(table.rows * table.dim * 4 for table in tables.tables) / cluster.world_size
    while True:
        try:
            return make_plan(tables, heat, cluster, budget=round(budget), gradients="bf16")
        except BadInput:  # id maps and buffers of very small tables take more than the rows
            if budget > cluster.gpu.memory:
                raise
            budget *= 1.25


def _row_wise(table: TablePlan) -> TablePlan:
    """The table in fp32, with each row on one GPU."""
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
    """Two nodes of two GPUs on a network of 1 Gbit/s, as small as the batches."""
    links = Links(node=Link(bandwidth=5e9, latency=1e-5), cluster=Link(bandwidth=125e6, latency=3e-5))
    gpu = GpuSpec(memory=8_000_000_000, bandwidth=50e9)
    return Topology(name="two nodes of two GPUs", nodes=NODES, gpus_per_node=GPUS, gpu=gpu, links=links)


def _train(stages: Stages, sizes: DemoSizes) -> Found:
    """Train all four runs in one launch: loading torch in four processes takes longer than a run."""
    stages.python(["-m", "examples.demo.worker", "warm", json.dumps(asdict(sizes))])
    count = str(NODES * GPUS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m", "examples.demo.worker"]
    stages.say(f"      $ torchrun --nproc-per-node {count} ... (dlrm and sequence model, each by both plans)")
    stages.python([*launch, "train", json.dumps(asdict(sizes))])
    return {arm: json.loads((stages.folder / f"trained_{arm}.json").read_text()) for arm in ARMS}


def _serve(stages: Stages, sizes: DemoSizes) -> Found:
    for arm in ARMS:
        stages.say(f"      $ thermocline serve run checkpoint_{arm} --shards {NODES * GPUS}")
    found: Found = {**query({arm: stages.folder / f"checkpoint_{arm}" for arm in ARMS}, NODES * GPUS, sizes.asked)}
    return found
