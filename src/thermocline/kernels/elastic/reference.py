"""Ids that come and go: the definition, in plain PyTorch and Python.

A training step looks up a batch of ids. Its result depends on the state and on how often each id occurs, not on their order:

1. `find` gives each id its row, or a shared row by its hash.
2. `touch` counts the lookups of rows. The heat of a row first halves once for every multiple of `half_life` steps since its
   last lookup, so counts decay as if all were halved at these steps.
3. `count` counts distinct ids without a row in the count-min sketch of their bucket. All ids read the counters as the step
   found them, and a counter becomes the largest of the counts of its ids: estimates are never too low, and one-off ids barely
   raise each other.
4. Of ids with enough lookups `admit_chance` admits some: a draw for each id and step, which is larger than the chance that none
   of its lookups admits it.
5. `place` gives rows to ids that were counted often enough, in the order of (bucket, most lookups, smallest hash). An id takes
   the first free row of its bucket, or the coldest: the smallest heat, then the longest unused, then the first. With LFU an id
   takes a row only if it is counted at least as often as the row; with LRU the longest unused row goes. Rows used since step
   `barrier`, and pinned rows, stay: so ids of one batch never take each other's rows, and a step ends, whatever it looks up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.ids import fields as M
from thermocline.kernels.ids.reference import hash_ids, reduce_to, right, signed, splitmix64
from thermocline.kernels.quantize.reference import quantize_rows
from thermocline.kernels.slots import slots_of

from .fields import BUCKET, CELLS, CHANCE_KEY, DEPTH, MOST, PINNED, Admitted, KeyArrays, KeyRules, TableRows, chances


def as_bytes(words: Tensor) -> Tensor:
    return words.view(torch.uint8)


def bucket_of(hashes_N: Tensor, rows: int) -> Tensor:
    return reduce_to(hashes_N, rows) // BUCKET


def find(arrays: KeyArrays, rules: KeyRules, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """(the row of each id, its own or one of the shared rows after them; positions of ids without a row, ascending)."""
    hashes_N = hash_ids(ids_N, rules.key)
    first_N = BUCKET * bucket_of(hashes_N, rules.rows)
    rows_NB = (first_N[:, None] + torch.arange(BUCKET)).clamp(max=rules.rows - 1)
    here_NB = rows_NB - rules.first
    same_NB = (arrays.keys[here_NB] == ids_N[:, None]) & (as_bytes(arrays.tags)[here_NB] != 0)
    own_N = rows_NB.gather(1, same_NB.byte().argmax(dim=1, keepdim=True))[:, 0]
    found_N = same_NB.any(dim=1)
    return torch.where(found_N, own_N, rules.rows + reduce_to(hashes_N, rules.shared)), (~found_N).nonzero()[:, 0]


def score(arrays: KeyArrays, rules: KeyRules, rows_K: Tensor, step: int) -> Tensor:
    """The heat of rows at a step."""
    here_K = rows_K - rules.first
    halvings_K = step // rules.half_life - arrays.last[here_K].long() // rules.half_life
    return as_bytes(arrays.heat)[here_K].long() >> halvings_K.clamp(0, 8)


def touch(arrays: KeyArrays, rules: KeyRules, rows_N: Tensor, step: int) -> None:
    """Count the lookups of rows that belong to ids."""
    rows_U, counts_U = rows_N[rows_N < rules.rows].unique(return_counts=True)
    kept_U = arrays.last[rows_U - rules.first] != PINNED
    rows_U, counts_U = rows_U[kept_U], counts_U[kept_U]
    as_bytes(arrays.heat)[rows_U - rules.first] = (score(arrays, rules, rows_U, step) + counts_U).clamp(max=MOST).byte()
    arrays.last[rows_U - rules.first] = step


def look_up(arrays: KeyArrays, rules: KeyRules, ids_N: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """`find` in a training step, and `touch`."""
    rows_N, missed_M = find(arrays, rules, ids_N)
    touch(arrays, rules, rows_N, step)
    return rows_N, missed_M


def count(arrays: KeyArrays, rules: KeyRules, ids_U: Tensor, counts_U: Tensor) -> Tensor:
    """Count lookups of distinct ids without a row; returns the estimate of all their lookups."""
    lines = torch.arange(1, DEPTH + 1)
    hashes_U = hash_ids(ids_U, rules.key)
    mixed_UD = splitmix64(hashes_U[:, None] + lines * signed(M.GOLDEN))
    lines_UD = DEPTH * (bucket_of(hashes_U, rules.rows) - rules.first // BUCKET)[:, None] + lines - 1
    cells_UD = CELLS * lines_UD + reduce_to(mixed_UD, CELLS)
    cells = as_bytes(arrays.sketch)
    estimates_U = (cells[cells_UD].amin(dim=1).long() + counts_U).clamp(max=MOST)
    raised = cells.long().scatter_reduce(0, cells_UD.reshape(-1), estimates_U.repeat_interleave(DEPTH), "amax")
    cells.copy_(raised.byte())
    return estimates_U


def admit(
    arrays: KeyArrays, rules: KeyRules, ids_N: Tensor, rows_N: Tensor, missed_M: Tensor, after: int, chance: float, step: int,
    barrier: int,
) -> Admitted:  # fmt: skip
    """`count` ids without a row, and `place` those with enough lookups that `chance` admits; `rows_N` gets their rows."""
    ids_U, inverse_M, counts_U = ids_N[missed_M].unique(return_inverse=True, return_counts=True)
    heat_U = count(arrays, rules, ids_U, counts_U)
    draws_U = right(hash_ids(hash_ids(ids_U, rules.key), signed(step ^ CHANCE_KEY)), 32)
    ready_U = (heat_U >= after) & (draws_U >= torch.tensor(chances(chance), dtype=torch.int64)[counts_U.clamp(max=MOST)])
    rows_C, before_C, left_C = place(arrays, rules, ids_U[ready_U], heat_U[ready_U], step, barrier)
    rows_U = torch.full_like(ids_U, -1).masked_scatter(ready_U, rows_C)
    rows_M, placed_U = rows_U[inverse_M], rows_U >= 0
    rows_N[missed_M[rows_M >= 0]] = rows_M[rows_M >= 0]
    sizes = ids_U.numel(), rows_C.numel(), int((rows_M < 0).sum())
    return Admitted(ids_U[placed_U], rows_U[placed_U], before_C[left_C], rows_C[left_C], *sizes)


def place(
    arrays: KeyArrays, rules: KeyRules, ids_C: Tensor, heat_C: Tensor, step: int, barrier: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Give rows to distinct ids: (row of each or -1, the id that had the row, whether there was one)."""
    tags, heat = as_bytes(arrays.tags), as_bytes(arrays.heat)
    rows_C, before_C, left_C = torch.full_like(ids_C, -1), torch.zeros_like(ids_C), torch.zeros_like(ids_C, dtype=torch.bool)
    hashes_C = hash_ids(ids_C, rules.key)
    for at in placing_order(hashes_C, heat_C, rules.rows).tolist():
        first = BUCKET * int(bucket_of(hashes_C[at : at + 1], rules.rows))
        bucket = range(first, min(first + rules.open, rules.rows))
        free = [row for row in bucket if tags[row - rules.first] == 0]
        used = {row: int(arrays.last[row - rules.first]) for row in bucket}
        cold = [row for row in bucket if used[row] != PINNED and used[row] < barrier]
        if free:
            row = free[0]
        elif not cold:
            continue
        elif rules.lru:
            row = min(cold, key=lambda row: (used[row], row))
        else:
            scores = dict(zip(cold, score(arrays, rules, torch.tensor(cold, dtype=torch.int64), step).tolist(), strict=True))
            row = min(cold, key=lambda row: (scores[row], used[row], row))
            if scores[row] > int(heat_C[at]):
                continue
        here = row - rules.first
        rows_C[at], before_C[at], left_C[at] = row, arrays.keys[here], not free
        arrays.keys[here], arrays.last[here] = ids_C[at], step
        tags[here], heat[here] = tag_of(int(hashes_C[at])), int(heat_C[at])
    return rows_C, before_C, left_C


