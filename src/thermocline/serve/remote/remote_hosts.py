"""The front end's side of shards on other hosts: connections, rows fetched in one round trip, and failure detection.

The lookup kernel turns rows into addresses. Segments of other hosts have addresses outside of any memory (`REMOTE`). Between
finding and pooling, those rows are requested, each once, from all hosts at the same time, and pooled from where they arrived.
So results are the same in every bit however shards are spread over hosts.

    address = REMOTE | host << 48 | shard of the host << 40 | offset in its segment

A thread sends every host a heartbeat. The shards of a host that does not reply get no address: lookups in them fail and name
the shard. When the host is back, everything is loaded again, beside the version in use.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.serve.errors import ShardDown
from thermocline.serve.tables.load_job import LoadJob
from thermocline.serve.tables.row_split import Rows
from thermocline.serve.tables.segments import Bytes, ShardLayout, Words

from . import frames
from .rendezvous import Rendezvous, host_rank_and_count, join_rendezvous, shards_of

REMOTE = 1 << 62
HEARTBEAT = 1.0  # seconds
SILENT, STUCK = 5.0, 60.0  # seconds until a silent machine, and a process that does not reply, is lost
LINGER = 60.0  # seconds that hosts keep a replaced version
_HOST_BIT, _SHARD_BIT = 48, 40


@dataclass(frozen=True)
class RemoteSegment:
    """The segment of a shard on another host: an address for `RemoteFetch`."""

    host: int
    shard: int  # of that host

    def data_ptr(self) -> int:
        """The address of the segment's first byte."""
        return REMOTE | self.host << _HOST_BIT | self.shard << _SHARD_BIT


class RemoteHost:
    """Connections to one host: for rows, for messages, and for heartbeats."""

    def __init__(self, rendezvous: Rendezvous, number: int) -> None:
        self.number, self._rendezvous = number, rendezvous
        self.lost, self._broken = True, False
        self.missing: WeakSet[Any] = WeakSet()  # groups that the host has not loaded since it is back
        self.rows_lock, self._control_lock, self._heartbeat_lock = (threading.Lock() for _ in range(3))
        self.shards: dict[str, tuple[list[int], list[bool]]] = {}  # of a group: pids, and whether they are up

    def connect(self) -> None:
        """Connect, and have the host release what it may still hold."""
        address = self._rendezvous.address_of(self.number)
        self.rows, self._heartbeats, self._control = (self._open(address, seconds) for seconds in (STUCK, STUCK, None))
        self.request({"do": "forget"})
        self.lost = self._broken = False

    def _open(self, address: tuple[str, int], seconds: float | None) -> socket.socket:
        connection = socket.create_connection(address, SILENT)
        connection.settimeout(STUCK)
        frames.configure(connection, SILENT)
        if self._rendezvous.tls is not None:
            connection = self._rendezvous.tls.wrap(connection, server=False)
        frames.prove_to_host(connection, self._rendezvous.secret)
        connection.settimeout(seconds)  # None: a load may take any time
        return connection

    def request(self, message: dict[str, Any], *data: Any) -> dict[str, Any]:
        """The reply to a message. An error of the host is raised here."""
        with self._control_lock:
            try:
                reply = frames.exchange_messages(self._control, message, *data)
            except BaseException:
                self._broken = True  # the next reply may belong to this message
                raise
        if "error" in reply:
            raise FormatError(f"host {self.number}: {reply['error']}", host=self.number)
        return reply

    def end(self) -> None:
        """Have the host end. Uses the heartbeat connection: others may wait for a load."""
        if self._heartbeat_lock.acquire(timeout=SILENT):
            try:
                self._heartbeats.sendall(frames.CONTROL)
                frames.send_message(self._heartbeats, {"do": "end"})
            finally:
                self._heartbeat_lock.release()

    def heartbeat(self) -> None:
        """Ask for the state of the host's shards. Raises if the host does not reply."""
        if self._broken:
            raise EOFError("messages do not get through")
        with self._heartbeat_lock:
            reply = frames.exchange_messages(self._heartbeats, {"do": "status"})
        self.shards = {name: (pids, ready) for name, (pids, ready) in reply["shards"].items()}

    def close(self) -> None:
        """Close all connections."""
        self.lost = True
        for name in ("rows", "_heartbeats", "_control"):
            with suppress(OSError, AttributeError):
                getattr(self, name).shutdown(socket.SHUT_RDWR)
                getattr(self, name).close()


