"""Tables of any precision as one module: ids [B, F] -> [B, F * dim], rows updated in backward.

A thin cover of `rows`, with the part of `EmbeddingCollection`'s interface that training a DLRM needs. It has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..rows.arena import Arena, TableSpec
from ..rows.lookup import Trainer, lookup
from ..rows.optimizers import RowOptimizer


class Memory(NamedTuple):
    """Bytes of tables, in all and by what they are for."""

    total: int
    parts: dict[str, int]


class ArenaTables(nn.Module):
    """One table for each feature, by name."""

    def __init__(
        self,
        rows: Mapping[str, int],
        dim: int,
        precision: str,
        optimizer: RowOptimizer,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._number = {name: number for number, name in enumerate(rows)}
        self._arena = Arena([TableSpec(count, dim, precision, name) for name, count in rows.items()], device=device)
        self._trainer = Trainer(self._arena, optimizer, seed=seed)
        buffers = {
            "codes": self._arena.codes,
            "meta": self._arena.meta,
            "clock": self._trainer.clock,
            "hyper": self._trainer.hyper,
        }
        buffers |= {f"state{number}": state for number, state in enumerate(self._trainer.states)}
        for name, tensor in buffers.items():  # the same memory: what load_state_dict writes is what lookups read
            self.register_buffer(name, tensor)

    def forward(self, ids_BF: Tensor) -> Tensor:
        batch, features = ids_BF.shape
        offsets = torch.arange(batch * features + 1, device=ids_BF.device)
        trainer = self._trainer if self.training and torch.is_grad_enabled() else None
        return lookup(self._arena, ids_BF.t().reshape(-1), offsets, trainer=trainer)

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        self._arena.write(self._number[table], ids, values)

    def stats(self) -> dict[str, int]:
        """What happened to the rows, in numbers to log."""
        return {"steps": int(self._trainer.clock[1])}

    def memory(self) -> Memory:
        states = sum(4 * state.numel() for state in self._trainer.states)
        parts = {"codes": self._arena.codes.numel(), "metadata": 4 * self._arena.meta.numel(), "optimizer state": states}
        return Memory(sum(parts.values()), parts)

    def flush(self) -> None:
        """Nothing waits outside the rows."""
