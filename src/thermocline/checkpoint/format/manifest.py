"""`manifest.json`: everything about a checkpoint but its tensors. A folder is a checkpoint once it has one.

    saves       a full save, and the incremental ones after it; each with its files and its sections
    modules     what the modules of thermocline are, so that they can be built again
    tables      names, sizes, precisions, features: what a reader looks for
    id_maps     by feature, as `IdMap.to_json`; their arrays are in the file that `state` names

A *section* is rows of one table in one precision. It has all rows from `first` to before `end`, or, where it is `scattered`,
some of them, with their numbers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from thermocline.errors import FormatError

FORMAT: Literal["thermocline checkpoint"] = "thermocline checkpoint"
VERSION = 2
NAME = "manifest.json"
_STRICT = ConfigDict(extra="forbid", frozen=True)


class File(BaseModel):
    """A file of the folder."""

    model_config = _STRICT
    name: str  # with its own folder
    bytes: int
    sha256: str


class Section(BaseModel):
    """Rows of a table in a file, as tensors `<key>/codes`, `/meta`, `/state0`, ... and, if scattered, `/rows`."""

    model_config = _STRICT
    table: str
    precision: str
    first: int
    end: int
    count: int
    scattered: bool
    file: str
    key: str


class Save(BaseModel):
    """What one call wrote."""

    model_config = _STRICT
    number: int
    token: str  # of what was saved: chance, the same after compacting
    kind: Literal["full", "incremental"]
    created: str
    step: int
    ranks: int
    files: tuple[File, ...]
    sections: tuple[Section, ...]
    state: str  # the file of everything that is not rows
    slots: tuple[str, ...] = ()  # files of what ranks have in the slots of their caches

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class Slots(BaseModel):
    """A pool of cache slots: the fields of `kernels.layout.Pool`, in their order."""

    model_config = _STRICT
    dim: int
    format: int
    row: int
    rows: int
    codes: int
    meta: int
    slots: int
    slot: int
    base: int
    near: int
    near_base: int


class TableEntry(BaseModel):
    """A table as readers know it."""

    model_config = _STRICT
    name: str  # its own, where no other table of the model has it
    module: str
    own_name: str  # in its module
    rows: int
    dim: int
    precision: str  # of the rows; where a plan gives tiers others, of those that have none of their own
    precisions: tuple[str, ...]
    features: tuple[str, ...]
    first: int  # its first row in the arena of one process


class ModuleEntry(BaseModel):
    """A module of thermocline, and how to build it."""

    model_config = _STRICT
    name: str  # in the model; "" for the model itself
    kind: Literal["EmbeddingCollection", "EmbeddingBag", "Embedding"]
    settings: dict[str, Any]  # arguments of its constructor that JSON can hold
    optimizer: dict[str, Any]  # its name and numbers
    states: int  # arrays of optimizer state: one number a row, or one a column
    states_by_row: bool
    trains: bool  # or frozen
    step: int
    seed: int
    layout: str  # of the arena that was saved: where another module has the same, slots are taken over as they are
    pools: tuple[Slots, ...] = ()
    policy: str


class Manifest(BaseModel):
    """A checkpoint."""

    model_config = _STRICT
    format: Literal["thermocline checkpoint"] = FORMAT
    version: int = VERSION
    package: str
    saves: tuple[Save, ...]
    modules: tuple[ModuleEntry, ...]
    tables: tuple[TableEntry, ...]
    id_maps: dict[str, dict[str, Any]]
    plan: dict[str, Any] | None = None  # that it was trained under
    heat: str | None = None  # sha256 of the heat file that the plan was made with
    optimizers: dict[str, Any] = {}  # of the dense part: what JSON holds of their state
    progress: dict[str, Any] = {}  # whatever the caller wanted to find again

    @property
    def step(self) -> int:
        """Steps that the rows had taken."""
        return self.saves[-1].step

    @property
    def files(self) -> list[File]:
        return [file for save in self.saves for file in save.files]

    def table(self, name: str) -> TableEntry:
        for table in self.tables:
            if table.name == name:
                return table
        raise FormatError(f"table {name!r} is not in this checkpoint; it has {', '.join(t.name for t in self.tables)}")

    def module(self, name: str) -> ModuleEntry:
        return next(module for module in self.modules if module.name == name)

    def text(self) -> str:
        own = self.model_dump(mode="json")
        return json.dumps({**own, "sha256": _sha256(own)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / NAME
        try:
            given = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise FormatError(f"'{folder}' holds no checkpoint: there is no {NAME} in it") from None
        except ValueError as error:
            raise FormatError(f"'{path}' is not JSON ({error}); copy the folder again, or use another checkpoint") from None
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise FormatError(f"'{path}' is not the manifest of a checkpoint")
        version = given.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise FormatError(
                f"'{folder}' has format version {version}, and this package (which reads up to {VERSION}) is older; "
                f"it was written by thermocline {given.get('package')}: install that or a newer one"
            )
        if (written := given.pop("sha256", None)) != (found := _sha256(given)):
            raise FormatError(
                f"'{path}' is damaged: its sha256 is {found[:12]}... and was {str(written)[:12]}...; copy the folder again, or "
                "use another checkpoint"
            )
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise FormatError(f"'{path}' cannot be read: {where}: {first['msg']}; use another checkpoint") from None


def _sha256(manifest: dict[str, Any]) -> str:
    """Of all fields but itself, written without spaces and in the order of their names."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