def placing_order(hashes_C: Tensor, heat_C: Tensor, rows: int) -> Tensor:
    """The order in which ids take rows: by bucket, then most lookups first, then by hash."""
    order = (hashes_C ^ signed(1 << 63)).argsort()  # unsigned
    order = order[heat_C[order].argsort(descending=True, stable=True)]
    return order[bucket_of(hashes_C, rows)[order].argsort(stable=True)]


def tag_of(hash: int) -> int:
    return max(1, hash & 255)


def tags_of(hashes_N: Tensor) -> Tensor:
    return (hashes_N & 255).clamp(min=1).byte()


def first_values(ids_K: Tensor, key: int, dim: int, bound: float) -> Tensor:
    """First values of the rows of ids: uniform in [-bound, bound), a function of id and key alone."""
    columns = torch.arange(1, dim + 1, device=ids_K.device) * signed(M.GOLDEN)
    bits_KD = right(splitmix64(hash_ids(ids_K, key)[:, None] + columns), 40)
    return (bits_KD.float() * 2.0**-23 - 1.0) * bound


def begin_rows(table: TableRows, ids_K: Tensor, rows_K: Tensor, key: int, bound: float) -> None:
    """Begin distinct rows of a table, which new ids have now. What the cache holds of them is forgotten."""
    codes_RB, meta_RW, format, dim, _, cache, pool, states = table
    if cache is not None and pool is not None:
        words_K = meta_RW[rows_K, 0]
        slots_K = pool[1].slot + slots_of(pool[1], words_K[words_K < 0])
        cache.rows[slots_K], cache.scores[slots_K] = F.EMPTY, 0
        cache.ledger[pool[0], F.EVICTIONS] += slots_K.numel()
    codes_RB[rows_K], meta_RW[rows_K] = quantize_rows(first_values(ids_K, key, dim, bound), format, None, None)
    for state in states:
        state[rows_K] = 0.0
