"""A training log as the batches of many ranks: in each step rank after rank takes the next samples, in log order.

The batch of a node is a contiguous range of the log, as the planner assumes. A log that is too short is repeated: distant ranks
then look up the same samples, and the cluster requests fewer distinct rows than with a longer log. `rounds` tells how often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle
from pathlib import Path

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.log_columns import LogIds
from thermocline.heat.log_reader import open_logs
from thermocline.plan.model import Plan

from .simulator import RankBatches

_LOOKUPS = 1 << 21  # processed at a time, about


class SimulationLog:
    """The columns of log files for the features of a plan.

    Args:
        paths: log files with a column for each feature.
        plan: the plan whose batches are read.

    Raises:
        BadInput: a file or column is missing, or the files have no samples.

    Example::

        log = SimulationLog(["clicks.parquet"], plan)
        found = simulate(plan, heat, log.steps(plan, 4))
    """

    def __init__(self, paths: Sequence[Path | str], plan: Plan) -> None:
        features = [feature for table in plan.tables for feature in table.features]
        self.files, self.features = open_logs(paths, features)
        self.samples = sum(file.samples for file in self.files)
        self.taken = 0  # ids taken by all steps so far
        if not self.samples:
            names = ", ".join(str(path) for path in paths)
            raise BadInput(f"there are no samples in {names}; give a log with samples", parameter="log")

    def rounds(self, plan: Plan, steps: int) -> float:
        """How often `steps` steps of all ranks read the log."""
        return steps * plan.topology.world_size * plan.batch / self.samples

    def steps(self, plan: Plan, steps: int) -> Iterator[Iterator[RankBatches]]:
        """The batches of `steps` steps for `simulate`, some nodes at a time."""
        samples = _SampleReader(self)
        for _ in range(steps):
            yield _step(samples, plan)


def _step(samples: _SampleReader, plan: Plan) -> Iterator[RankBatches]:
    nodes, local_size = plan.topology.nodes, plan.topology.gpus_per_node
    lookups = local_size * sum(table.lookups for table in plan.tables)  # of a node
    at_once = max(1, int(_LOOKUPS / max(lookups, 1.0)))
    for first in range(0, nodes, at_once):
        here = min(at_once, nodes - first) * local_size
        yield RankBatches(samples.take(here * plan.batch), np.full(here, plan.batch))


class _SampleReader:
    """The samples of a log, repeated forever."""

    def __init__(self, log: SimulationLog) -> None:
        self.log = log
        self.chunks = chain.from_iterable(file.chunks(log.features) for file in cycle(log.files))
        self.left: dict[str, LogIds] = {}

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
    return LogIds(ids_N, np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
