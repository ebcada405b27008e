"""The log of publishes in a checkpoint folder, for servers that come later.

    folder/publishes/RUN/0000000012-0000000011.0of2      publish 12, which continues publish 11: part of rank 0 of two

A file holds a part (`part.py`) and then its sha256. It is written under another name, fsynced and renamed, so that a name is a
complete part. A save names the publish that it contains (`publish/state` in its state file): the log of that run is applied on
top of it, from that publish on, and its older files are removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from thermocline.checkpoint.format.tensor_files import explain_write_errors
from thermocline.errors import BadPublish, open_regular

from .part import PublishPart, dense_of, merge_parts, moved_ids
from .row_delta import merge_deltas

if TYPE_CHECKING:
    from thermocline.checkpoint.reader import Checkpoint

FOLDER = "publishes"
PUBLISH_STATE = "publish/state"  # tensor of a state file: run, publish, and the token of the save that wrote it
_NAME = re.compile(r"(\d{10,})-(\d{10,})\.(\d+)of(\d+)", re.ASCII)
_DIGEST = 32
_MERGED, _MERGED_BYTES = 64, 1 << 26  # publishes that are merged into one, unless they have more bytes


def token_number(token: str) -> int:
    """The token of a save as an int64."""
    return int.from_bytes(bytes.fromhex(token), "little", signed=True)


def contained_publish(checkpoint: Checkpoint) -> tuple[int, int]:
    """Run and number of the publish that a checkpoint contains; zeros if its trainer did not publish."""
    if PUBLISH_STATE not in checkpoint.state:
        return 0, 0
    run, number, token = checkpoint.state.read(PUBLISH_STATE).tolist()
    return (run, number) if token == token_number(checkpoint.manifest.saves[-1].token) else (0, 0)


class LoggedPart(NamedTuple):
    """A file of the log."""

    number: int
    since: int
    rank: int
    ranks: int
    path: Path


class PublishLog:
    """The log of one training run."""

    def __init__(self, folder: Path | str, run: int) -> None:
        self.folder = Path(folder) / FOLDER / f"{run:016x}"

    def append(self, part: PublishPart) -> int:
        """Write a part durably. Returns its bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{part.number:010d}-{part.since:010d}.{part.rank}of{part.ranks}"
        writing, digest, size = path.with_suffix(f"{path.suffix}.part"), hashlib.sha256(), 0
        with explain_write_errors(self.folder):
            with open(writing, "wb") as file:
                for piece in part.encode():
                    digest.update(piece)
                    size += file.write(piece)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(writing, path)
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return size

    def files(self) -> list[LoggedPart]:
        """Complete files, by publish and rank."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        found = []
        for name in names:
            if match := _NAME.fullmatch(name):
                number, since, rank, ranks = map(int, match.groups())
                found.append(LoggedPart(number, since, rank, ranks, self.folder / name))
        return sorted(found)

    def after(self, number: int) -> Iterator[list[PublishPart]]:
        """Publishes that continue publish `number`, in order; ends where a rank's part is missing.

        Raises:
            BadPublish: a file is damaged
        """
        while (publish := self._next(number)) is not None:
            number = publish[0].number
            try:
                yield [read_part(each.path) for each in publish]
            except FileNotFoundError:  # a save that contains it came meanwhile
                return

    def _next(self, number: int) -> list[LoggedPart] | None:
        """The last complete publish that continues `number`: a merged one, if there is one."""
        found: dict[int, dict[int, LoggedPart]] = {}
        for each in self.files():
            if each.since <= number < each.number:
                found.setdefault(each.number, {})[each.rank] = each
        complete = [parts for _, parts in sorted(found.items()) if len(parts) == next(iter(parts.values())).ranks]
        return list(complete[-1].values()) if complete else None

    def merge(self, last: PublishPart) -> None:
        """Merge a rank's files up to this part, every `_MERGED` publishes, and remove those that the merge before replaced.

        All ranks merge the same publishes. Files stay for one more round: another rank may end before it has merged its own.
        """
        if last.number % _MERGED:
            return
        own = [each for each in self.files() if each.rank == last.rank]
        for each in own:
            if each.number <= last.number - _MERGED and each.number - each.since < _MERGED and _is_merged(each, own):
                each.path.unlink(missing_ok=True)
        few = [each for each in own if last.number - _MERGED < each.number <= last.number]
        with suppress(FileNotFoundError):  # another rank removes what a save contains
            self._merge(few, last.number - _MERGED)

    def _merge(self, few: list[LoggedPart], number: int) -> None:
        if few and few[0].since <= number and sum(each.path.stat().st_size for each in few) <= _MERGED_BYTES:
            parts = [read_part(each.path) for each in few]
            deltas = {name: merge_deltas(each) for name, each in merge_parts(parts).items()}
            dense, ids = dict(dense_of(parts)), moved_ids(parts)
            self.append(replace(parts[-1], since=parts[0].since, deltas=deltas, dense=dense, ids=ids))

    def prune(self, number: int) -> None:
        """Remove what a save contains: publishes up to `number`."""
        for each in self.files():
            if each.number <= number:
                each.path.unlink(missing_ok=True)

    def only(self) -> None:
        """Remove the logs of other runs: their publishes do not fit the saves of this one."""
        for other in self.folder.parent.iterdir() if self.folder.parent.is_dir() else ():
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)


def _is_merged(file: LoggedPart, files: list[LoggedPart]) -> bool:
    return any(each.since <= file.since and file.number <= each.number and each.since < each.number - 1 for each in files)


def read_part(path: Path) -> PublishPart:
    """A part of the log. Raises `BadPublish` if it is damaged."""
    with open_regular(path) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        view, done = memoryview(data), 0
        while done < len(data) and (got := file.readinto(view[done:])):
            done += got
    if done < _DIGEST or hashlib.sha256(view[:-_DIGEST]).digest() != bytes(view[-_DIGEST:]):
        raise BadPublish(f"'{path}' is damaged; publish again, or save and load", "damaged", path=path)
    return PublishPart.decode(view[:-_DIGEST])
