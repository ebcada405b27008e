"""TorchRec's `MCHManagedCollisionModule` as a map from ids to rows of one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ENTRY = {"mch-lfu": 24, "mch-distance-lfu": 32}  # bytes of a row in its buffers: id, row, count, and the last use


class Remapped:
    """The rows of a table under TorchRec's rule. Buffers that hold the ids of an interval are not counted as bytes."""

    def __init__(self, policy: str, budget: int, row_bytes: int, interval: int, batch: int) -> None:
        from torchrec.modules import mc_modules as torchrec
        from torchrec.sparse.jagged_tensor import JaggedTensor

        self.rows = budget // (row_bytes + ENTRY[policy])
        self._jagged: Any = JaggedTensor
        rule = torchrec.LFU_EvictionPolicy() if policy == "mch-lfu" else torchrec.DistanceLFU_EvictionPolicy()
        self._module: Any = torchrec.MCHManagedCollisionModule(self.rows, torch.device("cpu"), rule, interval)
        self._module._init_history_buffers({"ids": self._ids(torch.zeros(batch, dtype=torch.int64))})  # not by a short batch
        kept = [tensor for name, tensor in self._module.named_buffers() if name.startswith("_mch_")]
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        self.lookups = self.shared = 0

    def __call__(self, ids: Sequence[Tensor], trains: bool) -> tuple[list[Tensor], Tensor]:
        """(rows of the ids of each feature, rows that lost their id)."""
        self._module.train(trains)
        ids_N = torch.cat(list(ids))
        found = self._module({"ids": self._ids(ids_N)})["ids"].values()
        if trains:
            self.lookups += found.numel()
            self.shared += int((found == self.rows - 1).sum())
        reset = self._module.evict()
        return list(found.split([each.numel() for each in ids])), found[:0] if reset is None else reset

    def _ids(self, ids_N: Tensor) -> Any:
        return self._jagged(ids_N, lengths=torch.ones_like(ids_N))
