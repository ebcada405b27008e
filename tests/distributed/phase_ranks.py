"""What ranks do in the tests of phases."""

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
from thermocline.distributed.exchange.traffic_meter import Meter
from thermocline.distributed.process_groups import Group
from thermocline.plan.cost.phases import RowKinds


def exchanged(rank: int, size: int, plan: tc.Plan, heat: Any, settings: Any, ahead: bool) -> tuple[RowKinds, Counter[Any]]:
    """What the plan uses; and the exchanges of one step in the middle of some, by what the meter takes them for and group."""
    seen: list[tuple[str, Any]] = []
    now, timed, plain, mail = threading.local(), Meter.timed, dist.all_to_all_single, Group._mail

    @contextmanager
    def noted(self: Meter, direction: Any) -> Iterator[None]:
        now.direction = direction
        with timed(self, direction):
            yield

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append((now.direction, named["group"]))
        return plain(*arguments, **named)

    def mailed(self: Group, *given: Any) -> None:  # messages one by one are an exchange too
        seen.append((now.direction, self.process))
        mail(self, *given)

    model = Model(**settings)
    sharding = tc.shard_(model, plan, heat)
    tables, world = sharding.collections["tables"], sharding.world
    tables.overlap = ahead
    with (
        mock.patch.object(Meter, "timed", noted),
        mock.patch.object(dist, "all_to_all_single", counted),
        mock.patch.object(Group, "_mail", mailed),
    ):
        for step in range(3):
            tables.wait()
            seen.clear()
            if ahead:
                tables.prefetch(batches(step + 1, sizes_of(step + 1, size))[rank])
            model.tables(batches(step, sizes_of(step, size))[rank]).values().sum().backward()
        tables.wait()
        assert tables.meter.ahead == 2 * ahead
    names = {getattr(world, name).process: name for name in ("everyone", "node", "across")}
    return tables.ways.routes.uses, Counter((direction, names[group]) for direction, group in seen)
