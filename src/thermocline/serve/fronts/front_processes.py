"""Front processes of a server: started, watched, replaced, and told what to serve.

Each front has two socket pairs: *orders* of the server, answered one by one, and *asks* of the front, which also carry its
counts every second. A front that ends is replaced; one that does not answer an order, or is silent, is killed first. Rows are
written in place only when every front has answered that no lookup reads them, and a dead front reads nothing.
"""

from __future__ import annotations

import base64
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from logging import WARNING
from typing import TYPE_CHECKING, Any, NamedTuple

from thermocline.errors import BadInput
from thermocline.serve.server.config import ServerConfig
from thermocline.serve.server.json_log import log
from thermocline.serve.tables.forkserver import search_path
from thermocline.serve.tables.shard_server import socket_pair

from .messages import pack, receive_message, send_message

if TYPE_CHECKING:
    from thermocline.checkpoint.publishes.row_delta import RowDelta
    from thermocline.serve.tables.segments import SharedSegment
    from thermocline.serve.tables.shard_group import ShardGroup
    from thermocline.serve.tables.version import TableVersion

ORDER_S, LOAD_S = 10.0, 600.0  # seconds for an order; to map a newly loaded version, and to start
SILENT_S = 10.0  # without a word of a front
_MAX_PAUSE_S = 5.0  # before a front is replaced again
# Isolated: Python puts neither the working directory nor PYTHONPATH before the folders that this process imports from.
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; from thermocline.serve.fronts.front import main; main(*map(int, sys.argv[1:3]))"
)
Values = dict[str, Any]


class ShownVersion(NamedTuple):
    """What every front serves of a model."""

    group: ShardGroup
    held: int
    segments: Sequence[SharedSegment]
    values: Values


class FrontProcess:
    """A running front process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.orders, orders = socket_pair()
        self.asks, asks = socket_pair()
        with orders, asks:
            theirs = orders.fileno(), asks.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, *map(str, theirs), *search_path()],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the server
            )
        self.has: dict[str, tuple[int, Values]] = {}  # by model: the segments and values that it was sent
        self.gauges: dict[str, Any] = {}
        self.answers = True

    def order(self, seconds: float, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send an order, whose reply must come within some seconds."""
        with suppress(OSError):  # `reply` notices
            self.orders.settimeout(seconds)
            send_message(self.orders, message, descriptors)

    def reply(self) -> dict[str, Any] | None:
        """The reply to an order; None if the process is gone or hangs, and then it is gone."""
        if self.answers:
            try:
                return receive_message(self.orders)[0]
            except (EOFError, OSError):
                self.answers = False
                self.kill()
        return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.orders.close()
        self.asks.close()