class RemoteHosts:
    """All other hosts. Calls `host_lost` and `host_back` of the groups that joined."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.count = rendezvous.hosts
        self.remote = [RemoteHost(rendezvous, number) for number in range(1, rendezvous.hosts)]
        self.groups: WeakSet[Any] = WeakSet()
        self.sent = self.received = 0  # bytes of row requests and replies
        self._joined = 0
        self._ended = threading.Event()
        for host in self.remote:
            host.connect()
        atexit.register(self.end)
        threading.Thread(target=self._send_heartbeats, name="hosts", daemon=True).start()

    def join(self, group: Any) -> str:
        """Register a group. Returns its name for hosts: two groups of one model may be open at the same time."""
        self.groups.add(group)
        self._joined += 1
        return f"{self._joined}"

    def local_shards(self, shards: int) -> range:
        """The shards of this host."""
        return shards_of(0, self.count, shards)

    def segments(self, local: Sequence[Any], shards: int) -> list[Any]:
        """Segments of all shards: local ones, remote ones, and None for those of lost hosts."""
        found: list[Any] = list(local)
        for host in self.remote:
            there = shards_of(host.number, self.count, shards)
            found += [None if host.lost else RemoteSegment(host.number, n) for n in range(len(there))]
        return found

    def owner(self, shard: int, shards: int) -> tuple[int, int]:
        """The host of a shard, and the shard's number there."""
        host = next(n for n in range(self.count) if shard in shards_of(n, self.count, shards))
        return host, shard - shards_of(host, self.count, shards).start

    # -- versions --

    def load(self, group: str, version: int, job: LoadJob, shards: int) -> Callable[[], None]:
        """Have all hosts start to load. Returns a function that waits for them."""
        errors: list[Exception] = []

        def load_on(host: RemoteHost) -> None:
            there = shards_of(host.number, self.count, shards)
            try:
                if host.lost:
                    raise ShardDown(there.start, f"host {host.number} is gone")
                message = {"do": "load", "group": group, "version": version, "shards": len(there)}
                host.request(message, replace(job, first=there.start).to_bytes())
            except (OSError, EOFError) as error:
                errors.append(ShardDown(there.start, f"host {host.number} does not reply: {error}"))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=load_on, args=(host,), daemon=True) for host in self.remote]
        for thread in threads:
            thread.start()

        def wait() -> None:
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]

        return wait

    def put(self, version: int, table: int, rows_K: Rows, codes_KB: Bytes, meta_KW: Words) -> None:
        """Send rows to all hosts; each takes those of its shards."""
        for host in self.remote:
            message = {"do": "put", "version": version, "table": table, "rows": len(rows_K)}
            host.request(message, np.ascontiguousarray(rows_K, np.int64), codes_KB, meta_KW)

    def _request_all(self, message: dict[str, Any]) -> None:
        """Send a message to all hosts that are up, without regard to errors."""
        for host in self.remote:
            with suppress(OSError, EOFError, FormatError):
                if not host.lost:
                    host.request(message)

    def drop(self, version: int) -> None:
        """Have all hosts release a version."""
        self._request_all({"do": "drop", "version": version})

    def drop_later(self, version: int) -> None:
        """Have all hosts release a replaced version after `LINGER` seconds: lookups may still read it."""
        later = threading.Timer(LINGER, self.drop, (version,))
        later.daemon = True
        later.start()

    def leave(self, group: Any, name: str) -> None:
        """Remove a group, and have all hosts end its shards."""
        self.groups.discard(group)
        self._request_all({"do": "close", "group": name})

    # -- failure detection --

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            for host in self.remote:
                try:
                    if host.lost:
                        host.connect()
                        host.missing.update(self.groups)
                    for group in list(host.missing):
                        with suppress(Exception):  # the group's own error; an error of the host fails the heartbeat
                            group.host_back()
                            host.missing.discard(group)
                    host.heartbeat()
                except Exception:  # any error: the next heartbeat tries again
                    self.lose(host)

    def lose(self, host: RemoteHost) -> None:
        """Mark a host as lost."""
        if not host.lost:
            host.close()
            for group in list(self.groups):
                group.host_lost()

    def end(self) -> None:
        """Have all hosts end."""
        self._ended.set()
        for host in self.remote:
            with suppress(OSError, EOFError, FormatError):
                if not host.lost:
                    host.end()
            host.close()


