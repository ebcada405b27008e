"""The error for tables that do not fit: the missing bytes, the rank, and remedies, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np

from thermocline.errors import BadInput
from thermocline.plan.cost.heat_input import AccessStats
from thermocline.plan.cost.memory import RowPrecision
from thermocline.plan.cost.step_work import rotation_bytes
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology
from thermocline.plan.units import show_bytes

from .candidates import baseline_plans
from .precisions import PRECISION_ORDER, stored_bytes
from .solver import Problem

HASH_SHARES = tuple(2.0**-n for n in range(1, 11))  # of the bytes of all rows
NOT_ENOUGH = ", not enough alone"


def infeasible_error(
    tables: TablesConfig, topology: Topology, problem: Problem, precisions: Sequence[RowPrecision],
    stats: Sequence[AccessStats], hashed: Callable[[float], tuple[float, float]],
) -> BadInput:  # fmt: skip
    """The error for tables that no plan fits onto the GPUs, with the fields `rank`, `needed`, `available`, `table` and
    `remedies`.

    `hashed` gives the bytes of the cluster and the collision loss with hashing to a share of the bytes.
    """
    least = min((found for _, found in baseline_plans(problem)), key=lambda found: found.peak_bytes)
    rank, needed, available = int(np.argmax(least.bytes_R)), ceil(least.peak_bytes), problem.workload.budget
    sizes = [stored_bytes(s.curve.rows, t.dim, p, 0) for s, t, p in zip(stats, tables.tables, precisions, strict=True)]
    largest = tables.tables[int(np.argmax(sizes))].name
    id_maps = sum(work.id_map_bytes for work in problem.workload.tables)
    buffers = needed - _bytes_per_rank(tables, problem, precisions, stats) - id_maps
    remedies = [
        *_remedies(tables, topology, problem, precisions, stats, needed, buffers + id_maps),
        *_hash_remedy(hashed, topology.world_size, available, buffers),
    ]
    return BadInput(
        f"the tables do not fit: with every row once in the cluster, rank {rank} needs {show_bytes(needed)} and the budget is "
        f"{show_bytes(available)}: {show_bytes(needed - available)} too much (exchange buffers take "
        f"{show_bytes(max(buffers, 0))}; the largest table is {largest!r}). Remedies: {'; '.join(remedies)}",
        rank=rank,
        needed=needed,
        available=available,
        table=largest,
        remedies=tuple(remedies),
    )


def _hash_remedy(hashed: Callable[[float], tuple[float, float]], ranks: int, room: float, buffers: float) -> list[str]:
    """The largest share of the bytes that fits with hash sizes."""
    for share in HASH_SHARES:
        try:
            total, loss = hashed(share)
        except BadInput:  # fewer bytes than one row per table
            break
        if total / ranks + buffers <= room:
            takes = f"{show_bytes(total / ranks + buffers)} per GPU, {loss:.1%} of the information of ids lost to collisions"
            return [f"hash rows by heat to 1/{round(1 / share)} of their bytes with --hash {share:g} ({takes})"]
    return []


def _bytes_per_rank(
    tables: TablesConfig, problem: Problem, precisions: Sequence[RowPrecision], stats: Sequence[AccessStats]
) -> float:
    """Bytes per rank of all tables, split evenly: rows, state, and block rotations."""
    ranks = problem.workload.cluster.world_size
    states = [work.state + rotation_bytes(ranks) for work in problem.workload.tables]
    each = zip(stats, tables.tables, precisions, states, strict=True)
    return sum(stored_bytes(s.curve.rows, t.dim, p, state) for s, t, p, state in each) / ranks


def _remedies(
    tables: TablesConfig, topology: Topology, problem: Problem, precisions: Sequence[RowPrecision],
    stats: Sequence[AccessStats], needed: float, buffers: float,
) -> list[str]:  # fmt: skip
    """Changes that would make the tables fit, with sizes: fewer bits, no unseen rows, smaller batches, then hardware."""
    remedies, room, ranks = [], problem.workload.budget, topology.world_size
    lowest = [PRECISION_ORDER[-1] if t.precision is not None else p for t, p in zip(tables.tables, precisions, strict=True)]
    smaller = _bytes_per_rank(tables, problem, lowest, stats) + buffers
    named = sum(table.precision is not None for table in tables.tables)
    if named and smaller < needed:
        those = "the table that names one" if named == 1 else f"the {named} tables that name one"
        fits = "" if smaller <= room else NOT_ENOUGH
        remedies.append(f"let the plan choose the precision of {those} (down to {show_bytes(smaller)} per GPU{fits})")
    each = zip(stats, tables.tables, precisions, problem.workload.tables, strict=True)
    unseen = sum(stored_bytes(s.unseen, t.dim, p, w.state + rotation_bytes(ranks)) for s, t, p, w in each) / ranks
    if unseen > 0:
        fits = "" if needed - unseen <= room else NOT_ENOUGH
        remedies.append(f"prune rows that the heat file never saw with --prune 0 ({show_bytes(unseen)} less per GPU{fits})")
    if buffers > room / 2:
        remedies.append(f"lower the batch of {tables.batch} samples (exchange buffers take {show_bytes(buffers)} per GPU)")
    if buffers < room:
        gpus = int(np.ceil((needed - buffers) * ranks / (room - buffers)))
        nodes = -(-gpus // topology.gpus_per_node)
        remedies.append(f"use {gpus:,} GPUs instead of {ranks:,} ({nodes:,} nodes of {topology.gpus_per_node})")
    memory = topology.gpu.memory
    if memory > room:
        fits = "" if needed <= memory else NOT_ENOUGH
        remedies.append(f"raise the budget to {show_bytes(min(needed, memory))} of {show_bytes(memory)} GPU memory{fits}")
    if needed > memory:
        remedies.append(f"use GPUs with {show_bytes(needed)}")
    return remedies
