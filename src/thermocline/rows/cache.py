"""The cache of an arena: its tensors, and operations on cached rows outside a training step.

`kernels/cache/reference.py` defines admission and eviction while training. Tables of one dimension and precision share a pool
of fp32 and int8 slots, for which their hottest rows compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.kernels.cache.reference import COUNT_UNIT, COUNTERS, HALVING_LOOKUPS, TICK_BITS, pack_score, tick
from thermocline.kernels.layout import Cache, Pool
from thermocline.kernels.slots import pointers, read_pointed, slots_of, write_pointed

from .memory import table_zeros
from .precision import bytes_per_row

_SEED = 0x5EED_CAC4E  # differs from seeds that users choose
SLOT_BYTES = 8 + 4 + 4 + 2 * COUNTERS  # of a slot beside its values: row, score, displaced word, sketch
INT8_SLOT_FORMATS = (F.INT4, F.INT2)  # of tables that may have int8 slots
MOST_SLOTS = 1 << 29  # kernels count words of the sketch, four a slot, in 32 bits
_BLOCK = 1 << 16  # rows written back at a time
_STATISTICS = {
    "lookups": F.LOOKUPS, "hits": F.HITS, "admissions": F.ADMISSIONS,
    "evictions": F.EVICTIONS, "write_backs": F.WRITE_BACKS, "promotions": F.PROMOTIONS,
}  # fmt: skip


def policy_of(name: str) -> int:
    """The constant of `formats.py` for a policy."""
    if name not in F.POLICIES:
        raise BadInput(f"policy {name!r} is not known; use one of {', '.join(F.POLICIES)}", parameter="policy", value=name)
    return F.POLICIES.index(name)


def slot_bytes(dim: int, near: bool = False) -> int:
    """Bytes of an fp32 slot, or of an int8 slot, with its bookkeeping."""
    return SLOT_BYTES + (4 * F.int8_slot_words(dim) if near else 4 * dim)


def make_pools(
    fields: Sequence[tuple[int, ...]], slots: Sequence[int], near: Sequence[int], groups: Sequence[int]
) -> tuple[Pool, ...]:
    """Pools for tables with these fields, fp32 slots, int8 slots and groups."""
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for table, field in enumerate(fields):
        kinds.setdefault((groups[table], field[F.DIM], field[F.FORMAT]), []).append(table)
    pools: list[Pool] = []
    first = end = near_end = 0
    for (_, dim, format), tables in sorted(kinds.items()):
        rows, wanted, wanted_near = (
            sum(n) for n in zip(*((fields[t][F.ROWS], slots[t], near[t]) for t in tables), strict=True)
        )
        if wanted + wanted_near == 0:
            continue
        if F.META_WORDS[format] == 0:
            message = f"{F.NAMES[format]} rows cannot be cached; use cache=0.0, or a precision of 8 bits or less"
            raise BadInput(message, parameter="cache", precision=F.NAMES[format])
        if wanted_near and format not in INT8_SLOT_FORMATS:
            message = f"int8 slots are for int4 and int2 rows, not for {F.NAMES[format]}"
            raise BadInput(message, parameter="int8_slots", precision=F.NAMES[format])
        head, words = fields[min(tables, key=lambda t: fields[t][F.ROW])], F.int8_slot_words(dim)
        base, near_base, full = -(-end // dim), -(-near_end // words), min(wanted, rows)
        count = min(wanted_near, rows - full)
        if first + full + count > MOST_SLOTS:
            message = f"the cache would have {first + full + count:,} slots; the limit is {MOST_SLOTS:,}: use a smaller share"
            raise BadInput(message, parameter="cache", needed=first + full + count, available=MOST_SLOTS)
        place = (head[F.ROW], rows, head[F.CODES], head[F.META], full + count, first, base, count, near_base)
        pools.append(Pool(dim, format, *place))
        first, end, near_end = first + full + count, (base + full) * dim, (near_base + count) * words
    return tuple(pools)


def make_cache(pools: Sequence[Pool], device: torch.device | str, staging: bool = False) -> list[Tensor]:
    """The tensors of an empty cache, in the order of `Cache`. `staging`: rows may be staged later."""
    if not pools:
        return []
    slots, last = sum(p.slots for p in pools), pools[-1]
    near_words = (last.int8_base + last.int8_slots) * F.int8_slot_words(last.dim) if any(p.int8_slots for p in pools) else 0
    cache = Cache(
        # at least one element: kernels recognise a cache by the address of its values
        values=table_zeros(max(1, (last.base + last.fp32_slots) * last.dim), torch.float32, device),
        near=table_zeros(near_words, torch.int32, device),
        rows=torch.full((slots,), F.EMPTY, dtype=torch.int64, device=device),
        scores=torch.zeros(slots, dtype=torch.int32, device=device),
        words=torch.zeros(slots, dtype=torch.int32, device=device),
        sketch=torch.zeros(slots * COUNTERS // 2, dtype=torch.int32, device=device),
        ledger=torch.zeros(len(pools), F.LEDGER_FIELDS, dtype=torch.int64, device=device),
        clock=torch.tensor([_SEED, 0], dtype=torch.int64, device=device),
        steps=torch.zeros(1, dtype=torch.int64, device="cpu"),
        home=torch.zeros(3 if staging else 0, dtype=torch.int64, device="cpu"),
    )
    return list(cache)


def set_cached(
    cache: Cache, pools: Sequence[Pool], words_N: Tensor, values_ND: Tensor, rows_N: Tensor, clock: Tensor | None
) -> Tensor:
    """Set the rows that are cached; returns their mask. Rows in int8 slots are rounded as rows of the table are."""
    cached_N = words_N < 0
    for pool in pools:
        here_N = cached_N & (rows_N >= pool.row) & (rows_N < pool.row + pool.rows)
        if bool(here_N.any()):
            write_pointed(cache, words_N[here_N], values_ND[here_N], rows_N[here_N], clock)
            cache.rows[pool.slot + slots_of(pool, words_N[here_N])] |= F.DIRTY
    return cached_N


def warm_up(codes: Tensor, meta: Tensor, cache: Cache, pools: Sequence[Pool], index: int, heat_R: Tensor, policy: int) -> float:
    """Fill the empty slots of a pool with its hottest rows, fp32 slots first; rows without heat stay out.

    Counts become the scores of the slots, scaled down to HALVING_LOOKUPS lookups a slot in all, so that rows that cool down are
    evicted as soon as any. With LRU all rows count as used now. Rows are clean until they are updated. Returns the heat of the
    admitted rows.
    """
    pool = pools[index]
    hottest_K = heat_R.sort(descending=True, stable=True)[1][: pool.slots]
    at_K = hottest_K[heat_R[hottest_K] > 0]
    scale = COUNT_UNIT * min(1.0, HALVING_LOOKUPS * pool.slots / max(1.0, float(heat_R.sum(dtype=torch.float64))))
    admit(codes, meta, cache, pools, index, at_K, (scale * heat_R[at_K].double()).clamp(1, 1 << 30).int(), policy)
    return float(heat_R[at_K].sum(dtype=torch.float64))


def admit(
    codes: Tensor, meta: Tensor, cache: Cache, pools: Sequence[Pool], index: int, at_K: Tensor, counts_K: Tensor, policy: int
) -> None:
    """Put rows of a pool into its first slots, which must be empty, with these counts."""
    pool = pools[index]
    codes_RB, meta_RW = _table(codes, meta, pool)
    words_KW, slot_K = meta_RW[at_K], torch.arange(at_K.numel(), device=meta.device)
    values_KD = dequantize_rows(codes_RB[at_K.to(codes.device)].to(meta.device), words_KW, pool.format, pool.dim)
    pointer_K, here = pointers(pool, slot_K), pool.slot + slot_K
    write_pointed(cache, pointer_K, values_KD, pool.row + at_K, None)
    cache.words[here] = words_KW[:, 0]
    cache.rows[here] = (pool.row + at_K) | (F.DIRTY if policy == F.FIXED else 0)  # no refresh marks updated rows
    if policy == F.ADAPTIVE:
        counts_K = pack_score(counts_K, tick(int(cache.ledger[index, F.SINCE]), pool.slots))
    cache.scores[here] = cache.clock[F.STEP].int() if policy == F.LRU else counts_K
    meta_RW[at_K, 0] = pointer_K
    cache.ledger[index, F.ADMISSIONS] += at_K.numel()  # admissions less evictions are the cached rows


def evict_all(codes: Tensor, meta: Tensor, cache: Cache, pools: Sequence[Pool]) -> None:
    """Write every cached row back to its table, rounded to nearest, and empty the cache."""
    for index, pool in enumerate(pools):
        here = slice(pool.slot, pool.slot + pool.slots)
        rows_S, words_S = cache.rows[here], cache.words[here]
        occupied_S = rows_S != F.EMPTY
        dirty_S = occupied_S & (rows_S & F.DIRTY != 0)
        clean_S = occupied_S & ~dirty_S
        word = pool.meta + F.META_WORDS[pool.format] * ((rows_S[clean_S] & ~F.DIRTY) - pool.row)
        meta[word] = words_S[clean_S]
        codes_RB, meta_RW = _table(codes, meta, pool)
        for slots_K in dirty_S.nonzero()[:, 0].split(_BLOCK):
            at_K = (rows_S[slots_K] & ~F.DIRTY) - pool.row
            codes_KB, meta_RW[at_K] = quantize_rows(read_pointed(cache, pointers(pool, slots_K), pool.dim), pool.format)
            codes_RB[at_K.to(codes_RB.device)] = codes_KB.to(codes_RB.device)
        cache.ledger[index, F.EVICTIONS] += occupied_S.sum()
        cache.ledger[index, F.WRITE_BACKS] += dirty_S.sum()
    cache.rows.fill_(F.EMPTY)
    cache.scores.zero_()


def _table(codes: Tensor, meta: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    """Views of the codes and meta words of a pool's rows."""
    width, words = F.row_bytes(pool.format, pool.dim), F.META_WORDS[pool.format]
    codes_RB = codes[pool.codes : pool.codes + pool.rows * width].view(pool.rows, width)
    return codes_RB, meta[pool.meta : pool.meta + pool.rows * words].view(pool.rows, words)


