"""The rows that one card holds: read as they are stored, updated from summed gradients.

`update` is one step of the optimizer as `kernels/update/reference.py` defines it, but with rounding bits that are drawn for
the global row and not for the row's place here: the kernels that fuse all of it draw them for the place. It equals them bit for
bit, and is slower: several launches instead of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import formats as F
from ..kernels import dequantize_rows, quantize_rows
from ..kernels.update.reference import LIMIT, advance, step
from ..rows.arena import Arena
from ..rows.lookup import Trainer
from .atlas import Atlas, Where

Records = dict[int, tuple[Tensor, Tensor]]  # by part: which rows of a list, and their bytes [rows, bytes of one]


class Held:
    """The arena of one card, a table for each part."""

    def __init__(self, arena: Arena, trainer: Trainer, atlas: Atlas) -> None:
        self.arena, self.trainer, self.atlas = arena, trainer, atlas

    def records(self, where: Where) -> Records:
        """Rows that lie here, codes and then meta words."""
        found: Records = {}
        for k in range(len(self.atlas.parts)):
            at_K = (where.part_N == k).nonzero()[:, 0]
            if at_K.numel():
                codes_RB, meta_RW, _, _, _ = self.arena.views(k)
                place_K = where.place_N[at_K]
                meta_KB = [meta_RW[place_K].view(torch.uint8)] if meta_RW.shape[1] else []
                found[k] = at_K, torch.cat([codes_RB[place_K], *meta_KB], dim=1)
        return found

    def values(self, k: int, bytes_KB: Tensor) -> Tensor:
        """Records of one part, dequantized."""
        part = self.atlas.parts[k]
        width = F.row_bytes(part.format, part.dim)
        codes_KB, meta_KB = (
            each.clone(memory_format=torch.contiguous_format) for each in bytes_KB.tensor_split([width], dim=1)
        )
        meta_KW = meta_KB.view(torch.int32) if meta_KB.numel() else meta_KB.int()
        return dequantize_rows(codes_KB, meta_KW, part.format, part.dim)

    def tick(self) -> None:
        """One more step of the optimizer's clock: on every card, whether or not it has rows to update."""
        advance(self.trainer.clock, self.trainer.hyper)

    def update(self, rows_N: Tensor, where: Where, grads_NW: Tensor) -> list[int]:
        """One step on distinct rows that lie here; `rows_N` are their global rows. Returns those it had to refuse."""
        refused: list[int] = []
        for k, part in enumerate(self.atlas.parts):
            at_K = (where.part_N == k).nonzero()[:, 0]
            if at_K.numel():
                refused += self._update_part(k, rows_N[at_K], where.place_N[at_K], grads_NW[at_K, : part.dim])
        return refused

    def _update_part(self, k: int, rows_K: Tensor, place_K: Tensor, grads_KD: Tensor) -> list[int]:
        codes_RB, meta_RW, first, format, dim = self.arena.views(k)
        self.arena.changing(first + place_K)
        trainer, states = self.trainer, self.states(k)
        weight_KD = dequantize_rows(codes_RB[place_K], meta_RW[place_K], format, dim)
        old = [state[place_K] for state in states]
        weight_KD, new = step(weight_KD, grads_KD, old, trainer.hyper, trainer.optimizer.code, F.planes(format))
        good_K = (weight_KD.abs() < LIMIT).all(dim=1)
        for each in new:
            good_K &= each.isfinite() if each.dim() == 1 else each.isfinite().all(dim=1)
        kept_K = place_K[good_K]
        clock = trainer.clock if trainer.stochastic else None
        codes_KB, meta_KW = quantize_rows(weight_KD[good_K], format, clock, rows_K[good_K])
        codes_RB[kept_K], meta_RW[kept_K] = codes_KB, meta_KW
        for state, each in zip(states, new, strict=True):
            state[kept_K] = each[good_K]
        return [int(row) for row in rows_K[~good_K].tolist()]

    def states(self, k: int) -> list[Tensor]:
        """Optimizer state of one part: a number or a line for each place."""
        return self.arena.state_views(k, self.trainer.states, self.trainer.optimizer.states_per_row > 0)