class FrontProcesses:
    """`config.fronts` front processes. `heard(front, message)` is called with what fronts say, each front in its thread."""

    def __init__(self, config: ServerConfig, heard: Callable[[FrontProcess, dict[str, Any]], None]) -> None:
        self._config, self._heard = config, heard
        self._lock = threading.RLock()  # of orders: one at a time
        self._shown: dict[str, ShownVersion] = {}
        self._state: dict[str, Any] = {"do": "state", "ready": False, "names": [], "loading": [], "shards": {}, "regions": []}
        self._closing = False
        self.running: dict[int, FrontProcess] = {}

    def start(self) -> None:
        """Start all fronts. Raises `BadInput` if one cannot open its ports."""
        starting = [FrontProcess(number) for number in range(self._config.fronts)]
        try:
            for front in starting:
                self._configure(front)
            for front in starting:
                self._check(front)
                front.order(ORDER_S, {"do": "open"})
            for front in starting:
                self._check(front)
        except BaseException:
            for front in starting:
                front.kill()
            raise
        for front in starting:
            self.running[front.number] = front
            threading.Thread(target=self._watch, args=(front.number,), name=f"front-{front.number}", daemon=True).start()

    def _configure(self, front: FrontProcess) -> None:
        config = base64.b64encode(pickle.dumps(self._config)).decode()
        front.order(LOAD_S, {"config": config})

    def _check(self, front: FrontProcess) -> None:
        reply = front.reply()
        if reply is None or "error" in reply:
            error = "the process ended" if reply is None else reply["error"]
            raise BadInput(f"front process {front.number} cannot start: {error}", parameter="--fronts")

    def _watch(self, number: int) -> None:
        deaths = 0
        while True:
            front = self.running[number]
            with suppress(EOFError, OSError):
                front.asks.settimeout(SILENT_S)
                while True:
                    self._heard(front, receive_message(front.asks)[0])
                    deaths = 0
            front.kill()  # first: an order that has the lock may be waiting for its reply
            with self._lock:
                if self._closing:
                    return
                front.answers = False
            deaths += 1
            log("a front process has ended and is replaced", WARNING, front=number, pid=front.process.pid, deaths=deaths)
            time.sleep(min(0.05 * 2 ** min(deaths - 1, 10), _MAX_PAUSE_S))
            with suppress(BadInput, OSError):  # no process, descriptor or memory: it is tried again
                self._replace(front)

    def _replace(self, dead: FrontProcess) -> None:
        front = FrontProcess(dead.number)
        try:
            self._configure(front)
            self._check(front)
            with self._lock:
                for name in self._shown:
                    self._send_version(front, name, {})
                    self._check(front)
                for order in (self._state, {"do": "open"}):  # from now on it has clients
                    front.order(ORDER_S, order)
                    self._check(front)
                dead.close()
                self.running[front.number] = front
                if self._closing:
                    front.kill()
        except BaseException:
            front.kill()
            front.close()
            raise

    def _order_all(self, message: Mapping[str, Any], seconds: float = ORDER_S) -> list[dict[str, Any]]:
        """The replies of all fronts that are there."""
        with self._lock:
            fronts = [front for front in self.running.values() if front.answers]
            for front in fronts:
                front.order(seconds, message)
            return [reply for front in fronts if (reply := front.reply()) is not None]

    # -- VersionReaders -----------------------------------------------------------------------------------------------------

    def show(self, group: ShardGroup, version: TableVersion, held: int, segments: Sequence[SharedSegment]) -> None:
        """Have every front serve a version. If there is no memory to send it, all keep the one they have."""
        with self._lock:
            shown = ShownVersion(group, held, segments, _values_of(version))
            fronts = [front for front in self.running.values() if front.answers]
            packed: dict[tuple[str, ...], SharedSegment] = {}
            for front in fronts:
                _pack_for(front, group.name, shown, packed)
            self._shown[group.name] = shown
            for front in fronts:
                self._send_version(front, group.name, packed)
            for front in fronts:
                front.reply()

    def _send_version(self, front: FrontProcess, name: str, packed: dict[tuple[str, ...], SharedSegment]) -> None:
        """Send the values that a front has not."""
        shown = self._shown[name]
        values = _pack_for(front, name, shown, packed)
        held = front.has.get(name, (0, {}))[0]
        sizes = [] if held == shown.held else [segment.size for segment in shown.segments]
        descriptors = [values.descriptor, *(each.descriptor for each in shown.segments[: len(sizes)])]
        order = {"do": "show", "model": name, "sizes": sizes}
        front.order(LOAD_S if sizes else ORDER_S, order, descriptors)
        front.has[name] = shown.held, shown.values

    def settle(self, group: ShardGroup, seconds: float) -> bool:
        """Whether no front reads an earlier version of a group any more."""
        replies = self._order_all({"do": "settle", "model": group.name, "seconds": seconds}, ORDER_S + seconds)
        return all(reply["settled"] for reply in replies)

    def hide(self, group: ShardGroup) -> None:
        """Have every front stop serving a group, unless another one took its name."""
        with self._lock:
            if (shown := self._shown.get(group.name)) is not None and shown.group is group:
                del self._shown[group.name]
                for front in self.running.values():
                    front.has.pop(group.name, None)
                self._order_all({"do": "hide", "model": group.name})

    # -- state and end ------------------------------------------------------------------------------------------------------

    def show_state(self, state: Mapping[str, Any]) -> None:
        """Tell every front which models there are, and the state of their shards."""
        with self._lock:
            self._state = {"do": "state", **state}
            self._order_all(self._state)

    def stop(self) -> None:
        """Have every front finish its requests and end."""
        with self._lock:
            self._closing = True
            self._order_all({"do": "drain"})
        end = time.monotonic() + self._config.limits.drain + ORDER_S
        for front in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                front.process.wait(max(0.0, end - time.monotonic()))
            front.kill()


def _pack_for(
    front: FrontProcess, name: str, shown: ShownVersion, packed: dict[tuple[str, ...], SharedSegment]
) -> SharedSegment:
    """The values that a front has not, packed once for all fronts that have the same."""
    values = front.has.get(name, (0, {}))[1]
    names = tuple(key for key, value in shown.values.items() if key not in values or values[key] is not value)
    if names not in packed:
        packed[names] = pack({key: shown.values[key] for key in names})
    return packed[names]


def _values_of(version: TableVersion) -> Values:
    """Arguments of `TableVersion` that fronts need. Rows of an overlay are in its segment alone."""
    overlay = version.overlay
    if overlay is not None:
        overlay = type(overlay)(
            {name: _numbers(each) for name, each in overlay.changed.items()}, overlay.segment, overlay.layouts
        )
    names = ("name", "layout", "modes", "features", "tables", "maps", "dense")
    return {**{name: getattr(version, name) for name in names}, "overlay": overlay}


def _numbers(delta: RowDelta) -> RowDelta:
    return type(delta)(delta.rows_K, delta.codes_KB[:0], delta.meta_KW[:0])


def reserve_port(host: str, port: int, parameter: str) -> socket.socket:
    """A socket bound to a port that fronts can share, and no other server has. It does not listen."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            free = alone.getsockname()
        shared = socket.socket(family, kind)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(free)
        return shared
    except OSError as error:
        words = f"cannot listen on {host}:{port}: {error.strerror}"
        raise BadInput(words, parameter=parameter, value=port) from error