def connect_remote_hosts(device: str, shards: int) -> RemoteHosts | None:
    """Connections of this process to the other hosts of torchrun; None if there are none.

    Raises:
        BadInput: this is not host 0, or the shards cannot be spread over the hosts
    """
    rank, hosts = host_rank_and_count()
    if hosts == 1:
        return None
    if rank != 0:
        way_out = "call thermocline.serve.run_shard_host() here; host 0 looks rows up"
        raise BadInput(f"this is host {rank} of {hosts}: {way_out}", parameter="RANK")
    if device != "cpu" or shards < hosts:
        way_out = "several hosts need device 'cpu', and a shard for each host"
        raise BadInput(f"{shards} shards on {hosts} hosts, device {device}: {way_out}", parameter="shards", needed=hosts)
    rendezvous = join_rendezvous()
    assert rendezvous is not None
    return _connect(rendezvous)


_connect = cache(RemoteHosts)  # once in a process


class RemoteFetch:
    """Fetches rows of other hosts, for one version. A *run* is one table in one remote shard."""

    def __init__(self, hosts: RemoteHosts, layout: ShardLayout, version: int) -> None:
        self._hosts, self._version = hosts, version
        runs = []
        for shard in range(hosts.local_shards(layout.shards).stop, layout.shards):
            host, number = hosts.owner(shard, layout.shards)
            for table, each in enumerate(layout.tables):
                begin, meta = RemoteSegment(host, number).data_ptr() + each.codes_S[shard], 4 * F.META_WORDS[each.table.format]
                runs.append((begin, each.stride, meta, host, number * len(layout.tables) + table, shard))
        fields = np.array(runs, np.int64).T.copy()
        self._begins_K, self._strides_K, self._metas_K, self._hosts_K, self._numbers_K, self._shards_K = fields

    def __call__(self, addresses_N: NDArray[np.int64]) -> object:
        """Replace remote addresses by those of fetched records. Returns their memory, to be kept while they are read."""
        remote_M = np.flatnonzero(addresses_N >= REMOTE)
        if not len(remote_M):
            return None
        wanted_U, which_M = np.unique(addresses_N[remote_M], return_inverse=True)
        run_U = np.searchsorted(self._begins_K, wanted_U, "right") - 1
        strides_U = self._strides_K[run_U]
        places_U = ((wanted_U - self._begins_K[run_U]) // strides_U).astype(np.uint32)
        ends_U = strides_U.cumsum()
        memory = np.empty(int(ends_U[-1]) + 128, np.uint8)  # vector loads may read a little beyond the last row
        self._exchange(run_U, places_U, ends_U, memory.data)
        at_U = ends_U - strides_U + self._metas_K[run_U]
        addresses_N[remote_M] = memory.__array_interface__["data"][0] + at_U[which_M]
        return memory

    def _exchange(self, run_U: Rows, places_U: frames.Places, ends_U: Rows, into: memoryview) -> None:
        """Send all requests, then receive all replies: one round trip. The rows of a host are consecutive."""
        asked, shard, refused = [], -1, -1
        for host in self._hosts.remote:
            first, end = np.searchsorted(self._hosts_K[run_U], (host.number, host.number + 1)).tolist()
            if first < end:
                asked.append((host, slice(first, end), int(self._shards_K[run_U[first]])))
        with ExitStack() as locks:
            for host, _, shard in asked:
                locks.enter_context(host.rows_lock)
                if host.lost:
                    raise ShardDown(shard, f"host {host.number} is gone")
            try:
                for host, own, shard in asked:  # noqa: B007 the error names the shard
                    runs = np.stack(np.unique(self._numbers_K[run_U[own]], return_counts=True), 1)
                    self._hosts.sent += frames.request_rows(host.rows, self._version, runs, places_U[own])
                for host, own, shard in asked:
                    begin, end = int(ends_U[own.start - 1]) if own.start else 0, int(ends_U[own.stop - 1])
                    refused = refused if self._receive(host, into[begin:end]) else shard
            except (OSError, EOFError) as error:
                for host, _, _ in asked:
                    self._hosts.lose(host)  # all of them: their replies would be taken for those to the next request
                raise ShardDown(shard, f"its host does not reply: {error}") from None
        if refused >= 0:
            raise ShardDown(refused, "its host has another version")

    def _receive(self, host: RemoteHost, into: memoryview) -> bool:
        """Receive records; False if the host does not have the version."""
        (size,) = frames.SIZE.unpack(frames.receive_exactly(host.rows, frames.SIZE.size))
        if size == frames.REFUSED:
            return False
        if size != len(into):
            raise EOFError(f"it sent {size} bytes for {len(into)}")
        frames.receive_into(host.rows, into)
        self._hosts.received += frames.SIZE.size + size
        return True
