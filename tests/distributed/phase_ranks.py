"""Functions that ranks run in the tests of phases."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from cases import Model, batches, sizes_of

import thermocline as tc
from thermocline.distributed.exchange.traffic_meter import TrafficMeter
from thermocline.distributed.process_groups import RankGroup
from thermocline.plan.cost.phases import RowKinds

REACHES = {
    "world": "everyone",
    "intra_node": "node",
    "cross_node": "across",
}  # attributes of ProcessGroups, and the plan's words


def exchanged(rank: int, size: int, plan: tc.Plan, heat: Any, settings: Any, ahead: bool) -> tuple[RowKinds, Counter[Any]]:
    """What the plan uses, and the exchanges of one step after others, by direction and group."""
    seen: list[tuple[str, Any]] = []
    now, timed, plain, mail = threading.local(), TrafficMeter.timed, dist.all_to_all_single, RankGroup._send_to_peers

    @contextmanager
    def noted(self: TrafficMeter, direction: Any) -> Iterator[None]:
        now.direction = direction
        with timed(self, direction):
            yield

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append((now.direction, named["group"]))
        return plain(*arguments, **named)

    def mailed(self: RankGroup, *given: Any) -> Any:  # messages one by one are an exchange too
        seen.append((now.direction, self.process_group))
        return mail(self, *given)

    model = Model(**settings)
    sharding = tc.shard_(model, plan, heat)
    tables, groups = sharding.collections["tables"], sharding.groups
    tables.pipeline.overlap = ahead
    with (
        mock.patch.object(TrafficMeter, "timed", noted),
        mock.patch.object(dist, "all_to_all_single", counted),
        mock.patch.object(RankGroup, "_send_to_peers", mailed),
    ):
        for step in range(3):
            tables.wait_for_exchange()
            seen.clear()
            if ahead:
                tables.prefetch(batches(step + 1, sizes_of(step + 1, size))[rank])
            model.tables(batches(step, sizes_of(step, size))[rank]).values().sum().backward()
        tables.wait_for_exchange()
        assert tables.state.meter.prefetched == 2 * ahead
    names = {getattr(groups, name).process_group: reach for name, reach in REACHES.items()}
    return tables.state.context.routes.uses, Counter((direction, names[group]) for direction, group in seen)
