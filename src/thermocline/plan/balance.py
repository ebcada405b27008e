"""Placement of rows without replicas: a fixed bijection of the row number, rotated block by block to balance the ranks.

    index     the row's number among the rows of its table without replicas: row - rank(row) in the bitmap of tiers
    position  scatter(index): a fixed bijection of 0 .. count - 1, so that neighbours do not stay neighbours
    block     position // ranks; also the place on the owner
    owner     (position + rotation[block]) % ranks

Rotations are chosen hottest block first. Without them the heat of warm rows does not average out: MovieLens' 3,706 items on 32
ranks are off by 25%, with them by less than 2%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cost.step_cost import Floats

Rows = NDArray[np.int64]

# Odd numbers whose products scatter well. Fixed: the place of every row on disk and GPU follows from them.
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MOST_BLOCKS = 1 << 16  # the hottest blocks are rotated; the others are cold enough to average out
MOST_ROWS = 64  # the hottest rows of a block decide its rotation


def scatter(index_N: Rows, count: int) -> Rows:
    """A fixed bijection of 0 .. count - 1: multiply and fold on the next power of two, repeated while outside the range."""
    bits = max(1, int(count - 1).bit_length())
    mask, fold = np.uint64((1 << bits) - 1), np.uint64(max(1, bits // 2))
    at_N = np.array(index_N, np.uint64)
    left = np.arange(len(at_N))
    while len(left):
        step = at_N[left]
        for multiplier in MULTIPLIERS:
            step ^= step >> fold
            step = (step * np.uint64(multiplier)) & mask
        step ^= step >> fold
        at_N[left] = step
        left = left[step >= count]
    return at_N.astype(np.int64)


@dataclass(frozen=True)
class Placement:
    """The rows of one table: replicated rows, sorted, and the rotation of each block of the others."""

    rows: int
    ranks: int
    copied_H: Rows
    rotations_B: NDArray[np.uint16]

    @property
    def cold(self) -> int:
        return self.rows - len(self.copied_H)

    def has_copies(self, rows_N: Rows) -> NDArray[np.bool_]:
        return np.isin(rows_N, self.copied_H)

    def owner_and_place(self, rows_N: Rows) -> tuple[Rows, Rows]:
        """The owner of rows without replicas, and their place on it."""
        position_N = scatter(rows_N - np.searchsorted(self.copied_H, rows_N), self.cold)
        block_N = position_N // self.ranks
        return (position_N + self.rotations_B[block_N]) % self.ranks, block_N


@dataclass(frozen=True)
class PlacementInput:
    """One table for placement: its hottest rows first, and the weight of each."""

    rows: int
    ids_H: Rows
    weights_H: Floats
    copies: int  # the hottest rows with replicas
    spread: float = 0.0  # weight of the rows that are not listed, taken as even


def request_probability(counts_H: NDArray[np.int64] | Floats, lookups: float) -> Floats:
    """The weight of rows with these counts: the chance that a rank requests them in a step (only distinct rows travel)."""
    share_H = counts_H / max(float(counts_H.sum()), 1.0)
    return np.asarray(-np.expm1(lookups * np.log1p(-np.minimum(share_H, 1 - 1e-12))), np.float64)


def place(tables: Sequence[PlacementInput], ranks: int) -> tuple[list[Placement], Floats]:
    """A placement for every table, one after the other, each balancing the load of those before; and the load of all ranks."""
    load_R = np.zeros(ranks)
    hottest_first = sorted(tables, key=lambda table: -float(table.weights_H[table.copies : table.copies + 1].sum()))
    made = {id(table): _place_one(table, ranks, load_R) for table in hottest_first}
    return [made[id(table)] for table in tables], load_R


def _place_one(table: PlacementInput, ranks: int, load_R: Floats) -> Placement:
    """The placement of one table; adds its weight to `load_R`."""
    copied_H = np.sort(table.ids_H[: table.copies])
    ids, weights = table.ids_H[table.copies :], table.weights_H[table.copies :]
    cold = table.rows - len(copied_H)
    rotations_B = np.zeros(max(1, -(-cold // ranks)), np.uint16)
    placement = Placement(table.rows, ranks, copied_H, rotations_B)
    load_R += table.spread / ranks
    if not len(ids):
        return placement
    position = scatter(ids - np.searchsorted(copied_H, ids), cold)
    choose_rotations(position, weights, rotations_B, ranks, load_R)
    return placement


def choose_rotations(
    position: Rows, weights: Floats, rotations_B: NDArray[np.integer[Any]], ranks: int, load_R: Floats
) -> None:
    """Rotates the hottest blocks to balance the ranks: sets `rotations_B` and adds to `load_R`."""
    block, column = position // ranks, position % ranks
    order = np.lexsort((-weights, block))
    block, column, weights = block[order], column[order], weights[order]
    begins = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
    ends = np.r_[begins[1:], len(block)]
    by_heat = np.argsort(-weights[begins], kind="stable")
    cold_blocks = np.isin(block, block[begins[by_heat[MOST_BLOCKS:]]])
    owner = (column[cold_blocks] + rotations_B[block[cold_blocks]]) % ranks
    load_R += np.bincount(owner, weights[cold_blocks], minlength=ranks)
    rotations = np.arange(ranks)
    for n in by_heat[:MOST_BLOCKS]:
        hottest = slice(begins[n], min(ends[n], begins[n] + MOST_ROWS))
        owners = (column[hottest, None] + rotations) % ranks  # [row, rotation]
        rotation = int(np.argmin(weights[hottest] @ load_R[owners]))
        rotations_B[block[begins[n]]] = rotation
        rows = slice(begins[n], ends[n])
        np.add.at(load_R, (column[rows] + rotation) % ranks, weights[rows])


def imbalance(load_R: Floats) -> float:
    """Maximum over mean."""
    return float(load_R.max() / max(load_R.mean(), 1e-30))
