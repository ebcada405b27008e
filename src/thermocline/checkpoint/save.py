"""`thermocline.save`: a model, its rows and its optimizers, into one folder that opens anywhere.

Every rank writes files of its own, at most FILE_BYTES each, and a note of what it wrote; then rank 0 makes one manifest of the
notes. `folder.py` says why nobody ever sees half of it.

An incremental save writes the rows that changed since the one before, into the same folder, and the manifest names it after
those it continues. It is one only if the folder's last save is that which the arenas count changes from; else it is a full one.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import __version__
from .. import formats as F
from ..distributed.sharded import ShardedCollection
from ..errors import BadInput
from ..kernels.layout import Cache
from ..rows.changes import Changes
from .dense import Optimizers, dense_here, named, take_apart, whole
from .describe import Found, describe, find
from .folder import begin, publish
from .manifest import Manifest, Save
from .reader import Checkpoint
from .state import state_tensors
from .team import Team, writes
from .write import collect, lot_of, write_rows, write_state


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
    found, dense = find(model), dense_here(model)
    _check_settled(found)
    numbers, tensors = take_apart(named(optimizers))
    tensors = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"model/{name}": whole(tensor) for name, tensor in dense.items()}
    about = {"optimizers": numbers, "progress": json.loads(json.dumps(dict(progress or {})))}
    if writes(model):
        _Saving(found, Team.of(model), Path(folder), incremental).run(tensors, about)


def _check_settled(found: list[Found]) -> None:
    for each in found:
        if each.module.anchor.waiting is not None:
            raise BadInput(
                f"gradients of the rows of {each.name or 'the module'!r} wait for fused_optimizer.step(); save after it, or "
                "after zero_grad()"
            )
        if each.module.arena.device.type == "meta":
            raise BadInput(f"the rows of {each.name or 'the module'!r} have no values (device 'meta')")


class _Saving:
    """One save, on one rank."""

    def __init__(self, found: list[Found], team: Team, root: Path, incremental: bool) -> None:
        self.found, self.team, self.root, self.counts = found, team, root, incremental
        began = team.do(lambda: (begin(root) if team.rank == 0 else None, _base(found)))
        assert began[0][0] is not None
        self.aside, self.before = began[0][0]
        self.token: str = team.do(lambda: secrets.token_hex(8))[0]
        continues = incremental and _continues(self.before, [base for _, base in began])
        self.old = Checkpoint(root, self.before) if continues and self.before is not None else None

    def run(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        taken = self._changed() if self.old is not None else None
        try:
            self.team.do(lambda: self._write(tensors, taken))
            self.team.do(lambda: self._publish(about) if self.team.rank == 0 else None)
        except Exception:
            if taken is not None:
                for each, bits in zip(self.found, taken, strict=True):
                    _changes(each).give_back(bits)
            if self.team.rank == 0:
                shutil.rmtree(self.aside, ignore_errors=True)  # others have told that they are done
            raise
        if self.counts:
            for each in self.found:
                arena = each.module.arena
                if taken is None:
                    arena.changes = Changes(arena.rows, arena.device, self.token)
                _changes(each).base = self.token

    def _changed(self) -> list[Tensor]:
        """Marks of the rows that changed, with those that left their slot: rounded to the table, or to a slot of int8."""
        assert self.old is not None
        for each in self.found:
            cache = each.module.arena.cache
            if cache:
                now_S, then_S = Cache(*cache).rows, self.old.read(f"module/{each.name}/cache_rows").to(cache[0].device)
                left_S = (then_S != F.EMPTY) & ((now_S == F.EMPTY) | (now_S & ~F.DIRTY != then_S & ~F.DIRTY))
                _changes(each).mark(then_S[left_S] & ~F.DIRTY)
        return [_changes(each).take() for each in self.found]

    def _write(self, tensors: dict[str, Tensor], taken: list[Tensor] | None) -> None:
        note = write_rows(self.found, self.aside, self.team.rank, taken)
        if self.team.rank == 0:
            for each in self.found:
                tensors = tensors | state_tensors(each, self.old)
            note.files.append(write_state([lot_of(*each) for each in tensors.items()], self.aside))
        note.leave(self.aside, self.team.rank)

    def _publish(self, about: dict[str, Any]) -> None:
        number = 1 if self.before is None else self.before.saves[-1].number + 1
        step = max(int(each.module.trainer.clock[F.STEP]) for each in self.found)
        kind = "full" if self.old is None else "incremental"
        save = collect(self.aside, self.team.size, number=number, token=self.token, kind=kind, step=step)

        def make(now: Manifest | None) -> Manifest:
            chain: tuple[Save, ...] = ()
            if self.old is not None:  # compacted meanwhile, perhaps, but not replaced
                if now is None or now.saves[-1].token != self.old.manifest.saves[-1].token:
                    raise BadInput(f"somebody else has saved to '{self.root}' meanwhile; save again")
                chain = now.saves
            return _manifest(self.found, (*chain, save), about)

        publish(self.root, self.aside, make)


def _changes(found: Found) -> Changes:
    assert found.module.arena.changes is not None
    return found.module.arena.changes


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


def _manifest(found: list[Found], saves: tuple[Save, ...], about: dict[str, Any]) -> Manifest:
    plans = [each.module.plan for each in found if isinstance(each.module, ShardedCollection)]
    plan = plans[0] if plans else None
    return Manifest(
        package=__version__, saves=saves, modules=tuple(describe(each) for each in found),
        tables=tuple(table for each in found for table in each.tables),
        id_maps={feature: map.to_json() for each in found for feature, map in each.maps.items()},
        plan=None if plan is None else plan.model_dump(mode="json"), heat=(plan.heat or None) if plan else None, **about,
    )  # fmt: skip
