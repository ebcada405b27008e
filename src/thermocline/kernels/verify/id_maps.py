"""The checks of maps from ids to rows, one feature of every kind with fields written by hand, and of rows of n-grams."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline.kernels.ids import fields as M
from thermocline.kernels.ids import reference
from thermocline.kernels.ids.bitmap import count_ones
from thermocline.kernels.ngrams import reference as ngrams_reference

from .checks import CheckResult, Implementation, check, same_bits

_SPAN = 3000  # ids that the bitmap covers


def _maps() -> tuple[Tensor, Tensor, Tensor]:
    """Fields, words and counts of five features: unchanged, within a range, hashed, sorted and in a bitmap."""
    generator = torch.Generator().manual_seed(0)
    sorted_K = torch.randint(-(1 << 62), 1 << 62, (100,), generator=generator).sort().values
    blocks = -(-_SPAN // (64 * M.BLOCK_WORDS))
    bits_W = torch.randint(-(1 << 63), (1 << 63) - 1, (blocks * M.BLOCK_WORDS,), generator=generator)
    bits_W[_SPAN // 64 :] = 0
    ones_B = count_ones(bits_W).view(blocks, M.BLOCK_WORDS).sum(1)
    words = torch.cat([sorted_K, torch.zeros(-len(sorted_K) % M.BLOCK_WORDS, dtype=torch.int64), bits_W])
    fields_FM = torch.zeros(5, M.FIELDS, dtype=torch.int64)
    key = reference.signed(0xE220A8397B1DCDAF)
    for feature, numbers in enumerate((
        {},
        {M.START: M.WITHIN, M.START_ROWS: _SPAN, M.FIRST: 17},
        {M.START: M.HASHED, M.START_ROWS: (1 << 40) - 5, M.START_KEY: key},
        {M.KEPT: M.SORTED, M.KEPT_COUNT: len(sorted_K), M.LOW: int(sorted_K[0]), M.HIGH: int(sorted_K[-1]),
         M.OTHERS: 7, M.OTHERS_KEY: key},
        {M.KEPT: M.BITMAP, M.KEPT_COUNT: int(ones_B.sum()), M.PLACE: len(words) - len(bits_W), M.HIGH: _SPAN - 1, M.OTHERS: 3,
         M.FIRST: 5},
    )):  # fmt: skip
        for field, number in numbers.items():
            fields_FM[feature, field] = number
    return fields_FM, words, (ones_B.cumsum(0) - ones_B).int()


@check("map ids", "reference", lambda batch: "every kind of map")
def map_ids(ours: Implementation, batch: int) -> CheckResult:
    """Map ids of all features; every other id of the sorted feature is a kept one."""
    maps, features = _maps(), 5
    generator = torch.Generator().manual_seed(batch)
    ids_FN = torch.randint(-(1 << 63), (1 << 63) - 1, (features, 2 * batch), generator=generator)
    ids_FN[3, ::2] = maps[1][torch.randint(0, 100, (batch,), generator=generator)]
    ids_FN[[1, 4]] = ids_FN[[1, 4]].remainder(_SPAN)
    ids_N, offsets = ids_FN.reshape(-1), torch.arange(0, 2 * features * batch + 1, 2)
    rows_N = ours.of("ids").map_ids(*(t.to(ours.device) for t in (*maps, ids_N, offsets)))
    ours.settle(rows_N)
    return same_bits(("rows", rows_N, reference.map_ids(*maps, ids_N, offsets)))


@check("n-gram rows", "reference", lambda batch: "two orders, three heads")
def ngram_rows(ours: Implementation, batch: int) -> CheckResult:
    """Rows of n-grams of two orders, between excluded tokens."""
    generator = torch.Generator().manual_seed(batch)
    keys_S = torch.randint(-(1 << 63), (1 << 63) - 1, (6,), generator=generator)
    tokens_BL, excluded_X = torch.randint(0, 50, (batch, 9), generator=generator), torch.tensor([3, 40], dtype=torch.int64)
    how = ((2, 3), 50, (1 << 40) - 5)
    rows_BLS = ours.of("ngrams").ngram_rows(*(t.to(ours.device) for t in (keys_S, excluded_X, tokens_BL)), *how)
    ours.settle(rows_BLS)
    return same_bits(("rows", rows_BLS, ngrams_reference.ngram_rows(keys_S, excluded_X, tokens_BL, *how)))
