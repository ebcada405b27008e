"""Look up rows of tables that are split over cards: the definition, in plain PyTorch. `fields.py` says what is where."""

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
from .fields import Bags, Placed


def owners(placed: Placed, feature: int, rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """(card, place) of rows, as they were loaded and but for copies."""
    field, cards = placed.fields_FN[feature].tolist(), placed.cards
    if field[S.WAY] == S.RANGES:
        return field[S.FIRST] + rows_N // field[S.PER], rows_N % field[S.PER]
    block_N = rows_N // cards
    if field[S.TURNS] == S.HASHED:
        turn_N = (fmix32((block_N & 0xFFFFFFFF) ^ field[S.KEY]) * cards) >> 32
    else:
        turn_N = placed.turns[field[S.TURNS] + block_N].long()
    return (rows_N + turn_N) % cards, block_N


def locate(placed: Placed, feature: int, rows_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
    """(card, place) where lookups read rows. `position_N`: of the lookups in their batch."""
    field, cards = placed.fields_FN[feature].tolist(), placed.cards
    card_N, place_N = owners(placed, feature, rows_N)
    copied_N, rank_N = _rank(placed, field[S.COPIED :], rows_N)
    card_N = torch.where(copied_N, position_N % cards, card_N)
    place_N = torch.where(copied_N, field[S.COPY_PLACE] + rank_N, place_N)
    over_N, rank_N = _rank(placed, field[S.OVERLAY :], rows_N)
    card_N = torch.where(over_N, cards, card_N)
    return card_N, torch.where(over_N, rank_N, place_N)


def _rank(placed: Placed, a_set: list[int], rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """(whether rows are in a set, their rank there)."""
    if a_set[S.KIND] == S.NOTHING:
        return torch.zeros_like(rows_N, dtype=torch.bool), torch.zeros_like(rows_N)
    field = [0] * M.FIELDS
    field[M.KEPT_COUNT], field[M.PLACE], field[M.BLOCK] = a_set[S.COUNT], a_set[S.WORDS], a_set[S.BLOCK]
    field[M.LOW], field[M.HIGH] = a_set[S.LOW], a_set[S.HIGH]
    if a_set[S.KIND] == S.SORTED:
        return sorted_rank(field, placed.words, rows_N)
    return bitmap_rank(field, placed.words, placed.counts, rows_N)


def read(placed: Placed, feature: int, card_N: Tensor, place_N: Tensor) -> Tensor:
    """Rows at places of cards, dequantized."""
    field = placed.fields_FN[feature].tolist()
    format, dim = field[S.FORMAT], field[S.DIM]
    codes_NB = torch.empty(len(card_N), F.row_bytes(format, dim), dtype=torch.uint8)
    words_NB = torch.empty(len(card_N), 4 * F.META_WORDS[format], dtype=torch.uint8)
    for card in card_N.unique().tolist():
        segment, mine_N = placed.segments[card], card_N == card
        assert segment is not None
        for into_NB, begins_FC, stride in (
            (codes_NB, placed.codes_FC, field[S.STRIDE]),
            (words_NB, placed.meta_FC, field[S.META_STRIDE]),
        ):
            at_N = int(begins_FC[feature, card]) + place_N[mine_N] * stride
            into_NB[mine_N] = segment[at_N[:, None] + torch.arange(into_NB.shape[1])]
    meta_NW = words_NB.view(-1).view(torch.int32).view(len(card_N), F.META_WORDS[format])
    return dequantize_rows(codes_NB, meta_NW, format, dim)


def gather_pool(placed: Placed, bags: Bags, out: Tensor) -> Tensor:
    """Look up and pool; writes `out` where `bags` says, and returns how many lookups each card and the overlay answered."""
    ends, tally_C = bags.ends_F1.tolist(), torch.zeros(placed.cards + 1, dtype=torch.int64)
    offsets = torch.arange(bags.rows_N.numel() + 1) if bags.offsets_B1 is None else bags.offsets_B1.long()
    for f, (at, pitch) in enumerate(bags.target_F2.tolist()):
        mine = offsets[ends[f] : ends[f + 1] + 1]
        first, last = int(mine[0]), int(mine[-1])
        rows_N, limit = bags.rows_N[first:last].long(), int(placed.fields_FN[f, S.ROWS])
        bad_N = (rows_N < 0) | (rows_N >= limit)
        if bool(bad_N.any()):
            position = int(bad_N.nonzero()[0])
            raise IdOutOfRange(f, first + position, int(rows_N[position]), limit)
        card_N, place_N = locate(placed, f, rows_N, torch.arange(first, last))
        tally_C += torch.bincount(card_N, minlength=placed.cards + 1)
        values_ND = read(placed, f, card_N, place_N)
        if bags.weights_N is not None:
            values_ND = values_ND * bags.weights_N[first:last, None].float()
        bag_N = bag_of_each(mine - first, last - first)
        sums_BD = torch.zeros(len(mine) - 1, values_ND.shape[1]).index_add_(0, bag_N, values_ND)
        answers_BD = sums_BD * bag_scale(mine, bags.mode)[:, None]
        out.as_strided(answers_BD.shape, (pitch, 1), out.storage_offset() + at)[:] = answers_BD
    return tally_C
