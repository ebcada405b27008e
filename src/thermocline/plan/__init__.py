"""The planner: from heat, memory budget and topology to precision, replicas and placement of every row. Needs no GPU.

    make_plan(tables, heat, topology)   the plan; `explain`, `plan_page` and `check_run` describe and verify it
    TablesConfig, Topology              the input files
    Plan, MeasuredRun                   the output files
    hash_sizes, prune, unify            levers that reduce rows, on their own

Names are imported on first use: `thermocline --help` must not load pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline._lazy import lazy_exports

if TYPE_CHECKING:
    from .cost.memory import bytes_per_row
    from .estimate import estimate_memory
    from .make import make_plan
    from .model import Plan, TablePlan, Tier
    from .report.explain import explain
    from .report.page import plan_page
    from .run_file import MeasuredRun, RunComparison, check_run, fingerprint
    from .schema import shipped
    from .solve.row_levers import FeatureColumn, hash_sizes, prune, unify
    from .tables import TableConfig, TablesConfig
    from .topology import GpuSpec, HostSpec, Link, Links, Topology, presets

__all__ = [
    "FeatureColumn", "GpuSpec", "HostSpec", "Link", "Links", "MeasuredRun", "Plan", "RunComparison", "TableConfig", "TablePlan",
    "TablesConfig", "Tier", "Topology", "bytes_per_row", "check_run", "estimate_memory", "explain", "fingerprint", "hash_sizes",
    "make_plan", "plan_page", "presets", "prune", "shipped", "unify",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
