"""Signs of life between ranks that write one save in the background.

The threads that write run no collectives, so no timeout of a process group ends their waiting. Instead each rank counts up in
the store of torch.distributed while its save is pending. A rank that waits for another one gives up when the count of the other
stands still for the timeout of the process group. A rank that fails leaves its reason in the store: the folder may have failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from thermocline.distributed.process_groups import ExchangeFailed, group_timeout
from thermocline.errors import ThermoclineError

from .ranks import CheckpointRanks

_COUNT, _FAILED = "thermocline/save/count/", "thermocline/save/failed/"
_BEAT = 1.0  # seconds between signs of life, if the timeout is long


class RankWatch:
    """Signs of life of this rank, and those of the ranks that it waits for; nothing for one process.

    Use as a context, around what the rank does for the save with this token. The process that serves the store may end first;
    the store is then not asked again, and waiting goes on for the timeout: reports in the folder may still arrive.
    """

    def __init__(self, ranks: CheckpointRanks, token: str) -> None:
        self._ranks, self._token, self._ended = ranks, token, threading.Event()
        self._stores: list[Any] = []  # connections of the thread that waits and of the one that counts
        if ranks.groups is None or ranks.size == 1:
            return
        self._timeout = group_timeout(ranks.groups.device).total_seconds()
        self._beat = min(_BEAT, self._timeout / 10)
        self._kept = dist.distributed_c10d._get_default_store()  # rank 0 may serve it, also after destroy_process_group
        clone = getattr(self._kept, "clone")  # noqa: B009 (not in torch's stubs)
        self._stores = [clone(), clone()]  # the main thread may wait on the first connection
        self._seen: dict[int, tuple[int, float]] = {}  # count of a rank, and when it was new
        self._looked = -self._beat

    def __enter__(self) -> RankWatch:
        if self._stores:
            store = self._stores.pop()
            threading.Thread(target=self._count_up, args=[store], name="thermocline save watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _count_up(self, store: Any) -> None:
        with contextlib.suppress(Exception):
            while not self._ended.is_set():
                store.add(f"{_COUNT}{self._ranks.rank}", 1)
                self._ended.wait(self._beat)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Any]:
        """The store; None once it failed."""
        try:
            yield self._stores[0] if self._stores else None
        except RuntimeError:
            self._stores.clear()

    def report(self, why: str) -> None:
        """Tell the other ranks that this one failed."""
        with self._store() as store:
            if store is not None:
                store.set(f"{_FAILED}{self._token}/{self._ranks.rank}", why)

    def failure_of(self, rank: int) -> str | None:
        """The reason that a rank reported."""
        key = f"{_FAILED}{self._token}/{rank}"
        with self._store() as store:
            if store is not None and store.check([key]):
                return str(store.get(key).decode())
        return None

    def check(self, others: Sequence[int]) -> None:
        """Raise if one of these ranks failed, or gave no sign of life for the timeout of the process group."""
        now = time.monotonic()
        if self._ranks.size == 1 or now - self._looked < self._beat:
            return
        self._looked = now
        for rank in others:
            if (why := self.failure_of(rank)) is not None:
                raise ThermoclineError(f"rank {rank} stopped: {why}")
            count, since = self._seen.get(rank, (-1, now))
            with self._store() as store:
                if store is not None and (new := store.add(f"{_COUNT}{rank}", 0)) != count:
                    count, since = new, now
            self._seen[rank] = count, since
        if silent := [rank for rank in others if now - self._seen[rank][1] > self._timeout]:
            names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            raise ExchangeFailed(
                f"{names} gave no sign of life for {self._timeout:g} s, the timeout of the process group, while rank "
                f"{self._ranks.rank} waited for the save; look for the first error there. The save before is intact",
                self._ranks.rank, silent,
            )  # fmt: skip
