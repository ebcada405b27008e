"""The models of one folder: which there are, which are in use, and how another version takes over.

The folder is a checkpoint itself, which is then the model `tables`, or holds checkpoints:

    FOLDER/NAME/           a checkpoint: the model NAME, version 1
    FOLDER/NAME/3/         a checkpoint: version 3 of the model NAME

A version is loaded beside the one in use, and takes over between two requests: a request keeps the version that it began with.
The old one is closed when its last request is answered. If loading fails, the old one stays in use and the index says why.

A model may bring others (`beside`): they answer from what it has loaded, come and go with it, and follow its versions.

Names come from clients, so they are matched against what is in the folder, and never joined to a path unless they are plain
names that lie in it, symbolic links followed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thermocline.errors import BadInput
from thermocline.serve.errors import NotReady, UnknownModel

from .dynamic_batcher import Lane
from .json_log import log, log_fault
from .limits import Limits
from .metrics import Metrics, Seen
from .served_model import Model
from .signature import Signature

ONLY = "tables"  # what a folder that is a checkpoint itself is called
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}", re.ASCII)

Load = Callable[[str, str, Path], Model]  # name, number of the folder or "", folder


def is_version(version: str, asked: str) -> bool:
    """Whether a version is what a client calls so: 3.7 is 3, too."""
    return asked in ("", version, version.partition(".")[0])


@dataclass(frozen=True)
class Served:
    """A version in use. `number` is that of its folder, empty where the folder has none."""

    model: Model
    lane: Lane
    signature: Signature
    number: str = ""
    of: str = ""  # the model that brought it

    @property
    def version(self) -> str:
        return self.model.version

    def version_of(self, outputs: object) -> str:
        """The version that outputs come from: they say so themselves where a model changes under its requests."""
        said: str = getattr(outputs, "version", None) or self.model.version
        return said

    def is_version(self, asked: str) -> bool:
        """Whether this is what a client calls so."""
        return is_version(self.version, asked)


@dataclass(frozen=True)
class Listed:
    """A line of the index."""

    name: str
    version: str
    state: str
    reason: str = ""


class Repository:
    """Models by name. `is_checkpoint` and `load` know what is in the folders."""

    def __init__(
        self, folder: Path, load: Load, is_checkpoint: Callable[[Path], bool], limits: Limits, metrics: Metrics
    ) -> None:
        self.folder, self.limits, self.metrics = folder, limits, metrics
        self._load, self._is_checkpoint = load, is_checkpoint
        self._served: dict[str, Served] = {}
        self._reasons: dict[str, str] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._coming: set[str] = set()  # what a server loads when it starts, and has not yet
        self._at_work: list[object] = []  # one for each thread that loads
        self._closing: set[asyncio.Task[None]] = set()
        self.draining = False
        metrics.watch = _Watch(self)

    # -- what is in the folder --

    def versions(self, name: str) -> dict[str, Path]:
        """Versions of a model in the folder, the newest last."""
        if name == ONLY and self._is_checkpoint(self.folder):
            return {"": self.folder}
        folder = self.folder / name
        if not _NAME.fullmatch(name) or not _lies_in(folder, self.folder) or not folder.is_dir():
            raise UnknownModel(
                f"there is no model {name[:100]!r} in this repository; it has {', '.join(self.names()) or 'none'}"
            )
        if self._is_checkpoint(folder):
            return {"": folder}
        numbers = sorted((one for one in folder.iterdir() if one.name.isdecimal()), key=lambda one: int(one.name))
        found = {one.name: one for one in numbers if _lies_in(one, self.folder) and self._is_checkpoint(one)}
        if not found:
            raise UnknownModel(f"model {name!r} has no checkpoint in its folder, nor in numbered folders below it")
        return found

    def names(self) -> list[str]:
        if self._is_checkpoint(self.folder):
            return [ONLY]
        inside = sorted(one.name for one in self.folder.iterdir() if one.is_dir() and _NAME.fullmatch(one.name))
        return [name for name in inside if self._has_versions(name)]

    def _has_versions(self, name: str) -> bool:
        folder = self.folder / name
        return _lies_in(folder, self.folder) and (
            self._is_checkpoint(folder) or any(one.name.isdecimal() and self._is_checkpoint(one) for one in folder.iterdir())
        )

    def index(self, only_ready: bool = False) -> list[Listed]:
        """Every model and version, and whether it is in use."""
        lines = []
        for name in sorted({*self.names(), *self._served}):
            served, reason = self._served.get(name), self._reasons.get(name, "")
            if served is not None:
                lines.append(Listed(name, served.version, "READY", reason))
            elif not only_ready:
                state = "LOADING" if self._is_coming(name) else "UNAVAILABLE"
                lines.append(Listed(name, "", state, reason or "not loaded"))
        return lines

    # -- what is in use --

    def served(self, name: str, version: str = "") -> Served:
        """The version in use, which must be `version` unless that is empty."""
        found = self._served.get(name)
        if found is None:
            if self._is_coming(name):
                raise NotReady(f"model {name!r} is being loaded; try again")
            raise UnknownModel(f"no model {name[:100]!r} is loaded; loaded are {', '.join(self._served) or 'none'}")
        if not found.is_version(version):
            raise UnknownModel(f"model {name!r} is served in version {found.version}, not {version[:40]!r}")
        return found

    def _is_coming(self, name: str) -> bool:
        return name in self._coming or (name in self._turns and self._turns[name].locked())

    @property
    def in_use(self) -> Mapping[str, Served]:
        """Versions in use by the names of their models, as they are at any time."""
        return self._served

    def all_served(self) -> list[Served]:
        return list(self._served.values())

    @property
    def ready(self) -> bool:
        return bool(self._served) and not self._coming and not self.draining

    @property
    def loading(self) -> bool:
        """Whether a thread loads, even if nobody waits for it any more."""
        return bool(self._at_work)

    async def load_all(self) -> None:
        """Load every model of the folder, one after another."""
        self._coming.update(names := self.names())
        for name in names:
            await self.load(name)
            self._coming.discard(name)

    async def load(self, name: str, version: str = "", quiet: bool = False) -> None:
        """Load a version (the newest, if empty) beside the one in use, then let it take over."""
        name = self._owner(name)
        found = self.versions(name)
        if version and version not in found:
            raise UnknownModel(
                f"model {name!r} has no version {version[:40]!r}; it has {', '.join(filter(None, found)) or 'one'}"
            )
        version = version or next(reversed(found))
        async with self._turns.setdefault(name, asyncio.Lock()):
            if not quiet:
                log("loading", model=name, version=version)
            try:
                await self._take_over(name, version, found[version])
            except Exception as error:
                self._reasons[name] = str(error)[:400]
                stays = f"; version {self._served[name].version} stays in use" if name in self._served else ""
                log(f"load failed{stays}", 30, model=name, version=version, error=str(error)[:400])
                raise
            self._reasons.pop(name, None)
            if not quiet and (served := self._served.get(name)) is not None:
                log("in use", model=name, version=served.version, cards=len(served.model.cards()))

    def _owner(self, name: str) -> str:
        """The model that brought this one, or itself."""
        served = self._served.get(name)
        return served.of or name if served is not None else name

    async def _take_over(self, name: str, version: str, folder: Path) -> None:
        before = self._served.get(name)
        if before is not None and (renew := getattr(before.model, "load", None)) is not None:
            follow = getattr(before.model, "follow", None) if before.number == version else None
            await self._in_thread(*((follow,) if follow is not None else (renew, folder)))
            if self._served.get(name) is before:  # else it was unloaded meanwhile
                self._served[name] = Served(before.model, before.lane, Signature(before.model), version)
                self._bring(name, before.model)
            return
        model = await self._in_thread(self._load, name, version, folder)
        lane = Lane(model, self.limits, self.metrics.of(name))
        before = self._served.get(name)  # it may have been unloaded meanwhile
        self._served[name] = Served(model, lane, Signature(model), version)
        self._bring(name, model)
        if before is not None:
            self._close(before)

    async def _in_thread(self, load: Callable[..., Any], *given: Any) -> Any:
        def work() -> Any:
            try:
                return load(*given)
            finally:
                self._at_work.remove(work)

        self._at_work.append(work)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _bring(self, name: str, model: Model) -> None:
        """Serve what a model has beside it, and no longer what it had. A model of the folder keeps its name."""
        try:
            beside = {one.name: one for one in getattr(model, "beside", tuple)()}
        except BadInput as error:
            log("not served beside its tables", 30, model=name, reason=str(error)[:400])
            beside = {}
        for old in self._brought(name):
            if beside.pop(old, None) is None:
                self._close(self._served.pop(old))
            else:
                kept = self._served[old]
                self._served[old] = Served(kept.model, kept.lane, Signature(kept.model), of=name)
        for one in beside.values():
            if one.name not in self._served and one.name not in self.names():
                lane = Lane(one, self.limits, self.metrics.of(one.name))
                self._served[one.name] = Served(one, lane, Signature(one), of=name)

    def _brought(self, name: str) -> list[str]:
        return [other for other, served in self._served.items() if served.of == name]

    async def follow(self) -> None:
        """Let models take up what was saved to their folders since. One that cannot keeps what it has."""
        for name, served in list(self._served.items()):
            if not hasattr(served.model, "follow") or served.of or self._turns[name].locked():
                continue
            before = served.version
            with suppress(Exception):  # it is in the log and in the index
                await self.load(name, served.number, quiet=True)
            if name in self._served and self._served[name].version != before:
                log("followed", model=name, version=self._served[name].version)

    def unload(self, name: str) -> None:
        """Stop serving a model, and what it brought; requests that they have are answered."""
        found = self._served.get(name)
        if found is not None and found.of:
            raise BadInput(f"model {name!r} is answered from {found.of!r}; unload that, and both are gone")
        found = self._served.pop(name, None)
        if found is None:
            raise UnknownModel(f"no model {name[:100]!r} is loaded; loaded are {', '.join(self._served) or 'none'}")
        self._reasons[name] = "unloaded"
        log("unloaded", model=name, version=found.version)
        self._close(found, *(self._served.pop(other) for other in self._brought(name)))

    def _close(self, *served: Served) -> None:
        """Close one model; what it brought, before it."""
        closing = asyncio.get_running_loop().create_task(_close_all([one.lane for one in reversed(served)]))
        self._closing.add(closing)
        closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            log_fault("a version could not be closed", error)

    async def close(self) -> None:
        """Answer what waits and close every model."""
        self.draining = True
        for name in [name for name, served in self._served.items() if not served.of]:
            self._close(self._served.pop(name), *(self._served.pop(other) for other in self._brought(name)))
        await asyncio.gather(*self._closing, return_exceptions=True)


@dataclass(frozen=True)
class _Watch:
    """What metrics look at: the models in use, each time anew."""

    repository: Repository

    def __iter__(self) -> Iterator[Seen]:
        for one in self.repository.all_served():
            cards = () if one.of else tuple(one.model.cards())  # each once: with the model that brought the others
            yield Seen(one.model.name, one.version, one.lane.queued, cards)


async def _close_all(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        await lane.close()


def _lies_in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def check_folder(folder: Path, repository: Repository) -> None:
    """Fail before any port is opened if there is nothing to serve."""
    if not repository.names():
        raise BadInput(f"'{folder}' is neither a checkpoint nor a folder of checkpoints; save one there with thermocline.save")
