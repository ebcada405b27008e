"""What tables cost that are not split into tiers: on one card, or row-wise with sums instead of rows on the wire.

A bag of L lookups whose rows lie on W cards comes as one sum from each owner, W (1 - (1 - 1/W)^L) of them, in fp32. From a
table on one card it comes as one sum. That is fewer bytes than its rows where bags are long and rows seldom repeat. Then every
occurrence of an id travels, for the owner has to know which bag it belongs to (`distributed/exchange/owner_pooling.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .step_cost import GRADIENTS, IDS, ROWS, TOUCHES, Floats, held_buffers, owners_of_bag
from .step_work import Grid, Job, turn_bytes


class Costs(NamedTuple):
    """[T]: seconds exposed, seconds that may hide, bytes. Of the owner alone for tables on one card; else of every card."""

    exposed: Floats
    hidden: Floats
    bytes: Floats
    local: Floats  # [lookup and update, T] seconds of the exposed ones in card memory
    sent: Floats  # [link, direction, T] bytes, mean over cards
    pooled: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]  # sums travel


def always(job: Job, grid: Grid) -> Floats:
    """Seconds [2, T] that every card spends on lookups and on updates however rows are placed: results are written, their
    gradients read."""
    results = 4 * grid.dim * _results(job, grid)
    return np.stack([results, results * (job.gradient is not None)]) / job.machine.memory_rate


def _results(job: Job, grid: Grid) -> Floats:
    """Vectors that a card gets out of its lookups: one a bag, or one a lookup."""
    return np.where([work.pooled for work in job.works], grid.bags, grid.lookups)


def held(grid: Grid) -> Floats:
    """Bytes [T] of one copy of every table, its slots and its state."""
    slots = grid.full * grid.slot[:, None] + grid.near * grid.near_slot[:, None]
    return np.asarray(((grid.row + grid.state)[:, None] * grid.rows + slots * grid.rows).sum(axis=1), np.float64)


def _update(job: Job, grid: Grid) -> Floats:
    """Bytes that updating each touched row once reads and writes."""
    each = 2 * (grid.row + grid.state) + 4 * grid.dim if job.gradient else np.zeros_like(grid.dim)
    return np.asarray((grid.asked.any * grid.rows).sum(axis=1) * each, np.float64)


def asked_self(asked: Floats) -> Floats:
    """[ids, rows and gradients, T] that a card asks of itself, as directions: there is no sync."""
    return np.concatenate([asked, np.zeros_like(asked[:1])])


def on_one_card(job: Job, grid: Grid) -> Costs:
    """Tables whole on one card: its costs for asking cards all together."""
    machine = job.machine
    cards, inside, between = machine.all, machine.cards - 1, machine.all - machine.cards
    distinct = (grid.asked.card * grid.rows).sum(axis=1)
    rows = np.stack(
        [distinct * machine.id_bytes, (grid.asked.card * grid.rows * grid.wire).sum(axis=1), distinct * grid.gradient]
    )
    bags = np.stack([grid.lookups * machine.id_bytes, grid.bags * 4 * grid.dim, grid.bags * grid.gradient])
    pooled = np.array([work.pooled for work in job.works]) & (bags.sum(axis=0) < rows.sum(axis=0))
    asked = np.where(pooled, bags, rows)  # [direction, T] bytes between the owner and one asking card
    seconds = asked * (machine.seconds_L * [inside, between]).sum()
    read = grid.read.sum(axis=1)
    lookup = np.where(pooled, cards * (read + asked[ROWS]), read + 2 * cards * asked[ROWS])
    local = np.stack([lookup, cards * TOUCHES * asked[GRADIENTS] + _update(job, grid)]) / machine.memory_rate
    sent = np.zeros((2, 4, len(grid.dim)))
    sent[:, :3] = asked * np.array([inside, between])[:, None, None] / cards
    buffers = held_buffers(sent, asked_self(asked / cards)) / 2 * cards
    exposed = local.sum(axis=0) + seconds[ROWS] + seconds[GRADIENTS]
    return Costs(exposed, seconds[IDS], held(grid) + buffers, local, sent, pooled)


def share_of_bags(lengths: Floats, taken: Floats) -> Floats:
    """On what share of bags of so many lookups a card works that takes so much of them."""
    return np.asarray(-np.expm1(np.maximum(lengths, 1e-9) * np.log1p(-np.minimum(taken, 1 - 1e-12))), np.float64)


def sums_by_owners(job: Job, grid: Grid) -> Costs:
    """Tables split row by row over all cards, each of which sums its part of a bag. Infinite where sums cannot travel."""
    machine = job.machine
    shares = np.array([machine.cards - 1, machine.all - machine.cards]) / machine.all
    lengths = grid.lookups / np.maximum(grid.bags, 1e-9)
    sums = grid.bags * np.array([owners_of_bag(length, machine.all) for length in lengths])
    asked = np.stack([grid.lookups * machine.id_bytes, sums * 4 * grid.dim, sums * grid.gradient])
    sent = np.zeros((2, 4, len(grid.dim)))
    sent[:, :3] = asked * shares[:, None, None]
    seconds = np.tensordot(machine.seconds_L, sent, axes=1)
    updates = TOUCHES * asked[GRADIENTS] + _update(job, grid) / machine.all
    local = np.stack([grid.read.sum(axis=1) + TOUCHES * asked[ROWS], updates]) / machine.memory_rate
    possible = np.array([work.pooled for work in job.works])
    exposed = np.where(possible, local.sum(axis=0) + seconds[ROWS] + seconds[GRADIENTS], np.inf)
    turns = grid.rows.sum(axis=1) * turn_bytes(machine.all)
    buffers = held_buffers(sent, asked_self(asked / machine.all))
    return Costs(exposed, seconds[IDS], (held(grid) + turns) / machine.all + buffers, local, sent, possible)
