"""Publishes of one served model: what is refused, what is applied, and the way back.

A model is at publish `number` of training run `run`. Its checkpoint names the publish that it contains; the log of the folder
and the connections of a trainer add later ones. A publish of several ranks is applied when all parts are there. Each publish
becomes one version (`ShardGroup.apply_deltas`), so a request sees it whole or not at all.

Rows that a publish replaces are kept, of the last `KEPT` publishes within `KEPT_BYTES`: rolling back applies them as one delta.
After it, the model is *held*: it refuses publishes until `resume`, which loads checkpoint and log again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from thermocline.checkpoint.publishes.log import PublishLog, contained_publish
from thermocline.checkpoint.publishes.part import PublishedTable, PublishPart, check_steps, dense_of, merge_parts, moved_ids
from thermocline.checkpoint.publishes.row_delta import RowDelta, merge_deltas
from thermocline.errors import BadInput, BadPublish, FormatError
from thermocline.ids.moved_ids import MovedIds
from thermocline.serve.tables.in_place import check_moved, put_deltas, put_moved, visible_ids, visible_rows
from thermocline.serve.tables.memory_limits import check_fits

from .staleness import PublishAge, Staleness

if TYPE_CHECKING:
    from thermocline.serve.remote.remote_hosts import RemoteHosts
    from thermocline.serve.tables.checkpoint_source import CheckpointSource
    from thermocline.serve.tables.shard_group import ShardGroup
    from thermocline.serve.tables.version import TableVersion

LOGGER = logging.getLogger("thermocline.serve")
KEPT, KEPT_BYTES = 32, 256 << 20
_STEP_BYTES = 24  # that a code of steps takes while they become rows
_MAX_OPEN, _PARTS_S = 4, 30.0  # publishes that wait for parts of other ranks, and for how long


@dataclass(frozen=True)
class ReplacedRows:
    """What a publish replaced: rows and their ids, and dense parameters if it had any."""

    number: int  # of the publish
    before: int  # the publish before it
    name: str  # of the version before it
    rows: Mapping[str, RowDelta]
    ids: Mapping[str, MovedIds]
    dense: Mapping[str, Tensor] | None

    @property
    def bytes(self) -> int:
        return sum(d.bytes for d in self.rows.values()) + sum(t.nbytes for each in self.ids.values() for t in each)


class PublishedModel:
    """The publishes of a `ShardGroup`. Methods may be called from any thread."""

    def __init__(self, group: ShardGroup) -> None:
        self._group, self.lock = group, threading.RLock()  # taken before the group's locks
        self._changed = threading.Condition(self.lock)
        self._parts: dict[tuple[int, int], dict[int, PublishPart]] = {}
        self._replaced: deque[ReplacedRows] = deque()
        self._age: PublishAge | None = None
        self.run = self.number = self.base = 0  # base: the publish that the save contains from which rows were read
        self.save, self.saved = "", 0  # token and number of that save
        self.held = False
        self.rows = self.refused = 0

    # -- loading ------------------------------------------------------------------------------------------------------------

    def put_log(
        self, source: CheckpointSource, version: TableVersion, hosts: RemoteHosts | None, held: int
    ) -> LoadedLog:  # fmt: skip
        """Write the log of a checkpoint to a version that no lookup reads yet. Returns where it leads to."""
        run, base = contained_publish(source.checkpoint)
        number, at, dense = base, 0.0, dict(version.dense)
        try:
            for parts in PublishLog(source.checkpoint.folder, run).after(base) if run else ():
                _check(parts, run, number, version)
                if moved := moved_ids(parts):
                    put_moved(version.with_deltas("", {}, moved=moved))
                put_deltas(version, {name: merge_deltas(each) for name, each in merge_parts(parts).items()}, hosts, held)
                number, at = parts[0].number, max(part.at for part in parts)
                dense |= dict(dense_of(parts))
        except (BadPublish, FormatError, OSError) as error:  # start with what is good
            LOGGER.warning("the log of publishes is damaged", extra={"fields": {"publish": number, "error": str(error)[:400]}})
        return LoadedLog(run, base, number, at, dense if number > base else version.dense, *_save_of(source))

    def loaded(self, log: LoadedLog) -> None:
        """A checkpoint with its log replaced what was served."""
        with self._changed:
            self.run, self.base, self.number, self.held = log.run, log.base, log.number, False
            self.save, self.saved = log.save, log.saved
            self._parts.clear()
            self._replaced.clear()
            self._age = PublishAge(max(0.0, time.time() - log.at)) if log.at else None
            self._changed.notify_all()

    def catch_up(self) -> bool:
        """Apply what the log has beyond the served publish. Returns whether it had any."""
        with self._changed:
            found = False
            if self.run and not self.held:
                for parts in PublishLog(self._group.folder, self.run).after(self.number):
                    self._apply(parts, max(0.0, time.time() - max(part.at for part in parts)))
                    found = True
            return found

    def contains(self, source: CheckpointSource) -> bool:
        """Whether publishes bring what a newer save of the folder has: it is of the same run, and not ahead.

        It may have later values of rows, which changed since its publish or wait for a budget. So it is not what is served.
        """
        run, number = contained_publish(source.checkpoint)
        with self._changed:
            return bool(run) and run == self.run and number <= self.number

    def followed(self, source: CheckpointSource) -> None:
        """Changed rows of a newer save were applied."""
        self.loaded(LoadedLog(*(found := contained_publish(source.checkpoint)), found[1], 0.0, {}, *_save_of(source)))
        self.catch_up()

    @property
    def is_checkpoint(self) -> bool:
        """Whether the served rows are those of save `saved` alone."""
        return self.number == self.base and not self.held

    # -- connections --------------------------------------------------------------------------------------------------------

    def hello(self, run: int, model: str) -> int:
        """The publish at which a trainer continues.

        Raises:
            BadPublish: the trainer has another model, or a run whose save is not in the folder; or publishes are held
        """
        with self._changed:
            self._check_not_held()
            PublishPart(run, 1, 0, model, {}).check(_tables_of(self._group.current))
        if run == self.run:
            with suppress(BadPublish):  # damaged: a newer save may be there
                self.catch_up()
        self._group.follow()  # of another run, or so far behind that saves have replaced the log
        with self._changed:
            if run != self.run:
                words = (
                    f"the folder '{self._group.folder}' has no save of the training run {run:016x}; give servers the folder "
                )
                raise BadPublish(words + "that publish(folder=...) saves to", "run", run=run)
            return self.number

    def offer(self, part: PublishPart, age: float, loaded: str = "") -> int:
        """Apply a publish once all of its parts are there, and return its number. `loaded`: the save that steps continue.

        Raises:
            BadPublish: it does not continue the served publish, has bad rows, or parts of other ranks are missing
        """
        with self._changed:
            try:
                self._check_next(part)
                part = self._with_rows(part, loaded)
                key = part.since, part.number
                parts = self._parts.setdefault(key, {})
                parts[part.rank] = part
                if len(parts) == part.ranks:
                    self._apply([parts[rank] for rank in sorted(parts)], age)
                elif len(self._parts) > _MAX_OPEN:
                    del self._parts[min(self._parts)]
                run = self.run
                if not self._changed.wait_for(lambda: self.number >= part.number or self.run != run or self.held, _PARTS_S):
                    self._parts.pop(key, None)
                    raise BadPublish(f"publish {part.number} has parts of {len(parts)} of {part.ranks} ranks", "order")
                self._check_not_held()
                return self.number
            except BadPublish:
                self.refused += 1
                raise

    def _check_not_held(self) -> None:
        if self.held:
            words = f"the model was rolled back to publish {self.number}, and takes none until it resumes"
            raise BadPublish(f"{words}: thermocline serve resume", "held", number=self.number)

    def _check_next(self, part: PublishPart) -> None:
        self._check_not_held()
        _check([part], self.run, self.number, self._group.current)

    def _with_rows(self, part: PublishPart, loaded: str) -> PublishPart:
        """A part with rows in place of steps, which are the served rows after their steps."""
        if not part.steps:
            return part
        if (part.since, loaded) != (self.number, self.save):
            words = (
                f"steps continue publish {part.since} after save {loaded[:16]!r}; {self.number} after {self.save!r} is served"
            )
            raise BadPublish(words, "order", number=self.number)
        codes = sum(steps.size for steps in part.steps)
        check_fits(_STEP_BYTES * codes, f"a publish of {codes:,} codes")
        version = self._group.current
        tables = {table.name: table for table in _tables_of(version)}
        deltas, formats = dict(part.deltas), {name: table.format for name, table in tables.items()}
        for steps in part.steps:
            base = dict[str, RowDelta]()
            for name, rows in steps.parts():
                check_steps(tables.get(name), steps, rows)
                if (found := visible_rows(version, name, steps.rows_K[rows])) is None:
                    raise BadPublish("this server cannot read its rows, which steps continue", "order", number=self.number)
                base[name] = found
            try:
                after = steps.applied(base, formats)
            except FormatError as error:
                raise BadPublish(f"rows after their steps: {error}", "values") from None
            for name, delta in after.items():
                deltas[name] = merge_deltas([deltas[name], delta]) if name in deltas else delta
        part = replace(part, deltas=deltas, steps=())
        part.check(list(tables.values()))
        return part

    @property
    def takes_steps(self) -> bool:
        """Whether the rows can be read here, which steps continue."""
        version = self._group.current
        return version.device.type == "cpu" and not self._group.waits

    def _apply(self, parts: Sequence[PublishPart], age: float) -> None:
        """Serve a publish. The caller holds the lock."""
        group, version, number, began = self._group, self._group.current, parts[0].number, time.monotonic()
        rows = {name: merge_deltas(each) for name, each in merge_parts(parts).items()}
        changed, ids = dict(dense_of(parts)), moved_ids(parts)
        dense = {**version.dense, **changed} if changed else None
        replaced = {name: visible_rows(version, name, delta.rows_K) for name, delta in rows.items()}
        left = {name: visible_ids(version, name, moved.rows_K) for name, moved in ids.items()}
        name, before = version.name, version.dense if changed else None
        del version  # not a reader
        group.apply_deltas(f"{group.saved_name}+{number}", rows, dense, moved=ids)
        if any(each is None for each in replaced.values()):
            self._replaced.clear()  # on GPUs and other hosts, `roll_back` loads the checkpoint and its log
        else:
            kept = {name: each for name, each in replaced.items() if each is not None}
            self._replaced.append(ReplacedRows(number, self.number, name, kept, left, before))
            while len(self._replaced) > KEPT or sum(each.bytes for each in self._replaced) > KEPT_BYTES:
                self._replaced.popleft()
        self.number, self.rows = number, self.rows + sum(len(delta.rows_K) for delta in rows.values())
        self._age = PublishAge(age + time.monotonic() - began, max((part.waiting for part in parts), default=()))
        for key in [key for key in self._parts if key[1] <= number]:
            del self._parts[key]
        self._changed.notify_all()

    # -- the way back -------------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> list[int]:
        """Publishes that `roll_back` can return to at once."""
        with self._changed:
            return [each.before for each in self._replaced]

    def roll_back(self, number: int | None = None) -> None:
        """Serve an earlier publish, by default the one before, and hold: publishes are refused until `resume`.

        Raises:
            BadInput: the publish is not kept
        """
        with self._changed:
            number = self.kept[-1] if number is None and self.kept else number
            if number is None or number not in self.kept:
                kept = ", ".join(map(str, self.kept)) or "none"
                words = f"publish {number} is not kept; kept are {kept}, and {self.number} is served"
                raise BadInput(words, parameter="to", value=number, available=self.kept)
            undone = [each for each in reversed(self._replaced) if each.before >= number]
            tables = {name for each in undone for name in each.rows}
            deltas = {name: merge_deltas([each.rows[name] for each in undone if name in each.rows]) for name in tables}
            dense = next((each.dense for each in reversed(undone) if each.dense is not None), None)
            ids: dict[str, MovedIds] = {}
            for each in undone:
                ids |= {name: ids[name].merged(moved) if name in ids else moved for name, moved in each.ids.items()}
            self._group.apply_deltas(undone[-1].name, deltas, dense, moved=ids)
            for _ in undone:
                self._replaced.pop()
            self.number, self.held, self._age = number, True, None
            self._parts.clear()
            self._changed.notify_all()

    def resume(self) -> None:
        """Take publishes again, after loading the checkpoint and its log."""
        self._group.load(self._group.folder)

    def staleness(self) -> Staleness | None:
        """Ages of what is served; None without a publish."""
        if (age := self._age) is None:
            return None
        return Staleness(self.number, age.quantile(0.5), age.quantile(0.99), self.rows, age.age)


@dataclass(frozen=True)
class LoadedLog:
    """What the log of a checkpoint leads to."""

    run: int
    base: int
    number: int
    at: float
    dense: Mapping[str, Tensor]
    save: str  # token
    saved: int


def _save_of(source: CheckpointSource) -> tuple[str, int]:
    """Token and number of the last save of a checkpoint."""
    save = source.checkpoint.manifest.saves[-1]
    return save.token, save.number


def _tables_of(version: TableVersion) -> list[PublishedTable]:
    tables = [each.table for each in version.layout.tables]
    return [PublishedTable(table.name, table.rows, table.dim, table.format) for table in tables]


def _check(parts: Sequence[PublishPart], run: int, number: int, version: TableVersion) -> None:
    """Raise `BadPublish` unless parts of a publish continue publish `number` of a run, and fit a version."""
    tables = _tables_of(version)
    for part in parts:
        if part.run != run:
            raise BadPublish(f"the publish is of run {part.run:016x}; {run:016x} is served", "run", run=part.run)
        if part.number <= number:
            raise BadPublish(f"publish {part.number} was applied already; {number} is served", "replay", number=number)
        if part.since > number:
            words = f"publish {part.number} continues {part.since}, and {number} is served; catch up from the checkpoint folder"
            raise BadPublish(words, "order", number=number)
        part.check(tables)
        check_moved(version, part.ids)
