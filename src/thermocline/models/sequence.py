"""The reference sequence model: next-item prediction by causal self-attention over a user's history, as in SASRec.

    items_N, offsets -> rows -> [B, L, D] + positions -> blocks of causal self-attention and an MLP -> hidden_BLD
                                                         hidden . row of a candidate = its score

Histories and candidates are rows of one table. A sample of n items has n - 1 predictions, item t + 1 from items 1 to t. Samples
are padded at their ends, where causal attention needs no mask. There is no dropout, so that runs on one GPU and on many are
equal. `encoder` is the dense part, for DistributedDataParallel.

`embeddings` maps {feature: (ids, offsets)} of its two features, history and negatives, to rows by feature: an
`EmbeddingCollection(mode="none")`, whole or sharded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from thermocline.errors import BadInput

FEATURES = 2  # of the table of items: the history, and negatives
HEADS = "heads"


class Predictions(NamedTuple):
    """Scores of the T predictions of a batch."""

    next_T: Tensor  # scores of the items that followed
    negative_TK: Tensor
    target_T: Tensor  # positions of the items that followed
    sample_T: Tensor


class SequenceModel(nn.Module):
    """Scores of next items, from histories of at most `length` items of dimension `dim`."""

    def __init__(self, embeddings: nn.Module, dim: int, length: int, blocks: int = 2, heads: int = 2) -> None:
        super().__init__()
        features: Any = getattr(embeddings, "features", ())
        if len(features) != FEATURES:
            message = f"the table of items has the features {features}; it needs two, history and negatives"
            raise BadInput(message, parameter="features", value=features)
        self.history, self.negative = features
        self.dim, self.length = dim, length
        self.embeddings = embeddings
        self.encoder = Encoder(dim, length, blocks, heads)

    def forward(self, items_N: Tensor, offsets: Tensor, negatives_BK: Tensor) -> Predictions:
        batch, count = negatives_BK.shape
        rows_ND, negatives_MD = self._look_up(items_N, offsets, negatives_BK)
        sample_N, place_N = _places(offsets, len(items_N))
        input_T = (place_N < offsets.diff()[sample_N] - 1).nonzero()[:, 0]  # all but the last of each sample
        target_T = (place_N > 0).nonzero()[:, 0]
        sample_T, place_T = sample_N[input_T], place_N[input_T]
        hidden_BLD = self._encode(rows_ND[input_T], (sample_T, place_T), batch)
        scores_BLK = hidden_BLD @ negatives_MD.view(batch, count, self.dim).transpose(1, 2)
        next_T = (hidden_BLD[sample_T, place_T] * rows_ND[target_T]).sum(1)
        return Predictions(next_T, scores_BLK[sample_T, place_T], target_T, sample_T)

    def encode(self, items_N: Tensor, offsets: Tensor) -> Tensor:
        """Hidden states [B, D] after the last items, whose dot products with rows are scores."""
        batch = len(offsets) - 1
        rows_ND, _ = self._look_up(items_N, offsets, offsets.new_zeros(batch, 0))
        hidden_BLD = self._encode(rows_ND, _places(offsets, len(items_N)), batch)
        return hidden_BLD[torch.arange(batch, device=offsets.device), offsets.diff() - 1]

    def bags(self, items_N: Tensor, offsets: Tensor, negatives_BK: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The input of `embeddings` for a batch."""
        batch, count = negatives_BK.shape
        negative_offsets = torch.arange(batch + 1, device=offsets.device) * count
        return {self.history: (items_N, offsets), self.negative: (negatives_BK.reshape(-1), negative_offsets)}

    def _look_up(self, items_N: Tensor, offsets: Tensor, negatives_BK: Tensor) -> tuple[Tensor, Tensor]:
        found = self.embeddings(self.bags(items_N, offsets, negatives_BK))
        return found[self.history], found[self.negative]

    def _encode(self, rows_ND: Tensor, where: tuple[Tensor, Tensor], batch: int) -> Tensor:
        longest = int(where[1].max()) + 1 if len(rows_ND) else 1
        if longest > self.length:
            message = f"a history has {longest} items; the model takes {self.length}"
            raise BadInput(message, parameter="length", value=longest, available=self.length)
        padded_BLD = rows_ND.new_zeros(batch, longest, self.dim).index_put(where, rows_ND)
        hidden_BLD: Tensor = self.encoder(padded_BLD)
        return hidden_BLD


class Encoder(nn.Module):
    """Positions, blocks and a norm: [B, L, D] -> [B, L, D]."""

    not_in_old_checkpoints = (HEADS,)

    def __init__(self, dim: int, length: int, blocks: int, heads: int) -> None:
        super().__init__()
        if min(dim, length, blocks, heads) < 1 or dim % heads:
            sizes = f"dimension {dim}, length {length}, {blocks} blocks, {heads} heads"
            raise BadInput(f"the encoder has {sizes}; use 1 or more, and heads that divide the dimension", parameter="heads")
        self.positions = nn.Parameter(torch.randn(length, dim) * dim**-0.5)
        self.scale, self.heads = dim**0.5, heads
        self.blocks = nn.Sequential(*(TransformerBlock(dim, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, rows_BLD: Tensor) -> Tensor:
        hidden_BLD = rows_BLD * self.scale + self.positions[: rows_BLD.shape[1]]
        normed: Tensor = self.norm(self.blocks(hidden_BLD))
        return normed

    # No shape of a weight tells the number of heads, so it is saved as the length of one more tensor (not a buffer, which
    # DistributedDataParallel would broadcast).

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + HEADS] = torch.ones(self.heads)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        heads = state_dict.pop(prefix + HEADS, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if heads is not None and len(heads) != self.heads:
            rest[-1].append(f"the saved encoder has {len(heads)} heads, this one {self.heads}; build it with the saved number")


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each with a norm before and a residual connection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # No biases: softmax does not depend on that of keys, so its gradient is rounding noise, which Adam would follow.
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        batch, length, dim = hidden_BLD.shape
        three = self.query_key_value(self.before_attention(hidden_BLD))
        query, key, value = three.view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BLD = hidden_BLD + self.out(seen.transpose(1, 2).reshape(batch, length, dim))
        added: Tensor = hidden_BLD + self.mlp(self.before_mlp(hidden_BLD))
        return added


def _places(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The sample of each item, and its position there."""
    lengths_B = offsets.diff()
    sample_N = torch.repeat_interleave(torch.arange(len(lengths_B), device=offsets.device), lengths_B, output_size=count)
    return sample_N, torch.arange(count, device=offsets.device) - offsets[:-1][sample_N]
