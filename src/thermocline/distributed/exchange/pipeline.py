"""Exchanges in the background of a training step: gradients of the last batch, and ids and rows of the next one.

Rows that the current batch updates are *deferred*: their owners know them, since the current batch requested them, and send
them after the update. Every row travels once, and lookups return the same values as without prefetching. One bit per row tells
the requester which rows are deferred. Replicated rows of tier 2 may be updated by lookups of other nodes, and are always
deferred on several nodes.

Only that update may change rows in between. After any other access that may change rows the prefetched batch is discarded, and
all ranks fetch it again. The same happens if a rank looks up another batch than the one it prefetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from thermocline.distributed.comm_thread import CommJob, CommThread, record_use
from thermocline.distributed.process_groups import RankGroup
from thermocline.nn.backward_pass import at_end_of_pass, current_pass
from thermocline.nn.inputs import JaggedIds

from .batch_exchange import BatchExchange, BatchGradients, RowDestination
from .batch_table import BatchTable, BatchTableLayout
from .context import ExchangeContext
from .traffic_meter import TrafficMeter

ReadBatch = Callable[[Any], tuple[JaggedIds, BatchTable]]
Reduction = tuple[BatchExchange, BatchGradients]


class PrefetchedBatch:
    """A batch whose ids and rows travel during the current batch. `input` is None on a rank without a next batch."""

    def __init__(self, context: ExchangeContext, read: ReadBatch, input: Any, current: BatchExchange) -> None:
        self._context, self._read, self._input, self.trains = context, read, input, current.trains
        self.previous = current if current.trains else None
        self.valid = True
        self.batch: BatchTable | None = None
        self._has_deferred = False

    def start(self) -> None:
        """Request its rows, and fetch those that are not deferred."""
        fields_KF = self._context.shard.fields_KF
        try:
            if self._input is not None:
                self._bags, self.batch = self._read(self._input)
        except Exception:  # forward raises it again, on all ranks
            self.valid = False
        if self.batch is None:
            none = torch.empty(0, dtype=torch.int64, device=fields_KF.device)
            self.exchange = BatchExchange(self._context, none, self.trains)
            self.target = RowDestination(none.view(torch.uint8), none, none)
        else:
            self.exchange = self.batch.exchange(self._context, self.trains)
            self.target = self.batch.destination(fields_KF)
        self.exchange.request()
        self.exchange.fetch_unchanged(self.target, self.previous)
        self._has_deferred = self.previous is not None

    def finish(self) -> None:
        """Fetch the deferred rows."""
        self._input = None  # needed until the job that read it is done
        if self._has_deferred:
            self.exchange.fetch_remote(self.target)
            self._has_deferred, self.previous = False, None

    def receive(self) -> None:
        """Fetch what is missing, and hand the tensors to the caller's stream."""
        self.finish()
        record_use(_tensors((self.batch, self.exchange)))

    def matches(self, bags: JaggedIds, trains: bool) -> bool:
        """Whether this is the batch `bags`, with up-to-date rows."""
        if not self.valid or trains != self.trains:
            return False
        if self.batch is None:
            return bags.ids_N.numel() == 0
        if self.exchange.sums is not None and (bags.weights_N is None) != (self._bags.weights_N is None):
            return False  # weighted bags are pooled by the requester
        return torch.equal(bags.ids_N, self._bags.ids_N) and torch.equal(bags.offsets, self._bags.offsets)


class PassReductions:
    """The gradients of several lookups of one backward pass. The engine's callback owns them (`nn/backward_pass.py`)."""

    def __init__(self, update: Callable[[list[Reduction]], None]) -> None:
        self.reductions: list[Reduction] = []
        self._update = update

    def apply(self) -> None:
        self._update(self.reductions)


class ExchangePipeline:
    """The background work of one collection: its communication thread, and its prefetched batch.

    Without `overlap`, exchanges run in the caller's thread and nothing is prefetched.
    """

    def __init__(self, comm_thread: CommThread, overlap: bool) -> None:
        self.comm_thread, self.overlap = comm_thread, overlap
        self.next_input: Any = None  # of the batch that the coming forward prefetches
        self._prefetched: PrefetchedBatch | None = None
        self.lookups = 0  # that train, since the last update; not those alive as in one process: the same on all ranks
        self._passes: WeakValueDictionary[int, PassReductions] = WeakValueDictionary()

    def add_gradients(self, reduction: Reduction, update: Callable[[list[Reduction]], None]) -> None:
        """Call `update` at once, or at the end of the backward pass for all its lookups if there may be others."""
        found = self._passes.get(current_pass())
        if found is None and self.lookups == 1:
            update([reduction])
            return
        if found is None:
            self._passes[current_pass()] = found = PassReductions(update)
            at_end_of_pass(found.apply)
        found.reductions.append(reduction)

    def submit(self, meter: TrafficMeter, job: CommJob) -> None:
        """Run a job in the background, or at once without overlap."""
        if not self.overlap:
            self.wait(meter)
            job()
            return
        meter.start_background()
        self.comm_thread.submit(job)

    def wait(self, meter: TrafficMeter) -> None:
        """Wait for all jobs, and raise the error of the first that failed. Returns at once inside a job."""
        if not self.comm_thread.is_current:
            begin = time.perf_counter()
            self.comm_thread.wait()
            meter.end_background(begin)

    # -- prefetching --------------------------------------------------------------------------------------------------------

    def start_prefetch(self, context: ExchangeContext, read: ReadBatch, input: Any, current: BatchExchange) -> None:
        """Prefetch a batch during the current one."""
        self._prefetched = PrefetchedBatch(context, read, input, current)
        self.submit(context.meter, self._prefetched.start)

    def take_prefetched(self, bags: JaggedIds, trains: bool) -> PrefetchedBatch | None:
        """The prefetched batch if it is this one."""
        found = self._prefetched
        return found if found is not None and found.matches(bags, trains) else None

    def drop_prefetched(self) -> None:
        self._prefetched = None

    def invalidate_prefetched(self) -> None:
        """Rows may have changed: a prefetched batch is fetched again."""
        if self._prefetched is not None:
            self._prefetched.valid = False

    def after_update(self, exchange: BatchExchange) -> None:
        """The rows of a batch are updated: fetch the rows that were deferred for it."""
        if self._prefetched is not None:
            if self._prefetched.previous is exchange:
                self._prefetched.finish()
            else:
                self._prefetched.valid = False


def _tensors(thing: object) -> Iterator[Tensor]:
    """All tensors of a batch, its exchange and their members, except those that all batches share."""
    if isinstance(thing, Tensor):
        yield thing
    shared = isinstance(thing, (ExchangeContext, BatchTableLayout, RankGroup))
    own = type(thing).__module__.startswith("thermocline.distributed.") and not shared
    for part in thing if isinstance(thing, tuple) else vars(thing).values() if own else ():
        yield from _tensors(part)
