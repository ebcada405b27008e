"""The rows that one card holds: read as they are stored, updated from summed gradients.

Rounding bits are drawn for the global row and not for the row's place here, so a row is rounded alike wherever it lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import BadGradient
from ..kernels.dispatch import serving
from ..kernels.exchange.fields import ROW
from ..kernels.update import update_rows
from ..kernels.update.reference import advance
from ..rows.arena import Arena
from ..rows.lookup import Trainer
from .atlas import Atlas, Where


class Held:
    """The arena of one card, a table for each part."""

    def __init__(self, arena: Arena, trainer: Trainer, atlas: Atlas) -> None:
        self.arena, self.trainer, self.atlas = arena, trainer, atlas
        lines = []
        for k, part in enumerate(atlas.parts):
            codes_RB, meta_RW, row, format, dim = arena.views(k)
            at = [each.storage_offset() for each in (codes_RB, meta_RW)]
            lines.append([codes_RB.shape[1], meta_RW.shape[1], *at, row, dim, format, part.gradient_bytes // dim])
        self.fields_KF = torch.tensor(lines, device=atlas.device)

    def pack(self, where: Where, offset_N: Tensor, message: Tensor) -> None:
        """Put rows into a message, as they are stored: codes and then meta words."""
        arena = self.arena
        pack = serving("exchange", arena.meta).pack_rows
        pack(arena.codes, arena.meta, self.fields_KF, where.part_N, where.place_N, offset_N, message)

    def tick(self) -> tuple[Tensor, Tensor]:
        """One more step of the optimizer's clock. Returns clock and rates as `update` takes them: whoever sets a learning rate
        after backward does not mean an update that is still under way."""
        trainer = self.trainer
        if trainer.clock.is_cuda:  # where nothing is under way, and kernels report by the clock's address
            return trainer.clock, trainer.hyper
        clock, hyper = trainer.clock.clone(), trainer.hyper.clone()
        advance(trainer.clock, trainer.hyper)
        return clock, hyper

    def update(self, rows_N: Tensor, where: Where, grads_NW: Tensor, clock: Tensor, hyper: Tensor) -> BadGradient | None:
        """One step on distinct rows that lie here; `rows_N` are their global rows. Returns what it had to refuse."""
        arena, trainer = self.arena, self.trainer
        at_N = self.fields_KF[:, ROW][where.part_N] + where.place_N
        arena.changing(at_N)
        try:
            update_rows(
                arena.codes, arena.meta, trainer.states, arena.layout, at_N, grads_NW, hyper, clock,
                trainer.optimizer.code, trainer.stochastic, names_U=rows_N,
            )  # fmt: skip
        except BadGradient as error:
            return error
        return None

    def states(self, k: int) -> list[Tensor]:
        """Optimizer state of one part: a number or a line for each place."""
        return self.arena.state_views(k, self.trainer.states, self.trainer.optimizer.states_per_row > 0)


def sha256_of(tensors: Sequence[Tensor]) -> str:
    """Of their bytes, one after another."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
