"""How a save becomes visible, and what is left of one that did not.

    folder/
        manifest.json                       names every file of the checkpoint
        save-000007-5f0c2a91/               what one save wrote
            rows-0000-000.safetensors       rank 0's first file of rows
            rows-0001-000.safetensors
            state.safetensors               clocks, caches, id maps, the dense part
            slots-0001.safetensors          what rank 1 has in the slots of its cache

A save writes a subfolder of its own and makes it last (fsync of every file and folder); then a new manifest takes the place of
the old one by one rename. Before that rename the folder is the old checkpoint, after it the new one, and nothing in between can
be seen. Subfolders that the manifest does not name are what a save left that was killed, or saves that were replaced: the next
save removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from thermocline.errors import BadInput, FormatError

from .manifest import NAME, Manifest
from .tensor_files import writing

_ASIDE = NAME + ".part"
_SAVE = re.compile(r"save-(\d{6,})-[0-9a-f]{8}")


def last(folder: Path) -> Manifest | None:
    """The checkpoint in a folder, if there is one."""
    return Manifest.read(folder) if (folder / NAME).exists() else None


def begin(folder: Path) -> tuple[Path, Manifest | None]:
    """A new subfolder for a save, and the checkpoint that is there. Removes what unfinished saves have left."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"'{folder}' is a file; give a folder to save to")
        folder.mkdir(parents=True, exist_ok=True)
        before = last(folder)
        strangers = [entry.name for entry in folder.iterdir() if not is_ours(entry.name)]
        if before is None and strangers:
            raise BadInput(f"'{folder}' holds other files ({', '.join(sorted(strangers)[:3])}); give an empty or a new folder")
        clean(folder, before)
        aside = new_subfolder(folder, 1 if before is None else before.saves[-1].number + 1)
        return aside, before


def new_subfolder(folder: Path, number: int) -> Path:
    aside = folder / f"save-{number:06d}-{secrets.token_hex(4)}"
    aside.mkdir()
    return aside


def is_ours(name: str) -> bool:
    return name in (NAME, _ASIDE) or _SAVE.fullmatch(name) is not None


def publish(folder: Path, aside: Path, make: Callable[[Manifest | None], Manifest]) -> Manifest:
    """Make a save the checkpoint, at once and for good. `make` is told what that is by now, and says what it will be."""
    part = folder / _ASIDE
    with writing(part), _alone(folder):
        before = last(folder)
        manifest = make(before)
        keep(aside)
        with open(part, "w") as file:
            file.write(manifest.text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / NAME)
        keep(folder)
    for name in _named(before) - _named(manifest):
        shutil.rmtree(folder / name, ignore_errors=True)  # the next save tries again
    return manifest


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While nobody else makes a save of this folder visible: somebody may compact it meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _named(manifest: Manifest | None) -> set[str]:
    """Subfolders that belong to a checkpoint."""
    return {Path(file.name).parts[0] for file in manifest.files} if manifest is not None else set()


def clean(folder: Path, manifest: Manifest | None) -> None:
    """Remove what a manifest does not name. Failing to is no error: the next save tries again."""
    named = _named(manifest)
    (folder / _ASIDE).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if _SAVE.fullmatch(entry.name) and entry.name not in named:
            shutil.rmtree(entry, ignore_errors=True)


def leftovers(folder: Path, manifest: Manifest) -> list[str]:
    """Subfolders of saves that are not part of the checkpoint."""
    named = _named(manifest)
    return sorted(e.name for e in folder.iterdir() if _SAVE.fullmatch(e.name) and e.name not in named)


def keep(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve(folder: Path | str) -> Path:
    """The folder to read from, or an error that says what is wrong with it."""
    path = Path(folder)
    if not path.is_dir():
        raise FormatError(f"there is no folder '{path}'; give one that thermocline.save wrote")
    return path
