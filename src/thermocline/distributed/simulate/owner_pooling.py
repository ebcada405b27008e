"""Bags that the owners of their rows pool, as the simulator counts them: `shares.py` for all cards at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.distributed.exchange.routes import PHASES, Counts, Phase, Routes, links_of
from thermocline.plan.model import LINK_CLASSES

Located = Callable[[Counts], tuple[Counts, Counts]]  # parts and homes of rows


class Ends(NamedTuple):
    """From which card to which something goes, and the part it is of."""

    from_N: Counts
    to_N: Counts
    part_N: Counts


class PooledByOwners(NamedTuple):
    """Lookups that others pool: their rows, the way of their ids, and that of the shares of bags that they make."""

    row_N: Counts
    ids: Ends
    shares: Ends


def take_apart(
    routes: Routes, located: Located, card_N: Counts, offsets: Counts | None, row_N: Counts
) -> tuple[NDArray[np.bool_], PooledByOwners]:
    """Which lookups of one feature the asker pools; and the others. Without offsets every bag has one."""
    bag_N = np.arange(len(row_N)) if offsets is None else np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    row_U, at_N = np.unique(row_N, return_inverse=True)
    part_U, home_U = located(row_U)
    summed_N = routes.summed_K[part_U][at_N]
    card_M, bag_M, part_M, home_M = (each[summed_N] for each in (card_N, bag_N, part_U[at_N], home_U[at_N]))
    _, first_S = np.unique(bag_M * (routes.nodes * routes.cards) + home_M, return_index=True)
    ids = Ends(card_M, home_M, part_M)
    return ~summed_N, PooledByOwners(row_N[summed_N], ids, Ends(*(each[first_S] for each in ids)))


def joined(parts: Sequence[PooledByOwners]) -> PooledByOwners:
    """Those of several features."""
    nothing = np.zeros(0, np.int64)

    def ends(each: Sequence[Ends]) -> Ends:
        return Ends(*(np.concatenate([nothing, *column]) for column in (zip(*each, strict=True) if each else ((), (), ()))))

    rows = np.concatenate([nothing, *(part.row_N for part in parts)])
    return PooledByOwners(rows, ends([part.ids for part in parts]), ends([part.shares for part in parts]))


def sums_sent(apart: PooledByOwners, routes: Routes) -> Iterator[tuple[Phase, Counts, Counts]]:
    """What cards send and receive in each phase [card, link class, part]: ids, sums back, gradients."""
    shape = routes.nodes * routes.cards, len(LINK_CLASSES), len(routes.summed_K)
    for phase in PHASES["ask"]:
        from_N, to_N, part_N = apart.ids if phase == "ids" else apart.shares
        link_N = links_of(from_N, to_N, routes.cards)
        keys = [(end_N * shape[1] + link_N) * shape[2] + part_N for end_N in (from_N, to_N)]
        out_CLK, in_CLK = (
            np.bincount(key_N, minlength=int(np.prod(shape))).reshape(shape) * routes.sum_bytes_K[phase] for key_N in keys
        )
        yield (phase, in_CLK, out_CLK) if phase == "rows" else (phase, out_CLK, in_CLK)
