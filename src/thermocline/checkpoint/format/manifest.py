"""`manifest.json`: everything about a checkpoint except its tensors. A folder with a manifest is a checkpoint.

    saves       a full save and the incremental saves after it, with their files and sections
    modules     constructor arguments of each rows module
    tables      names, sizes, precisions and features
    id_maps     by feature, as `IdMap.to_json`; their arrays are in the state file

A *section* is rows of one table in one precision: all rows from `first` to `end` (exclusive), or, if `scattered`, some of them
with their row numbers.
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
# The fields of `kernels.layout.Pool`, a pool of cache slots.
POOL_FIELDS = ("dim", "format", "row", "rows", "codes", "meta", "slots", "slot", "base", "near", "near_base")
_STRICT = ConfigDict(extra="forbid", frozen=True)
_WAY_OUT = "copy the folder again, or use another checkpoint"


class FileEntry(BaseModel):
    """A file of the folder."""

    model_config = _STRICT
    name: str  # relative to the checkpoint folder
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


class SaveEntry(BaseModel):
    """Files and sections of one save."""

    model_config = _STRICT
    number: int
    token: str  # random; compaction keeps the token of the last save
    kind: Literal["full", "incremental"]
    created: str
    step: int
    ranks: int
    files: tuple[FileEntry, ...]
    sections: tuple[Section, ...]
    state: str  # file of everything except rows
    slots: tuple[str, ...] = ()  # files of the ranks' cache slots

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class TableEntry(BaseModel):
    """A table: name, size, precision and features."""

    model_config = _STRICT
    name: str  # unique in the model: own_name, or module.own_name if two tables share it
    module: str
    own_name: str  # name in its module
    rows: int
    dim: int
    precision: str  # of the rows; under a plan with several precisions, that of the last tier
    precisions: tuple[str, ...]
    features: tuple[str, ...]
    first: int  # first row in the arena of an unsharded module


class ModuleEntry(BaseModel):
    """A rows module and how to build it."""

    model_config = _STRICT
    name: str  # in the model; "" for the model itself
    kind: Literal["EmbeddingCollection", "EmbeddingBag", "Embedding"]
    settings: dict[str, Any]  # constructor arguments that JSON can hold
    optimizer: dict[str, Any]  # name and hyperparameters
    states: int  # arrays of optimizer state
    states_by_row: bool  # one number for each row, else one for each column
    trains: bool  # False if frozen
    step: int
    seed: int
    layout: str  # of the saved arena; a module with an equal layout takes over cache slots unchanged
    pools: tuple[dict[str, int], ...] = ()  # by POOL_FIELDS
    policy: str


class Manifest(BaseModel):
    """Everything about a checkpoint except its tensors."""

    model_config = _STRICT
    format: Literal["thermocline checkpoint"] = FORMAT
    version: int = VERSION
    package: str
    saves: tuple[SaveEntry, ...]
    modules: tuple[ModuleEntry, ...]
    tables: tuple[TableEntry, ...]
    id_maps: dict[str, dict[str, Any]]
    plan: dict[str, Any] | None = None  # sharding plan of the run
    heat: str | None = None  # sha256 of the plan's heat file
    optimizers: dict[str, Any] = {}  # dense optimizers: state that is not tensors
    progress: dict[str, Any] = {}  # the caller's own

    @property
    def step(self) -> int:
        """Training steps of the rows at the last save."""
        return self.saves[-1].step

    @property
    def files(self) -> list[FileEntry]:
        return [file for save in self.saves for file in save.files]

    def table(self, name: str) -> TableEntry:
        for table in self.tables:
            if table.name == name:
                return table
        raise FormatError(f"the checkpoint has no table {name!r}; it has {', '.join(t.name for t in self.tables)}", table=name)

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
            raise FormatError(f"'{folder}' is not a checkpoint: it has no {NAME}", path=path) from None
        except ValueError as error:
            raise FormatError(f"'{path}' is not JSON ({error}); {_WAY_OUT}", path=path) from None
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise FormatError(f"'{path}' is not a checkpoint manifest", path=path)
        version = given.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise FormatError(
                f"'{folder}' has format version {version}; this package reads up to version {VERSION}. "
                f"Install thermocline {given.get('package')}, which wrote the folder, or a newer release",
                path=path, version=version, supported=VERSION, package=given.get("package"),
            )  # fmt: skip
        if (written := given.pop("sha256", None)) != (found := _sha256(given)):
            digests = f"its sha256 is {found[:12]}... and was {str(written)[:12]}..."
            raise FormatError(f"'{path}' is damaged: {digests}; {_WAY_OUT}", path=path)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            message = f"'{path}', field {where}: {first['msg']}; use another checkpoint"
            raise FormatError(message, path=path, field=where) from None


def _sha256(manifest: dict[str, Any]) -> str:
    """The sha256 of all other fields as JSON with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
