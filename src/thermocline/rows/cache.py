"""The full-precision cache of an arena: its tensors, and what is done with cached rows outside a training step.

How rows come and go while training is defined in `kernels/cache/reference.py`. Tables of one dimension and precision share a
pool of slots, so the hottest rows of all of them compete for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import BadInput
from ..kernels import formats as F
from ..kernels import quantize_rows
from ..kernels.cache.reference import COUNTERS
from ..kernels.layout import Cache, Pool
from .memory import table_zeros
from .precision import bytes_per_row

_SEED = 0x5EED_CAC4E  # any number: only different from seeds that users choose
SLOT_BYTES = 8 + 4 + 4 + 2 * COUNTERS  # of a slot beside its values: row, score, displaced word, sketch
_BLOCK = 1 << 16  # rows put back at a time


def policy_of(name: str) -> int:
    """The number kernels know a policy by."""
    if name not in F.POLICIES:
        raise BadInput(f"policy {name!r} is not known; use one of {', '.join(F.POLICIES)}")
    return F.POLICIES.index(name)


def make_pools(fields: Sequence[tuple[int, ...]], slots: Sequence[int]) -> tuple[Pool, ...]:
    """Pools for tables with these fields, of which each brings so many slots."""
    groups: dict[tuple[int, int], list[int]] = {}
    for table, field in enumerate(fields):
        groups.setdefault((field[F.DIM], field[F.FORMAT]), []).append(table)
    pools: list[Pool] = []
    first = end = 0
    for (dim, format), tables in sorted(groups.items()):
        rows, wanted = sum(fields[t][F.ROWS] for t in tables), sum(slots[t] for t in tables)
        if wanted == 0:
            continue
        if F.META_WORDS[format] == 0:
            raise BadInput(f"{F.NAMES[format]} rows cannot be cached; use cache=0, or a precision of 8 bits or less")
        head, base = fields[min(tables, key=lambda t: fields[t][F.ROW])], -(-end // dim)
        count = min(wanted, rows)
        assert base + count <= 1 << 30, "the bit above is that of staged rows"
        pools.append(Pool(dim, format, head[F.ROW], rows, head[F.CODES], head[F.META], count, first, base))
        first, end = first + count, (base + count) * dim
    return tuple(pools)


def make_cache(pools: Sequence[Pool], device: torch.device | str) -> list[Tensor]:
    """The tensors of an empty cache, as `Cache` names them, but for the area of staged rows: the first prefetch brings it."""
    if not pools:
        return []
    slots, last = sum(p.slots for p in pools), pools[-1]
    cache = Cache(
        values=table_zeros((last.base + last.slots) * last.dim, torch.float32, device),
        rows=torch.full((slots,), F.EMPTY, dtype=torch.int64, device=device),
        scores=torch.zeros(slots, dtype=torch.int32, device=device),
        words=torch.zeros(slots, dtype=torch.int32, device=device),
        sketch=torch.zeros(slots * COUNTERS // 2, dtype=torch.int32, device=device),
        ledger=torch.zeros(len(pools), F.LEDGER_FIELDS, dtype=torch.int64, device=device),
        clock=torch.tensor([_SEED, 0], dtype=torch.int64, device=device),
        steps=torch.zeros(1, dtype=torch.int64),
    )
    return list(cache[:-1])


def get_cached(cache: Cache, words_N: Tensor, values_ND: Tensor) -> None:
    """Put the values of cached rows in their places; `words_N` are the first meta words of the rows."""
    cached_N, slot_K = words_N < 0, words_N[words_N < 0] & F.SLOT_BITS
    values_ND[cached_N] = cache.values[_elements(slot_K, values_ND.shape[1])]


def set_cached(cache: Cache, pools: Sequence[Pool], words_N: Tensor, values_ND: Tensor, format: int) -> Tensor:
    """Set the rows that are cached, and say which they are."""
    cached_N, slot_K, dim = words_N < 0, words_N[words_N < 0] & F.SLOT_BITS, values_ND.shape[1]
    for pool in pools:
        if (pool.dim, pool.format) == (dim, format):
            cache.values[_elements(slot_K, dim)] = values_ND[cached_N]
            cache.rows[slot_K.long() + (pool.slot - pool.base)] |= F.DIRTY
    return cached_N


def _elements(slot_K: Tensor, dim: int) -> Tensor:
    return slot_K.long()[:, None] * dim + torch.arange(dim, device=slot_K.device)


def evict_all(codes: Tensor, meta: Tensor, cache: Cache, pools: Sequence[Pool]) -> None:
    """Put every cached row back into its table, rounded to nearest, and leave the cache empty."""
    for index, pool in enumerate(pools):
        here = slice(pool.slot, pool.slot + pool.slots)
        rows_S, words_S = cache.rows[here], cache.words[here]
        occupied_S = rows_S != F.EMPTY
        dirty_S = occupied_S & (rows_S & F.DIRTY != 0)
        clean_S = occupied_S & ~dirty_S
        word = pool.meta + F.META_WORDS[pool.format] * ((rows_S[clean_S] & ~F.DIRTY) - pool.row)
        meta[word] = words_S[clean_S]
        for slots_K in dirty_S.nonzero()[:, 0].split(_BLOCK):
            _round(codes, meta, cache, pool, slots_K, rows_S[slots_K] & ~F.DIRTY)
        cache.ledger[index, F.EVICTIONS] += occupied_S.sum()
        cache.ledger[index, F.WRITE_BACKS] += dirty_S.sum()
    cache.rows.fill_(F.EMPTY)
    cache.scores.zero_()


def _round(codes: Tensor, meta: Tensor, cache: Cache, pool: Pool, slots_K: Tensor, rows_K: Tensor) -> None:
    """Round the rows of some slots into their tables."""
    width, words = F.row_bytes(pool.format, pool.dim), F.META_WORDS[pool.format]
    values_KD = cache.values[pool.base * pool.dim :][: pool.slots * pool.dim].view(-1, pool.dim)[slots_K]
    codes_RB = codes[pool.codes : pool.codes + pool.rows * width].view(pool.rows, width)
    meta_RW = meta[pool.meta : pool.meta + pool.rows * words].view(pool.rows, words)
    at_K = rows_K - pool.row
    codes_KB, meta_RW[at_K] = quantize_rows(values_KD, pool.format)
    codes_RB[at_K.to(codes_RB.device)] = codes_KB.to(codes_RB.device)


def statistics(cache: Cache, pools: Sequence[Pool]) -> dict[str, int]:
    """What the cache did since it was made. Waits for the GPU."""
    ledger = cache.ledger.cpu()
    _, lookups, hits, admissions, evictions, write_backs = ledger.sum(0).tolist()[: F.WINDOW]
    moved = 0
    for pool, line in zip(pools, ledger.tolist(), strict=True):
        moved += (line[F.ADMISSIONS] + line[F.WRITE_BACKS]) * bytes_per_row(F.NAMES[pool.format], pool.dim)
    return {
        "lookups": lookups,
        "hits": hits,
        "admissions": admissions,
        "evictions": evictions,
        "write_backs": write_backs,
        "bytes_moved": moved,
    }
