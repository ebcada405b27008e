"""The model repository: models of one folder, the versions in use, and how a version replaces another.

The folder is a checkpoint, which is then the model `tables`, or it holds checkpoints:

    FOLDER/NAME/           a checkpoint: the model NAME, version 1
    FOLDER/NAME/3/         a checkpoint: version 3 of the model NAME

A version loads beside the one in use and replaces it between two requests. The old version closes after its last request. If
loading fails, the old version stays in use, and the index gives the reason. At the start, an older version replaces a damaged
newest one, and a model without a good version does not stop the others. Companion models answer from the tables of a loaded
model: they load, unload and change versions with it. Names come from clients: their folders must lie in the repository.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.errors import BadInput
from thermocline.serve.errors import NotReady, UnknownModel
from thermocline.serve.served_model import ModelSignature, ServableModel

from .config import ServerLimits
from .dynamic_batcher import DynamicBatcher
from .json_log import log, log_fault
from .metrics import ModelSnapshot, ServerMetrics

if TYPE_CHECKING:
    from .model_loader import ShardConfig

ROOT_MODEL = "tables"  # name of the model if the folder itself is a checkpoint
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}", re.ASCII)


def is_version(version: str, requested: str) -> bool:
    """Whether a version satisfies a request for `requested`: 3.7+12, publish 12 after save 3.7, is also 3.7 and 3."""
    saved = version.partition("+")[0]
    return requested in ("", version, saved, saved.partition(".")[0])


@dataclass(frozen=True)
class ServedVersion:
    """A model version in use. `number` is that of its folder, or empty."""

    model: ServableModel
    batcher: DynamicBatcher
    signature: ModelSignature
    number: str = ""
    owner: str = ""  # of a companion: the model whose tables it uses

    @property
    def version(self) -> str:
        return self.model.version


class ModelRepository:
    """Models by name. `loader` turns folders into models."""

    def __init__(self, folder: Path, loader: ShardConfig, limits: ServerLimits, metrics: ServerMetrics) -> None:
        self.folder, self.limits, self.metrics, self._loader = folder, limits, metrics, loader
        self._served: dict[str, ServedVersion] = {}
        self._reasons: dict[str, str] = {}
        self._load_locks: dict[str, asyncio.Lock] = {}
        self._pending: set[str] = set()  # models that the server has yet to load at its start
        self._load_threads: list[object] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.draining = False
        self.on_load: Callable[[Any], None] | None = None  # called with a model before it is served, in a thread
        metrics.watch = self._snapshots

    # -- models in the folder --

    def versions(self, name: str) -> dict[str, Path]:
        """Versions of a model in the folder, the newest last. Raises `UnknownModel`."""
        if not (found := self._versions(name)):
            there = ", ".join(self.names()) or "none"
            raise UnknownModel(f"there is no model {name[:100]!r} in this repository; it has {there}", model=name)
        return found

    def _versions(self, name: str) -> dict[str, Path]:
        is_checkpoint, folder = self._loader.is_checkpoint, self.folder / name
        if name == ROOT_MODEL and is_checkpoint(self.folder):
            return {"": self.folder}
        if not _NAME.fullmatch(name) or not self._holds(folder) or not folder.is_dir():
            return {}
        if is_checkpoint(folder):
            return {"": folder}
        numbers = sorted((each for each in folder.iterdir() if each.name.isdecimal()), key=lambda each: int(each.name))
        return {each.name: each for each in numbers if self._holds(each) and is_checkpoint(each)}

    def _holds(self, path: Path) -> bool:
        """Whether a path lies in the repository, symbolic links resolved."""
        return path.resolve().is_relative_to(self.folder.resolve())

    def names(self) -> list[str]:
        """Models in the folder."""
        if self._loader.is_checkpoint(self.folder):
            return [ROOT_MODEL]
        return [each.name for each in sorted(self.folder.iterdir()) if self._versions(each.name)]

    def index(self, only_ready: bool = False) -> list[dict[str, str]]:
        """State of every model: RepositoryIndex of the model repository extension."""
        entries = []
        for name in sorted({*self.names(), *self._served}):
            served, reason = self._served.get(name), self._reasons.get(name, "")
            if served is not None:
                entries.append({"name": name, "version": served.version, "state": "READY", "reason": reason})
            elif not only_ready:
                state = "LOADING" if self._is_loading(name) else "UNAVAILABLE"
                entries.append({"name": name, "version": "", "state": state, "reason": reason or "not loaded"})
        return entries

    # -- models in use --

    def served(self, name: str, version: str = "") -> ServedVersion:
        """The version in use. Raises `NotReady` while it loads, and `UnknownModel`."""
        found = self._served.get(name)
        if found is None:
            if self._is_loading(name):
                raise NotReady(f"model {name!r} is loading; try again")
            raise self._not_loaded(name)
        if not is_version(found.version, version):
            words = f"model {name!r} is served in version {found.version}, not {version[:40]!r}"
            raise UnknownModel(words, model=name, version=version)
        return found

    def in_use(self, name: str) -> ServedVersion | None:
        """The version in use, if there is one."""
        return self._served.get(name)

    def _not_loaded(self, name: str) -> UnknownModel:
        words = f"no model {name[:100]!r} is loaded; loaded are {', '.join(self._served) or 'none'}"
        return UnknownModel(words, model=name, loaded=[*self._served])

    def _is_loading(self, name: str) -> bool:
        return name in self._pending or (name in self._load_locks and self._load_locks[name].locked())

    def all_served(self) -> list[ServedVersion]:
        """Every version in use."""
        return list(self._served.values())

    def _snapshots(self) -> Iterator[ModelSnapshot]:
        for each in self.all_served():
            shards = () if each.owner else tuple(each.model.shards())  # companions share the shards of their owner
            publishes = getattr(each.model, "publishes", None)
            staleness = None if publishes is None else publishes.staleness()
            queued = each.batcher.queued + self.metrics.of(each.model.name).queued_in_fronts
            counts = getattr(getattr(each.model, "current", None), "id_counts", {})
            yield ModelSnapshot(each.model.name, each.version, queued, shards, staleness, counts)

    @property
    def ready(self) -> bool:
        """Whether all models of the folder are loaded."""
        return bool(self._served) and not self._pending and not self.draining

    @property
    def loading(self) -> bool:
        """Whether a thread loads a model, even if its request was cancelled."""
        return bool(self._load_threads)

    async def load_all(self) -> None:
        """Load every model of the folder, one after another. Raises only if none can be loaded."""
        self._pending.update(names := self.names())
        errors = []
        for name in names:
            try:
                await self._load_newest(name)
            except Exception as error:  # the log and the index have it
                errors.append(error)
            self._pending.discard(name)
        if errors and not self._served:
            raise errors[0]

    async def _load_newest(self, name: str) -> None:
        """Load the newest version that can be loaded. The index gives the reason if there is a newer one."""
        errors = []
        for version in reversed(self.versions(name)):
            try:
                await self.load(name, version)
            except Exception as error:
                errors.append(error)
                continue
            if errors:
                self._reasons[name] = str(errors[0])[:400]
            return
        raise errors[0]

    async def load(self, name: str, version: str = "", quiet: bool = False) -> None:
        """Load a version (empty: the newest) beside the one in use, then replace it."""
        if (served := self._served.get(name)) is not None:
            name = served.owner or name
        found = self.versions(name)
        if version and version not in found:
            words = f"model {name!r} has no version {version[:40]!r}; it has {', '.join(filter(None, found)) or 'one'}"
            raise UnknownModel(words, model=name, version=version)
        version = version or next(reversed(found))
        async with self._load_locks.setdefault(name, asyncio.Lock()):
            if not quiet:
                log("loading", model=name, version=version)
            try:
                await self._replace(name, version, found[version])
            except Exception as error:
                self._reasons[name] = str(error)[:400]
                stays = f"; version {self._served[name].version} stays in use" if name in self._served else ""
                log(f"load failed{stays}", WARNING, model=name, version=version, error=str(error)[:400])
                raise
            self._reasons.pop(name, None)
            if not quiet and (served := self._served.get(name)) is not None:
                log("in use", model=name, version=served.version, shards=len(served.model.shards()))

    async def _replace(self, name: str, version: str, folder: Path) -> None:
        before = self._served.get(name)
        if before is not None and (reload := getattr(before.model, "load", None)) is not None:
            follow = getattr(before.model, "follow", None) if before.number == version else None
            await self._in_thread(*((follow,) if follow is not None else (reload, folder)))
            if self._served.get(name) is before:  # not unloaded during the load
                self._served[name] = replace(before, signature=ModelSignature(before.model), number=version)
                self._serve_companions(name, before.model)
            return
        model = await self._in_thread(self._loader.load, name, version, folder)
        if self.on_load is not None:
            await self._in_thread(self.on_load, model)
        before = self._served.get(name)  # may be gone: unloaded during the load
        self._served[name] = self._serve(model, number=version)
        self._serve_companions(name, model)
        if before is not None:
            self._close(before)

    def _serve(self, model: ServableModel, number: str = "", owner: str = "") -> ServedVersion:
        batcher = DynamicBatcher(model, self.limits, self.metrics.of(model.name))
        return ServedVersion(model, batcher, ModelSignature(model), number, owner)

    async def _in_thread(self, load: Callable[..., Any], *given: Any) -> Any:
        def work() -> Any:
            try:
                return load(*given)
            finally:
                self._load_threads.remove(work)

        self._load_threads.append(work)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _serve_companions(self, name: str, model: ServableModel) -> None:
        """Serve the companions of a model, and stop those that it no longer has. A model of the folder keeps its name."""
        try:
            companions = {each.name: each for each in self._loader.companions(model)}
        except BadInput as error:
            log("companion models are not served", WARNING, model=name, reason=str(error)[:400])
            companions = {}
        for old in self._companions_of(name):
            if companions.pop(old, None) is None:
                self._close(self._served.pop(old))
            else:
                self._served[old] = replace(self._served[old], signature=ModelSignature(self._served[old].model))
        for each in companions.values():
            if each.name not in self._served and each.name not in self.names():
                self._served[each.name] = self._serve(each, owner=name)

    def _companions_of(self, name: str) -> list[str]:
        return [other for other, served in self._served.items() if served.owner == name]

    async def follow(self) -> None:
        """Serve newer saves of the folders in use. A model whose save cannot be loaded keeps its version."""
        for name, served in list(self._served.items()):
            if not hasattr(served.model, "follow") or served.owner or self._load_locks[name].locked():
                continue
            before = served.version
            with suppress(Exception):  # the log and the index have it
                await self.load(name, served.number, quiet=True)
            if name in self._served and self._served[name].version != before:
                log("followed", model=name, version=self._served[name].version)

    def unload(self, name: str) -> None:
        """Stop serving a model and its companions, after their queued requests."""
        found = self._served.get(name)
        if found is None:
            raise self._not_loaded(name)
        if found.owner:
            raise BadInput(f"model {name!r} uses the tables of {found.owner!r}; unload that model instead", model=name)
        self._reasons[name] = "unloaded"
        log("unloaded", model=name, version=found.version)
        self._close_with_companions(name)

    def _close_with_companions(self, name: str) -> None:
        self._close(self._served.pop(name), *(self._served.pop(other) for other in self._companions_of(name)))

    def _close(self, *served: ServedVersion) -> None:
        """Close a model, and its companions before it."""
        closing = asyncio.get_running_loop().create_task(_close_all([each.batcher for each in reversed(served)]))
        self._closing.add(closing)
        closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            log_fault("a version could not be closed", error)

    async def closed(self) -> None:
        """Wait until the models that were unloaded are closed."""
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def close(self) -> None:
        """Finish queued requests and close every model."""
        self.draining = True
        for name in [name for name, served in self._served.items() if not served.owner]:
            self._close_with_companions(name)
        await self.closed()


async def _close_all(batchers: Sequence[DynamicBatcher]) -> None:
    for batcher in batchers:
        await batcher.close()
