"""The reference sequence model: self-attention over what a user did, in the manner of SASRec, to tell what comes next.

    items_N, offsets -> rows -> [B, L, D] + positions -> blocks of causal self-attention and an MLP -> hidden_BLD
                                                         hidden . row of a candidate = its score

History and candidates are rows of one table: what an item is told by is also what it is found by. Samples are padded at their
ends; attention is causal, so no item sees the padding behind it, and no mask is needed. A sample of n items gives n - 1
predictions, item t + 1 from items 1 to t, so that every row of a sample is looked up once, as history and as the right answer.

There is no dropout: a run must end the same on one card and on many. Norms stand before attention and MLP, which trains without
a warm-up. `encoder` is the dense part, the one to wrap in DistributedDataParallel. Its initial weights follow torch's seed.

`embeddings` is any module that takes {feature: (ids, offsets)} for its two features, history and negatives, and returns rows by
feature: an `EmbeddingCollection(mode="none")`, whole or sharded, or `PlainItems`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from thermocline.errors import BadInput

from .plain import TorchRowwiseAdagrad

FEATURES = 2  # of the table of items: the history, and negatives
HEADS = "heads"


class Predictions(NamedTuple):
    """Scores at the T places of a batch that something follows."""

    next_T: Tensor  # of what did follow
    negative_TK: Tensor
    target_T: Tensor  # which of the batch's items followed
    sample_T: Tensor  # of which sample


class SequenceModel(nn.Module):
    """Scores of next items, from histories of at most `length` items whose rows have `dim` columns."""

    def __init__(self, embeddings: nn.Module, dim: int, length: int, blocks: int = 2, heads: int = 2) -> None:
        super().__init__()
        features: Any = getattr(embeddings, "features", ())
        if len(features) != FEATURES:
            raise BadInput(f"the table of items has the features {features}; it needs two, the history and negatives")
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
        """What a row is multiplied with to score what comes after each sample: [B, D]."""
        batch = len(offsets) - 1
        rows_ND, _ = self._look_up(items_N, offsets, offsets.new_zeros(batch, 0))
        hidden_BLD = self._encode(rows_ND, _places(offsets, len(items_N)), batch)
        return hidden_BLD[torch.arange(batch, device=offsets.device), offsets.diff() - 1]

    def bags(self, items_N: Tensor, offsets: Tensor, negatives_BK: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """What is looked up for a batch."""
        batch, count = negatives_BK.shape
        negative_offsets = torch.arange(batch + 1, device=offsets.device) * count
        return {self.history: (items_N, offsets), self.negative: (negatives_BK.reshape(-1), negative_offsets)}

    def _look_up(self, items_N: Tensor, offsets: Tensor, negatives_BK: Tensor) -> tuple[Tensor, Tensor]:
        found = self.embeddings(self.bags(items_N, offsets, negatives_BK))
        return found[self.history], found[self.negative]

    def _encode(self, rows_ND: Tensor, where: tuple[Tensor, Tensor], batch: int) -> Tensor:
        longest = int(where[1].max()) + 1 if len(rows_ND) else 1
        if longest > self.length:
            raise BadInput(f"a history has {longest} items; the model looks back on {self.length}")
        padded_BLD = rows_ND.new_zeros(batch, longest, self.dim).index_put(where, rows_ND)
        hidden_BLD: Tensor = self.encoder(padded_BLD)
        return hidden_BLD


class Encoder(nn.Module):
    """[B, L, D] -> [B, L, D]: what is known at each place, from it and those before."""

    not_in_old_checkpoints = (HEADS,)

    def __init__(self, dim: int, length: int, blocks: int, heads: int) -> None:
        super().__init__()
        if min(dim, length, blocks, heads) < 1 or dim % heads:
            raise BadInput(
                f"the encoder has dimension {dim}, {length} places, {blocks} blocks and {heads} heads; all are at least 1, and "
                "heads divide the dimension"
            )
        self.positions = nn.Parameter(torch.randn(length, dim) * dim**-0.5)
        self.scale, self.heads = dim**0.5, heads
        self.blocks = nn.Sequential(*(TransformerBlock(dim, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, rows_BLD: Tensor) -> Tensor:
        hidden_BLD = rows_BLD * self.scale + self.positions[: rows_BLD.shape[1]]
        normed: Tensor = self.norm(self.blocks(hidden_BLD))
        return normed

    # How many heads there are is in no weight's shape, but whoever has the weights needs to know: so it is saved as the length
    # of one more tensor, which does not fit a model with another number. It is no buffer, which cards would send around.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + HEADS] = torch.ones(self.heads)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        heads = state_dict.pop(prefix + HEADS, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if heads is not None and len(heads) != self.heads:
            rest[-1].append(f"the saved encoder has {len(heads)} heads, and this one {self.heads}; build the model it is of")


class TransformerBlock(nn.Module):
    """Causal self-attention, then an MLP, each added to what came in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # Without biases: softmax does not see that of keys, so its gradient is rounding alone, which Adam would follow.
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


class PlainItems(nn.Module):
    """The baseline: a plain `nn.Embedding`, trained by row-wise Adagrad in plain PyTorch. `rows_of` turns raw ids into rows."""

    def __init__(self, rows: int, dim: int, lr: float, rows_of: Callable[[Tensor], Tensor], column: str = "item") -> None:
        super().__init__()
        self.features = (column, "negative")
        self.table = nn.Embedding(rows, dim, sparse=True)
        self.fused_optimizer = TorchRowwiseAdagrad([self.table.weight], lr)
        self._rows_of = rows_of

    def forward(self, bags: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        together = self.table(self._rows_of(torch.cat([bags[feature][0] for feature in self.features])))
        return dict(zip(self.features, together.split([len(bags[feature][0]) for feature in self.features]), strict=True))

    def get_rows(self, table: str, ids: Tensor) -> Tensor:
        return self.table.weight.detach()[ids]

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        with torch.no_grad():
            self.table.weight[ids] = values


def _places(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The sample of each item, and its place in it."""
    lengths_B = offsets.diff()
    sample_N = torch.repeat_interleave(torch.arange(len(lengths_B), device=offsets.device), lengths_B, output_size=count)
    return sample_N, torch.arange(count, device=offsets.device) - offsets[:-1][sample_N]
