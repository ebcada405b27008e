"""Id maps of all features in the form of the kernel: fields of each feature, and all arrays concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from thermocline.kernels.ids import fields as M
from thermocline.kernels.ids.reference import signed
from thermocline.kernels.ops import map_ids_anywhere

from .elastic_rows import ElasticRows, refuse_elastic
from .idmap import IdMap, RowRange, SaltedHash
from .kept_ids import KeptIds
from .keyed_map import KeyedMap


class IdMaps:
    """One map for each feature; None leaves ids as they are. Features that keep the same ids share one array."""

    elastic = False  # whether ids come and go, which needs key tables (`nn/elastic_maps.py`)

    def __init__(self, maps: Sequence[IdMap | None], device: torch.device | str) -> None:
        fields: list[list[int]] = []
        words: list[Tensor] = []
        counts: list[Tensor] = []
        places: dict[KeptIds, tuple[int, int]] = {}
        for each in maps:
            if each is not None and each.is_elastic and not (self.elastic or isinstance(each, KeyedMap)):
                refuse_elastic(f"outside of the module that trains them ({each})", "pass raw ids to the module")
            kept = None if each is None else each.kept
            if kept is not None and kept not in places:
                if gap := -sum(map(len, words)) % M.BLOCK_WORDS:
                    words.append(kept.words.new_zeros(gap))  # bitmaps lie on cache lines
                places[kept] = sum(map(len, words)), sum(map(len, counts))
                words.append(kept.words)
                counts.append(kept.block_counts)
            fields.append(_fields(each, (0, 0) if kept is None else places[kept]))
        self.keyed = {f: each for f, each in enumerate(maps) if isinstance(each, KeyedMap)}
        self.fields_FM = torch.tensor(fields, dtype=torch.int64, device=device)
        self.words = _join(words, torch.int64).to(device)
        self.counts = _join(counts, torch.int32).to(device)

    @property
    def bytes(self) -> int:
        keys = {id(each.keys): each.bytes for each in self.keyed.values()}  # features may share a table
        return sum(t.numel() * t.element_size() for t in (self.fields_FM, self.words, self.counts)) + sum(keys.values())

    def with_keyed(self, keyed: dict[int, KeyedMap]) -> IdMaps:
        """These maps with other keyed ones, by feature."""
        found = copy(self)
        found.keyed = keyed
        return found

    def __call__(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        """Rows of the ids of all features: feature-major, with features * batch + 1 offsets."""
        rows_N = map_ids_anywhere(self.fields_FM, self.words, self.counts, ids_N, offsets)
        if self.keyed:
            ends = offsets[:: (offsets.numel() - 1) // len(self.fields_FM) or 1].tolist()
            for f, each in self.keyed.items() if len(ends) > 1 else ():
                rows_N[ends[f] : ends[f + 1]] = each.look_up(ids_N[ends[f] : ends[f + 1]].long())
        return rows_N


def _join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """All parts concatenated; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=dtype), *parts])


def _fields(each: IdMap | None, place: tuple[int, int]) -> list[int]:
    field = [0] * M.FIELDS
    if each is None:
        return field
    if isinstance(each.start, RowRange):
        field[M.START], field[M.START_ROWS] = M.WITHIN, each.start.rows
    elif isinstance(each.start, SaltedHash):
        field[M.START], field[M.START_ROWS], field[M.START_KEY] = M.HASHED, each.start.rows, signed(each.start.key)
    elif isinstance(each.start, ElasticRows):
        field[M.START], field[M.START_ROWS], field[M.START_KEY] = (
            M.HASHED,
            each.start.others,
            signed(SaltedHash(1, each.start.salt).key),
        )
    if each.kept is not None and each.others is not None:
        field[M.KEPT] = M.BITMAP if each.kept.form == "bitmap" else M.SORTED
        field[M.KEPT_COUNT], field[M.LOW], field[M.HIGH] = each.kept.count, each.kept.low, each.kept.high
        field[M.PLACE], field[M.BLOCK] = place
        field[M.OTHERS], field[M.OTHERS_KEY] = each.others.rows, signed(each.others.key)
    field[M.FIRST] = each.first + (each.start.own if isinstance(each.start, ElasticRows) else 0)
    return field
