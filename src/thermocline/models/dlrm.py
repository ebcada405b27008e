"""DLRM, the reference click model.

    dense_BI -> bottom MLP -> [B, D] ---+
                                        +--> dot products of all pairs, and the bottom's output --> top MLP --> logit_B
    ids_BF -> embeddings -> [B, F * D] -+

Without dense features (MovieLens) the top MLP gets the rows themselves beside their dot products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput


class DLRM(nn.Module):
    """Logits of clicks. `embeddings` maps ids [B, F] to [B, F * dim], or to an object with `values()` of that shape."""

    def __init__(
        self, embeddings: nn.Module, features: int, dim: int, dense: int = 13, bottom: Sequence[int] = (64, 32),
        top: Sequence[int] = (256, 128),
    ) -> None:  # fmt: skip
        super().__init__()
        if features < 1 or dim < 1 or dense < 0:
            message = f"DLRM has {features} features of dimension {dim} and {dense} dense ones; use at least 1, 1 and 0"
            raise BadInput(message, parameter="features", value=features)
        self.features, self.dim, self.dense = features, dim, dense
        self.embeddings = embeddings
        self.bottom = _mlp([dense, *bottom, dim], last_relu=True) if dense else None
        vectors = features + (dense > 0)
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pair", first * vectors + second, persistent=False)
        beside = dim if dense else features * dim
        self.top = _mlp([beside + len(first), *top, 1], last_relu=False)

    def forward(self, dense_BI: Tensor, ids_BF: Tensor) -> Tensor:
        looked_up = self.embeddings(ids_BF)
        values = looked_up if isinstance(looked_up, Tensor) else looked_up.values()
        rows_BFD = values.view(-1, self.features, self.dim)
        if self.bottom is None:
            vectors_BVD, beside = rows_BFD, values
        else:
            beside = self.bottom(dense_BI)
            vectors_BVD = torch.cat([beside[:, None].to(rows_BFD.dtype), rows_BFD], dim=1)
        dots_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        assert isinstance(self.pair, Tensor)
        pairs_BP = dots_BVV.flatten(1).index_select(1, self.pair)
        logit_B: Tensor = self.top(torch.cat([beside, pairs_BP], dim=1)).squeeze(1)
        return logit_B


def _mlp(sizes: Sequence[int], last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[: len(layers) if last_relu else -1])
