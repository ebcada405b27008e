"""The ids of a table in one of another capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline.kernels.elastic import fields as K
from thermocline.kernels.elastic.fields import DROPPED, STEPS, WINDOW
from thermocline.kernels.elastic.reference import as_bytes, bucket_of, placing_order, score, tags_of
from thermocline.kernels.ids.reference import hash_ids

from .elastic import KeyTable


def take_over(keys: KeyTable, saved: KeyTable) -> Tensor:
    """Make an empty table a saved one of another size: the new row of each of its rows, shared ones included, or -1 if dropped.

    Where a bucket has fewer rows than ids, the coldest are dropped. Ids that wait for a row are counted anew.
    """
    own, rows_K = keys.rules.rows, saved.occupied()
    ids_K, last_K = saved.keys[rows_K], saved.last[rows_K]
    hashes_K = hash_ids(ids_K, keys.rules.key)
    heat_K = score(saved.arrays, saved.rules, rows_K, int(saved.counts[STEPS]))
    heat_K = last_K.long() if keys.rules.lru else heat_K
    order_K = placing_order(hashes_K, torch.where(last_K == K.PINNED, 1 << 40, heat_K), own)
    bucket_K = bucket_of(hashes_K[order_K], own)
    begins_K = torch.searchsorted(bucket_K, bucket_K)
    place_K = K.BUCKET * bucket_K + torch.arange(rows_K.numel()) - begins_K
    fits_K = (place_K < K.BUCKET * (bucket_K + 1)) & (place_K < own)
    kept_K, place_K = order_K[fits_K], place_K[fits_K]
    remap = torch.full((saved.policy.rows,), -1)
    remap[saved.places.rows(rows_K[kept_K])] = keys.places.rows(place_K)
    remap[saved.rules.rows :] = own + torch.arange(saved.policy.others)
    for tensor in keys.arrays:
        tensor.zero_()
    keys.keys[place_K], keys.last[place_K] = ids_K[kept_K], last_K[kept_K]
    as_bytes(keys.tags)[place_K] = tags_of(hashes_K[kept_K])
    as_bytes(keys.heat)[place_K] = as_bytes(saved.heat)[rows_K[kept_K]]
    keys.counts.copy_(saved.counts)
    keys.counts[DROPPED] += rows_K.numel() - kept_K.numel()
    keys.counts[WINDOW] = 0
    keys.open.fill_(max(keys.policy.open, int((place_K % K.BUCKET).max()) + 1 if place_K.numel() else 0))
    keys.grow()
    if keys.clock is not None and saved.clock is not None:
        keys.clock[:] = saved.clock
    return remap
