"""The cache: which rows are admitted and evicted, and when (policies in words: docs/decisions/kernel_notes.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.layout import Cache, Layout, Pool
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.slots import pointers, read_pointed, slots_of, write_pointed

FULL_RATE_STEPS = 64  # steps in which LFU refreshes after every batch
LARGE_BATCH = 1 << 16  # lookups of a batch from which LFU may skip batches
COUNT_UNIT = 16  # score of a slot for each count
HALVING_LOOKUPS = 64  # lookups a slot between two halvings of all counts
MARGIN = 4  # buckets by which a candidate must beat a victim
MAX_WEIGHT = 128
BUCKETS = 256
COUNTERS = 8  # 16-bit counters a slot
# The adaptive policy.
TICK_BITS = 13
HALVING_TICKS = 1 << (TICK_BITS - 1)  # ticks between two halvings
MAX_COUNT = (1 << (31 - TICK_BITS)) - 1
AGE_BUCKETS = 64  # buckets below are ages, half as fine as counts; buckets above are counts
OCTAVE = 8  # buckets
FIRST_LINE = 41  # the initial line: two lookups
MIN_WINDOW_SHARE = 128  # the window has at least 1/128 of the slots
WINDOW_PARTS = 64  # resolution of the wanted window size, in parts of a slot
WINDOW_STEP = 4  # slots by which one hit moves the window size
_MASK = 0xFFFFFFFF
SALTS = (0x2545F491, 0x9E3779B9)


def refresh_due(cache: Cache, policy: int, lookups: int) -> bool:
    """Count a training step; returns whether the cache is refreshed in it."""
    if policy == F.FIXED:
        return False
    cache.steps.add_(1)
    step = int(cache.steps)
    small = policy != F.LFU or lookups < LARGE_BATCH
    return small or step <= FULL_RATE_STEPS or step % (2 if step <= 4 * FULL_RATE_STEPS else 4) == 0


def weight(counts_U: Tensor) -> Tensor:
    """What a batch adds to the count of a row: the largest power of two in its lookups, at most MAX_WEIGHT."""
    exponent_U = torch.frexp(counts_U.clamp(1, MAX_WEIGHT).float())[1] - 1
    return torch.ones_like(counts_U) << exponent_U.long()


def bucket(score: Tensor) -> Tensor:
    """Bucket of a count: exponent and three mantissa bits of the count as fp32; 0 for 0, 1 for 1."""
    return ((score.float().view(torch.int32) >> 20) - 1015).clamp(min=0)


def counters(rows_U: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    """The two counters of each row in its pool's sketch."""
    half = pool.slots * COUNTERS // 2
    low_U, high_U = rows_U & _MASK, (rows_U >> 32) & _MASK
    first, second = (quantize.fmix32(low_U ^ quantize.fmix32(high_U ^ salt)) for salt in SALTS)
    return (first * half) >> 32, half + ((second * half) >> 32)


