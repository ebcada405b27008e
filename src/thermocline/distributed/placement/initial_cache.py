"""Which rows begin in slots, of all cards at once: what `shard_` does on each of them, for whoever has no cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from thermocline.distributed.exchange.routes import Counts
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap

from .local_shard import FULL, NEAR
from .row_index import Atlas
from .table_map import counted


def seated(
    atlas: Atlas, features: Sequence[Sequence[str]], heat: HeatProfile | None, ids: Mapping[str, IdMap], cards: int
) -> tuple[Counts, Counts]:
    """Global rows that have slots, ascending, and the kinds of these; `features`: of each table. `cards`: of a node."""
    rows, kinds = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table, names in enumerate(features):
        rows_H, counts_H = counted(names, heat, ids)
        where = atlas(torch.from_numpy(rows_H) + atlas.first[table])
        part_H, home_H, place_H = (each.numpy() for each in where)
        for k, part in enumerate(atlas.parts):
            if part.table == table and part.slots:
                at = np.flatnonzero((part_H == k) & (counts_H > 0))
                card_N = {1: 0 * home_H, 2: home_H % cards, 3: home_H}[part.tier][at]
                at, card_N = (each[np.lexsort((place_H[at], -counts_H[at], card_N))] for each in (at, card_N))
                rank_N = np.arange(len(at)) - np.searchsorted(card_N, card_N)
                taken = rank_N < part.slots
                rows.append(rows_H[at][taken] + atlas.first[table])
                kinds.append(np.where(rank_N[taken] < part.full, FULL, NEAR))
    order = np.argsort(np.concatenate(rows))
    return np.concatenate(rows)[order], np.concatenate(kinds)[order]
