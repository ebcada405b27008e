"""The full-precision cache: which rows are in it, and how rows come and go. The definition, in plain PyTorch.

**The pointer lives in the row.** While a row is cached its codes are stale, so its first meta word is free: the sign bit says
"cached", the others name the slot. A lookup reads that word anyway. The cache is fully associative and needs no tags,
no hash and no map; a slot costs its values and 16 bytes (its row, its score, the displaced word), and 16 bytes of sketch.

**When.** In a training step (`refresh`), after the lookups of a batch are known and before its rows are updated. So a row
that comes in is updated in full precision at once, evaluation changes nothing, and every decision depends on ids alone. LRU
and the adaptive policy look at every step. LFU wants counts, and a sample of large batches gives them: after a while it looks
at every second of those, then at every fourth (`due`). Where the policy is "fixed", rows stay in the slots they were given.

**Who.** Rows of the batch that are not cached are *candidates*; every slot is a *victim*. Each has a bucket, 0 to 255, on a
logarithmic scale with 8 steps an octave:

    lru        candidates 255; a slot by the steps since its row was last used: 255 for this step, falling with age
    lfu        a candidate by its estimated count; a slot by its row's count, MARGIN up: a newcomer must be clearly hotter
    adaptive   as lfu, but for the slots of a window, which are below all candidates: among them the order is lru's
    an empty slot is bucket 0 in all

Candidates come in as long as each finds a victim in a lower bucket: the best candidates against the worst victims. Ties inside
the last bucket go by row and slot number. Buckets instead of exact order because two histograms and a prefix sum are one pass
over slots on a GPU, where sorting them would cost as much as the rest of the step.

**Counts** are sums of `weight(lookups in the batch)`, a power of two. A cached row's count stands in its slot (times UNIT).
Rows that are not cached share a sketch: 8 counters of 16 bits for each slot, two for each row, of which the smaller counts.
All counts are halved after HALF lookups a slot, which is the decay. A counter for each row would cost a tenth of an int4 table.

**Adaptive.** The *window* is the slots whose count lies below a *line*. It is LRU's part of the cache: newcomers land there,
and stay if they are used again before they are the oldest. The line moves by a bucket a step, towards a window of the size
that is wanted; and that size follows hits. Let the *oldest* be the slots of the window that are at least a quarter as old as
the last to leave, and the *coldest* those that are at most an octave above the line and older than that one: what a narrower
window would lose, and what a wider one. Each hit of the oldest widens the window and each of the coldest narrows it, in
proportion to how many slots the others have: it rests where both are hit equally often. A score holds a count and the time of
the last use, in ticks of 1/64 lookup a slot. Both fit in 31 bits, because a halving takes the elder half of the time as well.

**Two kinds of slots** where a pool has near ones: full slots hold fp32 values, near slots int8 rows at a quarter of the bytes
(`slots.py`). All slots compete as above, and a row that comes into a near slot is rounded. Then rows change places
(`_promote`): the rows of near slots are candidates by their own count or age, full slots are victims with MARGIN, whichever
the policy. The hottest rows end up in fp32, the warm ones in int8, and the cold ones stay in the format of the table.

**Dirty.** A row that leaves is rounded stochastically into its codes if it was updated, else its word is put back and nothing
is lost. The rounding bits come from a clock of the cache's own, so they are independent of those of the updates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.layout import Cache, Layout, Pool
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.slots import pointers, read_pointed, slots_of, write_pointed

EVERY = 64  # steps in which LFU looks at every batch
LARGE = 1 << 16  # lookups of a batch from which on it may look at fewer
UNIT = 16
HALF = 64
MARGIN = 4
HEAVIEST = 128
BUCKETS = 256
COUNTERS = 8  # 16-bit counters a slot
# The adaptive policy.
TICK_BITS = 13
PERIOD = 1 << (TICK_BITS - 1)  # ticks between two halvings
MOST = (1 << (31 - TICK_BITS)) - 1  # the highest count
AGES = 64  # buckets up to here are ages, half as fine as counts; those above are counts
OCTAVE = 8
LINE = 41  # the line at first: two lookups
NARROWEST = 128  # part of the slots
FINE = 64  # parts of a slot in which the size that is wanted is counted
SPEED = 4  # slots for each hit
_MASK = 0xFFFFFFFF
SALTS = (0x2545F491, 0x9E3779B9)


def due(cache: Cache, policy: int, lookups: int) -> bool:
    """Count one more training step; whether the cache is refreshed in it."""
    if policy == F.FIXED:
        return False
    cache.steps.add_(1)
    step = int(cache.steps)
    small = policy != F.LFU or lookups < LARGE
    return small or step <= EVERY or step % (2 if step <= 4 * EVERY else 4) == 0


def weight(counts_U: Tensor) -> Tensor:
    """What a batch adds to a row's count: the largest power of two in its lookups, HEAVIEST at most."""
    exponent_U = torch.frexp(counts_U.clamp(1, HEAVIEST).float())[1] - 1
    return torch.ones_like(counts_U) << exponent_U.long()