class _PoolSlots:
    """The part of one pool in every array."""

    def __init__(self, codes: Tensor, meta: Tensor, cache: Cache, pool: Pool) -> None:
        width, words = F.row_bytes(pool.format, pool.dim), F.META_WORDS[pool.format]
        here, sketch = slice(pool.slot, pool.slot + pool.slots), COUNTERS // 2
        self.pool, self.cache, self.clock = pool, cache, cache.clock
        self.codes_RB = codes[pool.codes : pool.codes + pool.rows * width].view(pool.rows, width)
        self.meta_RW = meta[pool.meta : pool.meta + pool.rows * words].view(pool.rows, words)
        self.rows_S, self.scores_S, self.words_S = cache.rows[here], cache.scores[here], cache.words[here]
        self.sketch = cache.sketch[sketch * pool.slot : sketch * (pool.slot + pool.slots)]

    def values(self, slot_K: Tensor) -> Tensor:
        """Values of the rows in slots."""
        return read_pointed(self.cache, pointers(self.pool, slot_K), self.pool.dim)

    def store(self, slot_K: Tensor, row_K: Tensor, values_KD: Tensor, stochastic: bool) -> None:
        """Write rows into slots and set their pointers."""
        pointer_K = pointers(self.pool, slot_K)
        write_pointed(self.cache, pointer_K, values_KD, row_K, self.clock if stochastic else None)
        self.meta_RW[row_K - self.pool.row, 0] = pointer_K

    def write_back(self, slot_K: Tensor, stochastic: bool) -> int:
        """Write the rows of occupied slots back to the table; returns the number of rounded rows."""
        row_K = self.rows_S[slot_K]
        dirty_K = row_K & F.DIRTY != 0
        row_K = row_K & ~F.DIRTY
        self.meta_RW[(row_K - self.pool.row)[~dirty_K], 0] = self.words_S[slot_K[~dirty_K]]
        row_K = row_K[dirty_K]
        codes, meta = quantize.quantize_rows(
            self.values(slot_K[dirty_K]), self.pool.format, self.clock if stochastic else None, row_K
        )
        self.codes_RB[row_K - self.pool.row], self.meta_RW[row_K - self.pool.row] = codes, meta
        return int(dirty_K.sum())

    def admit(self, row_K: Tensor, slot_K: Tensor, score_K: Tensor, flag: int, stochastic: bool = True) -> None:
        """Move rows into slots; the previous rows of the slots must have been written back."""
        at_K = row_K - self.pool.row
        words_KW = self.meta_RW[at_K]
        values_KD = quantize.dequantize_rows(self.codes_RB[at_K], words_KW, self.pool.format, self.pool.dim)
        self.store(slot_K, row_K, values_KD, stochastic)
        self.words_S[slot_K] = words_KW[:, 0]
        self.rows_S[slot_K] = row_K | flag
        self.scores_S[slot_K] = score_K.int()

    def exchange(self, int8_K: Tensor, fp32_K: Tensor, stochastic: bool) -> None:
        """Exchange the rows of int8 slots with the rows, if any, of fp32 slots."""
        occupied_K = self.rows_S[fp32_K] != F.EMPTY
        down_K, up_KD, down_KD = fp32_K[occupied_K], self.values(int8_K), self.values(fp32_K[occupied_K])
        self.store(fp32_K, self.rows_S[int8_K] & ~F.DIRTY, up_KD, stochastic)
        self.store(int8_K[occupied_K], self.rows_S[down_K] & ~F.DIRTY, down_KD, stochastic)
        for array_S in (self.rows_S, self.scores_S, self.words_S):
            array_S[int8_K], array_S[fp32_K] = array_S[fp32_K], array_S[int8_K]


def refresh(
    codes: Tensor, meta: Tensor, cache: Cache, layout: Layout, rows_U: Tensor, counts_U: Tensor, stochastic: bool
) -> None:
    """Count a batch of distinct arena rows (ascending) and their lookups; admit and evict rows."""
    if rows_U.numel() == 0 or not refresh_due(cache, layout.tables.policy, int(counts_U.sum())):
        return
    cache.clock[F.STEP] += 1
    for index, pool in enumerate(layout.tables.pools):
        mine_U = (rows_U >= pool.row) & (rows_U < pool.row + pool.rows)
        slots, ledger = _PoolSlots(codes, meta, cache, pool), cache.ledger[index]
        _refresh_pool(slots, ledger, rows_U[mine_U], counts_U[mine_U], layout.tables.policy, stochastic)


def _refresh_pool(slots: _PoolSlots, ledger: Tensor, rows_U: Tensor, counts_U: Tensor, policy: int, stochastic: bool) -> None:
    pool = slots.pool
    if policy != F.LRU and int(ledger[F.SINCE]) >= HALVING_LOOKUPS * pool.slots:
        _halve(slots, ledger, policy)
    now = int(slots.clock[F.STEP]) if policy == F.LRU else tick(int(ledger[F.SINCE]), pool.slots)
    word_U, weight_U = slots.meta_RW[rows_U - pool.row, 0].long(), weight(counts_U)
    cached_U = word_U < 0
    hit = slots_of(pool, word_U[cached_U])
    before = slots.scores_S[hit]
    slots.scores_S[hit] = _score_after_hit(before, weight_U[cached_U].int(), policy, now)
    slots.rows_S[hit] |= F.DIRTY
    candidate_C = rows_U[~cached_U]
    if policy == F.LRU:
        score_C, bucket_C = torch.full_like(candidate_C, now), torch.full_like(candidate_C, BUCKETS - 1)
    else:
        score_C = _count(slots.sketch, candidate_C, weight_U[~cached_U], pool)
        bucket_C = bucket(score_C)
    if policy == F.ADAPTIVE:
        bucket_C, score_C = AGE_BUCKETS + bucket(score_C.clamp(max=MAX_COUNT)), pack_score(score_C, now)
    victim_S = _victims(slots, policy, ledger, now)
    selected_C, selected_S = select(bucket_C, victim_S)
    if policy == F.ADAPTIVE and rows_U.numel():
        occupied_S = slots.rows_S != F.EMPTY
        window, *sizes = (int((part & occupied_S).sum()) for part in window_parts(slots.scores_S, ledger, now))
        edge_hits = [int(weight_U[cached_U][part].sum()) for part in window_parts(before, ledger, now)[1:]]
        low = int(victim_S[selected_S].max()) if selected_S.numel() else 0
        adapted = adapt_window(ledger.tolist(), pool.slots, window, edge_hits, sizes, low)
        ledger[F.WINDOW :] = torch.tensor(adapted, dtype=torch.int64)
    occupied_K = slots.rows_S[selected_S] != F.EMPTY
    written = slots.write_back(selected_S[occupied_K], stochastic)
    slots.admit(candidate_C[selected_C], selected_S, score_C[selected_C], F.DIRTY, stochastic)
    promoted = _promote(slots, policy, now, stochastic) if pool.int8_slots and rows_U.numel() else 0
    lookups, hits = counts_U.sum(), counts_U[cached_U].sum()
    done = (lookups, lookups, hits, selected_S.numel(), occupied_K.sum(), written, promoted)
    ledger[: F.WINDOW] += torch.tensor(done, dtype=torch.int64, device=ledger.device)


