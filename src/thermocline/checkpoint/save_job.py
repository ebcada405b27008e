"""`thermocline.save`: writes a model, its rows and its optimizers into one folder that opens anywhere.

Each rank writes files of bounded size and a report of them. Rank 0 then merges the reports into one manifest; `folder.py`
describes why no reader sees an unfinished save.

An incremental save writes the rows that changed since the save before, into the same folder; the manifest lists it after the
saves that it continues. A save can continue a chain only if the arenas count changes from the folder's last save; otherwise it
is a full save.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thermocline import __version__
from thermocline import formats as F
from thermocline.distributed.process_groups import world_size
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import BadInput
from thermocline.kernels.layout import Cache
from thermocline.rows.change_bitmap import Changes
from thermocline.rows.memory import size_of

from .copy_budget import CopyBudget
from .format import sections
from .format.cache_slots import saved_rows
from .format.dense_state import Optimizers, dense_tensors, full_tensor, optimizer_state, optimizers_by_name
from .format.folder import begin_save_folder, discard, publish
from .format.manifest import FileEntry, Manifest, SaveEntry
from .format.module_entries import NamedModule, find_modules, module_entry
from .format.state_files import patches
from .format.write import SLOTS, STATE, collect_reports, write_report, write_sections, write_tensors
from .live_rows import LiveRows
from .publishes.log import PUBLISH_STATE, token_number
from .ranks import CheckpointRanks, ended_by_all_replicas
from .reader import Checkpoint
from .snapshot import Snapshot

THREADS = 4  # hash and write; some of them wait for the disk
_PATCHED = ("cache_values", "cache_near", "cache_rows", "cache_scores", "cache_words", "cache_sketch")


class PendingSave(Protocol):
    def wait(self) -> None: ...


PENDING_SAVES: list[PendingSave] = []  # background saves of this process


def wait_for_saves() -> None:
    """Wait until all background saves are visible; raises the error of one that failed."""
    while PENDING_SAVES:
        PENDING_SAVES[0].wait()


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    optimizers: Optimizers = None,
    progress: Mapping[str, Any] | None = None,
    incremental: bool = False,
    keep: int = 1,
) -> None:
    """Save a model, or a single thermocline module. When the call returns, the save is durable.

    All ranks of a sharded model call this together. Of an unsharded model, rank 0 writes.

    Args:
        model: a module that is, or contains, thermocline modules.
        folder: an empty folder, a new one, or one with earlier saves, which this save replaces or continues.
        optimizers: dense optimizers, one or several by name.
        progress: what the caller needs to resume, such as the next batch number; anything that JSON holds.
        incremental: write only the rows that changed since the last incremental save to this folder. The first such save is
            full, and so is a save that would make the chain larger than a full save.
        keep: full saves to keep, each with the incremental saves after it; `load(folder, save=number)` opens earlier ones.

    Raises:
        BadInput: the model has no thermocline module, gradients wait for `step()`, the folder holds other files, another
            process saves to it now, or ranks do not share it.
        FormatError: the folder has saves, but their manifest is missing or damaged.
        ThermoclineError: a file cannot be written. Earlier saves are intact.

    Example:
        >>> tc.save(model, "checkpoint", optimizers=adam, progress={"batch": 1200})
    """
    with ended_by_all_replicas(model):
        job = begin_save(model, folder, optimizers, progress, incremental, keep)
        if job is None:
            return
        try:
            job.ranks.on_all(job.write)
            job.ranks.on_all(job.publish)
        except BaseException:
            job.abandon()
            raise


def begin_save(
    model: nn.Module, folder: str | Path, optimizers: Optimizers, progress: Mapping[str, Any] | None, incremental: bool,
    keep: int = 1, background: bool = False,
) -> SaveJob | None:  # fmt: skip
    """A save that is ready to be written, perhaps while training continues; None if this process writes nothing."""
    number: object = keep
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise BadInput(f"keep is {keep!r}; keep 1 or more full saves", parameter="keep", value=keep)
    modules, dense = find_modules(model), dense_tensors(model)
    for found in modules:
        _check_saveable(found)
    numbers, tensors = optimizer_state(optimizers_by_name(optimizers))
    tensors = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"model/{name}": full_tensor(tensor) for name, tensor in dense.items()}
    fields = {"optimizers": numbers, "progress": json.loads(json.dumps(dict(progress or {})))}
    wait_for_saves()
    ranks = CheckpointRanks.of(model)
    if ranks.groups is None and world_size() > 1 and dist.get_rank() > 0:  # rank 0 writes replicas of an unsharded model
        return None
    if ranks.groups is not None and ranks.groups.replicas is not None and ranks.groups.replicas.index > 0:
        return None  # the first replica writes
    return SaveJob(modules, ranks, Path(folder), tensors, fields, incremental, background, keep)


def _check_saveable(found: NamedModule) -> None:
    name = found.name or "the module"
    if isinstance(found.module, ShardedCollection):
        found.module.trained.sync_replicas()
        found.module.wait_for_exchange()
    if found.module.placeholder.pending is not None:
        raise BadInput(
            f"gradients of the rows of {name!r} wait for fused_optimizer.step(); save after it, or after zero_grad()",
            module=found.name, waits_for="step",
        )  # fmt: skip
    if found.module.arena.device.type == "meta":
        raise BadInput(f"the rows of {name!r} have no values (device 'meta')", module=found.name, device="meta")


@dataclass
class _ModuleSave:
    """One module of a save."""

    found: NamedModule
    arena: Any  # read once: `live_rows.py` has the reason
    bits: Tensor | None = None  # marks of the rows to write, if not all
    rows: LiveRows | None = None


class SaveJob:
    """One save on one rank. The constructor fixes what is saved; `write`, `publish` or `abandon` may follow later.

    It takes the marks of changed rows, and snapshots if rows may change before they are written (`background`).
    """

    def __init__(
        self, modules: list[NamedModule], ranks: CheckpointRanks, folder: Path, tensors: dict[str, Tensor],
        fields: dict[str, Any], incremental: bool, background: bool, keep: int,
    ) -> None:  # fmt: skip
        self.ranks, self.folder, self._tensors, self._keep = ranks, folder, tensors, keep
        self._modules = [_ModuleSave(found, found.module.arena) for found in modules]
        self._budget: CopyBudget | None = None
        rows = [(found.module.arena, found.module.trainer) for found in modules]
        self._total = sum(size_of(arena.codes, arena.meta, *trainer.states) for arena, trainer in rows)

        def begin() -> tuple[Any, str | None]:
            return (begin_save_folder(folder), secrets.token_hex(8)) if ranks.rank == 0 else None, self._base()

        results = ranks.on_all(begin)  # rank 0 holds the lock of the folder from here on
        assert results[0][0] is not None
        (self.subfolder, before), self.token = results[0][0]
        continues = incremental and _continues(before, [base for _, base in results])
        self._old = Checkpoint(folder, before) if continues and before is not None else None
        self._number = 1 if before is None else before.saves[-1].number + 1
        self._tensors |= self._publish_state()
        try:
            ranks.on_all(self._take_changes)
            if background:
                self._take_snapshots()
            else:
                ranks.on_all(self._read_live)
            for each in self._modules if incremental else ():  # later changes belong to the next save
                if each.arena.changes is None or self._old is None:
                    each.arena.changes = Changes(each.arena.rows, each.arena.device, self.token)
                each.arena.changes.base = self.token
            self._step = max(int(found.module.trainer.clock[F.STEP]) for found in modules)
            self._manifest = _manifest(modules, fields)
        except BaseException:  # an interrupt, too: the folder is locked
            self.abandon()
            raise

    def _publish_state(self) -> dict[str, Tensor]:
        """The publish that this save contains. Names the save: a later one of a trainer without a publisher has none."""
        published = self._modules[0].arena.unpublished
        self._published = None if published is None else published.number
        if published is None:
            return {}
        return {PUBLISH_STATE: torch.tensor([published.run, published.number, token_number(self.token)], dtype=torch.int64)}

    def _base(self) -> str | None:
        """Token of the save from which all modules of this rank count changes."""
        bases = {None if each.arena.changes is None else each.arena.changes.base for each in self._modules}
        return bases.pop() if len(bases) == 1 else None

    def _check_shared(self) -> None:
        if not self.subfolder.is_dir():
            raise BadInput(
                f"rank {self.ranks.rank} does not see '{self.subfolder}' of rank 0; give a folder that all nodes share",
                parameter="folder", path=self.folder, rank=self.ranks.rank,
            )  # fmt: skip

    def _take_changes(self) -> None:
        self._check_shared()
        for each in self._modules if self._old is not None else ():
            each.bits = self._changed(each)

    def _changed(self, each: _ModuleSave) -> Tensor:
        """Marks of the rows that changed, including rows that left their slot: eviction rounds them."""
        arena, found = each.arena, each.found
        assert self._old is not None and arena.changes is not None
        if arena.cache:
            then_S, now_S = saved_rows(found.module, self._old, found.name), Cache(*arena.cache).rows
            left_S = (then_S != F.EMPTY) & ((now_S == F.EMPTY) | (now_S & ~F.DIRTY != then_S))
            arena.changes.mark(then_S[left_S])
        bits: Tensor = arena.changes.take()
        return bits

    def _read_live(self) -> None:
        for each in self._modules:
            each.rows = LiveRows(each.found.module)

    def _take_snapshots(self) -> None:
        section = sections.SECTION_BYTES * (3 if self.ranks.groups else 1)  # a rank assembles its section from parts
        budget = self._budget = CopyBudget(self._total, self.subfolder, section)

        def copy() -> None:
            if self.ranks.rank == 0:  # writes dense tensors
                self._tensors = {name: budget.copy(tensor) for name, tensor in self._tensors.items()}

        def take(each: _ModuleSave) -> None:
            each.rows = Snapshot(each.found.module, each.bits, budget)

        self.ranks.on_all(copy)
        for each in self._modules:
            self.ranks.on_all(partial(take, each))

    def write(self, background: bool = False) -> None:
        """Write this rank's files and report them; in the background with one thread, to leave cores to training."""
        threads = 1 if background else THREADS if self.ranks.groups is None else THREADS // 2  # sections of a rank are copies
        with ThreadPoolExecutor(threads) as pool:
            state = pool.submit(self._write_state, background)
            pending = (
                section
                for each in self._modules if each.rows is not None
                for section in sections.pending_sections(each.found, each.rows, each.bits)
            )  # fmt: skip
            files, written = write_sections(pending, self.subfolder, self.ranks.rank, self._total, pool, background)
            files += state.result()
        self._close()
        write_report(self.subfolder, self.ranks.rank, files=files, sections=written)

    def _write_state(self, background: bool) -> list[FileEntry]:
        """Write everything except rows: rank 0 what all ranks share, each rank its cache slots."""
        shared, own = dict(self._tensors), dict[str, Tensor]()
        for each in self._modules:
            assert each.rows is not None
            tensors, slots = _state_tensors(each.found, each.rows, self._old)
            shared |= tensors
            own |= slots
        files = {STATE: shared if self.ranks.rank == 0 else {}, SLOTS.format(self.ranks.rank): own}
        return [write_tensors(tensors, self.subfolder / name, background) for name, tensors in files.items() if tensors]

    def publish(self) -> None:
        """Make the save visible, on rank 0, after all ranks have written."""
        if self.ranks.rank:
            return
        fields = {"number": self._number, "token": self.token, "step": self._step}
        kind = "full" if self._old is None else "incremental"
        save = collect_reports(self.subfolder, self.ranks.size, kind=kind, **fields)

        def make(now: Manifest | None) -> Manifest:
            chain: tuple[SaveEntry, ...] = ()
            if self._old is not None:  # the chain may have been compacted since, but not replaced
                if now is None or now.saves[-1].token != self._old.manifest.saves[-1].token:
                    raise BadInput(f"another process saved to '{self.folder}' meanwhile; save again", path=self.folder)
                chain = now.saves
            return self._manifest.model_copy(update={"saves": (*chain, save)})

        publish(self.folder, self.subfolder, make, self._keep)
        if self._published is not None and (counts := self._modules[0].arena.unpublished) is not None:
            counts.saved = str(self.folder), self._published

    def abandon(self) -> None:
        """Undo a failed save: changes count from the save before again."""
        self._close()
        for each in self._modules:
            changes = each.arena.changes
            if changes is not None and each.bits is not None and self._old is not None:
                changes.give_back(each.bits)
                changes.base = self._old.manifest.saves[-1].token
            elif changes is not None and changes.base == self.token:
                each.arena.changes = None
        if self.ranks.rank == 0:
            discard(self.subfolder)  # other ranks have reported that they are done

    def _close(self) -> None:
        for each in self._modules:
            if each.rows is not None:
                each.rows.close()
                each.rows = None
        self._tensors = {}
        if self._budget is not None:
            self._budget.close()
            self._budget = None


