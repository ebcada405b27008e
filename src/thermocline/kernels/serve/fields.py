"""Where the rows of tables lie that are split over cards: numbers for each feature, and what kernels take beside them.

A card is a *segment*: bytes of its own, in shared memory or on a GPU. The rows that it holds of a table lie at *places* there,
one after another. A row finds its card and place by a few operations on its number, so there is no map of rows:

    RANGES    card = FIRST + row // PER,  place = row % PER            in order; with PER = ROWS the whole table on one card
    BLOCKS    block = row // cards,  card = (row + turn) % cards,  place = block
              each run of `cards` rows has one row for each card, turned by a number of its own: a byte of `turns` from TURNS
              on, where somebody chose them so that all cards get the same work; else (fmix32(block ^ KEY) * cards) >> 32, by
              the 32-bit mixer of `quantize/reference.py` on the low 32 bits of the block

Two sets of rows lie elsewhere, both kept as `ids/kept_ids.py` does, sorted or as a bitmap. *Copied* rows lie on every card too,
from place COPY_PLACE on, in the order of their numbers; a lookup takes the copy on card (its position % cards). Rows of the
*overlay* were changed after the tables were loaded: they lie in a segment of their own, the last, in their order.

The address of place 0 of every table on every card is in a small array, the table of base pointers: a lookup reads the rows of
whichever card with one more load than it would need on one. Zero stands for a card that is down.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS, DIM, FORMAT, STRIDE, META_STRIDE, WAY, FIRST, PER, TURNS, KEY, COPY_PLACE = range(11)
KIND, COUNT, WORDS, BLOCK, LOW, HIGH = range(6)  # of a set
COPIED, OVERLAY = 11, 17  # where the two sets begin
FIELDS = 23

RANGES, BLOCKS = range(2)
NOTHING, SORTED, BITMAP = range(3)

HASHED = -1  # as TURNS
MIXED, ALL_RANGES, ALL_HASHED, ALL_TURNED = range(4)  # how the tables of a launch are split
MOST_CARDS = 256  # turns are bytes
FEW = 1 << 12  # ids of a request that one thread looks up in any case


class CardMissing(Exception):
    """Rows were looked up that lie on a card that is down. The layer above knows how to say so."""

    def __init__(self, card: int) -> None:
        super().__init__(f"card {card} is down")
        self.card = card


class Placed(NamedTuple):
    """The tables of all features, split over cards. F: features; C: cards, and one more for the overlay."""

    cards: int
    kinds: tuple[tuple[int, int], ...]  # distinct (DIM, FORMAT) of the features
    ways: int  # MIXED, or what all tables have in common
    sets: bool  # whether any row is copied, or in the overlay
    fields_FN: Tensor  # int64 [F, FIELDS]
    turns: Tensor  # uint8
    words: Tensor  # int64, of the sets
    counts: Tensor  # int32, of the sets
    segments: tuple[Tensor | None, ...]  # uint8, one a card and the overlay's; None where a card is down
    codes_FC: Tensor  # int64, on the CPU: where the codes of place 0 begin in the segment
    meta_FC: Tensor  # the same of the meta words
    bases_FC: Tensor  # int64: addresses of the codes of place 0; on a GPU, how far from the first segment
    meta_bases_FC: Tensor


class Bags(NamedTuple):
    """What is looked up: rows, feature by feature, in bags.

    Feature f has bags ends_F1[f] to ends_F1[f + 1] - 1, bag b the rows offsets_B1[b] to offsets_B1[b + 1] - 1. Without offsets
    each row is a bag. The answers to the bags of feature f go to `out` from element target_F2[f, 0] on, target_F2[f, 1] apart.
    """

    rows_N: Tensor
    ends_F1: Tensor
    offsets_B1: Tensor | None
    weights_N: Tensor | None
    mode: int  # SUM or MEAN
    target_F2: Tensor
    total: int  # bags of all features
    each: int = 0  # bags of every feature, where all have as many
    align: int = 1  # a power of two that divides every number of target_F2

    def to(self, device: torch.device | str) -> Bags:
        """The same on a device."""
        offsets_B1 = None if self.offsets_B1 is None else self.offsets_B1.to(device)
        weights_N = None if self.weights_N is None else self.weights_N.to(device)
        rows_N, ends_F1, target_F2 = (each.to(device) for each in (self.rows_N, self.ends_F1, self.target_F2))
        return self._replace(rows_N=rows_N, ends_F1=ends_F1, offsets_B1=offsets_B1, weights_N=weights_N, target_F2=target_F2)
