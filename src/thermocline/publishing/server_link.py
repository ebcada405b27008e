"""The connection to one server: a thread that sends the newest publish, and finds back to a server that was gone.

A server says at which publish it is. One that misses some reads them from the log of the checkpoint folder, which is written
before anything is sent; then it takes the next ones again. Nothing is kept for it here.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from thermocline.checkpoint.publishes.part import PublishPart
from thermocline.serve.remote.rendezvous import HostTls
from thermocline.serve.remote.session import AuthenticationFailed, Session, connect

_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0  # between attempts
_HELLO_S = 600.0
_MAX_REPLY = 1 << 16
_CATCHES_UP = ("order", "replay", "run")  # refusals after which the server is asked again where it is


@dataclass(frozen=True)
class ServerState:
    """What a trainer knows of a server.

    Attributes:
        address: host and port.
        state: "live"; "behind" while it is not reached or catches up; or "refused".
        number: the last publish that it serves.
        seconds: from the step to lookups, of that publish.
        error: why it is not live, or an empty string.

    Example::

        for server in publisher.servers:
            print(server.address, server.state, server.error)
    """

    address: str
    state: str
    number: int
    seconds: float
    error: str


@dataclass(frozen=True)
class LinkTarget:
    """A server's address, the model there, and the seconds that an answer may take."""

    host: str
    port: int
    model: str
    patience: float


class ServerLink:
    """Sends publishes to one server. `offer` and `is_waiting` are for the publisher's thread."""

    def __init__(
        self, target: LinkTarget, run: int, signature: str, save: str, secret: bytes, tls: HostTls | None
    ) -> None:  # fmt: skip
        self._target, self._secret, self._tls = target, secret, tls
        self._hello = {"do": "hello", "model": target.model, "run": run, "signature": signature}
        self._changed, self._ended = threading.Condition(), False
        self._part: PublishPart | None = None
        self._small: PublishPart | None = None  # of the same publish
        self.takes_steps, self._loaded, self._reloaded, self._steps_from = True, save, False, 0
        self._number, self._live, self._refused, self._error, self._seconds = 0, False, False, "not reached yet", 0.0
        self._session: Session | None = None
        self._thread = threading.Thread(target=self._run, name=f"publish {target.host}:{target.port}", daemon=True)
        self._thread.start()

    # -- the publisher's side -----------------------------------------------------------------------------------------------

    def offer(self, part: PublishPart, small: PublishPart) -> None:
        """Send a publish, which is in the log already. `small`: the same with steps in place of rows."""
        with self._changed:
            self._part, self._small = part, small
            self._changed.notify_all()

    def reloaded(self, number: int) -> bool:
        """Whether the server has loaded a save since publish `number - 1` was copied, which is the last without its rows.

        A save has other values of rows than were sent, if they wait or changed after its publish. From publish `number` on they
        go whole. Steps of an earlier one do not fit.
        """
        with self._changed:
            found, self._reloaded = self._reloaded, False
            self._steps_from = number if found else self._steps_from
            return found

    def has(self, number: int) -> bool:
        """Whether the publisher need not wait: the server serves a publish, or is not live."""
        return not self._live or self._number >= number

    def wait_for(self, number: int, seconds: float) -> bool:
        """Wait until the server serves a publish, even if it is not live now."""
        with self._changed:
            return self._changed.wait_for(lambda: self._number >= number or self._ended, seconds) and self._number >= number

    @property
    def state(self) -> ServerState:
        name = "live" if self._live else "refused" if self._refused else "behind"
        address = f"{self._target.host}:{self._target.port}"
        return ServerState(address, name, self._number, self._seconds, "" if self._live else self._error)

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if (session := self._session) is not None:
            with suppress(OSError):
                session.close()
        self._thread.join(self._target.patience)

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _PAUSE_S
        while not self._has_ended():
            try:
                target = self._target
                self._session = session = connect((target.host, target.port), self._secret, self._tls, target.patience)
                pause = _PAUSE_S
                self._follow(session)
            except AuthenticationFailed as error:
                self._lose(str(error), refused=True)
            except Exception as error:  # whatever it is: a publisher would wait for a link that has ended
                self._lose(f"not reached: {error}")
            finally:
                if self._session is not None:
                    self._session.close()
                    self._session = None
            self._pause(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _follow(self, session: Session) -> None:
        """Send publishes until the connection is lost."""
        known = False
        while not self._ended:
            if not known:
                known = self._find_number(session)
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._ended or (self._part is not None and self._part.number > self._number))
                part, small = self._part, self._small
                fits = self.takes_steps and not self._reloaded
            if part is None or small is None or self._has_ended():
                return
            fits = fits and part.number >= self._steps_from and part.since == self._number
            known = part.since <= self._number and self._send(session, part, small if fits else part)

    def _find_number(self, session: Session) -> bool:
        """Ask a server where it is. It reads the log before it answers."""
        target = self._target
        session.settimeout(_HELLO_S)  # it may load a checkpoint
        reply = self._ask(session, self._hello)
        session.settimeout(target.patience)
        if "refused" in reply:
            self._lose(reply["error"], refused=True)
            self._pause(_MAX_PAUSE_S)
            return False
        with self._changed:
            self._number, part = int(reply["number"]), self._part
            self._live = self._live or part is None or self._number >= part.since
            self._refused, self.takes_steps = False, bool(reply["steps"])
            self._reloaded |= reply["loaded"] != self._loaded
            self._loaded = str(reply["loaded"])
            self._changed.notify_all()
        if not self._live:
            self._pause(_PAUSE_S)
        return self._live

    def _has_ended(self) -> bool:
        return self._ended

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)

    def _send(self, session: Session, part: PublishPart, sent: PublishPart) -> bool:
        """Send a publish. Returns whether the server took it."""
        message = {"do": "publish", "model": self._target.model, "age": max(0.0, time.time() - part.at), "loaded": self._loaded}
        reply = self._ask(session, message, sent.encode())
        if "refused" in reply:
            refused = reply["refused"] not in _CATCHES_UP
            self._lose(reply["error"], refused)
            self._pause(_MAX_PAUSE_S if refused else _PAUSE_S)
            return False
        with self._changed:
            self._number, self._live, self._seconds = int(reply["number"]), True, max(0.0, time.time() - part.at)
            if self._part is part:
                self._part = self._small = None
            self._changed.notify_all()
        return True

    def _ask(self, session: Session, message: dict[str, Any], pieces: list[Any] | None = None) -> dict[str, Any]:
        session.send(message, pieces or [])
        return session.receive(_MAX_REPLY)[0]

    def _lose(self, error: str, refused: bool = False) -> None:
        with self._changed:
            self._live, self._refused, self._error = False, refused, error[:400]
            self._changed.notify_all()
