"""Which card holds a cold row: a fixed bijection of its number, turned block by block so that all cards get the same work.

    index     the row's number among the rows of its table that have no copies: row - rank(row) over the bitmap of tiers
    position  scatter(index): a fixed bijection of 0 .. count - 1, so that neighbours do not stay neighbours
    block     position // cards; place on its owner: the block's number
    owner     (position + turn[block]) % cards

A bijection alone is not enough. It gives every card the same number of rows, but the heat of a few thousand warm rows does not
average out: MovieLens' 3,706 items on 32 cards are off by 25%, retail's by 30%. So each block of W rows, one for each card, is
turned by a number of its own, one or two bytes for W rows. Turns are chosen hottest block first, each so that it lands where
least has landed before. What is left is as large as the coldest blocks: below 2% on every log. Rejected: an owner for each of
the warmest rows (4 bytes for each, on every card; with a tenth of the rows still 15% off on MovieLens).

Hot rows are copied, so the card that asks serves them; so it does a row that it asks for again in the same step, for the
exchange moves distinct rows. What is left is `Placement`'s, and the weight of a row is the number of cards expected to ask for
it in a step, not how often it is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput

from .cost.step_cost import Floats

Rows = NDArray[np.int64]

# Odd numbers whose products scatter well; fixed, as the place of every row on disk and card follows from them.
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MOST_BLOCKS = 1 << 16  # of the hottest are turned; the others are so cold that they average out
MOST_ROWS = 64  # of a block are looked at, its hottest


def scatter(index_N: Rows, count: int) -> Rows:
    """A fixed bijection of 0 .. count - 1: multiply and fold on the next power of two, again where that leaves the range."""
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
    """The rows of one table: those with copies, sorted, and the turn of each block of the others."""

    rows: int
    cards: int
    copied_H: Rows
    turns_B: NDArray[np.uint16]

    @property
    def cold(self) -> int:
        return self.rows - len(self.copied_H)

    def has_copies(self, rows_N: Rows) -> NDArray[np.bool_]:
        return np.isin(rows_N, self.copied_H)

    def owner_and_place(self, rows_N: Rows) -> tuple[Rows, Rows]:
        """The card of cold rows, and where on it they are."""
        position_N = scatter(rows_N - np.searchsorted(self.copied_H, rows_N), self.cold)
        block_N = position_N // self.cards
        return (position_N + self.turns_B[block_N]) % self.cards, block_N


@dataclass(frozen=True)
class Heat:
    """What is known of one table when rows are placed: its hottest rows first, and how much work each of them is."""

    rows: int
    ids_H: Rows
    weights_H: Floats
    copies: int  # so many of the hottest are copied
    spread: float = 0.0  # work of the rows that are not listed, taken to be even


def distinct(counts_H: NDArray[np.int64] | Floats, lookups: float) -> Floats:
    """Work of rows that were looked up so often, a step: the chance that a card asks, which makes `lookups` of them a step."""
    share_H = counts_H / max(float(counts_H.sum()), 1.0)
    return np.asarray(-np.expm1(lookups * np.log1p(-np.minimum(share_H, 1 - 1e-12))), np.float64)


def place(tables: Sequence[Heat], cards: int) -> tuple[list[Placement], Floats]:
    """A placement for every table, made one after the other so that each evens out what the others left; and the work of
    cards for cold rows."""
    load_C = np.zeros(cards)
    placements = []
    for heat in sorted(tables, key=lambda heat: -float(heat.weights_H[heat.copies : heat.copies + 1].sum())):
        placements.append((heat, _turned(heat, cards, load_C)))
    made = {id(heat): placement for heat, placement in placements}
    return [made[id(heat)] for heat in tables], load_C


def _turned(heat: Heat, cards: int, load_C: Floats) -> Placement:
    """One table's placement; adds its work to `load_C`."""
    copied_H = np.sort(heat.ids_H[: heat.copies])
    ids, weights = heat.ids_H[heat.copies :], heat.weights_H[heat.copies :]
    cold = heat.rows - len(copied_H)
    turns_B = np.zeros(max(1, -(-cold // cards)), np.uint16)
    placement = Placement(heat.rows, cards, copied_H, turns_B)
    load_C += heat.spread / cards
    if not len(ids):
        return placement
    position = scatter(ids - np.searchsorted(copied_H, ids), cold)
    choose_turns(position, weights, turns_B, cards, load_C)
    return placement


def choose_turns(position: Rows, weights: Floats, turns_B: NDArray[np.integer[Any]], cards: int, load_C: Floats) -> None:
    """Turn blocks so that cards get the same work, hottest block first: sets `turns_B`, adds to `load_C`. Blocks that are not
    among the hottest keep the turn they have."""
    block, column = position // cards, position % cards
    order = np.lexsort((-weights, block))
    block, column, weights = block[order], column[order], weights[order]
    begins = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
    ends = np.r_[begins[1:], len(block)]
    by_heat = np.argsort(-weights[begins], kind="stable")
    cold_blocks = np.isin(block, block[begins[by_heat[MOST_BLOCKS:]]])
    lands = (column[cold_blocks] + turns_B[block[cold_blocks]]) % cards
    load_C += np.bincount(lands, weights[cold_blocks], minlength=cards)
    turns = np.arange(cards)
    for n in by_heat[:MOST_BLOCKS]:
        here = slice(begins[n], min(ends[n], begins[n] + MOST_ROWS))
        lands = (column[here, None] + turns) % cards  # [row, turn]
        turn = int(np.argmin(weights[here] @ load_C[lands]))
        turns_B[block[begins[n]]] = turn
        whole = slice(begins[n], ends[n])
        np.add.at(load_C, (column[whole] + turn) % cards, weights[whole])


def hottest(tables: Mapping[str, tuple[int, Floats, float]], cards: int, extra: float) -> dict[str, int]:
    """How many rows of each table to copy: those with most work a byte, while copies add at most `extra` of all bytes. A table
    is (rows, work of its rows from the hottest on, bytes of a row)."""
    total = sum(rows * size for rows, _, size in tables.values())
    names = list(tables)
    worth = np.concatenate([tables[name][1] / tables[name][2] for name in names])
    owner = np.concatenate([np.full(len(tables[name][1]), n) for n, name in enumerate(names)])
    size = np.array([tables[name][2] for name in names])[owner]
    order = np.argsort(-worth, kind="stable")
    taken = order[np.cumsum(size[order]) * (cards - 1) <= extra * total]
    counts = np.bincount(owner[taken], minlength=len(names))
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def uneven(load_C: Floats) -> float:
    """Maximum over mean."""
    return float(load_C.max() / max(load_C.mean(), 1e-30))


def predicted(load_C: Floats, lookups: float) -> float:
    """Maximum over mean of the lookups that cards serve, if they make `lookups` in all: what is not cold work of owners is
    served by the cards that ask, which all ask for the same."""
    return uneven(load_C + max(lookups - float(load_C.sum()), 0.0) / len(load_C))


def replay(placements: Sequence[Placement], logs: Sequence[Rows], lookups: Sequence[int], window: int) -> list[float]:
    """Maximum over mean of the lookups that cards served in each window of a log.

    `logs` has one array of rows for each table, all of the same time; in a step every card takes the next `lookups[t]` of table
    t. A window is at least so many lookups a card, in whole steps; what is left at the end is not counted.
    """
    cards = placements[0].cards
    if any(placement.cards != cards for placement in placements):
        raise BadInput(f"placements are for {sorted({placement.cards for placement in placements})} cards; give one number")
    steps_a_window = max(1, -(-window // sum(lookups)))
    steps = min(len(log) // (count * cards) for log, count in zip(logs, lookups, strict=True))
    found = []
    for begin in range(0, steps - steps_a_window + 1, steps_a_window):
        load_C = np.zeros(cards)
        for placement, log, count in zip(placements, logs, lookups, strict=True):
            part = log[begin * count * cards : (begin + steps_a_window) * count * cards]
            load_C += _served(placement, part.reshape(-1, count))
        found.append(uneven(load_C))
    return found


def _served(placement: Placement, rows_AN: Rows) -> Floats:
    """Lookups that each card serves of [step and card, lookups]: owners the distinct cold rows, askers everything else."""
    asked_AN = np.sort(rows_AN, axis=1)
    first = np.ones(asked_AN.shape, bool)
    first[:, 1:] = asked_AN[:, 1:] != asked_AN[:, :-1]
    first &= ~placement.has_copies(asked_AN)
    owner, _ = placement.owner_and_place(asked_AN[first])
    served_C = np.bincount(owner, minlength=placement.cards).astype(np.float64)
    themselves = (~first).sum(axis=1).reshape(-1, placement.cards).sum(axis=0)
    return np.asarray(served_C + themselves, np.float64)
