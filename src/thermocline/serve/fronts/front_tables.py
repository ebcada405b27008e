"""Tables of a front process: the segments of the server's shards, mapped, and the versions that the server shows.

The server decides what is served; a front switches versions on its message, and reports when no lookup reads an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thermocline.serve.served_model import ShardStatus
from thermocline.serve.tables.huge_pages import HugePageThread
from thermocline.serve.tables.lookup import warm_up
from thermocline.serve.tables.reader_pins import RetiredVersions
from thermocline.serve.tables.segments import SharedSegment
from thermocline.serve.tables.served_tables import ServedTables
from thermocline.serve.tables.version import TableVersion


class FrontLookups:
    """Lookups that a front has counted of a model: by shard, and by feature with elastic ids, as in `KeyedMap`.

    They outlive the model: the front sends the server what was counted since it last sent.
    """

    def __init__(self) -> None:
        self.shards_S = np.zeros(0, np.int64)
        self.elastic: dict[str, torch.Tensor] = {}

    def counts(self) -> dict[str, Any]:
        """The counts as numbers."""
        return {"shards": self.shards_S.tolist(), "elastic": {name: each.tolist() for name, each in list(self.elastic.items())}}


class FrontTables(ServedTables):
    """The tables of one model in a front process."""

    def __init__(self, name: str, lookups: FrontLookups) -> None:
        self.name, self._lookups = name, lookups
        self._values: dict[str, Any] = {}
        self._segments: tuple[torch.Tensor, ...] = ()
        self._retired = RetiredVersions()
        self._huge_pages = HugePageThread(())
        self._status: list[ShardStatus] = []

    def prepare(self, changed: Mapping[str, Any], segments: Sequence[SharedSegment]) -> TableVersion:
        """The next version, from what changed since the last one. `segments`: those of a newly loaded version."""
        self._values |= changed
        if segments:
            memory = [segment.memory for segment in segments]
            for segment in segments:
                segment.populate()
            self._segments = tuple(map(torch.from_numpy, memory))
            self._huge_pages.stop()
            self._huge_pages = HugePageThread(memory)
        lookups = self._lookups
        if len(lookups.shards_S) != len(self._segments) + 1:
            lookups.shards_S = np.zeros(len(self._segments) + 1, np.int64)
        if (maps := changed.get("maps")) is not None:  # all fronts share the memory of its own counts
            names, zeros = self._values["features"], torch.zeros(2, dtype=torch.int64)
            counted = {f: lookups.elastic.setdefault(names[f], zeros.clone()) for f in maps.keyed}
            self._values["maps"] = maps.with_keyed({f: replace(map, looked_up=counted[f]) for f, map in maps.keyed.items()})
        version = TableVersion(segments=self._segments, tally_S=lookups.shards_S, **self._values)
        if segments:
            warm_up(version)
        return version

    def show(self, version: TableVersion) -> None:
        """Serve a version. Lookups in progress keep theirs."""
        if self._current is not None:
            self._retired.add(self._current.pin)
        self._current = version

    def settle(self, seconds: float) -> bool:
        """Whether no lookup reads an earlier version any more; waits for that."""
        return self._retired.wait(seconds)

    def report(self, shards: Sequence[Sequence[Any]]) -> None:
        """The state of the shards, from the server."""
        self._status = [ShardStatus(*each) for each in shards]

    def shards(self) -> list[ShardStatus]:
        """State of each shard, as the server last said."""
        return self._status

    def close(self) -> None:
        """End lookups; those in progress finish."""
        self._current = None
        self._huge_pages.stop()