class RecentCounts(NamedTuple):
    """Recent lookups of the rows of a pool or of a table."""

    rows_K: Tensor  # rows in slots
    counts_K: Tensor
    missed: int  # estimated lookups of all other rows


def recent_counts(cache: Cache, pools: Sequence[Pool], index: int, policy: int) -> RecentCounts:
    """Recent lookup counts of a pool; rows count from the first row of the pool."""
    if policy == F.LRU:
        message = "an 'lru' cache does not count lookups; use policy='lfu' or 'adaptive', or profile the log"
        raise BadInput(message, parameter="policy", value="lru")
    pool = pools[index]
    here = slice(pool.slot, pool.slot + pool.slots)
    held_S = cache.rows[here] != F.EMPTY
    scores_K = cache.scores[here][held_S]
    counts_K = (scores_K >> TICK_BITS if policy == F.ADAPTIVE else scores_K).long() // COUNT_UNIT
    rows_K = (cache.rows[here][held_S] & ~F.DIRTY) - pool.row
    lookups, hits = cache.ledger[index, [F.LOOKUPS, F.HITS]].tolist()
    # Counts are halved from time to time, lookups and hits are totals: their ratio carries over.
    missed = int(counts_K.sum()) * (lookups - hits) // max(hits, 1)
    return RecentCounts(rows_K[counts_K > 0], counts_K[counts_K > 0], missed)


def statistics(cache: Cache, pools: Sequence[Pool]) -> dict[str, int]:
    """Totals of the cache's ledger. Waits for the GPU."""
    ledger_PF = cache.ledger.cpu()
    moved_P = (ledger_PF[:, F.ADMISSIONS] + ledger_PF[:, F.WRITE_BACKS]).tolist()
    moved = sum(count * bytes_per_row(F.NAMES[p.format], p.dim) for p, count in zip(pools, moved_P, strict=True))
    return {**{name: int(ledger_PF[:, field].sum()) for name, field in _STATISTICS.items()}, "bytes_moved": moved}
