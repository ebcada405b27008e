"""Heat while training: what a card looks up is counted, now and then, by the profiler that counts logs.

One batch in so many is counted, by raw id and feature, exactly while memory lasts and by the profiler's sketch beyond it
(`heat/profiler.py`). Counting begins anew whenever the counts are taken: what they tell is recent. The profiles of all ranks
are merged pair by pair, so that no rank holds more than two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from thermocline.distributed.process_groups import World
from thermocline.heat.log_reader import LogIds
from thermocline.heat.profile import HeatProfile, merge
from thermocline.heat.profiler import PAGE, REST, Profiler, ProfilerSettings
from thermocline.nn import inputs as features

MEMORY = 256 << 20  # bytes of counters, at most


class Lookups:
    """Counts of one card's lookups. `every`: of so many batches one is counted; 0 for none. `batch`: samples of a batch."""

    def __init__(self, names: Sequence[str], every: int, batch: int, cards: int) -> None:
        self.names, self.every, self.seen = tuple(names), every, 0
        self.settings = ProfilerSettings(REST + PAGE * len(names) + MEMORY, batch, cards)
        self.profiler = Profiler(self.names, self.settings)

    def add(self, bags: features.JaggedIds) -> None:
        """A batch that is trained on."""
        self.seen += 1
        if self.every and (self.seen - 1) % self.every == 0 and bags.batch:
            self.profiler.add(_by_feature(self.names, bags.ids_N, bags.offsets, bags.batch))

    def take(self) -> HeatProfile:
        """What was counted since the last time."""
        profiler, self.profiler = self.profiler, Profiler(self.names, self.settings)
        return profiler.result("live training")


def _by_feature(names: Sequence[str], ids: Tensor, offsets: Tensor, batch: int) -> dict[str, LogIds]:
    ids_N, ends = ids.detach().cpu().long().numpy(), offsets.detach().cpu().long().numpy()
    found = {}
    for n, name in enumerate(names):
        mine = ends[n * batch : (n + 1) * batch + 1]
        found[name] = LogIds(ids_N[mine[0] : mine[-1]], mine - mine[0])
    return found


def merged(world: World, mine: HeatProfile) -> HeatProfile:
    """The heat of all ranks, on every rank. All of them call this together."""
    if world.everyone.is_one:
        return mine
    group = world.everyone.process
    rank, step = world.rank, 1
    with world.everyone.together():
        while step < world.size and rank % (2 * step) == 0:
            if rank + step < world.size:
                got: list[HeatProfile] = [mine]
                dist.recv_object_list(got, src=rank + step, group=group)
                mine = merge([mine, got[0]])
            step *= 2
        if rank:
            dist.send_object_list([mine], dst=rank - step, group=group)
        whole = [mine]
        dist.broadcast_object_list(whole, src=0, group=group)
    return whole[0]
