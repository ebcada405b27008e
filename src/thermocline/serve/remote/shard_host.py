"""A shard host: a process that holds shards for the front end on another host, and sends their rows.

    torchrun --nnodes 2 --node-rank N --nproc-per-node 1 ... -m thermocline serve run FOLDER --shards 4        on host N

Host 0 is the front end. All others publish their address in torchrun's store, and the front end connects and sends each the
same load job as its own shards get: a host needs the files at the same path, but neither plan nor heat. Each connection has a
thread, so that rows, messages and heartbeats do not wait for each other.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError, open_regular
from thermocline.serve.errors import NotReady, ShardDown
from thermocline.serve.tables.load_job import LoadJob
from thermocline.serve.tables.memory_limits import reserve
from thermocline.serve.tables.segments import Bytes, SharedSegment, put_rows
from thermocline.serve.tables.supervisor import Supervisor

from . import frames
from .rendezvous import Rendezvous, join_rendezvous

_GREETINGS, _GREETING_S = 16, 10.0  # connections that prove the secret at the same time, and seconds for each
MAX_ALONE = 30.0  # seconds without the front end, after which a host ends


class HostedVersion:
    """A version in the shards of this host."""

    def __init__(self, group: str, job: LoadJob, shards: int) -> None:
        self.group, self.job = group, job
        sizes = job.layout.sizes_S[job.first : job.first + shards]
        self.segments = [SharedSegment(size, f"shard-{job.first + n}") for n, size in enumerate(sizes)]
        # Records of every table in every shard, by place: shard after shard, tables in order.
        self.views: list[Bytes] = [
            np.ndarray((each.split.places(shard), each.stride), np.uint8, segment.memory, each.meta_S[shard])
            for shard, segment in enumerate(self.segments, job.first)
            for each in job.layout.tables
        ]


class ShardHost:
    """The shards of this host, and the connections of the front end."""

    def __init__(self, rendezvous: Rendezvous, folder: Path) -> None:
        self._rendezvous, self._folder = rendezvous, Path(os.path.abspath(folder))
        self._greeting = threading.Semaphore(_GREETINGS)
        self._versions: dict[int, HostedVersion] = {}
        self._supervisors: dict[str, Supervisor] = {}  # by group
        self._closed: set[str] = set()  # groups: a late load must not start their shards again
        self._lock = threading.Lock()
        self._connections = 0
        self.ended = threading.Event()
        self.dismissed = False  # whether the front end had this host end

    def listen(self) -> None:
        """Answer until the front end ends this host, or is gone."""
        with socket.create_server((self._rendezvous.address, 0)) as listener:
            self._rendezvous.publish(f"{self._rendezvous.address}:{listener.getsockname()[1]}")
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            self.ended.wait()
        for supervisor in list(self._supervisors.values()):
            supervisor.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            self._greeting.acquire()  # strangers take no more threads
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> socket.socket | None:
        """The connection, once its other side has proved the secret."""
        try:
            frames.configure(connection, MAX_ALONE)
            connection.settimeout(_GREETING_S)
            if self._rendezvous.tls is not None:
                connection = self._rendezvous.tls.wrap(connection, server=True)
            if frames.prove_to_front(connection, self._rendezvous.secret):
                connection.settimeout(None)
                return connection
        except (OSError, EOFError):
            pass
        finally:
            self._greeting.release()
        connection.close()
        return None

    def _serve(self, stranger: socket.socket) -> None:
        if (connection := self._greet(stranger)) is None:
            return
        with connection:
            self._count_connections(1)
            try:
                while True:
                    kind = bytes(frames.receive_exactly(connection, 1))
                    if kind == frames.ROWS:
                        self._send_rows(connection)
                    elif kind == frames.CONTROL:
                        frames.send_message(connection, self.handle(*frames.receive_message(connection)))
                    else:
                        return
            except (OSError, EOFError):
                return
            finally:
                self._count_connections(-1)

    def _count_connections(self, more: int) -> None:
        """End this host if the front end does not connect again within `MAX_ALONE` seconds."""
        with self._lock:
            self._connections += more
            alone = self._connections == 0
        if alone:
            later = threading.Timer(MAX_ALONE, self._end_if_alone)
            later.daemon = True
            later.start()

    def _end_if_alone(self) -> None:
        if self._connections == 0:
            self.ended.set()

    def _send_rows(self, connection: socket.socket) -> None:
        version, runs, places_N = frames.receive_row_request(connection)
        hosted = self._versions.get(version)
        views = [] if hosted is None else hosted.views
        if not views or any(number >= len(views) for number, _ in runs) or sum(n for _, n in runs) != len(places_N):
            connection.sendall(frames.SIZE.pack(frames.REFUSED))
            return
        size = sum(count * views[number].shape[1] for number, count in runs)
        out, at, first = np.empty(size, np.uint8), 0, 0
        for number, count in runs:
            view, end = views[number], at + count * views[number].shape[1]
            view.take(places_N[first : first + count], 0, out[at:end].reshape(count, -1), "clip")
            at, first = end, first + count
        connection.sendall(frames.SIZE.pack(size))
        connection.sendall(out.data)

    def handle(self, message: dict[str, Any], data: bytearray) -> dict[str, Any]:
        """Execute a message, and return the reply."""
        try:
            return self._execute(message, data)
        except (BadInput, FormatError, ShardDown, NotReady, OSError) as error:
            return {"error": str(error)}

    def _execute(self, message: dict[str, Any], data: bytearray) -> dict[str, Any]:
        action, version = message["do"], int(message.get("version", -1))
        if action == "load":
            self._load(message["group"], version, LoadJob.from_bytes(bytes(data)), message["shards"])
        elif action == "put":
            self._put(version, message, data)
        elif action == "drop":
            self._drop(version)
        elif action == "status":
            return {"shards": {name: [each.pids, each.ready] for name, each in list(self._supervisors.items())}}
        elif action == "close":
            with self._lock:
                self._closed.add(message["group"])
                self._close_group(message["group"])
        elif action == "forget":
            with self._lock:
                for group in list(self._supervisors):
                    self._close_group(group)
        elif action == "end":
            self.dismissed = True
            threading.Timer(0.2, self.ended.set).start()  # after the reply
        return {}

    def _load(self, group: str, version: int, job: LoadJob, shards: int) -> None:
        self._check_files(job)
        sizes = job.layout.sizes_S[job.first : job.first + shards]
        with reserve(sum(sizes), f"the rows of shards {job.first} to {job.first + shards - 1}"):
            self._load_reserved(group, version, HostedVersion(group, job, shards), shards)

    def _check_files(self, job: LoadJob) -> None:
        """Raise `BadInput` if a job reads outside of the folder of this host, or anything whose checksum it does not state."""
        checked = {number for number, _ in job.checksums}
        for number, name in enumerate(job.files):
            if not Path(os.path.abspath(name)).is_relative_to(self._folder):
                raise BadInput(f"'{name}' is not in '{self._folder}', which this host serves", path=name)
            if number not in checked:
                raise BadInput(f"'{name}' is loaded without a checksum", path=name)
            open_regular(name).close()

    def _load_reserved(self, group: str, version: int, hosted: HostedVersion, shards: int) -> None:
        job = hosted.job
        with self._lock:
            if group in self._closed:
                raise NotReady("the shards are closed")
            if group not in self._supervisors:
                self._supervisors[group] = Supervisor(shards, job.first)
            supervisor = self._supervisors[group]
        supervisor.load(str(version), job, hosted.segments)
        with self._lock:
            if self._supervisors.get(group) is not supervisor:
                raise NotReady("the shards were closed while they loaded")
            self._versions[version] = hosted

    def _drop(self, version: int) -> None:
        with self._lock:
            hosted = self._versions.pop(version, None)
            supervisor = None if hosted is None else self._supervisors[hosted.group]
        if supervisor is not None:
            supervisor.drop(str(version))

    def _close_group(self, group: str) -> None:
        for version in [number for number, each in self._versions.items() if each.group == group]:
            del self._versions[version]
        if (supervisor := self._supervisors.pop(group, None)) is not None:
            supervisor.close()

    def _put(self, version: int, message: dict[str, Any], data: bytearray) -> None:
        """Write rows that the front end read."""
        if (hosted := self._versions.get(version)) is None:
            raise NotReady("the shards were closed while they loaded")
        layout, count = hosted.job.layout.tables[message["table"]], message["rows"]
        width, words = F.row_bytes(layout.table.format, layout.table.dim), F.META_WORDS[layout.table.format]
        rows_K = np.frombuffer(data, np.int64, count)
        codes_KB: Bytes = np.frombuffer(data, np.uint8, count * width, 8 * count).reshape(count, width)
        meta_KW = np.frombuffer(data, np.int32, count * words, count * (8 + width)).reshape(count, words)
        put_rows(layout, [segment.memory for segment in hosted.segments], rows_K, codes_KB, meta_KW, hosted.job.first)


def run_shard_host(folder: Path | str) -> None:
    """Hold shards for the front end until it ends: for every process of torchrun but the first.

    Hosts know each other by the secret in the file that THERMOCLINE_SECRET_FILE names.

    Args:
        folder: the checkpoint, or model repository, that is served; nothing outside of it is loaded

    Raises:
        BadInput: this is host 0, there is no secret, or the front end is gone

    Example:
        torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr host0 host.py
    """
    rendezvous = join_rendezvous()
    if rendezvous is None or rendezvous.rank == 0:
        raise BadInput("run_shard_host(folder) is for hosts other than the first, by RANK and WORLD_SIZE", parameter="RANK")
    host = ShardHost(rendezvous, Path(folder))
    host.listen()
    if not host.dismissed:
        raise BadInput(
            f"host {rendezvous.rank} ({os.uname().nodename}): the front end is gone; start all hosts again",
            host=rendezvous.rank,
        )
