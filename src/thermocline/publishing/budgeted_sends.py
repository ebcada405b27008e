"""A byte budget of a publisher: the training thread copies changed rows, the thread of the log chooses what is sent of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from thermocline.checkpoint.publishes.part import PublishPart

from .backlog import CopiedRows, RowBacklog
from .changed_rows import ModuleRows
from .selection import SendBudget


class BudgetedSends:
    """Belongs to one publisher. `choose` runs while the training thread does not call `copy`."""

    def __init__(
        self, modules: Sequence[ModuleRows], bytes_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._header = 0  # bytes of the last message beside its rows
        self._modules, self._clock, self.budget = modules, clock, SendBudget(bytes_per_second, clock)
        self._compare()

    def _compare(self) -> None:
        """Take the rows of this moment for those that servers have."""
        self._arenas = [each.arena for each in self._modules]
        self._slots = [(each, index) for each in self._modules for index in range(len(each.arena.tables))]
        served = [each.all_rows(index) for each, index in self._slots]
        self._backlog = RowBacklog([each.table_of(index) for each, index in self._slots], served, self._clock)

    def copy(self, everything: bool, reloaded: bool) -> list[CopiedRows]:
        """Copy the rows that changed, and those that wait and should be sent now. `reloaded`: a server has loaded a save."""
        if any(each.arena is not arena for each, arena in zip(self._modules, self._arenas, strict=True)):
            self._compare()  # after a replanning: all rows are sent again
        backlog, found, number = self._backlog, list[CopiedRows](), 0
        wanted = backlog.pending if everything else backlog.wanted
        for module in self._modules:
            firsts = [module.span(index)[0] for index in range(len(module.arena.tables))]
            also = []
            for slot, first in enumerate(firsts, number):
                low, high = np.searchsorted(wanted, backlog.first[slot : slot + 2])
                also.append(torch.from_numpy(wanted[low:high] - backlog.first[slot] + first))
            rows_K = torch.cat([module.changed(), *also]).unique()
            found += [CopiedRows(number + index, *copied) for index, copied in module.copy(rows_K)]
            number += len(firsts)
        if reloaded:
            backlog.send_whole(found)
        return found

    def choose(
        self, part: PublishPart, copied: Sequence[CopiedRows], available: float, steps: bool
    ) -> tuple[PublishPart, PublishPart]:
        """The publish with all rows that are sent, for the log; and the same in few bytes, for servers."""
        chosen = self._backlog.choose(copied, available - self._header, steps)
        small = replace(part, deltas=chosen.whole, steps=chosen.steps, waiting=chosen.waiting)
        size = replace(small, dense={}).size  # dense parameters are sent whole each time, as without a budget
        self.budget.spend(size)
        rows = sum(each.bytes for each in chosen.whole.values()) + sum(len(p) for each in chosen.steps for p in each.pieces)
        self._header = size - rows
        return replace(part, deltas=chosen.rows, waiting=chosen.waiting), small

    def give_back(self) -> None:
        """The last publish failed: its rows are sent again."""
        self._backlog.give_back()
