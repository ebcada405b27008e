"""The handshake of all ranks before a batch: what each rank does next, and how many rows it requests.

If ranks differ, or one of them failed, all ranks raise an error that names the rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from thermocline.distributed.placement.table_map import Counts
from thermocline.distributed.process_groups import check_same
from thermocline.errors import BadInput

from .context import ExchangeContext

_FAILED = 0
_PREFETCHED, AT_MOST = 16, 15  # bits of the header word: the last four say how many batches a rank prefetches


class StepAgreement(NamedTuple):
    """What all ranks agreed on."""

    received_PJ: Counts  # requests of each rank to this one, in each of J concurrent exchanges
    most_J: Counts  # the maximum of all ranks
    differ: bool  # some ranks prefetched the batch, others did not
    following: int  # batches to prefetch, on the rank that has most


def handshake(
    context: ExchangeContext, what: str, sent_PJ: Counts, total_J: Counts, prefetched: bool = False, following: int = 0
) -> StepAgreement:
    """Exchange step headers, and raise on all ranks unless all do the same.

    `what` is the operation, `sent_PJ` the requests to each rank in each of J concurrent exchanges.
    """
    flags = _PREFETCHED * prefetched | min(following, AT_MOST)
    word = 1 + ((zlib.crc32(what.encode()) & 0x01FFFFFF) << 5 | flags)
    numbers_PJ = _exchange(context, word, sent_PJ, total_J)
    word_P = numbers_PJ[:, 0] - 1
    if _FAILED not in numbers_PJ[:, 0] and len(set((word_P >> 5).tolist())) == 1:
        prefetched_P, following_P = (word_P & _PREFETCHED) > 0, word_P & AT_MOST
        received_PJ, most_J = numbers_PJ[:, 1::2], numbers_PJ[:, 2::2].max(axis=0)
        return StepAgreement(received_PJ, most_J, len(set(prefetched_P.tolist())) > 1, int(following_P.max()))
    everyone = context.groups.all_gather({"operation": what, "error": ""})
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
    return context.exchange_numbers(context.groups.world, "ids", numbers_PJ)
