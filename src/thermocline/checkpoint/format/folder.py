"""How a save becomes visible, what remains of a save that failed, and which earlier saves are kept.

    folder/
        manifest.json                       names every file of the checkpoint
        save-000007-5f0c2a91/               files of one save
            rows-0000-000.safetensors       first rows file of rank 0
            rows-0001-000.safetensors
            state.safetensors               clocks, caches, id maps, dense parameters
            slots-0001.safetensors          cache slots of rank 1
            manifest.json                   a copy of the manifest that this save published
            save.lock                       until the save is published; locked while its process lives

A save writes its own subfolder and fsyncs every file and folder. One rename then replaces the manifest. Before the rename the
folder is the old checkpoint, after the rename the new one; no reader sees a state between. The next save removes leftovers of
killed saves: subfolders with an unlocked lock file. Published saves are removed by later ones, except the last
`keep` chains of saves; their copies of the manifest open them.

Locks are those of fcntl: they work between nodes on NFS, end with their process, and forked workers do not inherit them. One
process holds several at once, so it keeps its own in `_HELD`: opening and closing a file again would end its lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from thermocline.errors import BadInput, FormatError

from .manifest import NAME, Manifest
from .tensor_files import explain_write_errors

_PART = NAME + ".part"
_SAVE = re.compile(r"save-(\d{6,})-[0-9a-f]{8}")
_REMOVED = "removed-"  # begins the names of saves that are being removed
SAVING, COMPACTING = "save.lock", "compact.lock"
_HELD: dict[Path, IO[str]] = {}  # lock files of this process


def current_manifest(folder: Path) -> Manifest | None:
    """The manifest of the checkpoint in a folder, or None if nothing was saved there.

    Raises:
        FormatError: the manifest is damaged, or it is missing next to finished saves, which a new save would remove.
    """
    saves = [] if (folder / NAME).exists() else published(folder)
    if (folder / NAME).exists():  # looked at again: a save may have ended in between
        return Manifest.read(folder)
    if not saves:
        return None
    raise FormatError(
        f"'{folder}' has the saves {', '.join(saves[-3:])} but no {NAME}; copy '{folder / saves[-1] / NAME}' to '{folder}' to "
        "open the last one, or move the saves to another folder",
        path=folder / NAME, saves=saves,
    )  # fmt: skip


def begin_save_folder(folder: Path) -> tuple[Path, Manifest | None]:
    """A new locked subfolder for a save, and the current manifest. Removes leftovers of unfinished saves."""
    with explain_write_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"'{folder}' is a file; give a folder to save to", parameter="folder", path=folder)
        folder.mkdir(parents=True, exist_ok=True)
    with explain_write_errors(folder), _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another job may begin a save at the same time
        before = current_manifest(folder)
        names = sorted(entry.name for entry in folder.iterdir())
        others = [name for name in names if name not in (NAME, _PART) and not _SAVE.fullmatch(name.removeprefix(_REMOVED))]
        if before is None and others:
            raise BadInput(
                f"'{folder}' holds other files ({', '.join(others[:3])}); give an empty or a new folder",
                parameter="folder", path=folder, files=others,
            )  # fmt: skip
        (folder / _PART).unlink(missing_ok=True)
        for path in folder.glob(f"{_REMOVED}save-*"):
            shutil.rmtree(path, ignore_errors=True)
        for name in leftovers(folder, before):
            if _is_locked(folder / name / SAVING):
                raise BadInput(
                    f"another process saves to '{folder}' now ({name}); save to another folder, or end that job",
                    parameter="folder", path=folder, save=name,
                )  # fmt: skip
            if not _is_locked(folder / name / COMPACTING):
                discard(folder / name)
        return new_subfolder(folder, 1 if before is None else before.saves[-1].number + 1, SAVING), before


def new_subfolder(folder: Path, number: int, lock: str) -> Path:
    """A subfolder that this process has locked until it is published or discarded."""
    subfolder = folder / f"save-{number:06d}-{secrets.token_hex(4)}"
    subfolder.mkdir()
    held = _HELD[subfolder / lock] = open(subfolder / lock, "w")  # noqa: SIM115
    with contextlib.suppress(OSError):  # a filesystem without locks
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return subfolder


def _is_locked(path: Path) -> bool:
    """Whether a living process holds a lock file."""
    if path in _HELD:
        return True
    try:
        with open(path, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def _release(subfolder: Path) -> None:
    for path in (subfolder / SAVING, subfolder / COMPACTING):
        path.unlink(missing_ok=True)
        if path in _HELD:
            _HELD.pop(path).close()


def discard(subfolder: Path) -> None:
    """Remove a save under another name: no rank can write to it any more, and what is left after a kill looks like no save."""
    gone = subfolder.with_name(_REMOVED + subfolder.name)
    with contextlib.suppress(OSError):  # the next save tries again
        subfolder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    _release(subfolder)


def publish(
    folder: Path, subfolder: Path, make: Callable[[Manifest | None], Manifest], keep: int | None = None
) -> Manifest:  # fmt: skip
    """Replace the manifest atomically and durably. `make` gets the current manifest and returns the new one.

    Removes the saves that the manifest replaced; with `keep`, all but the last chains of saves.
    """
    part = folder / _PART
    with explain_write_errors(part), _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # a save and a compaction may finish at the same time
        before = current_manifest(folder)
        manifest = make(before)
        _write(subfolder / NAME, manifest.text())
        with _opened(subfolder) as written:
            os.fsync(written)  # makes the names in it durable
        _write(part, manifest.text())
        os.replace(part, folder / NAME)
        os.fsync(descriptor)
        _release(subfolder)
    kept = _subfolders(manifest).union(*_chains(folder, keep or 1))
    for name in _subfolders(before) - _subfolders(manifest) if keep is None else set(published(folder)) - kept:
        discard(folder / name)
    return manifest


def _write(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


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
    """Subfolders of saves that did not end."""
    done = _subfolders(manifest).union(published(folder))
    return sorted(e.name for e in folder.iterdir() if _SAVE.fullmatch(e.name) and e.name not in done)


def published(folder: Path) -> list[str]:
    """Subfolders of saves that ended, oldest first."""
    found: list[str] = []
    names = filter(_SAVE.fullmatch, os.listdir(folder) if folder.is_dir() else [])
    for name in sorted(names, key=lambda name: (int(name.split("-")[1]), name)):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            kinds = {Path(file).suffix for file in os.listdir(folder / name)}
            found += [name] if kinds and ".lock" not in kinds else []
    return found


def kept_manifests(folder: Path) -> Iterator[Manifest]:
    """Manifests of the saves in a folder that are complete, newest first: the current one and earlier ones."""
    for name in reversed(published(folder)):
        with contextlib.suppress(FormatError):
            manifest = Manifest.read(folder / name)
            if all((folder / each).is_dir() for each in _subfolders(manifest)):  # a compaction replaces saves of a chain
                yield manifest


def _chains(folder: Path, count: int) -> Iterator[set[str]]:
    """Subfolders of the last chains of saves, each a full save and the incremental saves after it."""
    tokens: dict[str, None] = {}
    for manifest in kept_manifests(folder) if count > 1 else ():
        tokens[manifest.saves[0].token] = None
        if len(tokens) > count:
            return
        yield _subfolders(manifest)
