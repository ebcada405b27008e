"""`Checkpoint`: reads a checkpoint without a model. `load`, serving, `inspect` and `diff` use it.

    checkpoint = Checkpoint.open("folder")
    checkpoint.verify()                                                    every byte, by sha256
    for first, codes_RB, meta_RW, precision in checkpoint.blocks("user"):  stored rows in order
        ...
    rows_K, values_KD = checkpoint.cached("user")                          rows whose fp32 value is newer than their block

A block merges the sections of all ranks and incremental saves. Memory holds a few blocks at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.ids.idmap import IdMap
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.rows.precision import bytes_per_row, format_of

from .format.folder import kept_manifests
from .format.manifest import FileEntry, Manifest, SaveEntry, Section, TableEntry
from .format.saved_cache import CachedRows, SavedCache
from .format.section_tensors import Shapes, section_names, section_shapes
from .format.state_files import StateFiles
from .format.tensor_files import TensorFile, damaged, sha256_of

_THREADS = 4
_BLOCK_ROWS, _BLOCK_BYTES, _BLOCK_VALUES = 1 << 16, 1 << 23, 1 << 22
_CHECKED_ROWS = 1 << 26  # at once, a byte each
_OPEN_FILES = 256  # opened at once: a process may have a thousand


class RowBlock(NamedTuple):
    """Consecutive rows of a table, as stored."""

    first: int
    codes_RB: Tensor
    meta_RW: Tensor
    precision: str


class SectionRows(NamedTuple):
    """Rows of a section, in rising order, as one rank wrote them."""

    rows_R: Tensor
    codes_RB: Tensor
    meta_RW: Tensor
    states: list[Tensor]
    precision: str


def block_rows(table: TableEntry, states: int) -> int:
    """Rows of a block that is read with this number of state arrays."""
    each = max(bytes_per_row(precision, table.dim) for precision in table.precisions) + 4 * table.dim * states
    return max(64, min(_BLOCK_ROWS, _BLOCK_BYTES // each))


class Checkpoint:
    """An open checkpoint. Its files stay open (up to 256), so that a later save cannot remove them.

    Attributes:
        folder: the checkpoint folder.
        manifest: everything except tensors: saves, modules, tables, progress.
        id_maps: `IdMap` of each feature.
        state: tensors that are not rows.

    Example:
        >>> checkpoint = Checkpoint.open("checkpoint")
        >>> checkpoint.verify()
        >>> [table.name for table in checkpoint.manifest.tables]
        ['user', 'item']
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, TensorFile] = {}
        self._sizes = {file.name: file.bytes for file in manifest.files}

    @classmethod
    def open(cls, folder: Path | str, save: int | None = None) -> Checkpoint:
        """Open the checkpoint in a folder.

        Args:
            folder: a folder that `save` wrote.
            save: number of an earlier save that the folder still has; by default the last one.

        Raises:
            FormatError: the folder is missing, is no checkpoint, or lacks a file or the save.
        """
        path = Path(folder)
        if not path.is_dir():
            what = f"'{path}' is no folder" if path.exists() else f"there is no folder '{path}'"
            raise FormatError(f"{what}; give a folder that thermocline.save wrote", path=path)
        read = partial(Manifest.read, path) if save is None else partial(_manifest_of, path, save)
        manifest = read()
        while True:
            checkpoint = cls(path, manifest)
            try:
                for file in manifest.files[:_OPEN_FILES]:
                    checkpoint.file(file.name)
                return checkpoint
            except FormatError:
                checkpoint.close()
                before, manifest = manifest, read()
                if manifest == before:  # otherwise a save has just replaced it
                    raise

    @property
    def number(self) -> int:
        """Number of the last save; newer saves have larger numbers."""
        return self.manifest.saves[-1].number

    @cached_property
    def state(self) -> StateFiles:
        return StateFiles([[self.file(name) for name in (save.state, *save.slots)] for save in self.manifest.saves])

    @cached_property
    def cache(self) -> SavedCache:
        return SavedCache(self.manifest, self.state)

    @cached_property
    def id_maps(self) -> dict[str, IdMap]:
        maps = {}
        for feature, json in self.manifest.id_maps.items():
            kept = {"kept": self.state.read(f"ids/{feature}/kept")} if "pruned" in json else None
            maps[feature] = IdMap.from_json(json, kept)
        return maps

    def dense(self) -> dict[str, Tensor]:
        """Dense parameters and buffers of the model, by name."""
        return self.state.with_prefix("model/")

    def file(self, name: str) -> TensorFile:
        if name not in self._files:
            file = self._files[name] = TensorFile(self.folder / name, self._sizes[name])
            if sections := self._sections_of.get(name, ()):
                known: list[str] = []
                for section in sections:
                    table = self.manifest.table(section.table)
                    known += section_names(section, table, self.state_shapes(table), file)
                if sorted(known) != sorted(file.names()):
                    raise damaged(file.path, "its tensors are not those of the sections in the manifest")
        return self._files[name]

    @cached_property
    def _sections_of(self) -> dict[str, list[Section]]:
        """Sections by file."""
        found: dict[str, list[Section]] = {}
        for section in (each for save in self.manifest.saves for each in save.sections):
            found.setdefault(section.file, []).append(section)
        return found

    def check_rows(self) -> None:
        """Check that sections have every row of every table. Reads row numbers only, which unsharded tables do not have.

        Raises:
            FormatError: a row is missing, or row numbers are damaged; `table` and `row`, or `path`, name it.
        """
        for table in self.manifest.tables:
            for first, known_R, _ in self.merged(self.sections(table.name), {}, 0, table.rows, _CHECKED_ROWS):
                self._check_known(table, first, known_R)

    def _check_known(self, table: TableEntry, first: int, known_R: Tensor) -> None:
        if not bool(known_R.all()):
            row = first + int((~known_R).nonzero()[0])
            message = f"'{self.folder}' has no row {row} of table {table.name!r}; use another checkpoint"
            raise FormatError(message, table=table.name, row=row)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Compare the sha256 of every file, and check that every row is in one.

        Args:
            share: (i, n) checks every n-th file from the i-th on, so that n ranks share the work.

        Raises:
            FormatError: a file is missing or damaged; `path` names it.
        """
        if share[0] == 0:
            self.check_rows()
        files = self.manifest.files[share[0] :: share[1]]
        with ThreadPoolExecutor(_THREADS) as threads:  # hashing releases the GIL
            list(threads.map(self._verify, files))

    def _verify(self, file: FileEntry) -> None:
        self.file(file.name)  # raises if the file is missing or truncated
        if (found := sha256_of(self.folder / file.name)) != file.sha256:
            raise damaged(self.folder / file.name, f"its sha256 is {found[:12]}... and was {file.sha256[:12]}...")

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def blocks(self, table: str) -> Iterator[RowBlock]:
        """Stored rows of a table in order, after all incremental saves.

        Raises:
            BadInput: rows of the table have several precisions; read them with `section_rows`.
        """
        entry = self.manifest.table(table)
        if len(entry.precisions) > 1:
            raise BadInput(
                f"table {table!r} has rows in several precisions ({', '.join(entry.precisions)}); use `section_rows`",
                table=table, precisions=entry.precisions,
            )  # fmt: skip
        for first, found in self._complete(entry, section_shapes(entry.precision, entry.dim)):
            yield RowBlock(first, found["codes"], found["meta"], entry.precision)

    def states(self, table: str) -> Iterator[tuple[int, list[Tensor]]]:
        """Optimizer state of a table in order: first row, and each state array of the block."""
        entry = self.manifest.table(table)
        shapes: Shapes = {f"state{n}": (torch.float32, shape) for n, shape in enumerate(self.state_shapes(entry))}
        for first, found in self._complete(entry, shapes):
            yield first, [found[name] for name in shapes]

    def values(self, table: str) -> Iterator[tuple[int, Tensor]]:
        """Rows of a table in order as fp32 values, cached rows included: first row, values of the block."""
        entry = self.manifest.table(table)
        rows_K, values_KD = self.cached(table)
        size = min(block_rows(entry, 0), _BLOCK_VALUES // entry.dim)
        blocks = (
            self.merged(self.sections(table, precision), section_shapes(precision, entry.dim), 0, entry.rows, size)
            for precision in entry.precisions
        )
        for parts in zip(*blocks, strict=True):
            first, out_RD = parts[0][0], torch.empty(len(parts[0][1]), entry.dim, dtype=torch.float32)
            for precision, (_, known_R, found) in zip(entry.precisions, parts, strict=True):
                codes_KB, meta_KW = found["codes"][known_R], found["meta"][known_R]
                out_RD[known_R] = dequantize_rows(codes_KB, meta_KW, format_of(precision), entry.dim)
            begin, end = torch.searchsorted(rows_K, torch.tensor([first, first + len(out_RD)], dtype=torch.int64)).tolist()
            out_RD[rows_K[begin:end] - first] = values_KD[begin:end]
            yield first, out_RD

    def state_shapes(self, table: TableEntry) -> list[tuple[int, ...]]:
        """Shapes of the optimizer state arrays of a table, without the row dimension."""
        module = self.manifest.module(table.module)
        return [() if module.states_by_row else (table.dim,)] * module.states

    def _complete(self, table: TableEntry, shapes: Shapes) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Blocks of a table that has all its rows in sections of these shapes."""
        for first, known_R, found in self.merged(self.sections(table.name), shapes, 0, table.rows, block_rows(table, 0)):
            self._check_known(table, first, known_R)
            yield first, found

    def merged(
        self, sections: list[Section], shapes: Shapes, first: int, end: int, size: int
    ) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
        """Rows `first` to `end` (exclusive) after sections in the order of their saves, `size` rows at a time.

        Each block is its first row, a mask of the rows that are known, and their tensors; formats without meta words have meta
        words without columns.
        """
        numbers: dict[int, Tensor] = {}  # rows of scattered sections that later blocks need
        for begin in range(first, end, size):
            last = min(begin + size, end)
            found = {name: torch.empty((last - begin, *shape), dtype=dtype) for name, (dtype, shape) in shapes.items()}
            known_R = torch.zeros(last - begin, dtype=torch.bool)
            for at, section in enumerate(sections):
                if section.end <= begin or section.first >= last:
                    continue
                here, place = self._overlap(section, begin, last, numbers, at)
                for name, out in found.items():
                    out[place] = self.file(section.file).read(f"{section.key}/{name}", here.start, here.stop)
                known_R[place] = True
                if section.end <= last:
                    numbers.pop(at, None)
            yield begin, known_R, {"meta": _no_words(last - begin), **found}

    def _overlap(
        self, section: Section, first: int, last: int, numbers: dict[int, Tensor], key: int
    ) -> tuple[slice, slice | Tensor]:
        """The part of a section inside a range of rows: rows of the section, and their places in the range."""
        if not section.scattered:
            begin, end = max(first, section.first), min(last, section.end)
            return slice(begin - section.first, end - section.first), slice(begin - first, end - first)
        if key not in numbers:
            numbers[key] = self._row_numbers(section, 0, section.count)
        rows_K = numbers[key]
        here = slice(*torch.searchsorted(rows_K, torch.tensor([first, last], dtype=rows_K.dtype)).tolist())
        return here, rows_K[here].long() - first

    def sections(self, table: str, precision: str | None = None) -> list[Section]:
        """Sections of a table in the order of their saves, of all precisions or of one."""
        every = [section for save in self.manifest.saves for section in save.sections if section.table == table]
        return [section for section in every if precision in (None, section.precision)]

    def section_rows(self, table: str) -> Iterator[SectionRows]:
        """Rows of a table as they were written, in any order; a later row replaces an earlier one with its number."""
        entry = self.manifest.table(table)
        states = self.manifest.module(entry.module).states
        size = block_rows(entry, states)
        for section in self.sections(table):
            for begin in range(0, section.count, size):
                yield self.read_section(section, begin, min(begin + size, section.count), states)

    def row_numbers(self, section: Section, begin: int, end: int) -> Tensor:
        if section.scattered:
            return self._row_numbers(section, begin, end).long()
        return torch.arange(section.first + begin, section.first + end)

    def _row_numbers(self, section: Section, begin: int, end: int) -> Tensor:
        file = self.file(section.file)
        rows_K = file.read(f"{section.key}/rows", begin, end)
        rising = bool((rows_K[1:] > rows_K[:-1]).all())
        if len(rows_K) and not (rising and rows_K[0] >= section.first and rows_K[-1] < section.end):
            raise damaged(
                file.path, f"row numbers of section {section.key!r} do not rise from {section.first} to {section.end}"
            )
        return rows_K

    def read_section(self, section: Section, begin: int, end: int, states: int) -> SectionRows:
        """Rows `begin` to `end` (exclusive) of a section, with this number of state arrays."""
        file, key = self.file(section.file), section.key
        has_words = F.META_WORDS[format_of(section.precision)] > 0
        meta_RW = file.read(f"{key}/meta", begin, end) if has_words else _no_words(end - begin)
        own = [file.read(f"{key}/state{n}", begin, end) for n in range(states)]
        rows_R, codes_RB = self.row_numbers(section, begin, end), file.read(f"{key}/codes", begin, end)
        return SectionRows(rows_R, codes_RB, meta_RW, own, section.precision)

    # -- the cache and incremental saves ------------------------------------------------------------------------------------

    def cached(self, table: str) -> CachedRows:
        """Rows that were updated in the cache, in rising order, and their fp32 values.

        `blocks` holds older values of these rows. A reader without a cache rounds them to nearest (`quantize_rows` without a
        clock), as `flush` does. Rows that were cached but not updated have their values in `blocks`.
        """
        entry = self.manifest.table(table)
        none = CachedRows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, entry.dim, dtype=torch.float32))
        rows, values = zip(none, *self.cache.updated_rows(entry), strict=True)
        rows_K, order_K = torch.cat(rows).sort()
        return CachedRows(rows_K, torch.cat(values)[order_K])

    def deltas(self, after: int) -> list[Delta] | None:
        """Incremental saves after the save with this number, oldest first; None if a full save came since."""
        if self.manifest.saves[0].number > after:
            return None
        return [Delta(self, save) for save in self.manifest.saves[1:] if save.number > after]

    def newer(self) -> Checkpoint | None:
        """The checkpoint that is in the folder now, or None if nothing was saved since this one."""
        now = Checkpoint.open(self.folder)
        return now if now.number > self.number else None

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class Delta:
    """Rows that one incremental save changed, as a table without a cache would hold them."""

    def __init__(self, checkpoint: Checkpoint, save: SaveEntry) -> None:
        self._checkpoint, self._sections = checkpoint, save.sections

    def rows(self, table: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Changed rows of a table in bounded pieces: (rows_K, codes_KB, meta_KW).

        Cached rows are rounded to nearest, as `flush` does. Applied in order, all deltas give the table of the checkpoint.
        """
        checkpoint, entry = self._checkpoint, self._checkpoint.manifest.table(table)
        size, cached = block_rows(entry, 0), checkpoint.cached(table)
        last = torch.tensor([-1], dtype=torch.int64)  # rows larger than all cached rows are found there
        past_K = torch.cat([cached.rows_K, last])
        for section in self._sections:
            for begin in range(0, section.count if section.table == table else 0, size):
                part = checkpoint.read_section(section, begin, min(begin + size, section.count), 0)
                place_R = torch.searchsorted(cached.rows_K, part.rows_R)
                here = (past_K[place_R] == part.rows_R).nonzero()[:, 0]
                values_KD = cached.values_KD[place_R[here]]
                part.codes_RB[here], part.meta_RW[here] = quantize_rows(values_KD, format_of(part.precision))
                yield part.rows_R, part.codes_RB, part.meta_RW


def _manifest_of(folder: Path, number: int) -> Manifest:
    """The manifest that the save with this number published."""
    found = {manifest.saves[-1].number: manifest for manifest in kept_manifests(folder)}
    if number not in found:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise FormatError(f"'{folder}' has no save {number}; it has {has}", path=folder, save=number, available=sorted(found))
    return found[number]


def _no_words(rows: int) -> Tensor:
    """Meta words of formats that have none."""
    return torch.zeros((rows, 0), dtype=torch.int32)
