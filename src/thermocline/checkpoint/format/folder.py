"""How a save becomes visible, and what remains of a save that failed.

    folder/
        manifest.json                       names every file of the checkpoint
        save-000007-5f0c2a91/               files of one save
            rows-0000-000.safetensors       first rows file of rank 0
            rows-0001-000.safetensors
            state.safetensors               clocks, caches, id maps, dense parameters
            slots-0001.safetensors          cache slots of rank 1

A save writes its own subfolder and fsyncs every file and folder. One rename then replaces the manifest. Before the rename the
folder is the old checkpoint, after the rename the new one; no reader sees a state between. The next save removes subfolders
that the manifest does not name: leftovers of killed saves, and saves that were replaced.
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

from thermocline.errors import BadInput

from .manifest import NAME, Manifest
from .tensor_files import explain_write_errors

_PART = NAME + ".part"
_SAVE = re.compile(r"save-(\d{6,})-[0-9a-f]{8}")


def current_manifest(folder: Path) -> Manifest | None:
    """The manifest of the checkpoint in a folder, or None."""
    return Manifest.read(folder) if (folder / NAME).exists() else None


def begin_save_folder(folder: Path) -> tuple[Path, Manifest | None]:
    """A new subfolder for a save, and the current manifest. Removes leftovers of unfinished saves."""
    with explain_write_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"'{folder}' is a file; give a folder to save to", parameter="folder", path=folder)
        folder.mkdir(parents=True, exist_ok=True)
        before = current_manifest(folder)
        names = sorted(entry.name for entry in folder.iterdir())
        others = [name for name in names if name not in (NAME, _PART) and not _SAVE.fullmatch(name)]
        if before is None and others:
            raise BadInput(
                f"'{folder}' holds other files ({', '.join(others[:3])}); give an empty or a new folder",
                parameter="folder", path=folder, files=others,
            )  # fmt: skip
        (folder / _PART).unlink(missing_ok=True)
        for name in leftovers(folder, before):
            shutil.rmtree(folder / name, ignore_errors=True)  # the next save tries again
        return new_subfolder(folder, 1 if before is None else before.saves[-1].number + 1), before


def new_subfolder(folder: Path, number: int) -> Path:
    subfolder = folder / f"save-{number:06d}-{secrets.token_hex(4)}"
    subfolder.mkdir()
    return subfolder


def publish(folder: Path, subfolder: Path, make: Callable[[Manifest | None], Manifest]) -> Manifest:
    """Replace the manifest atomically and durably. `make` gets the current manifest and returns the new one."""
    part = folder / _PART
    with explain_write_errors(part), _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # a save and a compaction may finish at the same time
        before = current_manifest(folder)
        manifest = make(before)
        with _opened(subfolder) as written:
            os.fsync(written)  # makes the names in it durable
        with open(part, "w") as file:
            file.write(manifest.text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / NAME)
        os.fsync(descriptor)
    for name in _subfolders(before) - _subfolders(manifest):
        shutil.rmtree(folder / name, ignore_errors=True)  # the next save tries again
    return manifest


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The descriptor of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _subfolders(manifest: Manifest | None) -> set[str]:
    """Subfolders that a manifest names."""
    return {Path(file.name).parts[0] for file in manifest.files} if manifest is not None else set()


def leftovers(folder: Path, manifest: Manifest | None) -> list[str]:
    """Subfolders of saves that are not part of the checkpoint."""
    named = _subfolders(manifest)
    return sorted(e.name for e in folder.iterdir() if _SAVE.fullmatch(e.name) and e.name not in named)
