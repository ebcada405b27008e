"""The port for trainers and operators: publishes, rolling back, resuming. One thread for each connection.

Every connection proves the secret first (`remote/session.py`); strangers hold a thread for `_GREETING_S` seconds at most. The
data of a message is bounded by the memory that is there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from logging import WARNING
from typing import Any

from thermocline.checkpoint.publishes.part import PublishPart
from thermocline.errors import BadInput, BadPublish, ThermoclineError
from thermocline.serve.remote.rendezvous import HostTls
from thermocline.serve.remote.session import AuthenticationFailed, Session, accept
from thermocline.serve.server.json_log import log, log_fault
from thermocline.serve.tables.memory_limits import check_fits

from .published_model import PublishedModel

_GREETINGS, _GREETING_S = 16, 10.0  # connections that prove the secret at the same time, and seconds for each
_MAX_CONNECTIONS, _PAUSE_S = 1024, 0.1
_SILENT_S = 10.0  # until a machine that does not acknowledge is given up
_MAX_DATA = 1 << 34
Find = Callable[[str], PublishedModel]


class PublishListener:
    """Listens from the constructor to `close`. `find` gives a model by name, or raises `ThermoclineError`."""

    def __init__(self, find: Find, host: str, port: int, secret: bytes, tls: HostTls | None) -> None:
        self._find, self._secret, self._tls = find, secret, tls
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            words = f"port {port} of {host} cannot be opened: {error.strerror}; give another --publish-port, or 0"
            raise BadInput(words, parameter="--publish-port", value=port) from None
        self.port: int = self._listener.getsockname()[1]
        self._sessions: set[Session] = set()
        self._greetings = threading.Semaphore(_GREETINGS)
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept, name="publish", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_S)  # no descriptors are left, for now
                continue
            self._greetings.acquire()
            threading.Thread(target=self._serve, args=(connection,), name="publish", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            session = accept(connection, self._secret, self._tls, _GREETING_S)
        except AuthenticationFailed as error:
            log("a connection to the publish port was refused", WARNING, reason=str(error))
            return
        except (OSError, EOFError):
            return
        finally:
            self._greetings.release()
        with self._lock:
            if self._closed or len(self._sessions) >= _MAX_CONNECTIONS:
                session.close()
                return
            self._sessions.add(session)
        try:
            session.settimeout(None)  # keepalive probes find a machine that is gone
            while True:
                message, data = session.receive(_MAX_DATA)
                session.send(self._answer(message, data))
                del data
        except (OSError, EOFError, ValueError):
            pass
        finally:
            with self._lock:
                self._sessions.discard(session)
            session.close()

    def _answer(self, message: dict[str, Any], data: bytearray) -> dict[str, Any]:
        """Execute a message. Refusals are replies with a reason."""
        try:
            return self._execute(message, data)
        except BadPublish as error:
            about = {"model": str(message.get("model"))[:100], "reason": error.reason, "error": str(error)[:400]}
            log("a publish was refused", WARNING, **about)
            return {"refused": error.reason, "error": str(error)}
        except (ThermoclineError, KeyError, TypeError, ValueError) as error:
            return {"refused": "model", "error": str(error)}
        except Exception as error:
            log_fault("a publish failed", error)
            return {"refused": "order", "error": type(error).__name__}

    def _execute(self, message: dict[str, Any], data: bytearray) -> dict[str, Any]:
        model, action = self._find(str(message["model"])), message["do"]
        if action == "publish":
            check_fits(2 * len(data), f"a publish of {len(data):,} bytes")
            return {"number": model.offer(PublishPart.decode(data), float(message["age"]), str(message["loaded"]))}
        if action == "hello":
            number = model.hello(int(message["run"]), str(message["signature"]))
            log("a trainer publishes", model=message["model"], run=f"{model.run:016x}", publish=number)
            return {"number": number, "loaded": model.save, "steps": model.takes_steps}
        if action == "roll back":
            model.roll_back(None if message["to"] is None else int(message["to"]))
            log("rolled back", WARNING, model=message["model"], publish=model.number)
        elif action == "resume":
            model.resume()
            log("resumed", model=message["model"], publish=model.number)
        elif action != "status":
            raise BadInput(f"{str(action)[:40]!r} is not an action", parameter="do")
        return {"number": model.number, "held": model.held, "kept": model.kept, "run": f"{model.run:016x}"}

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # `close` would not wake up `accept`
        self._listener.close()
        for session in sessions:
            session.close()
