"""When nothing fits: by how many bytes, on which card, and what would help, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np

from thermocline.errors import BadInput
from thermocline.plan.cost.heat_input import Seen
from thermocline.plan.cost.memory import Store
from thermocline.plan.cost.step_work import turn_bytes
from thermocline.plan.tables import Tables
from thermocline.plan.topology import Topology
from thermocline.plan.units import show_bytes

from .candidates import plain
from .precisions import LADDER, stored_bytes
from .solver import Problem

SHARES = tuple(2.0**-n for n in range(1, 11))  # of the bytes of all rows, tried for hash sizes


def infeasible(
    tables: Tables, topology: Topology, problem: Problem, stores: Sequence[Store], seen: Sequence[Seen],
    hashed: Callable[[float], tuple[float, float]],
) -> BadInput:  # fmt: skip
    """The error for tables that no plan fits onto the cards. `hashed`: bytes of the cluster and harm, if rows by heat had this
    share of their bytes."""
    least = min((found for _, found in plain(problem)), key=lambda found: found.fullest)
    card, need, room = int(np.argmax(least.bytes_C)), ceil(least.fullest), problem.job.budget
    missing = need - room
    largest = int(
        np.argmax([stored_bytes(s.curve.rows, t.dim, k, 0) for s, t, k in zip(seen, tables.tables, stores, strict=True)])
    )
    held, maps = _held(tables, problem, stores, seen), sum(work.ids for work in problem.job.works)
    buffers = need - held - maps
    ways = _ways(tables, topology, problem, stores, seen, need, buffers + maps)
    out = "; ".join([*ways, *_hash_way(hashed, topology.cards, room, buffers)])
    return BadInput(
        f"the tables do not fit: card {card} would hold {show_bytes(need)} with every row once in the cluster, and may hold "
        f"{show_bytes(room)}: {show_bytes(missing)} too much (buffers of the exchange are {show_bytes(max(buffers, 0))} of it; "
        f"the largest table is {tables.tables[largest].name!r}). Ways out: {out}"
    )


def _hash_way(hashed: Callable[[float], tuple[float, float]], cards: int, room: float, buffers: float) -> list[str]:
    """The largest share of the bytes that fits, if hash sizes were asked for."""
    for share in SHARES:
        try:
            once, harm = hashed(share)
        except BadInput:  # fewer bytes than one row each
            break
        if once / cards + buffers <= room:
            takes = f"{show_bytes(once / cards + buffers)} a card, {harm:.1%} of what ids say lost to collisions"
            return [f"rows by heat in 1/{round(1 / share)} of their bytes, --hash {share:g} ({takes})"]
    return []


def _held(tables: Tables, problem: Problem, stores: Sequence[Store], seen: Sequence[Seen]) -> float:
    """Bytes a card of all tables, split evenly: rows, state, and the turns of their blocks."""
    states = [work.state + turn_bytes(problem.job.machine.all) for work in problem.job.works]
    each = zip(seen, tables.tables, stores, states, strict=True)
    return sum(stored_bytes(s.curve.rows, t.dim, k, state) for s, t, k, state in each) / problem.job.machine.all


def _ways(
    tables: Tables, topology: Topology, problem: Problem, stores: Sequence[Store], seen: Sequence[Seen],
    need: float, buffers: float,
) -> list[str]:  # fmt: skip
    """What would make the tables fit, each with its size: bits, rows nobody asks for, smaller steps, then machines."""
    ways, room = [], problem.job.budget
    lowest = [LADDER[-1] if table.precision is not None else store for table, store in zip(tables.tables, stores, strict=True)]
    smaller = _held(tables, problem, lowest, seen) + buffers
    named = sum(table.precision is not None for table in tables.tables)
    if named and smaller < need:
        those = "the table that names one" if named == 1 else f"{named} tables that name one"
        fits = "" if smaller <= room else ", which is not enough alone"
        ways.append(f"let the plan choose the precision of {those} (down to {show_bytes(smaller)} a card{fits})")
    unseen = sum(
        stored_bytes(s.unseen, t.dim, k, w.state + turn_bytes(problem.job.machine.all))
        for s, t, k, w in zip(seen, tables.tables, stores, problem.job.works, strict=True)
    ) / problem.job.machine.all  # fmt: skip
    if unseen > 0:
        fits = "" if need - unseen <= room else ", which is not enough alone"
        ways.append(f"prune rows that the heat file never saw ({show_bytes(unseen)} less a card{fits})")
    if buffers > room / 2:
        ways.append(f"lower the batch of {tables.batch} samples (the exchange of a step takes {show_bytes(buffers)} a card)")
    held = (need - buffers) * topology.cards
    if buffers < room:
        cards = int(np.ceil(held / (room - buffers)))
        nodes = -(-cards // topology.cards_per_node)
        ways.append(f"{cards:,} cards instead of {topology.cards:,} ({nodes:,} nodes of {topology.cards_per_node})")
    most = topology.card.memory
    if most > room:
        fits = "" if need <= most else ", which is not enough alone"
        ways.append(f"a budget of {show_bytes(min(need, most))} of the {show_bytes(most)} that a card has{fits}")
    if need > most:
        ways.append(f"cards with {show_bytes(need)}")
    return ways
