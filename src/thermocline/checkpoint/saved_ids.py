"""The ids of elastic tables in a checkpoint: where they are, and id maps that have them for reading."""

from __future__ import annotations

from itertools import count, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline.distributed.elastic_ids import RankMaps
from thermocline.ids.elastic import KeyTable
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.ids.idmap import IdMap
from thermocline.ids.keyed_map import KeyedMap, new_keys, without_counts
from thermocline.kernels.elastic.fields import STEPS
from thermocline.nn.rows_module import RowsModule

from .reader import Checkpoint


class SavedPlace(NamedTuple):
    """The elastic part of a table: its number among those of its module, and its rule."""

    number: int
    policy: ElasticRows


def saved_places(checkpoint: Checkpoint, module: str) -> dict[tuple[str, int], SavedPlace]:
    """The elastic parts of a module's tables, by table and first row."""
    tables = [table for table in checkpoint.manifest.tables if table.module == module]
    maps = [(t, table.name, checkpoint.id_maps[feature]) for t, table in enumerate(tables) for feature in table.features]
    known = {(t, map.first): (name, map.start) for t, name, map in maps if isinstance(map.start, ElasticRows)}
    return {(known[at][0], at[1]): SavedPlace(n, known[at][1]) for n, at in enumerate(sorted(known))}


def key_arrays(module: RowsModule) -> dict[str, Tensor]:
    """The key tables of a module by name; of several ranks, the buckets of this one, `<name>/<rank>`."""
    if not isinstance(module.maps, RankMaps):
        return {} if module.maps is None else module.maps.tensors()
    return {f"{name}/{module.maps.groups.rank}": each for name, each in module.maps.tensors().items() if each.numel()}


def read_keys(checkpoint: Checkpoint, module: str, place: SavedPlace, keys: KeyTable) -> None:
    """Fill a key table of the saved size."""
    state, counts = checkpoint.state, keys.counts
    for name, tensor in keys.tensors().items():
        saved = f"module/{module}/elastic{place.number}_{name}"
        if saved in state:
            tensor.copy_(state.read(saved))
            continue
        ranks = takewhile(lambda rank: f"module/{module}/elastic{place.number}_counts/{rank}" in state, count())
        parts = [state.read(f"{saved}/{rank}") for rank in ranks if f"{saved}/{rank}" in state]
        if tensor is counts and parts:
            counts.copy_(parts[0])  # steps are the same on all ranks
            counts[:STEPS] = torch.stack(parts).sum(0)[:STEPS]
        else:
            tensor.copy_(parts[0] if name in ("clock", "open") and parts else torch.cat([tensor[:0].cpu(), *parts]))


def read_id_maps(checkpoint: Checkpoint) -> dict[str, IdMap]:
    """The id map of each feature; elastic ones with the ids that have rows, for reading only."""
    maps = dict(checkpoint.id_maps)
    for module in checkpoint.manifest.modules:
        places = saved_places(checkpoint, module.name)
        found: dict[tuple[str, int], KeyTable] = {}
        for at, place in places.items():
            found[at] = new_keys(place.policy)
            read_keys(checkpoint, module.name, place, found[at])
            without_counts(found[at])
        for table in checkpoint.manifest.tables:
            for feature in table.features if table.module == module.name else ():
                if (table.name, maps[feature].first) in found and maps[feature].is_elastic:
                    maps[feature] = KeyedMap.of(maps[feature], found[table.name, maps[feature].first])
    return maps
