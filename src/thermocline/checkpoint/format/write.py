"""The files of a save: rows in files of bounded size, one state file, and a report of each rank's files."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from thermocline.errors import ThermoclineError

from .manifest import FileEntry, SaveEntry, Section
from .sections import PendingSection
from .tensor_files import TensorGroup, TensorInfo, explain_write_errors, write_file

_FILES, _MIN_BYTES, _MAX_BYTES = 8, 1 << 25, 1 << 30  # files of a rank, bytes of a file
STATE, SLOTS = "state.safetensors", "slots-{:04d}.safetensors"
_REPORT = "rank-{:04d}.json"
_ROWS = "rows-{:04d}-{}.safetensors"


def write_report(subfolder: Path, rank: int, **report: Any) -> None:
    """Write the report of a rank atomically: rank 0 may be polling for it."""
    path = subfolder / _REPORT.format(rank)
    with explain_write_errors(path):
        path.with_suffix(".part").write_text(json.dumps(report, default=BaseModel.model_dump))
        os.replace(path.with_suffix(".part"), path)


def report_failure(subfolder: Path, rank: int, why: str) -> None:
    """Report that a rank failed, after deleting its files: the disk may be full, and the report needs space."""
    for path in [*subfolder.glob(_ROWS.format(rank, "*")), subfolder / SLOTS.format(rank)]:
        path.unlink(missing_ok=True)
    write_report(subfolder, rank, failed=why)


def read_reports(subfolder: Path, ranks: int) -> list[dict[str, Any]] | None:
    """The reports of all ranks, or None if one is still missing. Raises if a rank failed."""
    paths = [subfolder / _REPORT.format(rank) for rank in range(ranks)]
    found = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    for rank, report in enumerate(found):
        if report is not None and "failed" in report:
            raise ThermoclineError(f"rank {rank} stopped: {report['failed']}")
    return None if None in found else found  # type: ignore[return-value]


def collect_reports(subfolder: Path, ranks: int, **fields: Any) -> SaveEntry:
    """Merge the reports of all ranks into one save."""
    files: list[FileEntry] = []
    sections: list[Section] = []
    for rank, report in enumerate(read_reports(subfolder, ranks) or ()):
        files += [FileEntry(**each) for each in report["files"]]
        sections += [Section(**each) for each in report["sections"]]
        (subfolder / _REPORT.format(rank)).unlink()
    slots = {f"{subfolder.name}/{SLOTS.format(rank)}" for rank in range(ranks)}
    return SaveEntry(
        created=utc_now(), ranks=ranks, files=tuple(files), sections=tuple(sections), state=f"{subfolder.name}/{STATE}",
        slots=tuple(file.name for file in files if file.name in slots), **fields,
    )  # fmt: skip


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_sections(
    sections: Iterator[PendingSection], subfolder: Path, rank: int, total: int, pool: Executor, background: bool = False
) -> tuple[list[FileEntry], list[Section]]:
    """Write sections of about `total` bytes, several files at a time: hashing needs the CPU, writing the disk."""

    def write(number: int, group: list[PendingSection]) -> tuple[FileEntry, list[Section]]:
        path = subfolder / _ROWS.format(rank, f"{number:03d}")
        file = write_file(path, [section.group() for section in group], background)
        return file, [section.written(file.name) for section in group]

    groups = _by_file(sections, min(max(_MIN_BYTES, total // _FILES), _MAX_BYTES))
    files: list[FileEntry] = []
    written: list[Section] = []
    for done in [pool.submit(write, number, group) for number, group in enumerate(groups)]:
        file, its_sections = done.result()
        files.append(file)
        written += its_sections
    return files, written


def _by_file(sections: Iterator[PendingSection], max_bytes: int) -> Iterator[list[PendingSection]]:
    """Sections that share a file."""
    group: list[PendingSection] = []
    size = 0
    for section in sections:
        if group and size + section.bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(section)
        size += section.bytes
    if group:
        yield group


def write_tensors(tensors: Mapping[str, Tensor], path: Path, background: bool) -> FileEntry:
    """Write tensors that exist already."""
    groups = [TensorGroup([TensorInfo(name, each.dtype, tuple(each.shape))], [each].copy) for name, each in tensors.items()]
    return write_file(path, groups, background)
