"""The cost of tables that are not split into tiers: table-wise on one rank, or row-wise with pooling by the owners.

A bag of L lookups arrives as one fp32 sum from each of W (1 - (1 - 1/W)^L) owners, or from the rank of a table-wise table. Each
occurrence of an id then travels, because the owner has to know its bag (`distributed/exchange/owner_pooling.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .step_cost import GRADIENTS, IDS, ROWS, TOUCHES, Floats, buffer_bytes, expected_owners
from .step_work import Grid, TableWork, Workload, rotation_bytes

HOT = 64  # rows whose owners are taken to be different


class UnsplitCosts(NamedTuple):
    """[T]: exposed seconds, seconds that may be hidden, bytes. Of the owner for table-wise tables, else of every rank."""

    exposed: Floats
    hidden: Floats
    bytes: Floats
    local: Floats  # [lookup and update, T] exposed seconds in GPU memory
    sent: Floats  # [link, direction, T] bytes, mean over ranks
    pooled: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]  # sums travel
    requested: Floats  # bytes of the buffers of every rank that requests rows of a table-wise table; `bytes` has the rest
    served: Floats  # [link, direction, T] bytes that the owner of a table-wise table exchanges with all other ranks
    mean: Floats  # exposed seconds of a rank, if many table-wise tables keep all ranks busy


def fixed_seconds(workload: Workload, grid: Grid) -> Floats:
    """Seconds [2, T] that every rank spends on lookup and update for any placement: writing results, reading gradients."""
    results = 4 * grid.dim * np.where([work.pooled for work in workload.tables], grid.bags, grid.lookups)
    return np.stack([results, results * (workload.gradient is not None)]) / workload.cluster.memory_rate


def one_copy_bytes(grid: Grid) -> Floats:
    """Bytes [T] of one copy of every table, with slots and optimizer state."""
    return np.asarray(((grid.row + grid.state)[:, None] * grid.rows + grid.slots * grid.rows).sum(axis=1), np.float64)


def _update_bytes(workload: Workload, grid: Grid) -> Floats:
    """Bytes read and written to update every requested row once."""
    each = 2 * (grid.row + grid.state) + 4 * grid.dim if workload.gradient else np.zeros_like(grid.dim)
    return np.asarray((grid.requested.any * grid.rows).sum(axis=1) * each, np.float64)


def _without_sync(moved: Floats) -> Floats:
    """[ids, rows and gradients, T] as all four directions: there is no sync."""
    return np.concatenate([moved, np.zeros_like(moved[:1])])


def table_wise_costs(workload: Workload, grid: Grid) -> UnsplitCosts:
    """Tables on one rank: the costs of that rank for all requesting ranks."""
    cluster = workload.cluster
    ranks, inside, between = cluster.world_size, cluster.gpus_per_node - 1, cluster.world_size - cluster.gpus_per_node
    distinct = (grid.requested.rank * grid.rows).sum(axis=1)
    rows = np.stack(
        [distinct * cluster.id_bytes, (grid.requested.rank * grid.rows * grid.wire).sum(axis=1), distinct * grid.gradient]
    )
    bags = np.stack([grid.lookups * cluster.id_bytes, grid.bags * grid.sum, grid.bags * grid.gradient])
    pooled = np.array([work.pooled for work in workload.tables]) & (bags.sum(axis=0) < rows.sum(axis=0))
    moved = np.where(pooled, bags, rows)  # [direction, T] bytes between the owner and one requesting rank
    served = np.zeros((2, 4, len(grid.dim)))
    served[:, :3] = moved * np.array([inside, between])[:, None, None]
    one_of_node = np.array([1.0, *[0.0] * (cluster.gpus_per_node - 1)])  # the owner alone
    seconds = cluster.uneven_seconds(served[..., None] * one_of_node)
    read = grid.read.sum(axis=1)
    lookup = np.where(pooled, ranks * (read + moved[ROWS]), read + 2 * ranks * moved[ROWS])
    local = np.stack([lookup, ranks * TOUCHES * moved[GRADIENTS] + _update_bytes(workload, grid)]) / cluster.memory_rate
    sent = served / ranks
    buffers = buffer_bytes(sent, _without_sync(moved / ranks)) / 2  # of one requesting rank, and of the owner for each
    exposed = local.sum(axis=0) + seconds[ROWS] + seconds[GRADIENTS]
    even = cluster.even_seconds(sent)
    mean = local.sum(axis=0) / ranks + even[ROWS] + even[GRADIENTS]
    held = one_copy_bytes(grid) + ranks * buffers
    return UnsplitCosts(exposed, seconds[IDS], held, local, sent, pooled, buffers, served, mean)


def share_of_bags(lengths: Floats, taken: Floats) -> Floats:
    """The share of bags of these lengths with a lookup on a rank that serves the share `taken` of all lookups."""
    return np.asarray(-np.expm1(np.maximum(lengths, 1e-9) * np.log1p(-np.minimum(taken, 1 - 1e-12))), np.float64)


def _owners(work: TableWork, length: float, ranks: int) -> float:
    """Expected number of ranks that own rows of a bag of one table, with `length` lookups as a mean."""
    known = work.lengths or ((1.0, 1.0),)
    scale = length / max(sum(each * share for each, share in known), 1e-9)
    hottest = work.curve.rows_K[:HOT].astype(np.int64)
    hot_H = np.repeat(work.curve.share_K[: len(hottest)], np.minimum(hottest, HOT))[:HOT]
    return expected_owners([(each * scale, share) for each, share in known], ranks, hot_H)


def owner_pooled_costs(workload: Workload, grid: Grid) -> UnsplitCosts:
    """Tables split row-wise over all ranks, each of which sums its part of a bag. Infinite where sums cannot travel."""
    cluster = workload.cluster
    shares = np.array([cluster.gpus_per_node - 1, cluster.world_size - cluster.gpus_per_node]) / cluster.world_size
    lengths = grid.lookups / np.maximum(grid.bags, 1e-9)
    sums = grid.bags * np.array(
        [_owners(work, length, cluster.world_size) for work, length in zip(workload.tables, lengths, strict=True)]
    )
    moved = np.stack([grid.lookups * cluster.id_bytes, sums * grid.sum, sums * grid.gradient])
    sent = np.zeros((2, 4, len(grid.dim)))
    sent[:, :3] = moved * shares[:, None, None]
    seconds = cluster.even_seconds(sent)
    updates = TOUCHES * moved[GRADIENTS] + _update_bytes(workload, grid) / cluster.world_size
    local = np.stack([grid.read.sum(axis=1) + TOUCHES * moved[ROWS], updates]) / cluster.memory_rate
    possible = np.array([work.pooled for work in workload.tables])
    exposed = np.where(possible, local.sum(axis=0) + seconds[ROWS] + seconds[GRADIENTS], np.inf)
    rotations = grid.rows.sum(axis=1) * rotation_bytes(cluster.world_size)
    held = (one_copy_bytes(grid) + rotations) / cluster.world_size
    buffers = buffer_bytes(sent, _without_sync(moved / cluster.world_size))
    none = np.zeros_like(sent)
    return UnsplitCosts(exposed, seconds[IDS], held + buffers, local, sent, possible, np.zeros_like(buffers), none, exposed)
