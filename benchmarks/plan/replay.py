"""Replays of logs on placements: how evenly ranks share the lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from thermocline.plan.balance import Placement, Rows, imbalance
from thermocline.plan.cost.step_cost import Floats


def copies_within(tables: Mapping[str, tuple[int, Floats, float]], ranks: int, extra: float) -> dict[str, int]:
    """The number of rows of each table to replicate: most weight per byte first, while replicas add at most the share `extra`
    of all bytes. A table is (rows, weights of its rows from the hottest on, bytes of a row)."""
    total = sum(rows * size for rows, _, size in tables.values())
    names = list(tables)
    worth = np.concatenate([tables[name][1] / tables[name][2] for name in names])
    owner = np.concatenate([np.full(len(tables[name][1]), n) for n, name in enumerate(names)])
    size = np.array([tables[name][2] for name in names])[owner]
    order = np.argsort(-worth, kind="stable")
    taken = order[np.cumsum(size[order]) * (ranks - 1) <= extra * total]
    counts = np.bincount(owner[taken], minlength=len(names))
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def predicted_imbalance(load_R: Floats, lookups: float) -> float:
    """Maximum over mean of the lookups that ranks serve, with `lookups` of all ranks: lookups that owners do not serve are
    served by the requesting ranks, evenly."""
    return imbalance(load_R + max(lookups - float(load_R.sum()), 0.0) / len(load_R))


def replay(placements: Sequence[Placement], logs: Sequence[Rows], lookups: Sequence[int], window: int) -> list[float]:
    """Maximum over mean of the lookups that ranks served in each window of a log.

    Args:
        placements: One placement per table.
        logs: One array of rows per table, all of the same time. In a step, every rank takes the next `lookups[t]` rows of
            table t.
        lookups: Lookups per rank and step of each table.
        window: Least lookups per rank in a window of whole steps; the rest at the end is dropped.
    """
    ranks = placements[0].ranks
    assert all(placement.ranks == ranks for placement in placements)
    steps_per_window = max(1, -(-window // sum(lookups)))
    steps = min(len(log) // (count * ranks) for log, count in zip(logs, lookups, strict=True))
    found = []
    for begin in range(0, steps - steps_per_window + 1, steps_per_window):
        load_R = np.zeros(ranks)
        for placement, log, count in zip(placements, logs, lookups, strict=True):
            part = log[begin * count * ranks : (begin + steps_per_window) * count * ranks]
            load_R += _served(placement, part.reshape(-1, count))
        found.append(imbalance(load_R))
    return found


def _served(placement: Placement, rows_AN: Rows) -> Floats:
    """Lookups that each rank serves, of [step and rank, lookups]: owners serve distinct rows without replicas, requesting
    ranks the rest."""
    rows_AN = np.sort(rows_AN, axis=1)
    first = np.ones(rows_AN.shape, bool)
    first[:, 1:] = rows_AN[:, 1:] != rows_AN[:, :-1]
    first &= ~placement.has_copies(rows_AN)
    owner, _ = placement.owner_and_place(rows_AN[first])
    served_R = np.bincount(owner, minlength=placement.ranks).astype(np.float64)
    local = (~first).sum(axis=1).reshape(-1, placement.ranks).sum(axis=0)
    return np.asarray(served_R + local, np.float64)
