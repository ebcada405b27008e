"""`thermocline.save`: a model, its rows and its optimizers, into one folder that opens anywhere.

Every rank writes files of its own, each of a bounded size, and a note of what it wrote; then rank 0 makes one manifest of the
notes. `folder.py` says why nobody ever sees half of it.

An incremental save writes the rows that changed since the one before, into the same folder, and the manifest names it after
those it continues. It is one only if the folder's last save is that which the arenas count changes from; else it is a full one.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thermocline import __version__
from thermocline import formats as F
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import BadInput
from thermocline.kernels.layout import Cache
from thermocline.rows.arena import Arena
from thermocline.rows.change_bitmap import Changes

from .copy_budget import Room
from .format import sections
from .format.cache_slots import rows_then
from .format.dense_state import Optimizers, dense_here, named, take_apart, whole
from .format.folder import begin, publish
from .format.manifest import File, Manifest, Save
from .format.module_entries import Found, describe, find
from .format.module_state import state_tensors
from .format.write import SLOTS, STATE, bytes_of_rows, collect, lot_of, write_pending, write_state
from .live_rows import Live
from .pending_saves import wait_for_saves
from .ranks import Team, writes
from .reader import Checkpoint
from .snapshot import Snapshot

THREADS = 4  # that hash and write while nothing else is done: some of them wait for the disk


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    optimizers: Optimizers = None,
    progress: Mapping[str, Any] | None = None,
    incremental: bool = False,
) -> None:
    """Save a model, or a module of thermocline alone. Once this returns, it is there whatever happens.

    `optimizers`: of the dense part, one or several by name. `progress`: what the caller needs to go on, such as the number of
    the next batch; anything that JSON holds. `incremental`: write only rows that changed since the last such save to this
    folder; the first one is a full one, and so is one that would make the chain larger than a full save. All ranks of a sharded
    model call this together; of others the first rank writes.
    """
    saving = begin_save(model, folder, optimizers, progress, incremental)
    if saving is None:
        return
    try:
        saving.team.do(saving.write)
        saving.team.do(saving.publish)
    except Exception:
        saving.give_up()
        raise


def begin_save(
    model: nn.Module, folder: str | Path, optimizers: Optimizers, progress: Mapping[str, Any] | None, incremental: bool,
    background: bool = False,
) -> Saving | None:  # fmt: skip
    """A save that is about to be written, perhaps while training goes on; None if this process has no part in it."""
    found, dense = find(model), dense_here(model)
    _check_settled(found)
    numbers, tensors = take_apart(named(optimizers))
    tensors = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"model/{name}": whole(tensor) for name, tensor in dense.items()}
    about = {"optimizers": numbers, "progress": json.loads(json.dumps(dict(progress or {})))}
    wait_for_saves()
    if not writes(model):
        return None
    return Saving(found, Team.of(model), Path(folder), incremental, background, tensors, about)


def _check_settled(found: list[Found]) -> None:
    for each in found:
        if isinstance(each.module, ShardedCollection):
            each.module.wait_for_exchange()
        if each.module.anchor.waiting is not None:
            raise BadInput(
                f"gradients of the rows of {each.name or 'the module'!r} wait for fused_optimizer.step(); save after it, or "
                "after zero_grad()"
            )
        if each.module.arena.device.type == "meta":
            raise BadInput(f"the rows of {each.name or 'the module'!r} have no values (device 'meta')")


class Saving:
    """One save, on one rank: what it will write is settled when it is made; `write`, `publish` or `give_up` may come later."""

    def __init__(
        self, found: list[Found], team: Team, root: Path, incremental: bool, background: bool,
        tensors: dict[str, Tensor], about: dict[str, Any],
    ) -> None:  # fmt: skip
        self.found, self.team, self.root, self._tensors = found, team, root, tensors
        self._arenas = [each.module.arena for each in found]  # `live.py` says why they are not asked for later
        self._total = bytes_of_rows([each.module for each in found])
        began = team.do(lambda: ((begin(root), secrets.token_hex(8)) if team.rank == 0 else None, _base(found)))
        assert began[0][0] is not None
        (self.aside, before), self.token = began[0][0]
        continues = incremental and _continues(before, [base for _, base in began])
        self._old = Checkpoint(root, before) if continues and before is not None else None
        self._bits: list[Tensor | None] = [None] * len(found)
        self._sources: list[Live] = []
        self._room: Room | None = None
        self._number = 1 if before is None else before.saves[-1].number + 1
        try:
            team.do(self._take_changes)
            self._look(background)
            if incremental:
                for arena in self._arenas:  # rows that change from here on are the next one's
                    self._count(arena, self.token)
            self._step = max(int(each.module.trainer.clock[F.STEP]) for each in found)
            self._manifest = _manifest(found, about)
        except Exception:
            self.give_up()
            raise

    def _take_changes(self) -> None:
        """Marks of the rows that this save writes, if not all: what was taken before one fails is given back."""
        if self._old is not None:
            for index, each in enumerate(self.found):
                self._bits[index] = self._changed(each)

    def _look(self, background: bool) -> None:
        """Where rows are read from; what may change before it is written is copied."""
        if not background:
            self.team.do(self._look_live)
            return
        section = sections.SECTION_BYTES * (3 if self.team.groups else 1)  # that of a rank is put together from parts
        room = self._room = Room(self._total, self.aside, section)

        def copy() -> None:
            if self.team.rank == 0:  # which writes it
                self._tensors = {name: room.copy(tensor) for name, tensor in self._tensors.items()}

        self.team.do(copy)
        for each, bits in zip(self.found, self._bits, strict=True):
            self.team.do(partial(self._look_at, each, bits, room))

    def _look_live(self) -> None:
        self._sources = [Live(each.module) for each in self.found]

    def _look_at(self, found: Found, bits: Tensor | None, room: Room) -> None:
        self._sources.append(Snapshot(found.module, bits, room))

    def _count(self, arena: Arena, token: str) -> None:
        if arena.changes is None or self._old is None:
            arena.changes = Changes(arena.rows, arena.device, token)
        arena.changes.base = token

    def _changed(self, found: Found) -> Tensor:
        """Marks of the rows that changed, with those that left their slot: rounded to the table, or to a slot of int8."""
        arena = found.module.arena
        assert self._old is not None and arena.changes is not None
        if arena.cache:
            now_S, then_S = Cache(*arena.cache).rows, self._rows_then(found)
            left_S = (then_S != F.EMPTY) & ((now_S == F.EMPTY) | (now_S & ~F.DIRTY != then_S & ~F.DIRTY))
            arena.changes.mark(then_S[left_S] & ~F.DIRTY)
        return arena.changes.take()

    def _rows_then(self, found: Found) -> Tensor:
        """By slot, the row that the save before has there."""
        assert self._old is not None
        old, name, module = self._old, found.name, found.module
        if isinstance(module, ShardedCollection):
            return rows_then(module, old, name)
        return old.read(f"module/{name}/cache_rows").to(module.arena.device)

    def write(self, gently: bool = False) -> None:
        """This rank's files, and a note of them. `gently`, by one thread that leaves the others to training."""
        threads = 1 if gently else THREADS if self.team.groups is None else THREADS // 2  # sections of a rank are copies
        with ThreadPoolExecutor(threads) as pool:
            state = pool.submit(self._write_state, gently)
            each = zip(self.found, self._sources, self._bits, strict=True)
            pending = (section for one in each for section in sections.sections(*one))
            note = write_pending(pending, self.aside, self.team.rank, self._total, pool, gently)
            note.files += state.result()
        self._close()
        note.leave(self.aside, self.team.rank)

    def _write_state(self, gently: bool) -> list[File]:
        """All that is not rows: rank 0 what is the same on all ranks, each of them its slots."""
        shared, own = dict(self._tensors), dict[str, Tensor]()
        for each, source in zip(self.found, self._sources, strict=True):
            tensors, slots = state_tensors(each, source, self._old)
            shared |= tensors
            own |= slots
        lots = {STATE: shared if self.team.rank == 0 else {}, SLOTS.format(self.team.rank): own}
        return [
            write_state([lot_of(*each) for each in lot.items()], self.aside / name, gently) for name, lot in lots.items() if lot
        ]

    def publish(self) -> None:
        """Once all ranks have written: rank 0 makes it visible."""
        if self.team.rank:
            return
        kind = "full" if self._old is None else "incremental"
        save = collect(self.aside, self.team.size, number=self._number, token=self.token, kind=kind, step=self._step)

        def make(now: Manifest | None) -> Manifest:
            chain: tuple[Save, ...] = ()
            if self._old is not None:  # compacted meanwhile, perhaps, but not replaced
                if now is None or now.saves[-1].token != self._old.manifest.saves[-1].token:
                    raise BadInput(f"somebody else has saved to '{self.root}' meanwhile; save again")
                chain = now.saves
            return self._manifest.model_copy(update={"saves": (*chain, save)})

        publish(self.root, self.aside, make)

    def give_up(self) -> None:
        """It did not come about: changes count from the save before again."""
        self._close()
        for arena, bits in zip(self._arenas, self._bits, strict=True):
            changes = arena.changes
            if changes is not None and bits is not None and self._old is not None:
                changes.give_back(bits)
                changes.base = self._old.manifest.saves[-1].token
            elif changes is not None and changes.base == self.token:
                arena.changes = None
        if self.team.rank == 0:
            shutil.rmtree(self.aside, ignore_errors=True)  # others have told that they are done

    def _close(self) -> None:
        for source in self._sources:
            source.close()
        self._sources, self._tensors = [], {}  # with the copies that they have
        if self._room is not None:
            self._room.close()
            self._room = None


def _base(found: list[Found]) -> str | None:
    """The save that all modules of this rank count changes from."""
    changes = [each.module.arena.changes for each in found]
    bases = {None if each is None else each.base for each in changes}
    return bases.pop() if len(bases) == 1 else None


def _continues(before: Manifest | None, bases: list[str | None]) -> bool:
    """Whether all ranks count from the folder's last save, and its chain is not larger than a full save."""
    if before is None or set(bases) != {before.saves[-1].token}:
        return False
    return sum(save.bytes for save in before.saves[1:]) <= before.saves[0].bytes


def _manifest(found: list[Found], about: dict[str, Any]) -> Manifest:
    """All but the saves."""
    plans = [each.module.plan for each in found if isinstance(each.module, ShardedCollection)]
    plan = plans[0] if plans else None
    return Manifest(
        package=__version__, saves=(), modules=tuple(describe(each) for each in found),
        tables=tuple(table for each in found for table in each.tables),
        id_maps={feature: map.to_json() for each in found for feature, map in each.maps.items()},
        plan=None if plan is None else plan.model_dump(mode="json"), heat=(plan.heat or None) if plan else None, **about,
    )  # fmt: skip
