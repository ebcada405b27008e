"""Exchanges in the background of a training step: gradients of the last batch, and ids and rows of the next ones.

Rows that an earlier batch updates are *deferred*: their owners know them, since the earlier batch requested them, and send them
after the last of these updates. Every row travels once, and lookups return the same values as without prefetching. One bit per
row tells the requester which rows are deferred. Replicated rows of tier 2 may be updated by lookups of other nodes, and are
always deferred on several nodes.

Only these updates may change rows in between. After any other access that may change rows the prefetched batches are
discarded, and all ranks fetch them again. The same happens if a rank looks up another batch than the one it prefetched.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from thermocline.distributed.comm_stream import CommStream
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
PendingBatch = Union[BatchExchange, "PrefetchedBatch"]  # a batch that will update rows


class PrefetchedBatch:
    """A batch whose ids and rows travel during earlier ones. `input` is None on a rank without such a batch.

    `previous` are the batches before it that will update rows.
    """

    def __init__(
        self, context: ExchangeContext, read: ReadBatch, input: Any, trains: bool, previous: Sequence[PendingBatch]
    ) -> None:  # fmt: skip
        self._context, self._read, self.input, self.trains = context, read, input, trains
        self._pending, self._previous = list(previous), list[BatchExchange]()
        self.valid, self.started = True, False
        self.batch: BatchTable | None = None
        self._has_deferred = False

    def start(self) -> None:
        """Request its rows, and fetch those that are not deferred."""
        fields_KF, self.started = self._context.shard.fields_KF, True
        try:
            if self.input is not None:
                self._bags, self.batch = self._read(self.input)
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
        self._previous = [each.exchange if isinstance(each, PrefetchedBatch) else each for each in self._pending]
        self._pending = []
        self._has_deferred = bool(self._previous)
        self.exchange.fetch_unchanged(self.target, self._previous)

    def after_update(self, exchange: BatchExchange) -> None:
        """Rows were updated: fetch deferred rows after the last update. Other updates may have changed any row."""
        left = [each for each in self._previous if each is not exchange]
        self.valid &= len(left) < len(self._previous)
        self._previous = left
        if self.valid and not left:
            self.finish()

    def finish(self) -> None:
        """Fetch the deferred rows."""
        if self._has_deferred:
            self.exchange.fetch_remote(self.target)
            self._has_deferred, self._previous = False, []

    def receive(self) -> None:
        """Fetch what is missing, and hand the tensors to the caller's stream."""
        self.finish()
        record_use(_tensors((self.batch, self.exchange)))

    def matches(self, bags: JaggedIds) -> bool:
        """Whether this is the batch `bags`."""
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
    """The background work of one collection: its communication thread or stream, and its prefetched batches.

    Without `overlap`, exchanges run in the caller's thread and nothing is prefetched. With a stream gradients are exchanged
    there, and nothing is prefetched either.
    """

    def __init__(self, comm_thread: CommThread, overlap: bool, comm_stream: CommStream | None = None) -> None:
        self.comm_thread, self.overlap, self._comm_stream = comm_thread, overlap, comm_stream
        self.next_inputs: list[Any] = []  # of batches that the coming forward prefetches
        self.depth = 1  # most batches prefetched at a time
        self._prefetched: deque[PrefetchedBatch] = deque()  # as many on all ranks
        self._missed = False  # whether the last lookup was of another batch
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
        if self._comm_stream is not None:
            self._comm_stream.launch(job)
            return
        meter.start_background()
        self.comm_thread.submit(job)

    def wait(self, meter: TrafficMeter) -> None:
        """Wait for all jobs, and raise the error of the first that failed. Returns at once inside a job."""
        if not self.comm_thread.is_current:
            begin = time.perf_counter()
            self.comm_thread.wait()
            meter.end_background(begin)
            if self._comm_stream is not None:
                self._comm_stream.wait()

    # -- prefetching --------------------------------------------------------------------------------------------------------

    def start_prefetch(self, context: ExchangeContext, read: ReadBatch, count: int, current: BatchExchange) -> None:
        """Prefetch `count` batches during the current one, the same on all ranks; some ranks have fewer."""
        inputs, self.next_inputs = self.next_inputs[:count], self.next_inputs[count:]
        if not self.overlap or self._comm_stream is not None:
            return
        if count and self._prefetched and self._prefetched[0].trains != current.trains:
            self._prefetched.clear()
        for input in [*inputs, *[None] * (count - len(inputs))]:
            previous: list[PendingBatch] = [current] if current.trains else []
            previous += [each for each in self._prefetched if each.trains]
            self._prefetched.append(PrefetchedBatch(context, read, input, current.trains, previous))
            self.submit(context.meter, self._prefetched[-1].start)
        self.depth = max(self.depth, len(self._prefetched))

    def take_prefetched(self, bags: JaggedIds, trains: bool) -> PrefetchedBatch | None:
        """The next prefetched batch if it is this one with up-to-date rows; else those after it are fetched again."""
        ahead = self._prefetched
        if ahead and trains != ahead[0].trains:  # training batches wait for a validation
            if trains:
                ahead.clear()
            return None
        found = [n for n, each in enumerate(ahead) if each.matches(bags)][:1]
        missed, self._missed = self._missed, bool(ahead) and not found
        if found == [0] and ahead[0].valid:
            return ahead.popleft()
        self.fetch_again((found or [len(ahead) if missed else -1])[0] + 1)  # twice another batch: these will not come
        return None

    def fetch_again(self, first: int = 0) -> None:
        """Prefetch the batches from `first` on again, which another batch will update, and forget those before."""
        self.next_inputs[:0] = [each.input for each in self._prefetched][first:]
        self._prefetched.clear()

    def drop_prefetched(self) -> None:
        self._prefetched.clear()

    def invalidate_prefetched(self) -> None:
        """Rows may have changed: prefetched batches whose rows have come are fetched again."""
        for each in self._prefetched:
            each.valid &= not each.started

    def after_update(self, exchange: BatchExchange) -> None:
        """The rows of a batch are updated: fetch the rows that were deferred for it."""
        for each in self._prefetched:
            each.after_update(exchange)


def _tensors(thing: object) -> Iterator[Tensor]:
    """All tensors of a batch, its exchange and their members, except those that all batches share."""
    if isinstance(thing, Tensor):
        yield thing
    shared = isinstance(thing, (ExchangeContext, BatchTableLayout, RankGroup))
    own = type(thing).__module__.startswith("thermocline.distributed.") and not shared
    for part in thing if isinstance(thing, tuple) else vars(thing).values() if own else ():
        yield from _tensors(part)
