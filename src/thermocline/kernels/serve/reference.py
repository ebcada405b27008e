"""Look up rows of tables that are split over shards: the definition, in plain PyTorch. Layout: `fields.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import IdOutOfRange
from thermocline.kernels.gather.reference import bag_of_each, bag_scale
from thermocline.kernels.ids import fields as M
from thermocline.kernels.ids.reference import bitmap_rank, sorted_rank
from thermocline.kernels.quantize.reference import dequantize_rows, fmix32

from . import fields as S
from .fields import ServedBags, ShardedTables


def owners(placed: ShardedTables, feature: int, rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """(shard, place) of the owners of rows."""
    field, shards = placed.fields_FN[feature].tolist(), placed.shards
    if field[S.SCHEME] == S.RANGES:
        return field[S.FIRST] + rows_N // field[S.PER], rows_N % field[S.PER]
    block_N = rows_N // shards
    if field[S.ROTATIONS] == S.HASHED:
        rotation_N = (fmix32((block_N & 0xFFFFFFFF) ^ field[S.KEY]) * shards) >> 32
    else:
        rotation_N = placed.rotations[field[S.ROTATIONS] + block_N].long()
    return (rows_N + rotation_N) % shards, block_N


def locate(placed: ShardedTables, feature: int, rows_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
    """(shard, place) where lookups read rows, copies and overlay included. `position_N`: positions in the batch."""
    field, shards = placed.fields_FN[feature].tolist(), placed.shards
    shard_N, place_N = owners(placed, feature, rows_N)
    copied_N, rank_N = _rank(placed, field[S.COPIED :], rows_N)
    shard_N = torch.where(copied_N, position_N % shards, shard_N)
    place_N = torch.where(copied_N, field[S.COPY_PLACE] + rank_N, place_N)
    over_N, rank_N = _rank(placed, field[S.OVERLAY :], rows_N)
    shard_N = torch.where(over_N, shards, shard_N)
    return shard_N, torch.where(over_N, rank_N, place_N)


def _rank(placed: ShardedTables, row_set: list[int], rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """(whether rows are in a set, their rank in it)."""
    if row_set[S.KIND] == S.NOTHING:
        return torch.zeros_like(rows_N, dtype=torch.bool), torch.zeros_like(rows_N)
    field = [0] * M.FIELDS
    field[M.KEPT_COUNT], field[M.PLACE], field[M.BLOCK] = row_set[S.COUNT], row_set[S.WORDS], row_set[S.BLOCK]
    field[M.LOW], field[M.HIGH] = row_set[S.LOW], row_set[S.HIGH]
    if row_set[S.KIND] == S.SORTED:
        return sorted_rank(field, placed.words, rows_N)
    return bitmap_rank(field, placed.words, placed.counts, rows_N)


def read(placed: ShardedTables, feature: int, shard_N: Tensor, place_N: Tensor) -> Tensor:
    """Dequantized rows at places of shards."""
    field = placed.fields_FN[feature].tolist()
    format, dim = field[S.FORMAT], field[S.DIM]
    codes_NB = torch.empty(len(shard_N), F.row_bytes(format, dim), dtype=torch.uint8)
    words_NB = torch.empty(len(shard_N), 4 * F.META_WORDS[format], dtype=torch.uint8)
    for shard in shard_N.unique().tolist():
        segment, mine_N = placed.segments[shard], shard_N == shard
        assert segment is not None
        for into_NB, begins_FC, stride in (
            (codes_NB, placed.codes_FC, field[S.STRIDE]),
            (words_NB, placed.meta_FC, field[S.META_STRIDE]),
        ):
            at_N = int(begins_FC[feature, shard]) + place_N[mine_N] * stride
            into_NB[mine_N] = segment[at_N[:, None] + torch.arange(into_NB.shape[1])]
    meta_NW = words_NB.view(-1).view(torch.int32).view(len(shard_N), F.META_WORDS[format])
    return dequantize_rows(codes_NB, meta_NW, format, dim)


def gather_pool(placed: ShardedTables, bags: ServedBags, out: Tensor) -> Tensor:
    """Look up and pool into `out`; returns the lookups of each shard and of the overlay."""
    ends, tally_C = bags.ends_F1.tolist(), torch.zeros(placed.shards + 1, dtype=torch.int64)
    offsets = torch.arange(bags.rows_N.numel() + 1) if bags.offsets_B1 is None else bags.offsets_B1.long()
    for f, (at, pitch) in enumerate(bags.target_F2.tolist()):
        mine = offsets[ends[f] : ends[f + 1] + 1]
        first, last = int(mine[0]), int(mine[-1])
        rows_N, limit = bags.rows_N[first:last].long(), int(placed.fields_FN[f, S.ROWS])
        bad_N = (rows_N < 0) | (rows_N >= limit)
        if bool(bad_N.any()):
            position = int(bad_N.nonzero()[0])
            raise IdOutOfRange(f, first + position, int(rows_N[position]), limit)
        shard_N, place_N = locate(placed, f, rows_N, torch.arange(first, last))
        tally_C += torch.bincount(shard_N, minlength=placed.shards + 1)
        values_ND = read(placed, f, shard_N, place_N)
        if bags.weights_N is not None:
            values_ND = values_ND * bags.weights_N[first:last, None].float()
        bag_N = bag_of_each(mine - first, last - first)
        sums_BD = torch.zeros(len(mine) - 1, values_ND.shape[1], dtype=torch.float32).index_add_(0, bag_N, values_ND)
        answers_BD = sums_BD * bag_scale(mine, bags.mode)[:, None]
        out.as_strided(answers_BD.shape, (pitch, 1), out.storage_offset() + at)[:] = answers_BD
    return tally_C
