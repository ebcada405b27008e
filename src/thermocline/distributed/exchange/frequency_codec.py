"""How often rows were looked up, told with their ids: caches count that, and a card sees only its own batch.

An id has bits to spare. Its upper ones tell, of a row of which a card had n lookups, the logarithm of the largest power of two
in n, `MAX_WEIGHT` at most, which is what caches make of a count anyway. Where cards ask on for others, and where gradients of
copied rows are summed, lookups are added up and told the same way; so all who hold a copy of a row hear the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline.kernels.cache.reference import MAX_WEIGHT

BITS = MAX_WEIGHT.bit_length().bit_length() - 1  # of the logarithm
assert MAX_WEIGHT.bit_length() == 1 << BITS


def told(rows_N: Tensor, lookups_N: Tensor | None, wire: torch.dtype) -> Tensor:
    """Rows and their lookups as ids; rows alone where nobody counts."""
    if lookups_N is None:
        return rows_N.to(wire)
    exponent_N = torch.frexp(lookups_N.clamp(1, MAX_WEIGHT).float())[1].long() - 1
    return (rows_N | exponent_N << _shift(wire)).to(wire)


def heard(ids_N: Tensor, counted: bool) -> tuple[Tensor, Tensor | None]:
    """Ids as rows and their lookups."""
    rows_N, shift = ids_N.long(), _shift(ids_N.dtype)
    if not counted:
        return rows_N, None
    return rows_N & ((1 << shift) - 1), torch.ones_like(rows_N) << (rows_N >> shift)


def added(rows_V: Tensor, rows_M: Tensor, lookups_M: Tensor | None) -> Tensor | None:
    """Lookups of distinct rows, ascending, from those of several cards."""
    if lookups_M is None:
        return None
    return torch.zeros_like(rows_V).index_add_(0, torch.searchsorted(rows_V, rows_M), lookups_M)


def _shift(wire: torch.dtype) -> int:
    return 8 * wire.itemsize - 1 - BITS
