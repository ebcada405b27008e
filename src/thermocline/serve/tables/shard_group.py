"""Tables of a checkpoint over several shards, and lookups in them.

On a CPU, shards are processes that fill shared memory, and lookups run in this process: one kernel reads the memory of all
shards. On GPUs, this process drives all GPUs of the host, and a kernel on the first reads the others through peer access.

The current `TableVersion` is an immutable value, replaced by one assignment: every batch of requests sees one version.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.errors import BadInput, FormatError
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.ids.moved_ids import MovedIds
from thermocline.plan.model import Plan
from thermocline.serve.errors import NotReady
from thermocline.serve.frozen_tables import FrozenTables
from thermocline.serve.publishing.published_model import PublishedModel
from thermocline.serve.remote.remote_hosts import RemoteFetch, connect_remote_hosts
from thermocline.serve.remote.rendezvous import shards_of
from thermocline.serve.served_model import ShardStatus

from . import gpu_shards
from .checkpoint_source import CheckpointSource
from .huge_pages import HugePageThread
from .in_place import check_deltas, write_in_place
from .lookup import warm_up
from .memory_limits import reserve
from .reader_pins import RetiredVersions, VersionReaders
from .segments import Bytes, ShardedTableLayout, ShardLayout, SharedSegment, make_layout, put_rows
from .served_tables import ServedTables
from .supervisor import Supervisor
from .version import TableVersion

GRACE_S = 0.05  # to wait for lookups of an earlier version before rows are written in place
_VERSIONS = itertools.count(1)  # numbers of loaded versions, for shard processes and other hosts


class ShardGroup(ServedTables):
    """Frozen tables of a checkpoint over several shards.

    Args:
        folder: a checkpoint
        shards: number of shards, 1 to 128
        split: "hash", "range", "feature", or "plan" with a plan
        plan: a plan for as many shards, or its file
        heat: the heat profile that the plan was made with, or its file
        device: "cpu" or "cuda"
        name: name of the model; groups with a `module()` need different names

    Raises:
        BadInput: a parameter is invalid, or the tables do not fit into memory
        FormatError: the checkpoint is damaged
        ShardDown: a shard process cannot be started

    Example:
        >>> with ShardGroup("checkpoint", shards=4) as group:
        ...     rows = group.lookup({"user": [3, 17]})["user"]  # [2, dim]
    """

    def __init__(
        self,
        folder: Path | str,
        shards: int = 4,
        split: str = "hash",
        *,
        plan: Plan | Path | str | None = None,
        heat: HeatProfile | Path | str | None = None,
        device: str = "cpu",
        name: str = "tables",
    ) -> None:
        self.name, self.count, self.split, self.device = name, shards, split, torch.device(device)
        self._plan = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        self._heat = HeatProfile.load(heat) if isinstance(heat, (str, Path)) else heat
        self._tally_S = np.zeros(shards + 1, np.int64)
        self._load_lock, self._publish_lock = threading.RLock(), threading.Lock()  # the second is held briefly
        self._closed = False  # no version is published after it is set
        self._current: TableVersion | None = None
        self._huge_pages, self._held = HugePageThread(()), 0  # the number of the current version
        self._retired = RetiredVersions()  # versions in the same segments, replaced by publishes
        self.publishes = PublishedModel(self)
        self._readers: VersionReaders | None = None
        self._source = source = CheckpointSource(folder)
        source.splits(shards, split, self._plan, self._heat)  # raises before processes are started
        self._hosts = connect_remote_hosts(self.device.type, shards)
        self._remote_name = "" if self._hosts is None else self._hosts.join(self)
        self._local = range(shards) if self._hosts is None else self._hosts.local_shards(shards)
        self._supervisor = Supervisor(len(self._local)) if self.device.type == "cpu" else None
        try:
            self._load(source)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- versions -----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise NotReady(f"the shards of {self.name!r} were closed; the loaded version is not served")

    @property
    def folder(self) -> Path:
        """The checkpoint that is served."""
        return self._source.checkpoint.folder

    @property
    def saved_name(self) -> str:
        """The name of the version without its publishes."""
        return self._source.name

    @property
    def waits(self) -> bool:
        """Whether lookups wait for other hosts."""
        return self._hosts is not None

    @property
    def closed(self) -> bool:
        return self._current is None

    def load(self, folder: Path | str) -> None:
        """Load another checkpoint beside the version in use, then replace it. On an error the old version stays.

        Args:
            folder: a checkpoint

        Raises:
            BadInput: the checkpoint does not fit beside the version in use
            FormatError: the checkpoint is damaged
            NotReady: the group was closed
        """
        self._load(CheckpointSource(folder))

    def _load(self, source: CheckpointSource) -> None:
        with self.publishes.lock, self._load_lock:
            self._check_open()
            splits = source.splits(self.count, self.split, self._plan, self._heat)
            layout = make_layout(source.tables, splits, records=self.device.type == "cpu")
            number, memory = next(_VERSIONS), list[Bytes]()
            if self._supervisor is None:
                segments: list[Any] = list(gpu_shards.load(source, layout, self.count))
            else:
                needed = sum(layout.sizes_S[: len(self._local)]) + source.state_bytes
                with reserve(needed, f"'{source.checkpoint.folder}' on {len(self._local)} shards"):
                    segments, memory = self._load_processes(source, layout, number, self._supervisor)
            fetch = None if self._hosts is None else RemoteFetch(self._hosts, layout, number)
            about = (source.id_maps, source.modes, source.checkpoint.dense(), self._tally_S, fetch)
            version = TableVersion.of(source.name, layout, segments, *about)
            log = self.publishes.put_log(source, version, self._hosts, number)
            if log.number > log.base:
                version = replace(version, name=f"{source.name}+{log.number}", dense=log.dense)
            warm_up(version)
            try:
                self._show(version, number)
                with self._publish_lock:
                    self._check_open()  # `close` does not wait for loads
                    before, self._current, self._held, self._source = self._held, version, number, source
                    old_thread, self._huge_pages = self._huge_pages, HugePageThread(memory)
            except BaseException:
                self._drop(number)
                raise
            self._retired = RetiredVersions()  # of these segments
            self.publishes.loaded(log)
            old_thread.stop()
            if before and self._supervisor is not None:
                self._supervisor.drop(str(before))
                if self._hosts is not None:
                    self._hosts.drop_later(before)

    def _drop(self, number: int) -> None:
        """Release a version that is not in use."""
        if self._supervisor is not None:
            self._supervisor.drop(str(number))
        if self._hosts is not None:
            self._hosts.drop(number)

    def _load_processes(
        self, source: CheckpointSource, layout: ShardLayout, number: int, supervisor: Supervisor
    ) -> tuple[list[Any], list[Bytes]]:
        """Load with shard processes. Returns the segments of all shards, and the memory of those on this host."""
        hosts, job, local = self._hosts, source.load_job(layout), self._local
        segments = [SharedSegment(layout.sizes_S[shard], f"shard-{shard}") for shard in local]
        wait = None if hosts is None else hosts.load(self._remote_name, number, job, layout.shards)
        memory = [segment.memory for segment in segments]

        def put(table: ShardedTableLayout, *rows: Any) -> None:
            put_rows(table, memory, *rows)
            if hosts is not None:
                hosts.put(number, layout.tables.index(table), *rows)

        try:
            try:
                supervisor.load(str(number), job, segments)
            finally:
                if wait is not None:
                    wait()
            source.put_rest(layout.tables, put)
        except BaseException:
            self._drop(number)
            self._check_open()  # if the group was closed, that is the reason
            raise
        with ThreadPoolExecutor(min(len(segments), 8)) as several:
            list(several.map(SharedSegment.populate, segments))
        here: list[Any] = [torch.from_numpy(each) for each in memory]
        return (here if hosts is None else hosts.segments(here, layout.shards)), memory

    def host_lost(self) -> None:
        """Serve without the shards of lost hosts. Lookups in them raise `ShardDown`."""
        with self._publish_lock:
            if self._hosts is not None and (version := self._current) is not None:
                self._retired.add(version.pin)
                local = version.segments[: len(self._local)]
                self._current = replace(version, segments=tuple(self._hosts.segments(local, self.count)))

    def host_back(self) -> None:
        """Load everything again, beside the version in use, for a host that is back without its memory."""
        if self._current is not None:
            self.load(self._source.checkpoint.folder)

    def follow(self) -> bool:
        """Serve newer saves and publishes of the same folder: changed rows, or else the whole checkpoint.

        Returns:
            False if there is nothing newer

        Raises:
            FormatError: the newer save is damaged
        """
        with self.publishes.lock:  # no publish comes between the rows of a save and its number
            if self.publishes.held or self._source.checkpoint.newer() is None:
                return self.publishes.catch_up()
            source = CheckpointSource(self.folder)
            if self.publishes.contains(source):
                self._source = source
                return self.publishes.catch_up()
            deltas = source.deltas(self.publishes.saved) if self.publishes.is_checkpoint else None
            if deltas is None:
                self._load(source)
            else:
                self.apply_deltas(source.name, deltas, source.checkpoint.dense(), source.id_maps)
                self._source = source
                self.publishes.followed(source)
            return True

    def apply_deltas(
        self, name: str, deltas: Mapping[str, RowDelta], dense: Mapping[str, Tensor] | None = None,
        id_maps: Mapping[str, IdMap] | None = None, moved: Mapping[str, MovedIds] | None = None,
    ) -> None:  # fmt: skip
        """Serve changed rows, and other ids if given, from now on as version `name`. Lookups in progress keep the old ones."""
        with self._load_lock:
            check_deltas(self.current, deltas)
            self._replace(self.current.with_deltas(name, deltas, dense, id_maps, moved))
            self.settle()

    def _replace(self, version: TableVersion) -> None:
        """Serve another version in the same segments. Other processes first: if they cannot, nothing has changed."""
        self._show(version, self._held)
        with self._publish_lock:
            self._check_open()
            self._retired.add(self.current.pin)
            self._current = version

    def share(self, readers: VersionReaders) -> None:
        """Show every version, from the current one on, to other processes that read the same memory.

        Raises:
            BadInput: the rows are on GPUs or other hosts, which other processes cannot read
        """
        if self._supervisor is None or self._hosts is not None:
            words = "several front processes need shards on the CPU of one host; use --fronts 1"
            raise BadInput(words, parameter="--fronts", value=self.device.type)
        with self._load_lock:
            self._readers = readers
            self._show(self.current, self._held)

    def _show(self, version: TableVersion, held: int) -> None:
        if self._readers is not None and self._supervisor is not None:
            self._readers.show(self, version, held, self._supervisor.segments(str(held)))

    def count_lookups(self, shards: Sequence[int], elastic: Mapping[str, Sequence[int]]) -> None:
        """Count lookups that other processes made: by shard, and by feature with elastic ids (all, and those without a row)."""
        self._tally_S += np.asarray(shards, np.int64)
        if (version := self._current) is not None and version.maps is not None:
            for number, map in version.maps.keyed.items():
                map.looked_up.add_(torch.tensor(elastic.get(version.features[number], (0, 0)), dtype=torch.int64))

    def settle(self) -> bool:
        """Write changed rows in place, if no lookup reads an earlier version. False if the overlay stays for now."""
        with self._load_lock:
            if self._current is None or self._current.is_in_place:
                return True
            if not self._retired.wait(GRACE_S) or not (self._readers is None or self._readers.settle(self, GRACE_S)):
                return False
            try:
                self._replace(write_in_place(self.current, self._hosts, self._held))
            except (OSError, EOFError, FormatError):  # another host is gone: the overlay has its rows
                return False
            return True

    def module(self) -> FrozenTables:
        """The tables as a module, for a PyTorch model in this process."""
        return FrozenTables(self)

    # -- shards -------------------------------------------------------------------------------------------------------------

    def shards(self) -> list[ShardStatus]:
        """State, bytes, lookups and process of each shard."""
        version = self.current
        pids, ready = [os.getpid()] * self.count, [True] * self.count
        if self._supervisor is not None:
            pids, ready = self._supervisor.pids, self._supervisor.ready
        if self._hosts is not None:
            for host in self._hosts.remote:
                there = len(shards_of(host.number, self._hosts.count, self.count))
                known = host.shards.get(self._remote_name, ([0] * there, [True] * there))
                lost = host.lost or self in host.missing
                pids, ready = pids + known[0], ready + [each and not lost for each in known[1]]
        sizes, lookups = version.layout.sizes_S, self._tally_S.tolist()
        return [ShardStatus(n, ready[n], sizes[n], lookups[n], pids[n]) for n in range(self.count)]

    def close(self) -> None:
        """End the shards. Lookups in progress finish; a load in progress is not waited for, and its version is not served."""
        with self._publish_lock:
            self._closed, self._current = True, None
        self._huge_pages.stop()
        if self._readers is not None:
            self._readers.hide(self)
        if self._supervisor is not None:
            self._supervisor.close()
        if self._hosts is not None:
            self._hosts.leave(self, self._remote_name)
