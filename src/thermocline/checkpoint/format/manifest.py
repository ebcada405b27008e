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
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from thermocline import formats as F
from thermocline.errors import FormatError, read_bytes

FORMAT: Literal["thermocline checkpoint"] = "thermocline checkpoint"
VERSION = 2
NAME = "manifest.json"
# The fields of `kernels.layout.Pool`, a pool of cache slots.
POOL_FIELDS = ("dim", "format", "row", "rows", "codes", "meta", "slots", "slot", "base", "near", "near_base")
_STRICT = ConfigDict(extra="forbid", frozen=True)
MAX_BYTES = 1 << 26  # of a manifest: sections of 6 TB
MAX_ROWS, MAX_STATES = 1 << 40, 2
_FILE_NAME = re.compile(r"save-\d{6,}-[0-9a-f]{8}/[A-Za-z0-9][A-Za-z0-9_.\-]*", re.ASCII)
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

    def contradictions(self, tables: Mapping[str, TableEntry]) -> Iterator[str]:
        """What is wrong with the names of files, and with sections."""
        names = {file.name for file in self.files}
        for name in names:
            if not _FILE_NAME.fullmatch(name):
                yield f"the file name {name[:100]!r} is not of the form save-NUMBER-TOKEN/NAME in the checkpoint's folder"
        if unused := names - {self.state, *self.slots, *(section.file for section in self.sections)}:
            yield f"file {min(unused)[:100]!r} has no section"
        if unknown := {self.state, *self.slots, *(section.file for section in self.sections)} - names:
            yield f"file {min(unknown)[:100]!r} is not among the files of the save"
        for each in self.sections:
            table = tables.get(each.table)
            if table is None or each.precision not in table.precisions:
                yield f"section {each.key[:100]!r} has no table {each.table[:100]!r} with rows in {each.precision[:20]!r}"
            elif not (0 <= each.first < each.end <= table.rows and 0 < each.count <= each.end - each.first):
                yield f"section {each.key[:100]!r} has {each.count} rows from {each.first} to {each.end} of {table.rows}"
            elif not each.scattered and each.count < each.end - each.first:
                yield f"section {each.key[:100]!r} has {each.count} of {each.end - each.first} rows without their numbers"
            elif each.key not in (key := f"{each.table}/{each.first}-{each.end}/{each.precision}", f"{key}/copied"):
                yield f"section {each.key[:100]!r} is not the section {key!r}"


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

    def contradictions(self, modules: Collection[str], id_maps: Collection[str]) -> Iterator[str]:
        """What is wrong with sizes, precisions and names."""
        if not (1 <= self.rows <= MAX_ROWS and 1 <= self.dim <= F.MAX_DIM and 0 <= self.first <= MAX_ROWS):
            yield f"the table has {self.rows} rows of {self.dim} columns from row {self.first} on"
        known = len(set(self.precisions) & set(F.NAMES)) == len(self.precisions)
        if self.precision not in self.precisions or not known:
            yield f"the precisions are {self.precision!r} of {self.precisions}; this package knows {', '.join(F.NAMES)}"
        if self.module not in modules or not self.features or not set(self.features) <= set(id_maps):
            yield f"the table lacks its module {self.module!r}, a feature, or the id map of a feature"


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

    def contradictions(self, tables: Sequence[TableEntry]) -> Iterator[str]:
        """What is wrong with the settings, given the tables of the module."""
        sizes = _stated_sizes(self.settings)
        own = [(table.own_name, len(table.features), table.rows, table.dim) for table in tables]
        if not tables or (sizes != own if "tables" in self.settings else sizes != [each[2:] for each in own]):
            yield f"its settings have tables of {sizes[:8]} rows and columns"
        ends = sorted((table.first, table.first + table.rows) for table in tables)
        if any(first < end for (_, end), (first, _) in pairwise(ends)):
            yield "two of its tables overlap"
        if self.settings.get("mode", "none") not in F.MODES:
            yield f"the mode is {self.settings['mode']!r}; use one of {', '.join(F.MODES)}"
        if not 0 <= self.states <= MAX_STATES:
            yield f"it has {self.states} arrays of optimizer state, and 0 to {MAX_STATES} are possible"
        yield from self._wrong_pools(tables)

    def _wrong_pools(self, tables: Sequence[TableEntry]) -> Iterator[str]:
        """Pools of cache slots that hold no whole tables, or do not lie one after another."""
        slot = end = near_end = 0
        for each in self.pools:
            if each.keys() != set(POOL_FIELDS) or not all(0 <= number <= MAX_ROWS * F.MAX_DIM for number in each.values()):
                yield f"a pool of cache slots has the fields {', '.join(POOL_FIELDS)}, each 0 or more"
                return
            dim, first, last = each["dim"], each["row"], each["row"] + each["rows"]
            inside = [table for table in tables if first <= table.first < last]
            if not inside or {table.dim for table in inside} != {dim} or not 0 <= each["near"] <= each["slots"]:
                yield f"a pool of {each['slots']} cache slots for {dim} columns has no such table"
                return
            words = F.int8_slot_words(dim)
            if min(table.first for table in inside) != first or max(table.first + table.rows for table in inside) != last:
                yield f"a pool of cache slots has rows {first} to {last} of the module, which are no whole tables"
            if (each["slot"], each["base"], each["near_base"]) != (slot, -(-end // dim), -(-near_end // words)):
                yield "its pools of cache slots do not lie one after another"
            slot += each["slots"]
            end, near_end = (each["base"] + each["slots"] - each["near"]) * dim, (each["near_base"] + each["near"]) * words


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
            given = json.loads(read_bytes(path, MAX_BYTES))
        except FileNotFoundError:
            raise FormatError(f"'{folder}' is not a checkpoint: it has no {NAME}", path=path) from None
        except FormatError:
            raise
        except (ValueError, RecursionError) as error:
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
            manifest = cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            message = f"'{path}', field {where}: {first['msg']}; use another checkpoint"
            raise FormatError(message, path=path, field=where) from None
        for where, words in manifest.contradictions():
            raise FormatError(f"'{path}', field {where}: {words}; use another checkpoint", path=path, field=where)
        return manifest

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Fields that other fields, or the format, exclude: names outside of the folder, sections of no table, ..."""
        tables = {table.name: table for table in self.tables}
        modules = {module.name for module in self.modules}
        if not self.saves or not self.tables:
            yield "saves", "a checkpoint has at least one save and one table"
        if len(tables) < len(self.tables) or len(modules) < len(self.modules):
            yield "tables", "two tables or modules have the same name"
        features = [feature for table in self.tables for feature in table.features]
        if len(set(features)) < len(features):
            yield "tables", "two tables have the same feature"
        for table in self.tables:
            yield from ((f"tables.{table.name}", words) for words in table.contradictions(modules, self.id_maps.keys()))
        for module in self.modules:
            own = [table for table in self.tables if table.module == module.name]
            yield from ((f"modules.{module.name}", words) for words in module.contradictions(own))
        for number, save in enumerate(self.saves):
            yield from ((f"saves.{number}", words) for words in save.contradictions(tables))
            if (save.kind == "full") != (number == 0) or (number and save.number <= self.saves[number - 1].number):
                yield f"saves.{number}", "one full save comes first, and the numbers of saves rise"


def _stated_sizes(settings: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Name, number of features, rows and columns of each table of a collection; rows and columns of a single table."""
    if "tables" not in settings:
        return [(settings.get("num_embeddings"), settings.get("embedding_dim"))]
    try:
        stated = [(each["name"], len(each["features"]), each["rows"], each["dim"]) for each in settings["tables"]]
        return stated if all(isinstance(name, str) for each in settings["tables"] for name in each["features"]) else []
    except (TypeError, KeyError):
        return []


def _sha256(manifest: dict[str, Any]) -> str:
    """The sha256 of all other fields as JSON with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
