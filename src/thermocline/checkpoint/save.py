"""`thermocline.save`: a model, its rows and its optimizers, into one folder that opens anywhere.

Every rank writes files of its own, at most FILE_BYTES each, and a note of what it wrote; then rank 0 makes one manifest of the
notes. `folder.py` says why nobody ever sees half of it.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import __version__
from .. import formats as F
from ..distributed.sharded import ShardedCollection
from ..errors import BadInput
from .dense import Optimizers, dense_here, named, take_apart, whole
from .describe import Found, describe, find
from .folder import begin, publish
from .manifest import File, Manifest, Save, Section
from .sections import Pending, sections
from .team import Team, writes
from .tensors import Entry, Lot, write_file, writing

FILE_BYTES = 1 << 28
_NOTE = "rank-{:04d}.json"
STATE = "state.safetensors"


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    optimizers: Optimizers = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Save a model, or a module of thermocline alone. Once this returns, it is there whatever happens.

    `optimizers`: of the dense part, one or several by name. `progress`: what the caller needs to go on, such as the number of
    the next batch; anything that JSON holds. All ranks of a sharded model call this together; of others the first rank writes.
    """
    found, dense = find(model), dense_here(model)
    _check_settled(found)
    numbers, tensors = take_apart(named(optimizers))
    tensors = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"model/{name}": whole(tensor) for name, tensor in dense.items()}
    if not writes(model):
        return
    team, root = Team.of(model), Path(folder)
    made = team.do(lambda: begin(root) if team.rank == 0 else None)[0]
    assert made is not None
    aside, before = made

    def write() -> None:
        note = _write_rows(found, aside, team.rank)
        if team.rank == 0:
            note.files.append(_write_state(found, tensors, aside))
        note.leave(aside, team.rank)

    try:
        team.do(write)
    except Exception:
        if team.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # others have told that they are done
        raise

    def finish() -> None:
        if team.rank == 0:
            save = collect(aside, 1 if before is None else before.saves[-1].number + 1, team.size, _step(found))
            manifest = _manifest(found, (save,), numbers, progress)
            publish(root, manifest, aside)

    team.do(finish)


def _check_settled(found: Sequence[Found]) -> None:
    for each in found:
        if each.module.anchor.waiting is not None:
            raise BadInput(
                f"gradients of the rows of {each.name or 'the module'!r} wait for fused_optimizer.step(); save after it, or "
                "after zero_grad()"
            )
        if each.module.arena.device.type == "meta":
            raise BadInput(f"the rows of {each.name or 'the module'!r} have no values (device 'meta')")


def _step(found: Sequence[Found]) -> int:
    return max(int(each.module.trainer.clock[F.STEP]) for each in found)


class Note:
    """What one rank wrote."""

    def __init__(self, files: list[File], sections: list[Section]) -> None:
        self.files, self.sections = files, sections

    def leave(self, aside: Path, rank: int) -> None:
        """As a file next to what it is about."""
        path = aside / _NOTE.format(rank)
        text = {"files": [f.model_dump() for f in self.files], "sections": [s.model_dump() for s in self.sections]}
        with writing(path):
            path.write_text(json.dumps(text))


def collect(aside: Path, number: int, ranks: int, step: int) -> Save:
    """One save of the notes of all ranks."""
    files: list[File] = []
    found: list[Section] = []
    for rank in range(ranks):
        path = aside / _NOTE.format(rank)
        note = json.loads(path.read_text())
        files += [File(**each) for each in note["files"]]
        found += [Section(**each) for each in note["sections"]]
        path.unlink()
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Save(
        number=number, kind="full", created=now, step=step, ranks=ranks, files=tuple(files), sections=tuple(found),
        state=f"{aside.name}/{STATE}",
    )  # fmt: skip


def _write_rows(found: Sequence[Found], aside: Path, rank: int) -> Note:
    note = Note([], [])
    for number, lot in enumerate(_files(section for each in found for section in sections(each))):
        path = aside / f"rows-{rank:04d}-{number:03d}.safetensors"
        size, sha256 = write_file(path, [section.lot() for section in lot])
        name = f"{aside.name}/{path.name}"
        note.files.append(File(name=name, bytes=size, sha256=sha256))
        note.sections += [section.written(name) for section in lot]
    return note


def _files(pending: Iterator[Pending]) -> Iterator[list[Pending]]:
    """Sections that share a file."""
    lot: list[Pending] = []
    size = 0
    for section in pending:
        if lot and size + section.bytes > FILE_BYTES:
            yield lot
            lot, size = [], 0
        lot.append(section)
        size += section.bytes
    if lot:
        yield lot


def _write_state(found: Sequence[Found], tensors: dict[str, Tensor], aside: Path) -> File:
    """Clocks, rates, caches, id maps, and what the caller has beside rows."""
    tensors = dict(tensors)
    for each in found:
        kept = {
            name: array for name, array in each.module._arrays().items() if name in ("hyper", "clock") or name[:6] == "cache_"
        }
        if isinstance(each.module, ShardedCollection):
            kept = {name: array for name, array in kept.items() if name in ("hyper", "clock")}
        tensors |= {f"module/{each.name}/{name}": array for name, array in kept.items()}
        for feature, map in each.maps.items():
            tensors |= {f"ids/{feature}/{name}": array for name, array in map.arrays().items()}
    lots = [_lot(name, tensor) for name, tensor in tensors.items()]
    size, sha256 = write_file(aside / STATE, lots)
    return File(name=f"{aside.name}/{STATE}", bytes=size, sha256=sha256)


def _lot(name: str, tensor: Tensor) -> Lot:
    return [Entry(name, tensor.dtype, tuple(tensor.shape))], lambda: [tensor]


def _manifest(
    found: Sequence[Found], saves: tuple[Save, ...], numbers: dict[str, Any], progress: Mapping[str, Any] | None
) -> Manifest:
    plans = [each.module.plan for each in found if isinstance(each.module, ShardedCollection)]
    plan = plans[0] if plans else None
    return Manifest(
        package=__version__, saves=saves, modules=tuple(describe(each) for each in found),
        tables=tuple(table for each in found for table in each.tables),
        id_maps={feature: map.to_json() for each in found for feature, map in each.maps.items()},
        plan=None if plan is None else plan.model_dump(mode="json"), heat=(plan.heat or None) if plan else None,
        optimizers=numbers, progress=json.loads(json.dumps(dict(progress or {}))),
    )  # fmt: skip