def _promote(slots: _PoolSlots, policy: int, now: int, stochastic: bool) -> int:
    """Exchange rows of int8 slots with colder rows of fp32 slots; returns the number of exchanges."""
    full, bucket_S = slots.pool.fp32_slots, slot_buckets(slots.scores_S, policy, now)
    candidate_C = full + (slots.rows_S[full:] != F.EMPTY).nonzero()[:, 0]
    victim_S = (bucket_S[:full] + MARGIN).clamp(max=BUCKETS - 1)
    selected_C, selected_S = select(bucket_S[candidate_C], torch.where(slots.rows_S[:full] == F.EMPTY, 0, victim_S))
    slots.exchange(candidate_C[selected_C], selected_S, stochastic)
    return selected_S.numel()


def slot_buckets(scores_S: Tensor, policy: int, now: int) -> Tensor:
    """Buckets of the rows in slots, by age or by count."""
    if policy == F.LRU:
        return (BUCKETS - 1 - bucket(now - scores_S)).clamp(min=1)
    return bucket(scores_S if policy == F.LFU else scores_S >> TICK_BITS)


def _halve(slots: _PoolSlots, ledger: Tensor, policy: int) -> None:
    """Halve all counts, and drop the older half of the time."""
    if policy == F.ADAPTIVE:
        ticks_S = (slots.scores_S & (2 * HALVING_TICKS - 1)) - HALVING_TICKS
        slots.scores_S.copy_(pack_score(slots.scores_S >> (TICK_BITS + 1), ticks_S.clamp(min=0)))
        ledger[F.LINE] = max(int(ledger[F.LINE]) - OCTAVE, 1 - FIRST_LINE)
    else:
        slots.scores_S >>= 1
    slots.sketch.copy_((slots.sketch >> 1) & 0x7FFF7FFF)
    ledger[F.SINCE] = 0


def _score_after_hit(score: Tensor, weight: Tensor, policy: int, now: int) -> Tensor:
    """Scores of rows after another lookup."""
    if policy == F.LRU:
        return torch.full_like(score, now)
    return score + COUNT_UNIT * weight if policy == F.LFU else pack_score((score >> TICK_BITS) + COUNT_UNIT * weight, now)


