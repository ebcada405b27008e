"""A GPT that adds given vectors, those of a memory table, before its second block: it compiles without the table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT and of its batches."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.before(x)).view(heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + mixed


class GPT(nn.Module):
    """Returns the mean loss of the next tokens.

    `memory`: size of the vectors, or 0. `gate`: scale them by the hidden state, as Engram does.
    """

    def __init__(self, shape: GPTShape, memory: int, gate: bool = False) -> None:
        super().__init__()
        width = shape.width
        self.tokens, self.places = nn.Embedding(shape.vocabulary, width), nn.Embedding(shape.length, width)
        self.blocks = nn.ModuleList(_Block(width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(width)
        self.projection = nn.Linear(memory, width, bias=False) if memory else None
        self.key = nn.Sequential(nn.Linear(memory, width, bias=False), nn.RMSNorm(width)) if gate and memory else None
        self.query = nn.RMSNorm(width) if gate and memory else None
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.layers) if last else 1))

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor, vectors_BLW: Tensor | None) -> Tensor:
        x = self.tokens(tokens_BL) + self.places.weight[: tokens_BL.shape[1]]
        for number, block in enumerate(self.blocks):
            if number == 1 and self.projection is not None and vectors_BLW is not None:
                x = x + self._gated(self.projection(vectors_BLW), vectors_BLW, x)
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BL.flatten())

    def _gated(self, out: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
        if self.key is None or self.query is None:
            return out
        score: Tensor = (self.query(x) * self.key(vectors)).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
        return out * torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign())


def adamw(model: nn.Module, lr: float, device: str, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=device != "cpu", **settings)
