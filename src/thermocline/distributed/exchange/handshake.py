"""The handshake of all ranks before a batch: what each rank does next, and how many rows it requests.

If ranks differ, or one of them failed, all ranks raise an error that names the rank.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from thermocline.distributed.placement.table_map import Counts
from thermocline.distributed.process_groups import ProcessGroups, check_same
from thermocline.errors import BadInput

from .traffic_meter import TrafficMeter

_FAILED = 0
_PREFETCHED, _HAS_NEXT = 2, 1  # bits of the header word


class StepHeader(NamedTuple):
    """What a rank does next."""

    operation: str
    sent_PJ: Counts  # requests to each rank, in each of J concurrent exchanges
    total_J: Counts
    prefetched: bool = False
    has_next: bool = False


class StepAgreement(NamedTuple):
    """What all ranks agreed on."""

    received_PJ: Counts  # requests of each rank to this one
    most_J: Counts  # the maximum of all ranks
    differ: bool  # some ranks prefetched the batch, others did not
    has_next: bool  # any rank has a batch to prefetch


def handshake(groups: ProcessGroups, meter: TrafficMeter, name: str, header: StepHeader) -> StepAgreement:
    """Exchange step headers, and raise on all ranks unless all do the same."""
    what = f"{name}: {header.operation}"
    flags = _PREFETCHED * header.prefetched | _HAS_NEXT * header.has_next
    word = 1 + ((zlib.crc32(what.encode()) & 0x0FFFFFFF) << 2 | flags)
    numbers_PJ = _exchange(groups, meter, word, header.sent_PJ, header.total_J)
    word_P = numbers_PJ[:, 0] - 1
    if _FAILED not in numbers_PJ[:, 0] and len(set((word_P >> 2).tolist())) == 1:
        prefetched_P, next_P = (word_P & _PREFETCHED) > 0, (word_P & _HAS_NEXT) > 0
        received_PJ, most_J = numbers_PJ[:, 1::2], numbers_PJ[:, 2::2].max(axis=0)
        return StepAgreement(received_PJ, most_J, len(set(prefetched_P.tolist())) > 1, bool(next_P.any()))
    everyone = groups.all_gather({"operation": what, "error": ""})
    for rank, each in enumerate(everyone):
        if each["error"]:
            raise BadInput(f"rank {rank} stopped: {each['error']}", rank=rank)
    check_same([{"operation": each["operation"]} for each in everyone], "this step")
    raise AssertionError("step headers differ, but their operations are equal")


def announce_failure(groups: ProcessGroups, meter: TrafficMeter, name: str, error: Exception, exchanges: int) -> None:
    """Take part in the handshake as a failed rank; the caller raises."""
    _exchange(groups, meter, _FAILED, np.zeros((groups.size, exchanges), np.int64), np.zeros(exchanges, np.int64))
    groups.all_gather({"operation": name, "error": f"{error}"})


def _exchange(groups: ProcessGroups, meter: TrafficMeter, word: int, sent_PJ: Counts, total_J: Counts) -> Counts:
    group = groups.world
    counts_PJ = np.stack([sent_PJ, np.broadcast_to(total_J, sent_PJ.shape)], axis=2).reshape(len(sent_PJ), -1)
    numbers_PJ = np.concatenate([np.full_like(counts_PJ[:, :1], word), counts_PJ], axis=1)
    with meter.timed("ids"):
        received_PJ = group.exchange_counts(numbers_PJ)
    meter.add_counts("ids", group.links, numbers_PJ.shape[1])
    return received_PJ
