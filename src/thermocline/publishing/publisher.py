"""`thermocline.publish`: changed rows of a training model on running servers within a second.

    step      on the training thread: every `interval`, if the publish before has arrived, copies changed rows
    log       a thread writes them to the log of the checkpoint folder, then hands them to the connections
    servers   one thread for each sends them (`server_link.py`)

Nothing queues up: while a publish is on its way, changes stay marks in the arena, one byte a row, and the next publish has them
all. It has the rows of a publish that failed, too: it continues the last one that is in the logs of all ranks. A server that is
gone, or takes longer than `patience`, is not waited for; it reads what it missed from the log. A publish copies rows on the
training thread, so it waits until training has taken 50 times as long as the copy.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thermocline.checkpoint.format.dense_state import dense_tensors, full_tensor
from thermocline.checkpoint.format.module_entries import NamedModule, find_modules
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.checkpoint.publishes.part import PublishedTable, PublishPart, model_signature
from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.checkpoint.ranks import CheckpointRanks
from thermocline.checkpoint.save_job import save
from thermocline.errors import BadInput
from thermocline.plan.units import read_bytes
from thermocline.serve.remote.rendezvous import read_secret, read_tls
from thermocline.serve.remote.session import read_address

from .backlog import CopiedRows
from .budgeted_sends import BudgetedSends
from .changed_rows import ModuleRows
from .server_link import LinkTarget, ServerLink, ServerState

SHARE = 0.02  # of the training time that publishing may take on the training thread
PATIENCE_S = 5.0


class Publisher:
    """Publishes the rows of a model, made by `thermocline.publish`. A context manager.

    Example::

        with thermocline.publish(model, "checkpoint", to="localhost:8002") as publisher:
            for batch in loader:
                train(batch)
                publisher.step()
    """

    def __init__(self, rows: Sequence[ModuleRows], ranks: CheckpointRanks, model: nn.Module, dense: bool) -> None:
        self._rows, self._ranks, self._dense = rows, ranks, model if dense else None
        self.tables: list[PublishedTable] = [table for each in rows for table in each.tables]
        self.number = 0
        self._run, self._interval = 0, 0.0
        self._budget: BudgetedSends | None = None
        self._log: PublishLog | None = None
        self._links: list[ServerLink] = []
        self._sealed: list[tuple[PublishPart, list[CopiedRows], float]] = []
        self._changed, self._ended, self._folder = threading.Condition(), False, ""
        self._error: BaseException | None = None
        self._since, self._failed = 0, False  # the last publish that succeeded, and whether the one after it did not
        self._logged = self._offered = self._steps = self._next_step = 0
        self._sealed_at = self._began = time.perf_counter()
        self._cost = self._spent = 0.0
        self._thread: threading.Thread | None = None

    def _start(
        self, model: nn.Module, folder: Path, targets: Sequence[LinkTarget], secret: bytes, interval: float, rate: float | None
    ) -> None:  # fmt: skip
        """Save, and begin to publish what changes from then on."""
        self._interval = interval
        self._run = self._ranks.on_all(lambda: secrets.randbits(62))[0]
        for each in self._rows:
            each.attach(self._run, 0)
        save(model, folder, incremental=True)
        self._budget = None if rate is None else BudgetedSends(self._rows, rate / self._ranks.size)
        self._folder, self._log = str(folder), PublishLog(folder, self._run)
        if self._ranks.rank == 0:
            self._log.only()
        signature = model_signature(self.tables)
        changes = self._rows[0].arena.changes
        token = "" if changes is None else changes.base
        self._links = [ServerLink(target, self._run, signature, token, secret, read_tls()) for target in targets]
        self._thread = threading.Thread(target=self._write_log, name="publish log", daemon=True)
        self._thread.start()

    # -- the training thread ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Publish if it is time; call this after every training step. All ranks of a sharded model call it.

        Returns:
            Whether changed rows were copied for a publish.

        Raises:
            BadPublish: a changed row is NaN or Inf.
            ThermoclineError: the log cannot be written.
        """
        self._steps += 1
        now = time.perf_counter()
        if self._ranks.size > 1:
            return self._steps >= self._next_step and self._step_together(now)
        if self._error is not None:
            self._check_logged()
        if now - self._sealed_at < max(self._interval, self._cost / SHARE) or not self._is_idle():
            return False
        self._seal(now, None)
        return True

    def _step_together(self, now: float) -> bool:
        """Publish on all ranks, if every rank is ready. Agrees on the step of the next attempt."""
        groups = self._ranks.groups
        assert groups is not None
        each_step = max((now - self._began) / self._steps, 1e-6)
        found = groups.all_gather((self._is_idle(), self._cost, each_step, self._error is not None))
        if any(failed for _, _, _, failed in found):
            self._check_logged()
        ready = all(idle for idle, _, _, _ in found)
        cost = max(cost for _, cost, _, _ in found)
        period = max(self._interval, cost / SHARE) if ready else cost / SHARE
        self._next_step = self._steps + max(1, round(period / max(step for _, _, step, _ in found)))
        if ready:
            self._seal(now, None)
        return ready

    def flush(self, seconds: float = 30.0) -> bool:
        """Publish everything that changed, whatever the budget, and wait until live servers serve it.

        Args:
            seconds: to wait for servers.

        Returns:
            Whether all servers serve it.

        Raises:
            BadPublish: a changed row is NaN or Inf.
            ThermoclineError: the log cannot be written.
        """
        end = time.monotonic() + seconds
        if not self._publish_rest(end):
            return False
        return all([link.wait_for(self.number, max(0.0, end - time.monotonic())) for link in self._links])

    def _publish_rest(self, end: float) -> bool:
        """Publish everything, on all ranks. Returns whether it is in all logs."""
        self._wait_idle(end)
        if not self._check_logged():
            return False
        self._seal(time.perf_counter(), float("inf"))
        self._wait_idle(end)
        return self._check_logged()

    def _check_logged(self) -> bool:
        """Whether the last publish is in the logs of all ranks. If one failed, all raise, and the next publish has its rows."""
        try:
            return all(self._ranks.on_all(self._own_log))
        except BaseException:
            self._logged, self._failed = self.number, True
            for each in self._rows:
                each.give_back()
            if self._budget is not None:
                self._budget.give_back()
            raise

    def _own_log(self) -> bool:
        if (error := self._error) is not None:
            self._error = None
            raise error
        return self._logged == self.number

    def _seal(self, now: float, available: float | None) -> None:
        """Copy changed rows, and hand them to the log."""
        began = time.thread_time()  # training, too, would wait for a processor
        at, deltas, ids, copied = time.time(), dict[str, RowDelta](), dict[str, Any](), list[CopiedRows]()
        for each in self._rows:
            each.attach(self._run, self.number)
            if self._budget is None:
                deltas |= each.take(each.changed())
        if self._budget is not None:
            available = self._budget.budget.available() if available is None else available
            reloaded = [link.reloaded(self.number + 1) for link in self._links]
            copied = self._budget.copy(available == float("inf"), any(reloaded))
        for each in self._rows:
            ids |= each.take_ids()
        dense = self._dense_tensors() if self._ranks.rank == 0 else {}
        self._since, self._failed = self._since if self._failed else self.number, False
        part = PublishPart(
            self._run, self.number + 1, self._since, model_signature(self.tables), deltas, dense, ids, self._ranks.rank,
            self._ranks.size, at, self._steps,
        )  # fmt: skip
        self.number += 1
        for each in self._rows:
            each.attach(self._run, self.number)
        with self._changed:
            self._sealed.append((part, copied, available or 0.0))
            self._changed.notify_all()
        self._cost = time.thread_time() - began
        self._spent += self._cost
        self._sealed_at = now

    def _dense_tensors(self) -> dict[str, Tensor]:
        if self._dense is None:
            return {}
        return {name: full_tensor(tensor).cpu().clone() for name, tensor in dense_tensors(self._dense).items()}

    def _is_idle(self) -> bool:
        """Whether the last publish is in the log, and on all live servers."""
        return self._logged == self.number and all(link.has(self._offered) for link in self._links)

    def _wait_idle(self, end: float) -> None:
        while not self._is_idle() and self._error is None and time.monotonic() < end:
            time.sleep(1e-3)

    # -- the log ------------------------------------------------------------------------------------------------------------

    def _write_log(self) -> None:
        assert self._log is not None
        pruned = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sealed or self._ended)
                if not self._sealed:
                    return
                part, copied, available = self._sealed.pop(0)
            try:
                small = part
                if self._budget is not None:
                    steps = bool(self._links) and all(link.takes_steps for link in self._links)
                    part, small = self._budget.choose(part, copied, available, steps)
                part.check(self.tables)
                self._log.append(part)
                for link in self._links:
                    link.offer(part, small)
                self._offered = part.number
                saved = self._rows[0].counts.saved
                if saved is not None and saved[0] == self._folder and saved[1] > pruned and not part.rank:
                    self._log.prune(pruned := saved[1])
                self._log.merge(part)
                self._logged = part.number
            except Exception as error:  # raised by the next step, which publishes its rows again
                self._error = error

    # -- what is known of it ------------------------------------------------------------------------------------------------

    @property
    def servers(self) -> list[ServerState]:
        """The state of each server."""
        return [link.state for link in self._links]

    @property
    def share(self) -> float:
        """Share of the time since the start that the training thread spent in publishes."""
        return self._spent / max(time.perf_counter() - self._began, 1e-9)

    def close(self, seconds: float = 10.0) -> None:
        """Publish what is left, wait for live servers, and end.

        Args:
            seconds: to wait for servers.

        Raises:
            BadPublish: a changed row is NaN or Inf.
            ThermoclineError: the log cannot be written.
        """
        if self._ended:
            return
        try:
            self._publish_rest(time.monotonic() + seconds)
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for link in self._links:
            link.close()
        for each in self._rows:
            each.detach()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._end()


