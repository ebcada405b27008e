"""Rows of the n-grams that end at each token: the definition, in plain PyTorch.

    gram(0)     GOLDEN
    gram(k)     hash(token, gram(k - 1)) of the k-th last token: a number for the last k tokens
    row         slot * part + reduce(hash(gram(k), key of the slot), part)

`hash` and `reduce` are those of id maps (`ids/reference.py`). Slots are ordered by order, then head. An n-gram of order n has
k = n tokens; it has fewer where the sequence begins, or after an excluded token. At an excluded token every slot has the row
after the last part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thermocline.errors import IdOutOfRange
from thermocline.kernels.ids.fields import GOLDEN
from thermocline.kernels.ids.reference import hash_ids, reduce_to, signed

VERSION = 1  # of the rows that n-grams have; operators carry it, as that of id maps


def bad_token(tokens_BL: Tensor, position: int, vocabulary: int) -> IdOutOfRange:
    """The error of a token outside the vocabulary."""
    sequence, place = divmod(position, tokens_BL.shape[1])
    error = IdOutOfRange(0, position, int(tokens_BL[sequence, place]), vocabulary, "vocabulary", "tokens", 0)
    words = f"tokens[{sequence}, {place}] is {error.id}, and the vocabulary has tokens 0 to {vocabulary - 1}"
    error.args = (f"{words}; give NGramHash the vocabulary of the tokenizer, which changes no row",)
    return error


def ngram_rows(
    keys_S: Tensor, excluded_X: Tensor, tokens_BL: Tensor, orders: Sequence[int], vocabulary: int, part: int
) -> Tensor:
    """Rows [batch, length, slots] (int64); a token outside the vocabulary raises."""
    tokens_BL = tokens_BL.long()
    bad_N = ((tokens_BL < 0) | (tokens_BL >= vocabulary)).reshape(-1)
    if bool(bad_N.any()):
        raise bad_token(tokens_BL, int(bad_N.nonzero()[0]), vocabulary)
    excluded_BL = torch.isin(tokens_BL, excluded_X)
    gram_BL, within_BL = torch.full_like(tokens_BL, signed(GOLDEN)), ~excluded_BL
    heads, rows = len(keys_S) // len(orders), []
    for back in range(max(orders)):
        at_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) - back
        before_L = at_L.clamp(min=0)
        within_BL = within_BL & (at_L >= 0) & ~excluded_BL[:, before_L]
        gram_BL = torch.where(within_BL, hash_ids(tokens_BL[:, before_L], gram_BL), gram_BL)
        for slot in range(len(keys_S)):
            if orders[slot // heads] == back + 1:
                rows.append(slot * part + reduce_to(hash_ids(gram_BL, keys_S[slot]), part))
    return torch.where(excluded_BL[..., None], len(keys_S) * part, torch.stack(rows, -1))
