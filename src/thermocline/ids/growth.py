"""How a table grows: ids have places in buckets of 64, and places have rows.

    place   64 * bucket + n: where the key, the counts and the tag of an id are
    row     its place; in a table that grows n * buckets + bucket, so that rows with a small n come first

    buckets   0  1  2  3        rows   | n = 0 | n = 1 | n = 2 | ...            ... | n = 63 | shared rows |
    open      n = 0 to 2               | 0 1 2 3 4 5 6 7 8 9 10 11 | reserved                |

A table that grows opens the places n < `open` of all buckets. It grows by a chunk of rows, one of each bucket, which lie after
those that are open. So nothing is rehashed, no id and no row moves, and whatever holds rows (recorded graphs, batches that were
prefetched, lookups that wait for their backward) stays right. CPU memory that was never written takes no room.

Rejected: splitting one bucket after another (linear hashing). It fills buckets as evenly as in a table that is full, but half
of the rows of a bucket move with their values, state and slots, and nothing may hold their numbers meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thermocline.kernels.elastic.fields import BUCKET, MOST_LOAD


class PlaceOrder(NamedTuple):
    """Places and rows of a table; those of shared rows, and of a bucket that has fewer than 64 places, are equal."""

    buckets: int  # of 64 rows, with places in another order than rows; 0 in a table that does not grow

    @property
    def end(self) -> int:
        return BUCKET * self.buckets

    def rows(self, place_N: Tensor) -> Tensor:
        """The rows of places."""
        if not self.buckets:
            return place_N
        return torch.where(place_N < self.end, (place_N & (BUCKET - 1)) * self.buckets + (place_N >> 6), place_N)

    def of(self, rows_N: Tensor) -> Tensor:
        """The places of rows."""
        if not self.buckets:
            return rows_N
        return torch.where(rows_N < self.end, rows_N % self.buckets * BUCKET + rows_N // self.buckets, rows_N)

    def closed(self, open: int) -> range:
        """Rows that a table has not grown to."""
        return range(open * self.buckets, self.end)


def opened(used: int, own: int) -> int:
    """Places of each bucket that a table with so many ids opens."""
    return min(BUCKET, -(-BUCKET * used * MOST_LOAD[1] // (MOST_LOAD[0] * own)))