def _check(found: list[NamedModule], ranks: CheckpointRanks) -> None:
    """Raise unless a publisher of these modules may begin."""
    if any(each.module.arena.unpublished is not None for each in found):
        raise BadInput(
            "a publisher of this model is open; close() it first, or give one publisher several addresses", open=True
        )
    if ranks.groups is not None and ranks.groups.replicas is not None:
        raise BadInput("replicas do not publish: use a job without a mesh, or serve what save writes", parameter="mesh")


def publish(
    model: nn.Module,
    folder: str | Path,
    *,
    to: str | Sequence[str] = (),
    name: str = "tables",
    interval: float = 0.25,
    budget: str | None = None,
    dense: bool = False,
    secret_file: str | Path | None = None,
) -> Publisher:
    """Publish changed rows of a training model to running servers, and to the folder for servers that start later.

    Saves the model to the folder first. Call `step()` of the result after every training step. All ranks of a sharded model
    call both; their publishes are one. A server needs `thermocline serve run FOLDER --publish-port PORT`, on the same folder.

    Args:
        model: a module that is, or contains, thermocline modules.
        folder: the checkpoint folder that servers open. Saving to it now and then (`incremental=True`) keeps its log short.
        to: addresses of servers, host:port of their --publish-port; without one, only the log is written.
        name: the model on the servers.
        interval: seconds between publishes, at least. They are rarer if copying rows would take more than 2% of the time.
        budget: bytes a second, such as "10MiB". Rows that are looked up most and changed most go first, rounded to fewer bytes,
            and the others within 4 * pending bytes / budget seconds. Takes memory for another copy of all rows.
        dense: publish dense parameters and buffers as well, whole, each time.
        secret_file: file with the secret that servers have, by default the one that THERMOCLINE_SECRET_FILE names.

    Returns:
        The publisher.

    Raises:
        BadInput: the model has no thermocline module, is published already, or an argument is invalid.
        ThermoclineError: the folder cannot be written.

    Example::

        publisher = thermocline.publish(model, "checkpoint", to="localhost:8002", secret_file="secret")
        for batch in loader:
            train(batch)
            publisher.step()
        publisher.close()
    """
    addresses = [to] if isinstance(to, str) else to
    if not 0 <= interval < float("inf"):
        raise BadInput(f"interval is {interval}; use seconds, 0 or more", parameter="interval", value=interval)
    rate = None if budget is None else read_bytes(budget)
    targets = [LinkTarget(*read_address(each), name, PATIENCE_S) for each in addresses]
    secret = read_secret(secret_file) if addresses else b""
    found, ranks = find_modules(model), CheckpointRanks.of(model)
    _check(found, ranks)
    publisher = Publisher([ModuleRows(each) for each in found], ranks, model, dense)
    try:
        publisher._start(model, Path(folder), targets, secret, interval, rate)
    except BaseException:
        publisher._end()
        raise
    return publisher
