"""The batch after the one that is worked on: its ids and rows travel while the caller computes.

Rows that the batch at work will update are *late*: their owners know them, as they were asked for them, and send them only when
they are updated. So every row travels once, and what is looked up is what would be without any of this. Who asked learns from a
bit a row which ones are late. Copied rows of tier 2 may be updated by what other nodes look up, and are late on several nodes.

Nothing may change rows between but the update that late rows wait for. If something else might have, the batch is *spoiled*:
its rows are fetched anew, on all cards. That is so too if a card is given another batch than it was told to expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from thermocline.distributed.process_groups import Group
from thermocline.errors import BadInput
from thermocline.nn.inputs import JaggedIds
from thermocline.nn.prefetch import PrefetchedInput, prefetch_loop

from .all_to_all import Target, Ways
from .batch import Batch, Shelf
from .batch_exchange import Journey
from .comm_thread import used_here

Read = Callable[[Any], tuple[JaggedIds, Batch]]


class Ahead:
    """A batch on its way, as the one `at_work`: both train or not. `input` is None on a card that has none."""

    def __init__(self, ways: Ways, read: Read, input: Any, at_work: Journey, fields_KF: Tensor) -> None:
        self._ways, self._read, self._input, self.trains = ways, read, input, at_work.trains
        self.before = at_work if at_work.trains else None
        self._fields_KF = fields_KF
        self.spoiled = False
        self.batch: Batch | None = None
        self._due = False  # whether late rows have not come yet

    def start(self) -> None:
        """Ask for its rows, and get those that are not late."""
        rows_U = torch.empty(0, dtype=torch.int64, device=self._fields_KF.device)
        try:
            if self._input is not None:
                self._bags, self.batch = self._read(self._input)
                rows_U = self.batch.rows_U
        except Exception:  # whatever it is, forward will meet it again, and tell all cards
            self.spoiled = True
        lookups_U = None if self.batch is None or not self._ways.counts else self.batch.lookups()
        apart = None if self.batch is None else self.batch.apart
        self.journey = Journey(self._ways, rows_U, self.trains, lookups_U, apart)
        self.journey.tell()
        self.target = Target(rows_U.view(torch.uint8), rows_U, rows_U)
        if self.batch is not None:
            self.target = self.batch.target(self._fields_KF)
        self.journey.fetch_early(self.target, self.before)
        self._due = self.before is not None

    def finish(self) -> None:
        """Get the rows that were late."""
        self._input = None  # was needed until a job was done, with all that it launched
        if self._due:
            self.journey.fetch_late(self.target)
            self._due, self.before = False, None

    def arrive(self) -> None:
        """Come to the caller, who works on it from here on."""
        self.finish()
        used_here(_tensors((self.batch, self.journey)))

    def matches(self, bags: JaggedIds, trains: bool) -> bool:
        """Whether this is the batch that was expected, and its rows are what they would be now."""
        if self.spoiled or trains != self.trains:
            return False
        if self.batch is None:
            return bags.ids_N.numel() == 0
        if self.journey.shares is not None and (bags.weights_N is None) != (self._bags.weights_N is None):
            return False  # its bags would be pooled elsewhere
        return torch.equal(bags.ids_N, self._bags.ids_N) and torch.equal(bags.offsets, self._bags.offsets)


def one_ahead(
    tables: Any, loader: Iterable[Any], ids: Callable[[Any], Any] | None = None, at_once: int | None = None
) -> Iterator[tuple[Any, PrefetchedInput]]:
    """Batches of a loader, the next one prefetched before each (see `nn.prefetch.prefetch_loop` for the arguments)."""
    if at_once not in (None, 1):
        message = f"at_once is {at_once}; ranks exchange the rows of one batch at a time"
        raise BadInput(message, parameter="at_once", value=at_once)
    return prefetch_loop(loader, ids, lambda following: tables.prefetch(*following[0]), 1)


def _tensors(thing: object) -> Iterator[Tensor]:
    """All that belong to a batch and its journey, and to parts of these; but not what all batches share."""
    if isinstance(thing, Tensor):
        yield thing
    own = type(thing).__module__.startswith("thermocline.distributed.") and not isinstance(thing, (Ways, Shelf, Group))
    for part in thing if isinstance(thing, tuple) else vars(thing).values() if own else ():
        yield from _tensors(part)
