"""Layout of tables that are split over shards: fields of each feature, and the arguments of the kernels.

    RANGES    shard = FIRST + row // PER,  place = row % PER
    BLOCKS    block = row // shards,  shard = (row + rotation) % shards,  place = block; the rotation is a byte of `rotations`
              from ROTATIONS on, or (fmix32(block ^ KEY) * shards) >> 32

Copied rows are also on every shard, from COPY_PLACE on; overlay rows, changed after loading, are in the last segment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS, DIM, FORMAT, STRIDE, META_STRIDE, SCHEME, FIRST, PER, ROTATIONS, KEY, COPY_PLACE = range(11)
KIND, COUNT, WORDS, BLOCK, LOW, HIGH = range(6)  # of a set
COPIED, OVERLAY = 11, 17  # where the two sets begin
FIELDS = 23

RANGES, BLOCKS = range(2)
NOTHING, SORTED, BITMAP = range(3)

HASHED = -1  # value of ROTATIONS
MIXED, ALL_RANGES, ALL_HASHED, ALL_ROTATED = range(4)  # scheme of all tables of a launch
MAX_SHARDS = 256  # rotations are bytes
MAX_UNPOOLED_ROWS = 1 << 12  # most ids of a request on the fast path


class ShardMissing(Exception):
    """A lookup needs a row of a shard that is down."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard} is down")
        self.shard = shard


class ShardedTables(NamedTuple):
    """Tables of all features, split over shards. F: features; C: shards and the overlay."""

    shards: int
    kinds: tuple[tuple[int, int], ...]  # distinct (DIM, FORMAT) of the features
    scheme: int  # MIXED, or the scheme of all tables
    sets: bool  # whether any row is copied or in the overlay
    fields_FN: Tensor  # int64 [F, FIELDS]
    rotations: Tensor  # uint8
    words: Tensor  # int64, of the sets
    counts: Tensor  # int32, of the sets
    segments: tuple[Tensor | None, ...]  # uint8, of each shard and the overlay; None if a shard is down
    codes_FC: Tensor  # int64, on the CPU: offset of the codes of place 0 in the segment
    meta_FC: Tensor  # the same for meta words
    bases_FC: Tensor  # int64: addresses of the codes of place 0; on a GPU, distances from the first segment
    meta_bases_FC: Tensor


class ServedBags(NamedTuple):
    """Rows to look up, by feature and bag.

    Feature f has bags ends_F1[f] to ends_F1[f + 1] - 1; bag b has rows offsets_B1[b] to offsets_B1[b + 1] - 1. Without offsets
    each row is a bag. Results of feature f are written to `out` from element target_F2[f, 0] on, target_F2[f, 1] apart.
    """

    rows_N: Tensor
    ends_F1: Tensor
    offsets_B1: Tensor | None
    weights_N: Tensor | None
    mode: int  # SUM or MEAN
    target_F2: Tensor
    total: int  # bags of all features
    each: int = 0  # bags of every feature, if equal
    align: int = 1  # a power of two that divides every number of target_F2

    def to(self, device: torch.device | str) -> ServedBags:
        """A copy on a device."""
        there: dict[str, Any] = {name: each.to(device) for name, each in self._asdict().items() if isinstance(each, Tensor)}
        return self._replace(**there)
