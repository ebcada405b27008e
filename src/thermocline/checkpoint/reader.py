"""A checkpoint read without a model: what serving, `inspect` and `diff` use, and what `load` reads from.

    checkpoint = Checkpoint.open("folder")
    checkpoint.verify()                                                    every byte, by sha256
    for first, codes_RB, meta_RW, precision in checkpoint.blocks("user"):  rows as stored, in their order
        ...
    rows_K, values_KD = checkpoint.cached("user")                          rows whose fp32 value is newer than what blocks have

Whatever plan and number of ranks wrote it, and however many incremental saves followed: `blocks` puts it together, a block at
a time, with no more memory than a few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.ids.idmap import IdMap
from thermocline.kernels import quantize_rows
from thermocline.kernels.layout import Cache, Pool
from thermocline.kernels.slots import pointers, read_pointed
from thermocline.rows.precision import bytes_per_row, format_of

from .format.array_patch import AT, put_patch
from .format.folder import resolve
from .format.manifest import File, Manifest, Save, Section, TableEntry
from .format.slot_layout import piece, places
from .format.tensor_files import TensorFile, TensorFiles, damaged, sha256_of

_THREADS = 4
_MOST_ROWS, _MOST_BYTES = 1 << 16, 1 << 23  # of a block
_SLOTS = 1 << 14  # of the cache, read at a time
_OPEN = 256  # files that are opened at once: a process may have a thousand

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # of tensors of a section, but for their first dimension


class Block(NamedTuple):
    """Rows of a table that follow each other, as stored."""

    first: int
    codes_RB: Tensor
    meta_RW: Tensor
    precision: str


class Part(NamedTuple):
    """Rows of a table as one rank wrote them, in rising order."""

    rows_R: Tensor
    codes_RB: Tensor
    meta_RW: Tensor
    states: list[Tensor]
    precision: str


class Cached(NamedTuple):
    """Rows and their values."""

    rows_K: Tensor
    values_KD: Tensor


def block_rows(table: TableEntry, states: int) -> int:
    """Rows of a block of a table, read with so many arrays of state."""
    each = max(bytes_per_row(precision, table.dim) for precision in table.precisions) + 4 * table.dim * states
    return max(64, min(_MOST_ROWS, _MOST_BYTES // each))


class Checkpoint:
    """An open checkpoint. Its files stay open (up to a number): a later save does not take them away."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, TensorFile] = {}
        self._sizes = {file.name: file.bytes for file in manifest.files}

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        path = resolve(folder)
        manifest = Manifest.read(path)
        while True:
            checkpoint = cls(path, manifest)
            try:
                for file in manifest.files[:_OPEN]:
                    checkpoint.file(file.name)
                return checkpoint
            except FormatError:
                checkpoint.close()
                before, manifest = manifest, Manifest.read(path)
                if manifest == before:  # else a save has replaced it just now
                    raise

    @cached_property
    def id_maps(self) -> dict[str, IdMap]:
        """How ids of each feature become rows."""
        maps = {}
        for feature, json in self.manifest.id_maps.items():
            kept = {"kept": self.read(f"ids/{feature}/kept")} if "pruned" in json else None
            maps[feature] = IdMap.from_json(json, kept)
        return maps

    @property
    def number(self) -> int:
        """Of the last save: what is newer has a larger one."""
        return self.manifest.saves[-1].number

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """A tensor of the state, or a part of it, after all incremental saves: they have it whole, some lines of it, or not."""
        saves = self.beside_rows
        _, dtype, shape = next((each for each in saves if name in each), saves[0]).entry(name)  # which says if there is none
        if shape:
            shape = ((shape[0] if last is None else last) - first, *shape[1:])
        out = torch.empty(shape, dtype=dtype)
        self.read_into(name, out, first)
        return out

    def read_into(self, name: str, out: Tensor, first: int = 0) -> None:
        """The same into a contiguous CPU tensor; its first dimension says how much."""
        saves = self.beside_rows
        whole = max((n for n, each in enumerate(saves) if name in each), default=0)
        saves[whole].file(name).read_into(name, out, first)
        for each in saves[whole + 1 :]:
            if name + AT in each:
                put_patch(each.file(name + AT), name, out, first)

    @cached_property
    def beside_rows(self) -> list[TensorFiles]:
        """By save, the tensors that are not rows."""
        return [TensorFiles([self.file(name) for name in (save.state, *save.slots)]) for save in self.manifest.saves]

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Tensors of the state by their names after a prefix, as the last save has them."""
        last = self.beside_rows[-1]
        return {name[len(prefix) :]: last.file(name).read(name) for name in last.names() if name.startswith(prefix)}

    def file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name, self._sizes[name])
        return self._files[name]

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Read every file and compare its sha256; raise for one that differs. `share`: which of how many shares of them."""
        files = self.manifest.files[share[0] :: share[1]]
        with ThreadPoolExecutor(_THREADS) as threads:  # hashing lets other threads run
            list(threads.map(self._verify, files))

    def _verify(self, file: File) -> None:
        self.file(file.name)  # which says if it is missing or cut
        if (found := sha256_of(self.folder / file.name)) != file.sha256:
            raise damaged(self.folder / file.name, f"its sha256 is {found[:12]}... and was {file.sha256[:12]}...")

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def blocks(self, table: str) -> Iterator[Block]:
        """All rows of a table in their order, as stored, after all incremental saves."""
        entry = self.manifest.table(table)
        if len(entry.precisions) > 1:
            raise BadInput(
                f"rows of table {table!r} are in several precisions ({', '.join(entry.precisions)}); read it with `parts`"
            )
        format = format_of(entry.precision)
        shapes: Shapes = {"codes": (torch.uint8, (F.row_bytes(format, entry.dim),))}
        if words := F.META_WORDS[format]:
            shapes["meta"] = (torch.int32, (words,))
        for first, found in self._merged(entry, shapes):
            codes_RB = found["codes"]
            yield Block(
                first, codes_RB, found.get("meta", codes_RB.new_zeros((len(codes_RB), 0), dtype=torch.int32)), entry.precision
            )

    def states(self, table: str) -> Iterator[tuple[int, list[Tensor]]]:
        """Optimizer state of all rows in their order: first row, and a number or a line a row for each array."""
        entry = self.manifest.table(table)
        module = self.manifest.module(entry.module)
        shape = () if module.states_by_row else (entry.dim,)
        names = [f"state{n}" for n in range(module.states)]
        for first, found in self._merged(entry, {name: (torch.float32, shape) for name in names}):
            yield first, [found[name] for name in names]

    def _merged(self, table: TableEntry, shapes: Shapes) -> Iterator[tuple[int, dict[str, Tensor]]]:
        sections, size = self.sections(table.name), block_rows(table, 0)
        numbers: dict[int, Tensor] = {}
        for first in range(0, table.rows, size):
            last = min(first + size, table.rows)
            known_R, found = self.merge(sections, shapes, first, last, numbers)
            if not bool(known_R.all()):
                row = first + int((~known_R).nonzero()[0])
                raise FormatError(f"'{self.folder}' has no row {row} of table {table.name!r}; use another checkpoint")
            yield first, found

    def merge(
        self, sections: list[Section], shapes: Shapes, first: int, last: int, numbers: dict[int, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows from `first` to before `last` of sections that follow each other: which there are, and their tensors.

        `numbers` keeps those of scattered sections for the next call, which is about rows further on.
        """
        found = {name: torch.empty((last - first, *shape), dtype=dtype) for name, (dtype, shape) in shapes.items()}
        known_R = torch.zeros(last - first, dtype=torch.bool)
        for at, section in enumerate(sections):
            if section.end <= first or section.first >= last:
                continue
            begin, end, place = self._overlap(section, first, last, numbers, at)
            file = self.file(section.file)
            for name, out in found.items():
                out[place] = file.read(f"{section.key}/{name}", begin, end)
            known_R[place] = True
            if section.end <= last:
                numbers.pop(at, None)
        return known_R, found

    def _overlap(
        self, section: Section, first: int, last: int, numbers: dict[int, Tensor], key: int
    ) -> tuple[int, int, slice | Tensor]:
        """What of a section lies in a range of rows: from where to where in it, and the places in the range."""
        if not section.scattered:
            begin, end = max(first, section.first), min(last, section.end)
            return begin - section.first, end - section.first, slice(begin - first, end - first)
        if key not in numbers:
            numbers[key] = self.file(section.file).read(f"{section.key}/rows")
        rows_K = numbers[key]
        begin, end = torch.searchsorted(rows_K, torch.tensor([first, last], dtype=rows_K.dtype)).tolist()
        return begin, end, rows_K[begin:end].long() - first

    def sections(self, table: str) -> list[Section]:
        """Of a table, those of later saves after those they change."""
        return [section for save in self.manifest.saves for section in save.sections if section.table == table]

    def parts(self, table: str) -> Iterator[Part]:
        """The rows of a table as they were written, in any order; a row that comes again replaces what came before."""
        entry = self.manifest.table(table)
        states = self.manifest.module(entry.module).states
        size = block_rows(entry, states)
        for section in self.sections(table):
            for begin in range(0, section.count, size):
                yield self.part_of(section, begin, min(begin + size, section.count), states)

    def rows_of(self, section: Section, begin: int, end: int) -> Tensor:
        """The numbers of some rows of a section."""
        if section.scattered:
            return self.file(section.file).read(f"{section.key}/rows", begin, end).long()
        return torch.arange(section.first + begin, section.first + end)

    def part_of(self, section: Section, begin: int, end: int, states: int) -> Part:
        """Some rows of a section, with so many arrays of optimizer state."""
        file = self.file(section.file)
        codes_RB = file.read(f"{section.key}/codes", begin, end)
        if F.META_WORDS[format_of(section.precision)]:
            meta_RW = file.read(f"{section.key}/meta", begin, end)
        else:
            meta_RW = torch.zeros((end - begin, 0), dtype=torch.int32)
        own = [file.read(f"{section.key}/state{n}", begin, end) for n in range(states)]
        return Part(self.rows_of(section, begin, end), codes_RB, meta_RW, own, section.precision)

    # -- incremental saves --------------------------------------------------------------------------------------------------

    def deltas(self, after: int) -> list[Delta] | None:
        """The incremental saves after the save with this number, oldest first; None if a full one came since: read it whole."""
        if self.manifest.saves[0].number > after:
            return None
        return [Delta(self, save) for save in self.manifest.saves[1:] if save.number > after]

    def newer(self) -> Checkpoint | None:
        """The checkpoint that is in the folder now, if something was saved since this one."""
        now = Checkpoint.open(self.folder)
        return now if now.number > self.number else None

    # -- the cache ----------------------------------------------------------------------------------------------------------

    def cached(self, table: str) -> Cached:
        """Rows that were in the cache and had been updated there, and their values.

        What a row without a slot has instead is its value rounded to nearest (`quantize_rows` without a clock), as `flush`
        would leave it. Rows that were cached and not updated are not here: blocks have their values.
        """
        found = list(self.cached_blocks(table))
        if not found:
            return Cached(torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.manifest.table(table).dim))
        return Cached(torch.cat([rows_K for rows_K, _ in found]), torch.cat([values_KD for _, values_KD in found]))

    def cached_blocks(self, table: str) -> Iterator[Cached]:
        """The same, some rows at a time."""
        entry = self.manifest.table(table)
        for number, pool, rows_S, held_S in self._slots(entry):
            dirty_S = held_S & (rows_S & F.DIRTY != 0)
            for first, last in _spans(pool):
                slot_K = first + dirty_S[first:last].nonzero()[:, 0]
                if slot_K.numel():
                    values_KD = self._values(entry.module, number, pool, first, last)[slot_K - first]
                    yield Cached((rows_S[slot_K] & ~F.DIRTY) - entry.first, values_KD)

    def hot(self, table: str) -> tuple[Tensor, Tensor]:
        """Rows that were in the cache, and how much each was worth keeping."""
        entry = self.manifest.table(table)
        none = torch.zeros(0, dtype=torch.int64)
        rows, scores = [none], [none]
        for number, _, rows_S, held_S in self._slots(entry):
            rows.append((rows_S[held_S] & ~F.DIRTY) - entry.first)
            scores.append(self.slots(entry.module, number, "scores")[held_S].long())
        return torch.cat(rows), torch.cat(scores)

    def slots(self, module: str, number: int, array: str, first: int = 0, last: int | None = None) -> Tensor:
        """What one pool of a module's cache has of an array, or a part of that: in a file of its rank, or with all others."""
        name, own = f"module/{module}/cache_{array}", f"module/{module}/{piece(array, number)}"
        if any(own in each for each in self.beside_rows):
            return self.read(own, first, last)
        here = places(Pool(*self.manifest.module(module).pools[number].model_dump().values()), number)[array]
        return self.read(name, here.start + first, here.stop if last is None else here.start + last)

    def _slots(self, entry: TableEntry) -> Iterator[tuple[int, Pool, Tensor, Tensor]]:
        """The pools of a table: number, pool, rows by slot, and which of the slots hold rows of the table."""
        for number, slots in enumerate(self.manifest.module(entry.module).pools):
            pool = Pool(*slots.model_dump().values())
            if pool.row <= entry.first < pool.row + pool.rows:
                rows_S = self.slots(entry.module, number, "rows")
                at_S = (rows_S & ~F.DIRTY) - entry.first
                yield number, pool, rows_S, (rows_S != F.EMPTY) & (at_S >= 0) & (at_S < entry.rows)

    def _values(self, module: str, number: int, pool: Pool, first: int, last: int) -> Tensor:
        """The values of some slots of a pool, which are all full or all near."""
        name, base, size = "values", 0, pool.dim
        if first >= pool.fp32_slots:
            name, base, size = "near", pool.fp32_slots, F.int8_slot_words(pool.dim)
        array = self.slots(module, number, name, (first - base) * size, (last - base) * size)
        none = torch.empty(0)
        cache = Cache(array, array[:0].int(), *[none] * 7) if first < pool.fp32_slots else Cache(none, array, *[none] * 7)
        own = pool._replace(base=0, int8_base=0, slots=last - first, int8_slots=0 if first < pool.fp32_slots else last - first)
        return read_pointed(cache, pointers(own, torch.arange(last - first)), pool.dim)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class Delta:
    """An incremental save: the rows that it changed, as a table without a cache would have them."""

    def __init__(self, checkpoint: Checkpoint, save: Save) -> None:
        self._checkpoint, self.number, self.step = checkpoint, save.number, save.step
        self._sections = save.sections

    def rows(self, table: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows of a table that changed, their codes and meta words: (rows_K, codes_KB, meta_KW), some at a time.

        Rows that were cached are rounded to nearest, as `flush` would. Of several deltas the last has the last word; after all
        of them the table is that of the checkpoint they were asked of.
        """
        checkpoint, entry = self._checkpoint, self._checkpoint.manifest.table(table)
        size, cached = block_rows(entry, 0), checkpoint.cached(table)
        order = cached.rows_K.argsort()
        sorted_K = cached.rows_K[order]
        for section in self._sections:
            for begin in range(0, section.count if section.table == table else 0, size):
                part = checkpoint.part_of(section, begin, min(begin + size, section.count), 0)
                place = torch.searchsorted(sorted_K, part.rows_R).clamp(max=max(0, len(order) - 1))
                here = (sorted_K[place] == part.rows_R).nonzero()[:, 0] if len(order) else place[:0]
                values_KD = cached.values_KD[order[place[here]]]
                part.codes_RB[here], part.meta_RW[here] = quantize_rows(values_KD, format_of(part.precision))
                yield part.rows_R, part.codes_RB, part.meta_RW


def _spans(pool: Pool) -> Iterator[tuple[int, int]]:
    """Slots of a pool in runs that are all full or all near, not many at a time."""
    for begin, end in ((0, pool.fp32_slots), (pool.fp32_slots, pool.slots)):
        for first in range(begin, end, _SLOTS):
            yield first, min(first + _SLOTS, end)