def tick(since: int, slots: int) -> int:
    """Time of the adaptive policy, from the lookups since the last halving."""
    return min(HALVING_TICKS + HALVING_TICKS * since // (HALVING_LOOKUPS * slots), 2 * HALVING_TICKS - 1)


def pack_score(count: Tensor, ticks: Tensor | int) -> Tensor:
    """A score of the adaptive policy."""
    return (count.clamp(max=MAX_COUNT) << TICK_BITS) | ticks


def window_parts(score: Tensor, ledger: Tensor, now: int) -> tuple[Tensor, Tensor, Tensor]:
    """(in the window, oldest of the window, coldest outside it) for scores of the adaptive policy."""
    line, edge = FIRST_LINE + int(ledger[F.LINE]), int(ledger[F.EDGE])
    count, age = bucket(score >> TICK_BITS), bucket(now - (score & (2 * HALVING_TICKS - 1)))
    window = count < line
    return window, window & (age > edge - 2 * OCTAVE), ~window & (count < line + OCTAVE) & (age > edge)


def adapt_window(ledger: list[int], slots: int, window: int, hits: Sequence[int], sizes: Sequence[int], low: int) -> list[int]:
    """WINDOW, LINE and EDGE of the next step, from hits and sizes of the oldest and coldest and the last evicted bucket."""
    (old_hits, cold_hits), (oldest, coldest) = hits, sizes
    wanted = 1 + slots // MIN_WINDOW_SHARE + ledger[F.WINDOW] // WINDOW_PARTS
    line = ledger[F.LINE] + (window < wanted) - (window > wanted)
    wider = WINDOW_STEP * WINDOW_PARTS * old_hits * coldest // (oldest + coldest + 1)
    narrower = WINDOW_STEP * WINDOW_PARTS * cold_hits * oldest // (oldest + coldest + 1)
    widest = WINDOW_PARTS * (slots - slots // 8)
    edge = 2 * max(AGE_BUCKETS - low, 0) if low else ledger[F.EDGE]
    return [
        min(max(ledger[F.WINDOW] + wider - narrower, 0), widest),
        min(max(line, 1 - FIRST_LINE), BUCKETS - FIRST_LINE),
        edge,
    ]


def _count(sketch: Tensor, row_C: Tensor, weight_C: Tensor, pool: Pool) -> Tensor:
    """Count rows in the sketch; returns their estimated scores."""
    # Additions are to whole words, so a counter that overflows carries into its neighbour: rare, harmless, the same everywhere.
    places = counters(row_C, pool)
    words = sketch.long()
    for place_C in places:
        words.index_add_(0, place_C >> 1, weight_C << (16 * (place_C & 1)))
    words &= _MASK
    sketch.copy_(torch.where(words > 0x7FFFFFFF, words - (1 << 32), words))
    first_C, second_C = ((words[place_C >> 1] >> (16 * (place_C & 1))) & 0xFFFF for place_C in places)
    return COUNT_UNIT * torch.minimum(first_C, second_C)


def _victims(slots: _PoolSlots, policy: int, ledger: Tensor, now: int) -> Tensor:
    """The bucket of each slot."""
    if policy != F.ADAPTIVE:
        bucket_S = (slot_buckets(slots.scores_S, policy, now) + MARGIN * (policy == F.LFU)).clamp(max=BUCKETS - 1)
    else:
        age_S = bucket(now - (slots.scores_S & (2 * HALVING_TICKS - 1)))
        expired_S = window_parts(slots.scores_S, ledger, now)[0] & (age_S > 0)
        bucket_S = torch.where(
            expired_S, AGE_BUCKETS - (age_S >> 1), AGE_BUCKETS + bucket(slots.scores_S >> TICK_BITS) + MARGIN
        )
    return torch.where(slots.rows_S == F.EMPTY, 0, bucket_S)


def select(bucket_C: Tensor, victim_S: Tensor) -> tuple[Tensor, Tensor]:
    """(indices of the admitted candidates, slots that they take), both ascending and of equal length."""
    candidates, victims = (torch.bincount(b, minlength=BUCKETS).tolist() for b in (bucket_C, victim_S))
    cut, low, from_tied, victims_of_low = thresholds(candidates, victims)
    selected_C = _select_places(bucket_C >= cut, bucket_C == cut - 1, from_tied)
    return selected_C, _select_places(victim_S < low, victim_S == low, victims_of_low)


def thresholds(candidates: list[int], victims: list[int]) -> tuple[int, int, int, int]:
    """(cut, low, candidates admitted from bucket cut - 1, victims evicted from bucket low), from two histograms.

    All candidates at or above `cut` are admitted: `cut` is the smallest bucket at which they are no more than the victims below
    it. The bucket under it contributes as many candidates as victims are left below that bucket. Victims are evicted from the
    lowest bucket up.
    """
    coming, below, cut = sum(candidates), 0, 0
    while coming > below:
        coming -= candidates[cut]
        below += victims[cut]
        cut += 1
    under = below - victims[cut - 1] if cut else 0
    from_tied = min(candidates[cut - 1], max(0, under - coming)) if cut else 0
    needed, left, low = coming + from_tied, 0, 0
    while left + victims[low] < needed:
        left += victims[low]
        low += 1
    return cut, low, from_tied, needed - left


def _select_places(always: Tensor, tied: Tensor, some: int) -> Tensor:
    """Indices where `always`, and the first `some` where `tied`, ascending."""
    return (always | (tied & (tied.cumsum(0) <= some))).nonzero()[:, 0]
