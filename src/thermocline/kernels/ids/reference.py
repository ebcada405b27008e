"""Map raw ids of many features to rows: the definition, in plain PyTorch.

hash(id, key)   splitmix64((id ^ key) * GOLDEN), on 64 bits that wrap
reduce(h, n)    floor(h * n / 2^64), h taken as unsigned: a row below n
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline.errors import IdOutOfRange

from . import fields as M
from .bitmap import rank

_LOW = 0xFFFFFFFF


def signed(value: int) -> int:
    """The int64 with the bits of `value`, taken modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def right(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def splitmix64(z: Tensor) -> Tensor:
    z = (z ^ right(z, 30)) * signed(M.MIX1)
    z = (z ^ right(z, 27)) * signed(M.MIX2)
    return z ^ right(z, 31)


def hash_ids(ids_N: Tensor, key: int | Tensor) -> Tensor:
    """64 bits for each id, another for every other id."""
    return splitmix64((ids_N ^ key) * signed(M.GOLDEN))


def reduce_to(hashes_N: Tensor, rows: int) -> Tensor:
    """floor(h * rows / 2^64), in products of 32 bits: h = a * 2^32 + b, rows = c * 2^32 + d, c small."""
    a_N, b_N, c, d = right(hashes_N, 32), hashes_N & _LOW, rows >> 32, rows & _LOW
    middle_N = a_N * d + right(b_N * d, 32)  # below 2^64
    return a_N * c + right(middle_N, 32) + right(b_N * c + (middle_N & _LOW), 32)


def sorted_rank(field: list[int], words: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """(whether each id is kept, its rank)."""
    kept_K = words[field[M.PLACE] : field[M.PLACE] + field[M.KEPT_COUNT]]
    rank_N = torch.searchsorted(kept_K, ids_N)
    if not kept_K.numel():
        return torch.zeros_like(ids_N, dtype=torch.bool), rank_N
    return kept_K[rank_N.clamp(max=kept_K.numel() - 1)] == ids_N, rank_N


def bitmap_rank(field: list[int], words: Tensor, counts: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    inside_N = (ids_N >= field[M.LOW]) & (ids_N <= field[M.HIGH])
    at_N = torch.where(inside_N, ids_N - field[M.LOW], 0)
    kept_N, rank_N = rank(words[field[M.PLACE] :], counts[field[M.BLOCK] :], at_N)
    return inside_N & kept_N, rank_N


def map_feature(field: list[int], words: Tensor, counts: Tensor, ids_N: Tensor) -> Tensor:
    """Rows of the ids of one feature."""
    if field[M.START] == M.HASHED:
        ids_N = reduce_to(hash_ids(ids_N, field[M.START_KEY]), field[M.START_ROWS])
    if field[M.KEPT] == M.ALL:
        return ids_N + field[M.FIRST]
    if field[M.KEPT] == M.SORTED:
        kept_N, rank_N = sorted_rank(field, words, ids_N)
    else:
        kept_N, rank_N = bitmap_rank(field, words, counts, ids_N)
    other_N = field[M.KEPT_COUNT] + reduce_to(hash_ids(ids_N, field[M.OTHERS_KEY]), field[M.OTHERS])
    return torch.where(kept_N, rank_N, other_N) + field[M.FIRST]


def map_ids(fields_FM: Tensor, words: Tensor, counts: Tensor, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """Rows (int64) of the ids of all features; an id without a row raises."""
    features = fields_FM.shape[0]
    batch = (offsets.numel() - 1) // features
    ends = offsets[::batch].tolist() if batch else [0] * (features + 1)
    rows_N = torch.empty_like(ids_N, dtype=torch.int64)
    for f, field in enumerate(fields_FM.tolist()):
        mine_N = ids_N[ends[f] : ends[f + 1]].long()
        if field[M.START] == M.WITHIN:
            bad_N = (mine_N < 0) | (mine_N >= field[M.START_ROWS])
            if bool(bad_N.any()):
                at = int(bad_N.nonzero()[0])
                raise IdOutOfRange(f, ends[f] + at, int(mine_N[at]), field[M.START_ROWS], first=ends[f])
        rows_N[ends[f] : ends[f + 1]] = map_feature(field, words, counts, mine_N)
    return rows_N
