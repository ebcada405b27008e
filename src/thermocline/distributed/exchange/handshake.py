"""The handshake of all ranks before a batch: what each rank does next, and how many rows it requests.

If ranks differ, or one of them failed, all ranks raise an error that names the rank.

With kernels and messages on one device, headers are made and exchanged there (`device_handshake`). They carry requested rows
by part, so that the host knows the sizes of all messages of the step from one read. Kernels that found a bad id, or a bad
gradient in the step before, have set a flag on the device; it makes the header that of a failed rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from thermocline.distributed.placement.table_map import Counts
from thermocline.distributed.process_groups import check_same
from thermocline.errors import BadInput

from .context import ExchangeContext
from .host_numbers import HostNumbers, to_device
from .routes import COUNT_BYTES

if TYPE_CHECKING:
    from .batch_exchange import BatchExchange
    from .batch_table import BatchTable

_FAILED = 0
_PREFETCHED, AT_MOST = 16, 15  # bits of the header word: the last four say how many batches a rank prefetches


class StepAgreement(NamedTuple):
    """What all ranks agreed on."""

    received_PJ: Counts  # requests of each rank to this one, in each of J concurrent exchanges
    most_J: Counts  # the maximum of all ranks
    differ: bool  # some ranks prefetched the batch, others did not
    following: int  # batches to prefetch, on the rank that has most
    received_PK: Counts | None = None  # requests of each rank to this one by part, in the first exchange


def handshake(
    context: ExchangeContext, what: str, sent_PJ: Counts, total_J: Counts, prefetched: bool = False, following: int = 0
) -> StepAgreement:
    """Exchange step headers, and raise on all ranks unless all do the same.

    `what` is the operation, `sent_PJ` the requests to each rank in each of J concurrent exchanges.
    """
    agreed = _agree(context, what, _exchange(context, _word(what, prefetched, following), sent_PJ, total_J))
    return agreed._replace(received_PK=None)  # these headers have no parts


def device_handshake(
    context: ExchangeContext, what: str, exchange: BatchExchange, following: int, batch: BatchTable
) -> StepAgreement:  # fmt: skip
    """`handshake` on the device: settles the exchange and the batch, whose numbers come to the host with the headers.

    Raises what kernels of this rank reported, on this rank; on the others that it stopped.
    """
    world, errors, counts_PK = context.groups.world, context.shard.errors, exchange.first.counts_PK
    sent_PK, ranks = counts_PK[:-1], len(counts_PK) - 1
    word = (errors.flag == 0).long() * _word(what, False, following)
    columns = [word.expand(ranks, 1), sent_PK, sent_PK.sum().expand(ranks, 1)]
    if exchange.sums is not None:
        columns.append(to_device(np.stack([exchange.sums.sent_P, np.full(ranks, exchange.sums.total)], axis=1), sent_PK.device))
    header_PJ = torch.cat(columns, dim=1).to(torch.int32)
    with context.meter.timed("ids"):
        received_PJ = world.all_to_all(header_PJ, [1] * ranks, [1] * ranks)
    context.meter.add_untabled("ids", world.links, np.full(ranks, header_PJ.shape[1] * COUNT_BYTES))
    numbers_PJ, counts, begins = HostNumbers(received_PJ, counts_PK, batch.begins).get()
    failed: Exception | None = None
    if numbers_PJ[world.index, 0] == _FAILED:
        try:
            errors.raise_pending()
        except BadInput as error:
            failed = error
    agreed = _agree(context, what, numbers_PJ, failed)
    exchange.settle(counts)
    batch.settle(begins.tolist())
    return agreed


def _word(what: str, prefetched: bool, following: int) -> int:
    flags = _PREFETCHED * prefetched | min(following, AT_MOST)
    return 1 + ((zlib.crc32(what.encode()) & 0x01FFFFFF) << 5 | flags)


def _agree(context: ExchangeContext, what: str, numbers_PJ: Counts, failed: Exception | None = None) -> StepAgreement:
    """What the headers of all ranks say; raises unless all do the same. `failed` is the error of this rank."""
    word_P = numbers_PJ[:, 0] - 1
    if _FAILED not in numbers_PJ[:, 0] and len(set((word_P >> 5).tolist())) == 1:
        prefetched_P, following_P = (word_P & _PREFETCHED) > 0, word_P & AT_MOST
        differ, following = len(set(prefetched_P.tolist())) > 1, int(following_P.max())
        received_PK = numbers_PJ[:, 1 : 1 + context.parts] if context.device_side else None
        numbers_PJ = _narrowed(context, numbers_PJ) if context.device_side else numbers_PJ
        return StepAgreement(numbers_PJ[:, 1::2], numbers_PJ[:, 2::2].max(axis=0), differ, following, received_PK)
    everyone = context.groups.all_gather({"operation": what, "error": "" if failed is None else f"{failed}"})
    if failed is not None:
        raise failed
    for rank, each in enumerate(everyone):
        if each["error"]:
            raise BadInput(f"rank {rank} stopped: {each['error']}", rank=rank)
    check_same([{"operation": each["operation"]} for each in everyone], "this step")
    raise AssertionError("step headers differ, but their operations are equal")


def announce_failure(context: ExchangeContext, name: str, error: Exception) -> None:
    """Take part in the handshake as a failed rank; the caller raises."""
    none_PJ = np.zeros((context.groups.size, context.routes.exchanges), np.int64)
    _exchange(context, _FAILED, none_PJ, none_PJ[0])
    context.groups.all_gather({"operation": name, "error": f"{error}"})


@contextmanager
def announced(context: ExchangeContext, name: str, cleanup: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Announce an error of this rank to all ranks, in place of its next handshake."""
    try:
        yield
    except Exception as error:
        cleanup()
        announce_failure(context, name, error)
        raise


def _exchange(context: ExchangeContext, word: int, sent_PJ: Counts, total_J: Counts) -> Counts:
    counts_PJ = np.stack([sent_PJ, np.broadcast_to(total_J, sent_PJ.shape)], axis=2).reshape(len(sent_PJ), -1)
    numbers_PJ = np.concatenate([np.full_like(counts_PJ[:, :1], word), counts_PJ], axis=1)
    if context.device_side:  # as wide as those of `device_handshake`: a rank may be in another operation
        numbers_PJ = np.insert(numbers_PJ, [2] * (context.parts - 1), 0, axis=1)
    return context.exchange_numbers(context.groups.world, "ids", numbers_PJ)


def _narrowed(context: ExchangeContext, numbers_PJ: Counts) -> Counts:
    """Numbers with the requests of all parts in one column."""
    word, first, rest = np.split(numbers_PJ, [1, 1 + context.parts], axis=1)
    return np.concatenate([word, first.sum(axis=1, keepdims=True), rest], axis=1)
