"""Splits of tables over shards. They follow from names, rows and the number of shards, and with a plan from heat.

range     rows in order: shard = row // per, per = rows / shards rounded up
hash      blocks of `shards` rows, one row for each shard, rotated by a hash of (table, block)
feature   whole tables: from the largest on, each to the shard with the fewest bytes
plan      as hash, with rotations chosen from heat so that all shards get the same lookups, and copies of tier-1 rows
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

from .row_split import Rows, TableSplit, hashed_rotation
from .segments import ServedTable

SPLITS = ("hash", "range", "feature", "plan")
MAX_SHARDS = 128


class RowHeat(NamedTuple):
    """Rows of a table that were looked up, hottest first, and their lookups."""

    rows_H: Rows
    counts_H: Rows


def hash_key(table: str) -> int:
    """The key of a table's rotations."""
    return int.from_bytes(hashlib.sha256(table.encode()).digest()[:4], "little")


def split_tables(
    tables: Sequence[ServedTable], shards: int, split: str, plan: Plan | None = None, heat: Mapping[str, RowHeat] | None = None
) -> list[TableSplit]:
    """Split tables over 1 to `MAX_SHARDS` shards by one of `SPLITS`.

    Args:
        plan: for split="plan", made for as many shards
        heat: of each table by name, for split="plan"
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise BadInput(f"shards is {shards}; use 1 to {MAX_SHARDS}", parameter="shards", value=shards)
    if split not in SPLITS:
        raise BadInput(f"split is {split!r}; use one of {', '.join(SPLITS)}", parameter="split", value=split)
    if split == "plan":
        if plan is None:
            words = "split='plan' needs a plan of `thermocline plan make --goal serve`; give one, or use split='hash'"
            raise BadInput(words, parameter="plan")
        return _by_plan(tables, shards, plan, heat or {})
    if split == "feature":
        return _whole_tables(tables, shards)
    if split == "range" or shards == 1:
        return [TableSplit(t.rows, shards, "ranges", per=-(-t.rows // shards)) for t in tables]
    return [TableSplit(t.rows, shards, "blocks", key=hash_key(t.name)) for t in tables]


def _whole_tables(tables: Sequence[ServedTable], shards: int) -> list[TableSplit]:
    held, shard_of = [0] * shards, {}
    for table in sorted(tables, key=lambda t: (-t.rows * t.row_bytes, t.name)):
        shard_of[table.name] = min(range(shards), key=lambda s: (held[s], s))
        held[shard_of[table.name]] += table.rows * table.row_bytes
    return [TableSplit(t.rows, shards, "ranges", first=shard_of[t.name], per=t.rows) for t in tables]


def _by_plan(tables: Sequence[ServedTable], shards: int, plan: Plan, heat: Mapping[str, RowHeat]) -> list[TableSplit]:
    planned = plan.topology.world_size
    if planned != shards:
        words = f"the plan is for {planned} shards, not {shards}; plan for {shards}, or use split='hash'"
        raise BadInput(words, parameter="plan", needed=planned, available=shards)
    known = {each.name: each for each in plan.tables}
    if missing := [table.name for table in tables if table.name not in known]:
        words = f"the plan has no table {missing[0]!r}; it has {', '.join(known)}: plan for the tables of the checkpoint"
        raise BadInput(words, parameter="plan", table=missing[0])
    made: dict[str, TableSplit] = {}
    load_S = np.zeros(shards)
    # The table with the hottest row that is not copied comes first: the other tables can even out what it leaves.
    for table in sorted(tables, key=lambda t: -_hottest_count(known[t.name], heat.get(t.name))):
        made[table.name] = _planned(table, shards, known[table.name], heat.get(table.name), load_S)
    return [made[table.name] for table in tables]


def _copies(plan: TablePlan) -> int:
    return plan.rows if plan.placement == "replicated" else sum(tier.rows for tier in plan.tiers if tier.tier == 1)


def _hottest_count(plan: TablePlan, heat: RowHeat | None) -> int:
    return 0 if heat is None else int(heat.counts_H[_copies(plan) : _copies(plan) + 1].sum())


def _planned(table: ServedTable, shards: int, plan: TablePlan, heat: RowHeat | None, load_S: NDArray[np.float64]) -> TableSplit:
    if plan.rows != table.rows:
        words = f"table {table.name!r} has {table.rows} rows, and {plan.rows} in the plan; plan for this checkpoint"
        raise BadInput(words, parameter="plan", table=table.name)
    if plan.placement == "card":
        return TableSplit(table.rows, shards, "ranges", first=plan.rank or 0, per=table.rows)
    copies = _copies(plan)
    if heat is None:
        if 0 < copies < table.rows:
            words = f"the plan copies {copies} hot rows of table {table.name!r}; give the heat file that the plan was made with"
            raise BadInput(words, parameter="heat", table=table.name)
        heat = RowHeat(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return balanced_split(table, shards, heat, copies, load_S)


def balanced_split(table: ServedTable, shards: int, heat: RowHeat, copies: int, load_S: NDArray[np.float64]) -> TableSplit:
    """Copy the hottest rows, and rotate blocks so that shards get the same lookups. Adds the lookups to `load_S`."""
    rows_H, counts_H = heat
    if len(rows_H) < copies:  # rows without lookups follow in the order of their numbers
        unseen = np.setdiff1d(np.arange(table.rows), rows_H)[: copies - len(rows_H)]
        rows_H, counts_H = np.concatenate([rows_H, unseen]), np.concatenate([counts_H, np.zeros(len(unseen), np.int64)])
    copied_H = np.sort(rows_H[:copies])
    key = hash_key(table.name)
    rotations_B = hashed_rotation(np.arange(-(-table.rows // shards)), key, shards).astype(np.uint8)
    if len(rows_H) > copies:
        choose_rotations(rows_H[copies:], counts_H[copies:].astype(np.float64), rotations_B, shards, load_S)
    return TableSplit(table.rows, shards, "blocks", key=key, rotations_B=rotations_B, copied_H=copied_H)
