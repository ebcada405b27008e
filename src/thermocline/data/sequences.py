"""Histories of users as batches for training and evaluation.

    B  samples of a batch     N  items of all samples     K  negatives of a sample
    L  items that the model reads     C  distinct items of the training part (the catalogue)

**Split.** The last item of every history of three or more items is held out, and predicted from the items before it. A cut at
one moment for all users would test how fast new items are learned, and half of the public logs have no times. Absolute numbers
are therefore optimistic where items come and go; comparisons of two ways to store the same tables are fair.

**Samples.** A history is cut into pieces of L + 1 items that overlap in one, so that every item but the first is predicted once
an epoch. The order of samples is a function of (seed, epoch).

**Negatives** are items at random positions of the training part, so their lookups have the heat of the log, and a plan made
from the log holds. Uniform negatives would be cold rows and most of the traffic. `chance` has the log-probability of each item,
for the correction in the loss.

A log takes 16 bytes of memory per interaction. Ids are those of the file; an `IdMap` maps them to rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap

from .random_bits import bits, key_of, right

Ints = NDArray[np.int64]
SHORTEST = 3  # items of a history that is tested
_NEGATIVE, _TESTED = 0x6E656761, 0x6A756467  # keys of random bits


class Histories(NamedTuple):
    """A training batch. `chance`: log-probability of drawing an item as a negative."""

    items_N: Tensor  # raw ids, oldest first
    offsets: Tensor  # B + 1
    negatives_BK: Tensor
    chance_N: Tensor
    chance_BK: Tensor

    @property
    def samples(self) -> int:
        return len(self.offsets) - 1

    def to(self, device: torch.device | str) -> Histories:
        return Histories(*(part.to(device, non_blocking=True) for part in self))


class Trials(NamedTuple):
    """A test batch: histories, and the next item of each."""

    items_N: Tensor
    offsets: Tensor
    next_B: Tensor


@dataclass(frozen=True)
class SequenceLog:
    """Concatenated histories. `column` names the items; at most `judged` histories are tested."""

    items_N: Ints
    offsets: Ints  # histories + 1
    column: str = "item"
    length: int = 50
    negatives: int = 64
    seed: int = 0
    judged: int = 10_000

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("negatives", 1), ("seed", 0), ("judged", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be at least {least}", parameter=name)

    # -- properties ---------------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        return len(self._stretches)

    @property
    def trials(self) -> int:
        return len(self._tested_U)

    @cached_property
    def catalogue_C(self) -> Ints:
        """The distinct items of the training part."""
        return self._known[0]

    def id_map(self) -> IdMap:
        """One row for each item of the training part, and one for all others."""
        return IdMap.pruned(self.catalogue_C)

    def training_items(self) -> Ints:
        """All items of the training part, for counting heat."""
        return self.items_N[self._train_N]

    @cached_property
    def _ends_U(self) -> Ints:
        """End of the training part of each history."""
        lengths_U = np.diff(self.offsets)
        return self.offsets[1:] - (lengths_U >= SHORTEST)

    @cached_property
    def _train_N(self) -> NDArray[np.bool_]:
        train_N = np.ones(len(self.items_N), bool)
        train_N[self._ends_U[self._ends_U < self.offsets[1:]]] = False
        return train_N

    @cached_property
    def _known(self) -> tuple[Ints, Tensor, Tensor]:
        """The catalogue, the catalogue index of each training position, and the log of each item's share."""
        items_C, place_T, counts_C = np.unique(self.training_items(), return_inverse=True, return_counts=True)
        share_C = torch.from_numpy(np.log(counts_C / max(1, counts_C.sum())))
        return items_C, torch.from_numpy(place_T), share_C.float()

    @cached_property
    def _stretches(self) -> Ints:
        """First and end position of each sample in the training part."""
        count_U = self._ends_U - self.offsets[:-1]
        end_U = np.cumsum(count_U)
        pieces_U = np.maximum(-(-(count_U - 1) // self.length), 0)
        of_S = np.repeat(np.arange(len(count_U)), pieces_U)
        number_S = np.arange(len(of_S)) - np.repeat(np.cumsum(pieces_U) - pieces_U, pieces_U)
        begin_S = (end_U - count_U)[of_S] + number_S * self.length
        return np.stack([begin_S, np.minimum(begin_S + self.length + 1, end_U[of_S])], axis=1)

    @cached_property
    def _tested_U(self) -> Ints:
        """Histories that are tested; of more than `judged`, a fixed hash selects."""
        tested_U = np.flatnonzero(self._ends_U < self.offsets[1:])
        if len(tested_U) <= self.judged:
            return tested_U
        order_U = bits(key_of(_TESTED), torch.from_numpy(tested_U)).argsort().numpy()
        return np.sort(tested_U[order_U[: self.judged]])

    # -- batches ------------------------------------------------------------------------------------------------------------

    def batches(self, size: int, epoch: int = 0, first: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[Histories]:
        """The part of `rank` of each batch of an epoch, from number `first` on; `size` samples per rank, perhaps none."""
        generator = torch.Generator().manual_seed((self.seed << 16) + epoch)
        order_S = torch.randperm(self.samples, generator=generator).numpy()
        for start in range(first * size * ranks, self.samples, size * ranks):
            mine = start + rank * size
            yield self._batch(order_S[mine : mine + size], epoch)

    def _batch(self, number_B: Ints, epoch: int) -> Histories:
        begin_B, end_B = self._stretches[number_B].T
        at_N, offsets = _ranges(begin_B, end_B)
        _, place_T, share_C = self._known
        place_N = place_T[torch.from_numpy(at_N)]
        counter_BK = torch.from_numpy(number_B)[:, None] * self.negatives + torch.arange(self.negatives)
        drawn_BK = right(bits(key_of(self.seed, _NEGATIVE, epoch), counter_BK), 32)
        negative_BK = place_T[(drawn_BK * len(place_T)) >> 32]
        items_C = torch.from_numpy(self.catalogue_C)
        return Histories(items_C[place_N], offsets, items_C[negative_BK], share_C[place_N], share_C[negative_BK])

    def test_batches(self, size: int, rank: int = 0, ranks: int = 1) -> Iterator[Trials]:
        """The part of `rank` of each batch of test histories; `size` per rank, perhaps none."""
        for start in range(0, self.trials, size * ranks):
            mine = start + rank * size
            user_B = self._tested_U[mine : mine + size]
            end_B = self._ends_U[user_B]
            at_N, offsets = _ranges(np.maximum(self.offsets[:-1][user_B], end_B - self.length), end_B)
            yield Trials(torch.from_numpy(self.items_N[at_N]), offsets, torch.from_numpy(self.items_N[end_B]))


def _ranges(begin_B: Ints, end_B: Ints) -> tuple[Ints, Tensor]:
    """Concatenated positions of ranges, and the offset of each range."""
    count_B = end_B - begin_B
    offsets = np.concatenate([[0], np.cumsum(count_B)])
    at_N = np.arange(offsets[-1]) + np.repeat(begin_B - offsets[:-1], count_B)
    return at_N, torch.from_numpy(offsets)


def by_user(user_N: Ints, item_N: Ints, time_N: NDArray[Any], **settings: Any) -> SequenceLog:
    """Histories from interactions in any order, sorted by user and time; ties keep their order."""
    order_N = np.lexsort((time_N, user_N))
    begins = np.flatnonzero(np.diff(user_N[order_N], prepend=user_N[order_N[:1]] - 1))
    return SequenceLog(item_N[order_N], np.append(begins, len(item_N)), **settings)
