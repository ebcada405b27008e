"""Gradients over both hops of a journey in pieces: while one piece goes between nodes, the next goes inside of them.

The two hops use different links, and one after the other each would be idle half of the time. A piece is a part of the rows by
their numbers, which both sides of an exchange know, so nothing more has to be told. All gradients of a row are in one piece, in
the order of the ranks: sums are the same, to the bit, as those of gradients that go whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from thermocline.distributed.placement.local_shard import Sums

from .all_to_all import Hop

PIECES = 4
_SPREAD, _SHIFT = 0x9E3779B1, 20  # rows that one card owns may be every n-th, and must be in all pieces

Coming = Callable[[], Sums]  # waits for what comes, and sums it


def bring_in_pieces(first: Hop, second: Hop, grads_NW: Tensor) -> Sums:
    """Bring gradients to the cards that `first` asks, and sums of those that go on to the cards that `second` asks."""
    ways, found = first.ways, []
    for hop in (first, second):
        hop.count("gradients", hop.asked_PK * ways.routes.bytes_K["gradients"])
    with ways.meter.timed("gradients"):
        coming, beyond = _post(first, 0, grads_NW), None
        for piece in range(PIECES):
            sums = coming()
            if piece + 1 < PIECES:
                coming = _post(first, piece + 1, grads_NW)
            if beyond is not None:
                found.append(beyond())
            up_V = ways.up_K[ways.atlas(sums.rows_V).part_N]
            found.append(sums.at(~up_V))
            beyond = _post(second, piece, sums.grads_VW[up_V], sums.rows_V[up_V])
        assert beyond is not None
        found.append(beyond())
    return reduce(Sums.and_, found)


def _post(hop: Hop, piece: int, grads_VW: Tensor, rows_V: Tensor | None = None) -> Coming:
    """Send a piece of the gradients of the rows that were asked for. `rows_V`: whose they are, ascending; else of all."""
    ways = hop.ways
    fields_KF, bytes_K = ways.held.fields_KF, ways.routes.bytes_K["gradients"]
    which_N, which_M = ((_piece(rows) == piece).nonzero()[:, 0] for rows in (hop.rows_N, hop.rows_M))
    from_N = hop.order_N[which_N] if rows_V is None else torch.searchsorted(rows_V, hop.rows_N[which_N])
    message = ways.kernels.pack_gradients(grads_VW, fields_KF, hop.part_N[which_N], from_N)
    part_M = hop.where.part_N[which_M]
    out_PK, in_PK = hop.counts(hop.card_N[which_N], hop.part_N[which_N]), hop.counts(hop.sender_M[which_M], part_M)
    received, wait = hop.group.post(message, (out_PK @ bytes_K).tolist(), (in_PK @ bytes_K).tolist())
    ways.meter.hold("gradients", message.nbytes + received.nbytes)

    def come() -> Sums:
        wait()
        grads_MW: Tensor = ways.kernels.unpack_gradients(received.to(message.device), fields_KF, part_M, grads_VW.shape[1])
        return ways.sum_rows(hop.rows_M[which_M], grads_MW, None if hop.lookups_M is None else hop.lookups_M[which_M])

    return come


def _piece(rows_N: Tensor) -> Tensor:
    return (rows_N * _SPREAD >> _SHIFT) % PIECES
