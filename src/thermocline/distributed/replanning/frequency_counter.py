"""Lookup counts while training, for `Sharding.heat` and `replan`.

One batch in `every` is counted by raw id and feature, exactly while memory lasts and by the sketch of `heat/profiler.py`
beyond. Counting restarts whenever the counts are taken, so they are recent. Profiles of all ranks are merged pairwise: no rank
holds more than two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from thermocline.distributed.exchange.host_numbers import HostNumbers
from thermocline.distributed.placement.table_map import Counts
from thermocline.distributed.process_groups import ProcessGroups, RankGroup
from thermocline.heat.log_columns import LogIds
from thermocline.heat.profile import HeatProfile, merge
from thermocline.heat.profiler import PAGE, REST, Profiler, ProfilerSettings
from thermocline.nn.inputs import JaggedIds

MEMORY = 256 << 20  # bytes of counters, at most


class FrequencyCounter:
    """Counts the lookups of one rank, in one batch of `every` (0: none) with `batch` samples."""

    def __init__(self, names: Sequence[str], every: int, batch: int, local_size: int) -> None:
        self.names, self.every, self.seen = tuple(names), every, 0
        self.settings = ProfilerSettings(REST + PAGE * len(names) + MEMORY, batch, local_size)
        self.profiler = Profiler(self.names, self.settings)
        self._batch: tuple[HostNumbers, int] | None = None  # on its way from a GPU

    def add(self, bags: JaggedIds) -> None:
        """Count a training batch, if it is its turn; one on a GPU with the next call, so that nothing waits."""
        self._count()
        self.seen += 1
        if self.every and (self.seen - 1) % self.every == 0 and bags.batch:
            self._batch = HostNumbers(bags.ids_N.detach(), bags.offsets.detach()), bags.batch
            if not bags.ids_N.is_cuda:
                self._count()

    def _count(self) -> None:
        if self._batch is not None:
            (numbers, batch), self._batch = self._batch, None
            ids_N, offsets = numbers.get()
            self.profiler.add(_by_feature(self.names, ids_N, offsets, batch))

    def take(self) -> HeatProfile:
        """The counts since the last call."""
        self._count()
        profiler, self.profiler = self.profiler, Profiler(self.names, self.settings)
        return profiler.result("live training")


def _by_feature(names: Sequence[str], ids_N: Counts, offsets: Counts, batch: int) -> dict[str, LogIds]:
    found = {}
    for n, name in enumerate(names):
        ends = offsets[n * batch : (n + 1) * batch + 1]
        found[name] = LogIds(ids_N[ends[0] : ends[-1]], ends - ends[0])
    return found


def merge_profiles(groups: ProcessGroups, profile: HeatProfile) -> HeatProfile:
    """The merged profile of all ranks, those of other replicas included, on every rank. Collective."""
    merged = _merge_over(groups.world, profile)
    return merged if groups.replicas is None else _merge_over(groups.replicas, merged)


def _merge_over(group: RankGroup, profile: HeatProfile) -> HeatProfile:
    """The merged profile of the members of a group."""
    if group.is_single:
        return profile
    process_group, ranks, index, step = group.process_group, group.ranks, group.index, 1
    with group.collective():
        while step < len(ranks) and index % (2 * step) == 0:
            if index + step < len(ranks):
                received: list[HeatProfile] = [profile]
                dist.recv_object_list(received, src=ranks[index + step], group=process_group)
                profile = merge([profile, received[0]])
            step *= 2
        if index:
            dist.send_object_list([profile], dst=ranks[index - step], group=process_group)
        merged = [profile]
        dist.broadcast_object_list(merged, src=ranks[0], group=process_group)
    return merged[0]
