"""Time and memory of one plan of a large model, made in a separate process (see `benchmark.py`)."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.heat.curve import Curve
from thermocline.plan.make import make_plan
from thermocline.plan.report.page import plan_page
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology

PRESET = "hgx-h200"
BATCH, DENSE = 512, 10e-6  # samples a card and step; seconds of the dense part for each table


def model(tables: int, rows: float, seed: int = 0) -> tuple[TablesConfig, dict[str, Curve]]:
    """Tables of very different sizes, half of them looked up once a sample, others up to fifty times; heat by Zipf's law."""
    random = np.random.default_rng(seed)
    sizes = random.lognormal(0.0, 2.0, tables)
    sizes = np.maximum(10, np.round(sizes / sizes.sum() * rows)).astype(np.int64)
    made, heat = [], {}
    for n, size in enumerate(sizes):
        name = f"table{n:04}"
        made.append(
            TableConfig(
                name=name,
                rows=int(size),
                dim=int(random.choice([32, 64, 128])),
                pooling="none" if random.random() < 0.2 else "sum",
                lookups=float(random.choice([1, 1, 1, 5, 20, 50])),
            )
        )
        heat[name] = Curve.zipf(int(size), float(random.uniform(0.7, 1.2)), 1e9)
    return TablesConfig(batch=BATCH, dense=DENSE * tables, tables=tuple(made)), heat


def measure(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make the plan of {"tables", "rows", "nodes", "budget"}, write it and its page, and say what that took."""
    tables, heat = model(job["tables"], job["rows"])
    topology = Topology.load(PRESET, nodes=job["nodes"])
    begin = time.perf_counter()
    plan = make_plan(tables, heat, topology, budget=job["budget"])
    planned = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        (Path(folder) / "plan.html").write_text(plan_page(plan), encoding="utf-8")
        sizes = {name: (Path(folder) / name).stat().st_size for name in ("plan.json", "plan.html")}
    yield {
        "seconds": planned,
        "with_files": time.perf_counter() - begin,
        "cpu_seconds": time.process_time(),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "files": sizes,
        "step": plan.step.total,
        "exposed": plan.step.exposed,
        "binding": plan.binding,
        "balance": plan.balance,
        "candidates": {other.name: other.time for other in plan.candidates},
        "fullest": plan.fullest_rank.total,
    }
