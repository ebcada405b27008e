"""Choosing a split: which card holds which row. It follows from names, rows and cards (by plan, also from heat) alone.

    range     rows in order, as many on each card: card = row // per, per = rows / cards rounded up
    hash      runs of `cards` rows, one for each card, each run turned by a hash of (table, run)
    feature   whole tables: from the largest on, each to the card that has the fewest bytes
    plan      as hash, but turns are chosen from heat so that all cards get the same lookups, hottest runs first; rows that the
              plan has in tier 1 lie on every card besides, and are read from all in turn

Every card gets the same number of rows of a table, give or take one, but for `feature`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput
from thermocline.plan.balance import choose_rotations
from thermocline.plan.model import Plan, TablePlan

from .row_split import Rows, TableSplit, hashed_turn

SPLITS = ("hash", "range", "feature", "plan")
MOST_CARDS = 128


class TableShape(NamedTuple):
    """A table, as far as its split depends on it. `row_bytes`: codes and metadata."""

    name: str
    rows: int
    row_bytes: int


class RowHeat(NamedTuple):
    """Rows of a table that were looked up, hottest first, and how often."""

    rows_H: Rows
    counts_H: Rows


def key_of(table: str) -> int:
    """What makes the turns of one table others than those of the next."""
    return int.from_bytes(hashlib.sha256(table.encode()).digest()[:4], "little")


def split_tables(
    tables: Sequence[TableShape], cards: int, split: str, plan: Plan | None = None, heat: Mapping[str, RowHeat] | None = None
) -> list[TableSplit]:
    """How every table is split. `heat` (by table) and `plan` are for split="plan"."""
    if not 1 <= cards <= MOST_CARDS:
        raise BadInput(f"cards is {cards}; use 1 to {MOST_CARDS}")
    if split not in SPLITS:
        raise BadInput(f"split is {split!r}; use one of {', '.join(SPLITS)}")
    if split == "plan":
        if plan is None:
            raise BadInput(
                "split='plan' needs a plan: give one made by `thermocline plan make --goal serve`, or use split='hash'"
            )
        return _by_plan(tables, cards, plan, heat or {})
    if split == "feature":
        return _whole(tables, cards)
    if split == "range" or cards == 1:
        return [TableSplit(t.rows, cards, "ranges", per=-(-t.rows // cards)) for t in tables]
    return [TableSplit(t.rows, cards, "blocks", key=key_of(t.name)) for t in tables]


def _whole(tables: Sequence[TableShape], cards: int) -> list[TableSplit]:
    held, card_of = [0] * cards, {}
    for table in sorted(tables, key=lambda t: (-t.rows * t.row_bytes, t.name)):
        card_of[table.name] = min(range(cards), key=lambda c: (held[c], c))
        held[card_of[table.name]] += table.rows * table.row_bytes
    return [TableSplit(t.rows, cards, "ranges", first=card_of[t.name], per=t.rows) for t in tables]


def _by_plan(tables: Sequence[TableShape], cards: int, plan: Plan, heat: Mapping[str, RowHeat]) -> list[TableSplit]:
    if plan.topology.world_size != cards:
        raise BadInput(
            f"the plan is for {plan.topology.world_size} cards, and there are {cards}; plan for {cards}, or use split='hash'"
        )
    known = {each.name: each for each in plan.tables}
    if missing := [table.name for table in tables if table.name not in known]:
        raise BadInput(
            f"the plan has no table {missing[0]!r}; it has {', '.join(known)}: plan for the tables of the checkpoint"
        )
    made: dict[str, TableSplit] = {}
    load_C = np.zeros(cards)
    # The hottest cold row first: what it leaves uneven the others can even out.
    for table in sorted(tables, key=lambda t: -_warmest(known[t.name], heat.get(t.name))):
        made[table.name] = _planned(table, cards, known[table.name], heat.get(table.name), load_C)
    return [made[table.name] for table in tables]


def _copies(plan: TablePlan) -> int:
    return plan.rows if plan.placement == "replicated" else sum(tier.rows for tier in plan.tiers if tier.tier == 1)


def _warmest(plan: TablePlan, heat: RowHeat | None) -> int:
    return 0 if heat is None else int(heat.counts_H[_copies(plan) : _copies(plan) + 1].sum())


def _planned(table: TableShape, cards: int, plan: TablePlan, heat: RowHeat | None, load_C: NDArray[np.float64]) -> TableSplit:
    if plan.rows != table.rows:
        raise BadInput(f"table {table.name!r} has {table.rows} rows, and {plan.rows} in the plan; plan for this checkpoint")
    if plan.placement == "card":
        return TableSplit(table.rows, cards, "ranges", first=plan.rank or 0, per=table.rows)
    copies = _copies(plan)
    if heat is None:
        if 0 < copies < table.rows:
            raise BadInput(
                f"the plan has {copies} hot rows of table {table.name!r} on every card; give the heat file that it was made "
                "with, which names them"
            )
        heat = RowHeat(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return turned(table, cards, heat, copies, load_C)


def turned(table: TableShape, cards: int, heat: RowHeat, copies: int, load_C: NDArray[np.float64]) -> TableSplit:
    """Copies of the hottest rows, the other runs turned so that cards get the same lookups. Adds those to `load_C`."""
    rows_H, counts_H = heat
    if len(rows_H) < copies:  # rows never seen tie at 0, and go by their numbers
        unseen = np.setdiff1d(np.arange(table.rows), rows_H)[: copies - len(rows_H)]
        rows_H, counts_H = np.concatenate([rows_H, unseen]), np.concatenate([counts_H, np.zeros(len(unseen), np.int64)])
    copied_H = np.sort(rows_H[:copies])
    key = key_of(table.name)
    turns_B = hashed_turn(np.arange(-(-table.rows // cards)), key, cards).astype(np.uint8)
    if len(rows_H) > copies:
        choose_rotations(rows_H[copies:], counts_H[copies:].astype(np.float64), turns_B, cards, load_C)
    return TableSplit(table.rows, cards, "blocks", key=key, turns_B=turns_B, copied_H=copied_H)
