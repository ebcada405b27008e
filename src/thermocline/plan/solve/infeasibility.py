"""The error for tables that do not fit: the missing bytes, the rank, and remedies, cheapest first."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import BadInput
from thermocline.plan.cost.memory import RowPrecision
from thermocline.plan.cost.step_work import rotation_bytes
from thermocline.plan.units import show_bytes

from .candidates import baseline_plans
from .precisions import PRECISION_ORDER, stored_bytes
from .solver import Problem

if TYPE_CHECKING:
    from thermocline.plan.make import PlanRequest

HASH_SHARES = tuple(2.0**-n for n in range(1, 11))  # of the bytes of all rows


def infeasible_error(request: PlanRequest, problem: Problem) -> BadInput:
    """The error for tables that no plan fits onto the GPUs: fields `rank`, `needed`, `available`, `table` and `remedies`."""
    least = min((found for _, found in baseline_plans(problem)), key=lambda found: found.peak_bytes)
    rank, needed, available = least.fullest, ceil(least.peak_bytes), problem.workload.budget
    tables, rows = request.tables.tables, [stats.curve.rows for stats in request.stats]
    sizes = [stored_bytes(n, t.dim, p, 0) for n, t, p in zip(rows, tables, request.precisions, strict=True)]
    largest = tables[int(np.argmax(sizes))].name
    id_maps = sum(work.id_map_bytes for work in problem.workload.tables)
    buffers = needed - _bytes_per_rank(request, problem, rows, request.precisions) - id_maps
    remedies = [
        *_remedies(request, problem, needed, buffers + id_maps),
        *_hash_remedy(request, buffers),
    ]
    message = (
        f"the tables do not fit: with every row once in the cluster, rank {rank} needs {show_bytes(needed)} and the budget is "
        f"{show_bytes(available)}: {show_bytes(needed - available)} too much (exchange buffers take "
        f"{show_bytes(max(buffers, 0))}; the largest table is {largest!r}). Remedies: {'; '.join(remedies)}"
    )
    return BadInput(message, rank=rank, needed=needed, available=available, table=largest, remedies=tuple(remedies))


def _hash_remedy(request: PlanRequest, buffers: float) -> list[str]:
    """The largest share of the bytes that fits with hash sizes."""
    for share in HASH_SHARES:
        try:
            total, loss = request.hash_outcome(share)
        except BadInput:  # fewer bytes than one row per table
            break
        if (size := total / request.topology.world_size + buffers) <= request.budget:
            takes = f"{show_bytes(size)} per GPU, {loss:.1%} of the information of ids lost to collisions"
            return [f"hash rows by heat to 1/{round(1 / share)} of their bytes with --hash {share:g} ({takes})"]
    return []


def _bytes_per_rank(request: PlanRequest, problem: Problem, rows: Sequence[float], precisions: Sequence[RowPrecision]) -> float:
    """Bytes per rank of a number of rows of each table, split evenly: rows, state, and block rotations."""
    ranks = request.topology.world_size
    each = zip(rows, precisions, problem.workload.tables, strict=True)
    return sum(stored_bytes(n, work.dim, p, work.state + rotation_bytes(ranks)) for n, p, work in each) / ranks


def _remedies(request: PlanRequest, problem: Problem, needed: float, buffers: float) -> list[str]:
    """Changes that would make the tables fit, with sizes: fewer bits, no unseen rows, smaller batches, then hardware."""
    remedies, topology = [], request.topology
    room, memory, ranks = problem.workload.budget, min(gpu.memory for gpu in topology.gpus), topology.world_size

    def fits(size: float, limit: float = room) -> str:
        return "" if size <= limit else ", not enough alone"

    tables, rows = request.tables.tables, [stats.curve.rows for stats in request.stats]
    lowest = [PRECISION_ORDER[-1] if t.precision is not None else p for t, p in zip(tables, request.precisions, strict=True)]
    smaller = _bytes_per_rank(request, problem, rows, lowest) + buffers
    named = sum(table.precision is not None for table in tables)
    if named and smaller < needed:
        those = "the table that names one" if named == 1 else f"the {named} tables that name one"
        size = f"down to {show_bytes(smaller)} per GPU{fits(smaller)}"
        remedies.append(f"let the plan choose the precision of {those} ({size})")
    unseen = _bytes_per_rank(request, problem, [stats.unseen for stats in request.stats], request.precisions)
    if unseen > 0:
        less = f"{show_bytes(unseen)} less per GPU{fits(needed - unseen)}"
        remedies.append(f"prune rows that the heat file never saw with --prune 0 ({less})")
    if buffers > room / 2:
        batch = request.tables.batch
        remedies.append(f"lower the batch of {batch} samples (exchange buffers take {show_bytes(buffers)} per GPU)")
    if buffers < room:
        gpus = int(np.ceil((needed - buffers) * ranks / (room - buffers)))
        nodes = -(-gpus // topology.gpus_per_node)
        remedies.append(f"use {gpus:,} GPUs instead of {ranks:,} ({nodes:,} nodes of {topology.gpus_per_node})")
    if memory > room:
        most = f"{show_bytes(min(needed, memory))} of {show_bytes(memory)} GPU memory{fits(needed, memory)}"
        remedies.append(f"raise the budget to {most}")
    if needed > memory:
        remedies.append(f"use GPUs with {show_bytes(needed)}")
    return remedies
