"""Staged rows wait on the GPU for their batch: the definition (protocol and races: docs/decisions/kernel_notes.md).

The first meta word of a row says where it is:

    0...                its table (the word is its scale)
    10 slot             the fp32 cache
    1100 place          staged: codes and words are in the place
    1110 place          arriving: codes are still in the table, the first word is in the place
    1101 place          leaving: codes and words are still in the place
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.layout import Layout, Pool, Staging


def make_staging(
    codes: Tensor, meta: Tensor, pools: tuple[Pool, ...], places: tuple[int, ...], most: tuple[int, ...] | None = None,
    slices: int = 1,
) -> Staging:  # fmt: skip
    """An empty staging area. The arrays of the tables must not move: places lie at distances from them."""
    sizes = [F.AREA_FIELDS * 8 * len(pools)]
    for pool, count in zip(pools, places, strict=True):
        assert count <= F.PLACE_BITS
        width, words = F.row_bytes(pool.format, pool.dim), 4 * F.META_WORDS[pool.format]
        sizes += [(count + 1) * words, (count + 1) * width]  # one more: where the first lies follows from the table's address
    device, total, most = meta.device, sum(places), places if most is None else most
    area = torch.zeros(-(-sum(sizes) // 8), dtype=torch.int64, device=device)
    fields, at = [], area.data_ptr() + sizes[0]
    for number, pool in enumerate(pools):
        width, words = F.row_bytes(pool.format, pool.dim), 4 * F.META_WORDS[pool.format]
        shift_meta = -((meta.data_ptr() + 4 * pool.meta - at) // words)
        at += sizes[1 + 2 * number]
        shift_codes = -((codes.data_ptr() + pool.codes - at) // width)
        at += sizes[2 + 2 * number]
        fields.append((shift_codes, shift_meta, pool.row))
    area[: F.AREA_FIELDS * len(pools)] = torch.tensor(fields, dtype=torch.int64).flatten().to(device)
    return Staging(
        area=area,
        rows=torch.full((total,), F.EMPTY, dtype=torch.int64, device=device),
        until=torch.full((total,), -1, dtype=torch.int32, device=device),
        ages=torch.zeros(total, dtype=torch.uint8, device=device),
        free=torch.zeros(sum(most), dtype=torch.int32, device=device),
        chosen=torch.zeros(slices * sum(most), dtype=torch.int32, device=device),
        leaving=torch.zeros(sum(most), dtype=torch.int32, device=device),
        counts=torch.zeros(len(pools), F.COUNT_FIELDS, dtype=torch.int64, device=device),
        places=places,
        most=most,
        slices=slices,
    )


class Places:
    """The slices of one pool in every array."""

    def __init__(self, codes: Tensor, meta: Tensor, staging: Staging, pools: tuple[Pool, ...], number: int) -> None:
        pool, first, count = pools[number], staging.first[number], staging.places[number]
        width, words = F.row_bytes(pool.format, pool.dim), F.META_WORDS[pool.format]
        here = slice(first, first + count)
        self.pool, self.counts, self.most = pool, staging.counts[number], staging.most[number]
        self.codes_RB = codes[pool.codes : pool.codes + pool.rows * width].view(-1, width)
        self.meta_RW = meta[pool.meta : pool.meta + pool.rows * words].view(-1, words)
        self.rows_P, self.until_P, self.ages_P = staging.rows[here], staging.until[here], staging.ages[here]
        listed, slices = staging.listed[number], staging.slices
        self.free_L, self.leaving_L = (each[listed : listed + self.most] for each in (staging.free, staging.leaving))
        self.slices, self.chosen_S = slices, staging.chosen[slices * listed : slices * (listed + self.most)]
        fields = staging.area[F.AREA_FIELDS * number : F.AREA_FIELDS * (number + 1)].tolist()
        bytes = staging.area.view(torch.uint8)
        at = self.codes_RB.data_ptr() + width * fields[F.SHIFT_CODES] - bytes.data_ptr()
        self.codes_PB = bytes[at : at + count * width].view(count, width)
        at = (self.meta_RW.data_ptr() + 4 * words * fields[F.SHIFT_META] - bytes.data_ptr()) // 4
        self.meta_PW = staging.area.view(torch.int32)[at : at + count * words].view(count, words)

    def found(self, place_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(places that have a row, their rows counted from the pool's first, the first words of those rows)."""
        place_K = place_K[self.rows_P[place_K] != F.EMPTY]
        at_K = self.rows_P[place_K] - self.pool.row
        return place_K, at_K, self.meta_RW[at_K, 0]

    def point(self, at_K: Tensor, place_K: Tensor, transit: int = 0) -> None:
        self.meta_RW[at_K, 0] = (place_K | F.STAGED | transit).int()

    def opened(self) -> Tensor:
        """The places that the last decision opened."""
        listed_K = self.leaving_L[: int(self.counts[F.OPEN])].long()
        return listed_K[listed_K != F.KEPT] & F.PLACE_BITS

    def left(self) -> Tensor:
        """The places that the last decision opened and whose rows leave."""
        listed_K = self.leaving_L[: int(self.counts[F.END])].long()
        return listed_K[(listed_K & F.NO_ROW) == 0]  # of those that keep their rows all bits are set

    def to_send(self) -> Tensor:
        """The slice of chosen places whose turn it is."""
        chosen, turn = int(self.counts[F.CHOSEN]), int(self.counts[F.NUMBER] - self.counts[F.SINCE_CHOSEN]) - 1
        size = -(-chosen // self.slices)
        begin = max(turn, 0) * size
        return self.chosen_S[begin : min(begin + size, chosen)].long()

    def came(self) -> Tensor:
        """The places that the last batch was given."""
        return self.free_L[: min(int(self.counts[F.TAKEN]), int(self.counts[F.FREE]))].long()


def commit(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, batch: bool) -> None:
    """End the last copies; `batch`: a new batch is about to be prefetched."""
    for number in range(len(staging.places)):
        here = Places(codes, meta, staging, layout.tables.pools, number)
        place_K, at_K, word_K = here.found(here.came())
        mine_K = word_K == (place_K | F.STAGED | F.ARRIVING)
        here.point(at_K[mine_K], place_K[mine_K])
        here.rows_P[place_K[~mine_K]] = F.EMPTY
        open_K = here.opened()
        place_K, at_K, word_K = here.found(open_K)
        mine_K, back_K = ((word_K & ~bits) == (place_K | F.STAGED) for bits in (F.LEAVING, 0))
        left_K = mine_K & ~back_K
        here.meta_RW[at_K[left_K]] = here.meta_PW[place_K[left_K]]
        here.rows_P[place_K[left_K | ~mine_K]] = F.EMPTY
        tally(here.counts, batch)
        open_K = torch.cat([open_K, here.to_send()]) if batch else open_K
        free_K = open_K[here.rows_P[open_K] == F.EMPTY][: here.most]
        here.free_L[: free_K.numel()] = free_K.int()
        here.counts[F.FREE] = free_K.numel()


def tally(counts: Tensor, batch: bool) -> None:
    """Add the last copies to the sums and reset their counts."""
    taken = torch.minimum(counts[F.TAKEN], counts[F.FREE])
    counts[F.ROWS_IN] += taken
    counts[F.ROWS_OUT] += counts[F.LEFT]
    counts[F.NO_ROOM] += counts[F.TAKEN] - taken
    counts[[F.FREE, F.TAKEN, F.OPENED, F.LEFT, F.END]] = 0
    counts[F.NUMBER] += batch


def claim(
    meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, batches: Sequence[tuple[Tensor, Tensor]]
) -> None:  # fmt: skip
    """Let the rows of batches (ids, offsets) arrive that are in their tables, as far as there is room."""
    if not any(ids_N.numel() for ids_N, _ in batches):
        return
    keys_N = torch.cat([arena_rows(layout, *batch) for batch in batches])
    for number, pool in enumerate(layout.tables.pools):
        here = Places(codes, meta, staging, layout.tables.pools, number)
        at_U = torch.unique(keys_N[(keys_N >= pool.row) & (keys_N < pool.row + pool.rows)]) - pool.row
        word_U = here.meta_RW[at_U, 0]
        staged_U = (word_U < 0) & (word_U >= F.STAGED)
        here.until_P[(word_U[staged_U] & F.PLACE_BITS).long()] = here.counts[F.NUMBER].int()
        here.counts[F.ROWS_THERE] += staged_U.sum()
        at_K = at_U[word_U >= 0]
        here.counts[F.TAKEN] = at_K.numel()
        here.counts[F.WISH] = wished(at_K.numel(), int(here.counts[F.WISH]))
        place_K = here.came()
        at_K = at_K[: place_K.numel()]
        here.rows_P[place_K], here.until_P[place_K] = at_K + pool.row, here.counts[F.NUMBER].int()
        here.meta_PW[place_K] = here.meta_RW[at_K]
        here.point(at_K, place_K, F.ARRIVING)


def choose(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, everything: bool = False) -> None:
    """Choose the places to open next; `everything`: all places with a row, of which none is arriving."""
    for number, count in enumerate(staging.places):
        here = Places(codes, meta, staging, layout.tables.pools, number)
        wish, opened = (int(here.counts[field]) for field in (F.WISH, F.OPENED))
        width = swept(here.slices * wish, count, here.pool.rows)
        here.ages_P[:] = torch.where(here.rows_P != F.EMPTY, F.AGE_ALL, 0) if everything else ages_of(here, width)
        empty = int((here.ages_P == F.AGE_EMPTY).sum())
        later = (here.slices + 1) * wish - opened  # the next batch has what was opened now, and leaves the rest
        need = here.most if everything else min(here.slices * here.most, max(later, empty))
        order_P = here.ages_P.sort(descending=True, stable=True)[1]
        place_K = order_P[(here.ages_P[order_P] % F.SWEPT >= F.AGE_TWO)][:need].sort()[0]
        key_K = torch.where(here.rows_P[place_K] == F.EMPTY, layout.tables.rows, here.rows_P[place_K])
        here.chosen_S[: place_K.numel()] = place_K[key_K.argsort(stable=True)].int()
        here.counts[F.CHOSEN], here.counts[F.SINCE_CHOSEN] = place_K.numel(), here.counts[F.NUMBER]
        if need > empty and not everything:
            here.counts[F.HAND] = (here.counts[F.HAND] + width) % here.pool.rows


def send(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, everything: bool = False) -> None:
    """Open the next slice of the chosen places; `everything`: all of them, even if a batch used their rows since."""
    for number in range(len(staging.places)):
        here = Places(codes, meta, staging, layout.tables.pools, number)
        since, now = (int(here.counts[field]) for field in (F.SINCE_CHOSEN, F.NUMBER))
        place_K = here.chosen_S[: int(here.counts[F.CHOSEN])].long() if everything else here.to_send()
        held_K = here.rows_P[place_K] != F.EMPTY
        kept_K = torch.zeros_like(held_K) if everything else held_K & (here.until_P[place_K] >= since)
        here.until_P[place_K[~kept_K]] = now
        out_K, at_K, word_K = here.found(place_K[~kept_K])
        mine_K = word_K == (out_K | F.STAGED)
        here.rows_P[out_K[~mine_K]] = F.EMPTY
        here.point(at_K[mine_K], out_K[mine_K], F.LEAVING)
        bare_K = here.rows_P[place_K] == F.EMPTY
        here.leaving_L[: place_K.numel()] = torch.where(kept_K, F.KEPT, place_K | torch.where(bare_K, F.NO_ROW, 0)).int()
        here.counts[F.OPEN], here.counts[F.OPENED], here.counts[F.LEFT] = place_K.numel(), (~kept_K).sum(), mine_K.sum()
        leaves_K = (~(kept_K | bare_K)).nonzero()
        here.counts[F.END] = leaves_K.max() + 1 if leaves_K.numel() else 0


def wished(taken: int, before: int) -> int:
    """Places to hold open for the next batch: some more than the last few batches needed."""
    return max(taken + (taken + 3) // 4, before - (before + 7) // 8)


def swept(wish: int, places: int, rows: int) -> int:
    """Number of rows from the hand on that leave first: four times the share of places to open."""
    return min(rows, 4 * wish * rows // places + 1) if places else 0


def ages_of(here: Places, width: int) -> Tensor:
    """The age of each place one batch from now, when its row leaves at the earliest."""
    age_P = (here.counts[F.NUMBER].int() + 1 - here.until_P).float().view(torch.int32)
    age_P = ((age_P >> F.AGE_SHIFT) - F.AGE_ONE).clamp(0, F.AGE_MOST)
    ahead_P = (here.rows_P - here.pool.row - here.counts[F.HAND]) % here.pool.rows
    age_P = torch.where(ahead_P < width, age_P + F.SWEPT, age_P)
    empty_P = torch.where(age_P % F.SWEPT >= F.AGE_TWO, F.AGE_EMPTY, 0)  # what was opened just now is not chosen again
    return torch.where(here.rows_P == F.EMPTY, empty_P, age_P)


def copy(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor) -> None:
    """Copy the codes of arriving and leaving rows, at any time before the next commit, beside anything else."""
    for number in range(len(staging.places)):
        here = Places(codes, meta, staging, layout.tables.pools, number)
        out_K, in_K = here.left(), here.came()
        here.codes_RB[here.rows_P[out_K] - here.pool.row] = here.codes_PB[out_K]
        here.codes_PB[in_K] = here.codes_RB[here.rows_P[in_K] - here.pool.row]


def arena_rows(layout: Layout, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """The arena row of every lookup with an id in range."""
    fields_F8, count = layout.fields_F8, ids_N.numel()
    features = fields_F8.shape[0]
    ends_F = offsets[:: max(1, (offsets.numel() - 1) // features)][1:]
    if ids_N.device.type == "cpu" and not torch.compiler.is_compiling():
        row_N = ids_N.to(torch.int64, copy=True)
        if _add_first_rows(row_N.numpy(), fields_F8[:, [F.ROW, F.ROWS]].tolist(), ends_F.tolist()):
            return row_N
    first_N, rows_N = fields_F8[:1, F.ROW], fields_F8[:1, F.ROWS]
    if features > 1 and count:
        counts_F = ends_F.diff(prepend=ends_F.new_zeros(1))
        counts_F[-1] += count - ends_F[-1]
        first_N, rows_N = (fields_F8[:, field].repeat_interleave(counts_F, output_size=count) for field in (F.ROW, F.ROWS))
    good_N = (ids_N >= 0) & (ids_N < rows_N)
    return (first_N + ids_N)[good_N]


def _add_first_rows(row_N: NDArray[np.int64], tables: list[list[int]], ends: list[int]) -> bool:
    """Add the first row of each feature's table to its ids. False if an id is not in range."""
    begin = 0
    for (first, rows), end in zip(tables, [*ends[:-1], len(row_N)], strict=False):
        part_N = row_N[begin:end]
        if (part_N.view(np.uint64) >= rows).any():
            return False
        part_N += first
        begin = end
    return True
