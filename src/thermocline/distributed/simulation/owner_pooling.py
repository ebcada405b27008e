"""Owner-pooled lookups in the simulator: `exchange/owner_pooling.py` for all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.distributed.exchange.routes import PHASES, Phase, Routes, links_of
from thermocline.distributed.placement.table_map import Counts
from thermocline.plan.model import LINK_CLASSES

Locate = Callable[[Counts], tuple[Counts, Counts]]  # parts and homes of rows


class Transfers(NamedTuple):
    """Sender, receiver and part of items."""

    from_N: Counts
    to_N: Counts
    part_N: Counts


class OwnerPooledRequests(NamedTuple):
    """Lookups that owners pool: rows, transfers of their ids, and of the partial sums of bags."""

    row_N: Counts
    ids: Transfers
    sums: Transfers


def split_owner_pooled(
    routes: Routes, locate: Locate, rank_N: Counts, offsets: Counts | None, row_N: Counts
) -> tuple[NDArray[np.bool_], OwnerPooledRequests]:
    """Split the lookups of one feature: flags of those that the requester pools, and the others. No offsets: one per bag."""
    bag_N = np.arange(len(row_N)) if offsets is None else np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    row_U, at_N = np.unique(row_N, return_inverse=True)
    part_U, home_U = locate(row_U)
    pooled_N = routes.owner_pooled_K[part_U][at_N]
    rank_M, bag_M, part_M, home_M = (each[pooled_N] for each in (rank_N, bag_N, part_U[at_N], home_U[at_N]))
    _, first_S = np.unique(bag_M * (routes.nodes * routes.local_size) + home_M, return_index=True)
    ids = Transfers(rank_M, home_M, part_M)
    return ~pooled_N, OwnerPooledRequests(row_N[pooled_N], ids, Transfers(*(each[first_S] for each in ids)))


def joined(parts: Sequence[OwnerPooledRequests]) -> OwnerPooledRequests:
    """The requests of several features."""
    nothing = np.zeros(0, np.int64)

    def ends(each: Sequence[Transfers]) -> Transfers:
        return Transfers(
            *(np.concatenate([nothing, *column]) for column in (zip(*each, strict=True) if each else ((), (), ())))
        )

    rows = np.concatenate([nothing, *(part.row_N for part in parts)])
    return OwnerPooledRequests(rows, ends([part.ids for part in parts]), ends([part.sums for part in parts]))


def sums_sent(pooled: OwnerPooledRequests, routes: Routes) -> Iterator[tuple[Phase, Counts, Counts]]:
    """Bytes sent and received in each phase [rank, link class, part]: ids, sums back, gradients."""
    shape = routes.nodes * routes.local_size, len(LINK_CLASSES), len(routes.owner_pooled_K)
    for phase in PHASES["request"]:
        from_N, to_N, part_N = pooled.ids if phase == "ids" else pooled.sums
        link_N = links_of(from_N, to_N, routes.local_size)
        keys = [(end_N * shape[1] + link_N) * shape[2] + part_N for end_N in (from_N, to_N)]
        out_CLK, in_CLK = (
            np.bincount(key_N, minlength=int(np.prod(shape))).reshape(shape) * routes.sum_bytes_K[phase] for key_N in keys
        )
        yield (phase, in_CLK, out_CLK) if phase == "rows" else (phase, out_CLK, in_CLK)