def _state_tensors(found: NamedModule, source: LiveRows, old: Checkpoint | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State of a module by name: what all ranks share, and this rank's slots. After `old`, only what changed.

    The cache is compared with the save before, which is read for that: slots and counters change at places that only kernels
    know, and reading a twentieth of the rows' bytes is cheaper than a second copy in memory.
    """
    prefix = f"module/{found.name}/"
    shared: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    if old is None:
        for feature, map in found.maps.items():
            shared |= {f"ids/{feature}/{name}": array for name, array in map.arrays().items()}
    for name, array in source.other_arrays().items():
        kind, _, number = name.partition("/")
        tensors = own if number else shared
        if old is None or not (kind in _PATCHED or kind.startswith("elastic")):
            tensors[prefix + name] = array
        else:
            dims = [pool["dim"] for pool in old.manifest.module(found.name).pools]
            width = _line_width(kind, dims[int(number) :][:1] if number else dims, array)
            tensors |= patches(prefix + name, array, width, partial(old.state.read, prefix + name))
    return shared, own


def _line_width(kind: str, dims: list[int], array: Tensor) -> int:
    """Elements that change together: those of a slot, or a common divisor where slots differ in size."""
    if kind == "cache_values":
        return gcd(*dims, array.numel())  # 1 if there are only int8 slots
    return gcd(*map(F.int8_slot_words, dims)) if kind == "cache_near" else 1


def _continues(before: Manifest | None, bases: list[str | None]) -> bool:
    """Whether all ranks count changes from the folder's last save, and its chain is not larger than a full save."""
    if before is None or set(bases) != {before.saves[-1].token}:
        return False
    return sum(save.bytes for save in before.saves[1:]) <= before.saves[0].bytes


def _manifest(modules: list[NamedModule], fields: dict[str, Any]) -> Manifest:
    """The manifest without saves."""
    plans = [each.module.plan for each in modules if isinstance(each.module, ShardedCollection)]
    plan = plans[0] if plans else None
    return Manifest(
        package=__version__, saves=(), modules=tuple(module_entry(each) for each in modules),
        tables=tuple(table for each in modules for table in each.tables),
        id_maps={feature: map.to_json() for each in modules for feature, map in each.maps.items()},
        plan=None if plan is None else plan.model_dump(mode="json"), heat=(plan.heat or None) if plan else None, **fields,
    )  # fmt: skip
