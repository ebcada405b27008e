"""A log as the batches of many cards: in each step card after card takes the next samples, in the order of the log.

So the batch of a node is a stretch of the log, as the planner takes it to be. A log that ends begins anew: then cards that are
far apart look up the same, and the whole cluster asks for fewer distinct rows than it would of a longer log. `rounds` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.log_reader import LogIds, open_logs
from thermocline.plan.model import Plan

from .simulator import Cards

_LOOKUPS = 1 << 21  # that are worked on at a time, about


class Log:
    """The columns of some files that a plan's features name."""

    def __init__(self, paths: Sequence[Path | str], plan: Plan) -> None:
        features = [feature for table in plan.tables for feature in table.features]
        self.files, self.features = open_logs(paths, features)
        self.samples = sum(file.samples for file in self.files)
        self.taken = 0  # ids, by all steps so far
        if not self.samples:
            raise BadInput(f"there are no samples in {', '.join(str(path) for path in paths)}; give a log that has some")

    def rounds(self, plan: Plan, steps: int) -> float:
        """How often so many steps of all cards go through the log."""
        return steps * plan.topology.world_size * plan.batch / self.samples

    def steps(self, plan: Plan, steps: int) -> Iterator[Iterator[Cards]]:
        """The batches of so many steps, as `simulate` takes them: some nodes at a time."""
        samples = _Samples(self)
        for _ in range(steps):
            yield _step(samples, plan)


def _step(samples: _Samples, plan: Plan) -> Iterator[Cards]:
    nodes, cards = plan.topology.nodes, plan.topology.gpus_per_node
    lookups = cards * sum(table.lookups for table in plan.tables)  # of a node
    at_once = max(1, int(_LOOKUPS / max(lookups, 1.0)))
    for first in range(0, nodes, at_once):
        here = min(at_once, nodes - first) * cards
        yield Cards(samples.take(here * plan.batch), np.full(here, plan.batch))


class _Samples:
    """The samples of a log, over and over."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.chunks = self._endless()
        self.left: dict[str, LogIds] = {}

    def _endless(self) -> Iterator[dict[str, LogIds]]:
        while True:
            for file in self.log.files:
                yield from file.chunks(self.log.features)

    def take(self, count: int) -> dict[str, LogIds]:
        """The next samples."""
        taken: list[dict[str, LogIds]] = []
        while count:
            chunk = self.left or next(self.chunks)
            there = next(iter(chunk.values())).samples
            here = min(count, there)
            taken.append({name: bags.part(0, here) for name, bags in chunk.items()})
            self.left = {name: bags.part(here, there) for name, bags in chunk.items()} if here < there else {}
            count -= here
        joined = {name: _joined([each[name] for each in taken]) for name in self.log.features}
        self.log.taken += sum(len(bags.ids_N) for bags in joined.values())
        return joined


def _joined(parts: Sequence[LogIds]) -> LogIds:
    ids_N = np.concatenate([part.ids_N for part in parts])
    if all(part.offsets is None for part in parts):
        return LogIds(ids_N)
    lengths = [np.ones(part.samples, np.int64) if part.offsets is None else np.diff(part.offsets) for part in parts]
    return LogIds(ids_N, np.concatenate([[0], *(np.cumsum(np.concatenate(lengths)),)]))