def bucket(score: Tensor) -> Tensor:
    """Bucket of a count: the exponent and three bits of the mantissa of it as an fp32 number; 0 for 0, 1 for 1."""
    return ((score.float().view(torch.int32) >> 20) - 1015).clamp(min=0)


def counters(rows_U: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    """The two counters of each row in its pool's sketch."""
    half = pool.slots * COUNTERS // 2
    low_U, high_U = rows_U & _MASK, (rows_U >> 32) & _MASK
    first, second = (quantize.mix(low_U ^ quantize.mix(high_U ^ salt)) for salt in SALTS)
    return (first * half) >> 32, half + ((second * half) >> 32)


class _Slots:
    """One pool's part of every array."""

    def __init__(self, codes: Tensor, meta: Tensor, cache: Cache, pool: Pool) -> None:
        width, words = F.row_bytes(pool.format, pool.dim), F.META_WORDS[pool.format]
        here, sketch = slice(pool.slot, pool.slot + pool.slots), COUNTERS // 2
        self.pool, self.cache, self.clock = pool, cache, cache.clock
        self.codes_RB = codes[pool.codes : pool.codes + pool.rows * width].view(pool.rows, width)
        self.meta_RW = meta[pool.meta : pool.meta + pool.rows * words].view(pool.rows, words)
        self.rows_S, self.scores_S, self.words_S = cache.rows[here], cache.scores[here], cache.words[here]
        self.sketch = cache.sketch[sketch * pool.slot : sketch * (pool.slot + pool.slots)]

    def values(self, slot_K: Tensor) -> Tensor:
        """The rows of some slots."""
        return read_pointed(self.cache, pointers(self.pool, slot_K), self.pool.dim)

    def put(self, slot_K: Tensor, row_K: Tensor, values_KD: Tensor, stochastic: bool) -> None:
        """Put rows into slots and let them point there."""
        pointer_K = pointers(self.pool, slot_K)
        write_pointed(self.cache, pointer_K, values_KD, row_K, self.clock if stochastic else None)
        self.meta_RW[row_K - self.pool.row, 0] = pointer_K

    def write_back(self, slot_K: Tensor, stochastic: bool) -> int:
        """Put the rows of occupied slots back into the table; returns how many had to be rounded."""
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
        """Move rows into slots, whatever was there before."""
        at_K = row_K - self.pool.row
        words_KW = self.meta_RW[at_K]
        values_KD = quantize.dequantize_rows(self.codes_RB[at_K], words_KW, self.pool.format, self.pool.dim)
        self.put(slot_K, row_K, values_KD, stochastic)
        self.words_S[slot_K] = words_KW[:, 0]
        self.rows_S[slot_K] = row_K | flag
        self.scores_S[slot_K] = score_K.int()

    def exchange(self, near_K: Tensor, full_K: Tensor, stochastic: bool) -> None:
        """Let the rows of near slots and those of full slots, where there are any, change places."""
        occupied_K = self.rows_S[full_K] != F.EMPTY
        down_K, up_KD, down_KD = full_K[occupied_K], self.values(near_K), self.values(full_K[occupied_K])
        self.put(full_K, self.rows_S[near_K] & ~F.DIRTY, up_KD, stochastic)
        self.put(near_K[occupied_K], self.rows_S[down_K] & ~F.DIRTY, down_KD, stochastic)
        for kept_S in (self.rows_S, self.scores_S, self.words_S):
            kept_S[near_K], kept_S[full_K] = kept_S[full_K], kept_S[near_K]


def refresh(
    codes: Tensor, meta: Tensor, cache: Cache, layout: Layout, rows_U: Tensor, counts_U: Tensor, stochastic: bool
) -> None:
    """Count a batch of distinct arena rows (ascending) and their lookups, and let rows come and go."""
    if rows_U.numel() == 0 or not due(cache, layout.tables.policy, int(counts_U.sum())):
        return
    cache.clock[F.STEP] += 1
    for index, pool in enumerate(layout.tables.pools):
        mine_U = (rows_U >= pool.row) & (rows_U < pool.row + pool.rows)
        slots, ledger = _Slots(codes, meta, cache, pool), cache.ledger[index]
        _refresh_pool(slots, ledger, rows_U[mine_U], counts_U[mine_U], layout.tables.policy, stochastic)


def _refresh_pool(slots: _Slots, ledger: Tensor, rows_U: Tensor, counts_U: Tensor, policy: int, stochastic: bool) -> None:
    pool = slots.pool
    if policy != F.LRU and int(ledger[F.SINCE]) >= HALF * pool.slots:
        _halve(slots, ledger, policy)
    now = int(slots.clock[F.STEP]) if policy == F.LRU else tick(int(ledger[F.SINCE]), pool.slots)
    word_U, weight_U = slots.meta_RW[rows_U - pool.row, 0].long(), weight(counts_U)
    cached_U = word_U < 0
    hit = slots_of(pool, word_U[cached_U])
    before = slots.scores_S[hit]
    slots.scores_S[hit] = _used(before, weight_U[cached_U].int(), policy, now)
    slots.rows_S[hit] |= F.DIRTY
    candidate_C = rows_U[~cached_U]
    if policy == F.LRU:
        score_C, bucket_C = torch.full_like(candidate_C, now), torch.full_like(candidate_C, BUCKETS - 1)
    else:
        score_C = _count(slots.sketch, candidate_C, weight_U[~cached_U], pool)
        bucket_C = bucket(score_C)
    if policy == F.ADAPTIVE:
        bucket_C, score_C = AGES + bucket(score_C.clamp(max=MOST)), packed(score_C, now)
    victim_S = _victims(slots, policy, ledger, now)
    chosen_C, chosen_S = choose(bucket_C, victim_S)
    if policy == F.ADAPTIVE and rows_U.numel():
        occupied_S = slots.rows_S != F.EMPTY
        window, *sizes = (int((part & occupied_S).sum()) for part in parts(slots.scores_S, ledger, now))
        edge_hits = [int(weight_U[cached_U][part].sum()) for part in parts(before, ledger, now)[1:]]
        low = int(victim_S[chosen_S].max()) if chosen_S.numel() else 0
        ledger[F.WINDOW :] = torch.tensor(steer(ledger.tolist(), pool.slots, window, edge_hits, sizes, low))
    occupied_K = slots.rows_S[chosen_S] != F.EMPTY
    written = slots.write_back(chosen_S[occupied_K], stochastic)
    slots.admit(candidate_C[chosen_C], chosen_S, score_C[chosen_C], F.DIRTY, stochastic)
    promoted = _promote(slots, policy, now, stochastic) if pool.near and rows_U.numel() else 0
    lookups, hits = counts_U.sum(), counts_U[cached_U].sum()
    done = (lookups, lookups, hits, chosen_S.numel(), occupied_K.sum(), written, promoted)
    ledger[: F.WINDOW] += torch.tensor(done, device=ledger.device)


def _promote(slots: _Slots, policy: int, now: int, stochastic: bool) -> int:
    """Let rows of near slots change places with colder ones of full slots; returns how many."""
    full, standing_S = slots.pool.full, standing(slots.scores_S, policy, now)
    candidate_C = full + (slots.rows_S[full:] != F.EMPTY).nonzero()[:, 0]
    victim_S = (standing_S[:full] + MARGIN).clamp(max=BUCKETS - 1)
    chosen_C, chosen_S = choose(standing_S[candidate_C], torch.where(slots.rows_S[:full] == F.EMPTY, 0, victim_S))
    slots.exchange(candidate_C[chosen_C], chosen_S, stochastic)
    return chosen_S.numel()


def standing(scores_S: Tensor, policy: int, now: int) -> Tensor:
    """The bucket of rows in slots among each other: by age or by count."""
    if policy == F.LRU:
        return (BUCKETS - 1 - bucket(now - scores_S)).clamp(min=1)
    return bucket(scores_S if policy == F.LFU else scores_S >> TICK_BITS)


def _halve(slots: _Slots, ledger: Tensor, policy: int) -> None:
    """Forget half of all counts, and with them half of the time."""
    if policy == F.ADAPTIVE:
        ticks_S = (slots.scores_S & (2 * PERIOD - 1)) - PERIOD
        slots.scores_S.copy_(packed(slots.scores_S >> (TICK_BITS + 1), ticks_S.clamp(min=0)))
        ledger[F.LINE] = max(int(ledger[F.LINE]) - OCTAVE, 1 - LINE)
    else:
        slots.scores_S >>= 1
    slots.sketch.copy_((slots.sketch >> 1) & 0x7FFF7FFF)
    ledger[F.SINCE] = 0


def _used(score: Tensor, weight: Tensor, policy: int, now: int) -> Tensor:
    """Scores of rows that were looked up once more."""
    if policy == F.LRU:
        return torch.full_like(score, now)
    return score + UNIT * weight if policy == F.LFU else packed((score >> TICK_BITS) + UNIT * weight, now)


def tick(since: int, slots: int) -> int:
    """The time of the adaptive policy, from the lookups since the last halving."""
    return min(PERIOD + PERIOD * since // (HALF * slots), 2 * PERIOD - 1)


def packed(count: Tensor, ticks: Tensor | int) -> Tensor:
    """A score of the adaptive policy."""
    return (count.clamp(max=MOST) << TICK_BITS) | ticks


def parts(score: Tensor, ledger: Tensor, now: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which of these scores of the adaptive policy are in the window, the oldest in it, the coldest outside of it."""
    line, edge = LINE + int(ledger[F.LINE]), int(ledger[F.EDGE])
    count, age = bucket(score >> TICK_BITS), bucket(now - (score & (2 * PERIOD - 1)))
    window = count < line
    return window, window & (age > edge - 2 * OCTAVE), ~window & (count < line + OCTAVE) & (age > edge)


def steer(ledger: list[int], slots: int, window: int, hits: Sequence[int], sizes: Sequence[int], low: int) -> list[int]:
    """WINDOW, LINE and EDGE of the next step, from hits and sizes of the oldest and coldest, and the last bucket to leave."""
    (old_hits, cold_hits), (oldest, coldest) = hits, sizes
    wanted = 1 + slots // NARROWEST + ledger[F.WINDOW] // FINE
    line = ledger[F.LINE] + (window < wanted) - (window > wanted)
    wider, narrower = (SPEED * FINE * n // (oldest + coldest + 1) for n in (old_hits * coldest, cold_hits * oldest))
    widest = FINE * (slots - slots // 8)
    edge = 2 * max(AGES - low, 0) if low else ledger[F.EDGE]
    return [min(max(ledger[F.WINDOW] + wider - narrower, 0), widest), min(max(line, 1 - LINE), BUCKETS - LINE), edge]


def _count(sketch: Tensor, row_C: Tensor, weight_C: Tensor, pool: Pool) -> Tensor:
    """Count rows in the sketch; returns their estimated scores."""
    # Whole words are added to, so a counter that overflows carries into its neighbour: rare, harmless, the same everywhere.
    places = counters(row_C, pool)
    words = sketch.long()
    for place_C in places:
        words.index_add_(0, place_C >> 1, weight_C << (16 * (place_C & 1)))
    words &= _MASK
    sketch.copy_(torch.where(words > 0x7FFFFFFF, words - (1 << 32), words))
    first_C, second_C = ((words[place_C >> 1] >> (16 * (place_C & 1))) & 0xFFFF for place_C in places)
    return UNIT * torch.minimum(first_C, second_C)


def _victims(slots: _Slots, policy: int, ledger: Tensor, now: int) -> Tensor:
    """The bucket of each slot."""
    if policy != F.ADAPTIVE:
        bucket_S = (standing(slots.scores_S, policy, now) + MARGIN * (policy == F.LFU)).clamp(max=BUCKETS - 1)
    else:
        age_S = bucket(now - (slots.scores_S & (2 * PERIOD - 1)))
        given_up_S = parts(slots.scores_S, ledger, now)[0] & (age_S > 0)
        bucket_S = torch.where(given_up_S, AGES - (age_S >> 1), AGES + bucket(slots.scores_S >> TICK_BITS) + MARGIN)
    return torch.where(slots.rows_S == F.EMPTY, 0, bucket_S)


def choose(bucket_C: Tensor, victim_S: Tensor) -> tuple[Tensor, Tensor]:
    """(places of the candidates that come in, slots they take), both ascending and of one length."""
    candidates, victims = (torch.bincount(b, minlength=BUCKETS).tolist() for b in (bucket_C, victim_S))
    cut, low, from_below, of_low = cuts(candidates, victims)
    chosen_C = _pick(bucket_C >= cut, bucket_C == cut - 1, from_below)
    return chosen_C, _pick(victim_S < low, victim_S == low, of_low)


def cuts(candidates: list[int], victims: list[int]) -> tuple[int, int, int, int]:
    """(cut, low, candidates that come in from bucket cut - 1, victims that leave from bucket low), from two histograms.

    All candidates at or above `cut` come in: the smallest bucket at which they are no more than the victims below it. From the
    bucket under it come as many as there are victims below that bucket too. Victims leave from the lowest buckets up.
    """
    coming, below, cut = sum(candidates), 0, 0
    while coming > below:
        coming -= candidates[cut]
        below += victims[cut]
        cut += 1
    under = below - victims[cut - 1] if cut else 0
    from_below = min(candidates[cut - 1], max(0, under - coming)) if cut else 0
    needed, left, low = coming + from_below, 0, 0
    while left + victims[low] < needed:
        left += victims[low]
        low += 1
    return cut, low, from_below, needed - left


def _pick(always: Tensor, tied: Tensor, some: int) -> Tensor:
    """Places where `always`, and the first `some` where `tied`, ascending."""
    return (always | (tied & (tied.cumsum(0) <= some))).nonzero()[:, 0]
