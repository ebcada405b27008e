"""Huge pages of served rows: the same bytes, and only where the system has them."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import thermocline
from support import mentions
from thermocline.serve import ShardGroup
from thermocline.serve.tables import huge_pages as pages
from thermocline.serve.tables.huge_pages import HUGE_PAGE, MAX_FAILURES, HugePageThread
from thermocline.serve.tables.segments import SharedSegment

ODD = 5 * HUGE_PAGE + 12_345


class FakeCollapse:
    """Records the pages that it was called for, and fails for given reasons."""

    def __init__(self, reasons: tuple[int, ...] = ()) -> None:
        self.places: list[int] = []
        self._reasons = list(reasons)

    def __call__(self, address: int, size: int) -> bool:
        assert size == HUGE_PAGE and address % HUGE_PAGE == 0
        self.places.append(address)
        reason = self._reasons.pop(0) if self._reasons else 0
        ctypes.set_errno(reason)
        return reason == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> FakeCollapse:
    return stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch, *reasons: int) -> FakeCollapse:
    asked = FakeCollapse(reasons)
    monkeypatch.setattr(pages, "collapse", asked)
    monkeypatch.setattr(pages, "are_enabled", lambda: True)
    monkeypatch.setattr(pages, "PAUSE", 0)
    return asked


def address(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])


def in_huge_pages(memory: np.ndarray) -> int:
    """Bytes of a mapping in huge pages."""
    begin = f"{address(memory):x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(begin))
    found = next(line for line in lines[first:] if line.startswith("ShmemPmdMapped"))
    return int(found.split()[1]) << 10


def test_memory_is_aligned_to_a_huge_page_and_shared_with_the_file() -> None:
    segment = SharedSegment(ODD)
    assert address(segment.memory) % HUGE_PAGE == 0 and len(segment.memory) == ODD
    segment.write(ODD - 3, np.array([1, 2, 3], np.uint8))
    segment.memory[7] = 9
    assert segment.memory[-3:].tolist() == [1, 2, 3] and os.pread(segment.descriptor, 1, 7) == b"\x09"


def test_memory_is_unmapped_with_its_last_view() -> None:
    segment = SharedSegment(ODD)
    at, view = address(segment.memory), segment.memory[HUGE_PAGE:]
    del segment
    view[0] = 1  # still mapped
    assert f"{at:x}-" in Path("/proc/self/maps").read_text()
    del view
    assert f"{at:x}-" not in Path("/proc/self/maps").read_text()


def test_a_failed_mapping_names_its_size() -> None:
    with pytest.raises(OSError, check=mentions("4,611,686,018,427,387,904")):
        pages.map_aligned(-1, (1 << 62) - HUGE_PAGE)


def test_every_whole_page_is_collapsed_once(asked: FakeCollapse) -> None:
    segments = [SharedSegment(ODD), SharedSegment(HUGE_PAGE - 1), SharedSegment(HUGE_PAGE)]
    HugePageThread([segment.memory for segment in segments])._thread.join()
    first, _, last = (address(segment.memory) for segment in segments)
    assert asked.places == [*range(first, first + 5 * HUGE_PAGE, HUGE_PAGE), last]


def test_the_thread_gives_up_after_consecutive_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = [errno.ENOMEM] * (MAX_FAILURES - 1) + [0] + [errno.EAGAIN] * MAX_FAILURES
    asked, segment = stand_in(monkeypatch, *reasons), SharedSegment(4 * MAX_FAILURES * HUGE_PAGE)
    HugePageThread([segment.memory])._thread.join()
    assert len(asked.places) == 2 * MAX_FAILURES


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_stop_ends_the_thread_before_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, segment = stand_in(monkeypatch), SharedSegment(ODD)
    began, seconds = threading.Event(), itertools.count()

    def first_page(address: int, size: int) -> bool:
        began.set()
        return asked(address, size)

    monkeypatch.setattr(pages, "collapse", first_page)
    monkeypatch.setattr(pages, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))  # each page takes a second
    monkeypatch.setattr(pages, "PAUSE", 1 << 20)  # days
    thread = HugePageThread([segment.memory])
    began.wait()
    thread.stop()
    assert len(asked.places) == 1


SETTINGS = [
    (HUGE_PAGE, "always [madvise] never", True),
    (HUGE_PAGE, "always madvise [never]", False),
    (512 << 20, "[always] madvise never", False),
    (None, "", False),
]


@pytest.mark.parametrize("size, setting, wanted", SETTINGS)
def test_the_systems_setting_is_respected(
    size: int | None, setting: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_SETTING", tmp_path)
    if size is not None:
        (tmp_path / "hpage_pmd_size").write_text(f"{size}\n")
        (tmp_path / "enabled").write_text(setting)
    assert pages.are_enabled() is wanted


def test_bytes_stay_the_same_in_huge_pages() -> None:
    segment, expected = SharedSegment(ODD), np.random.default_rng(1).integers(0, 256, ODD, np.uint8)
    segment.write(0, expected)
    if not pages.are_enabled() or not pages.collapse(address(segment.memory), HUGE_PAGE):
        pytest.skip("this system has no huge pages")
    HugePageThread([segment.memory])._thread.join()
    assert np.array_equal(segment.memory, expected)
    assert in_huge_pages(segment.memory) >= HUGE_PAGE


def test_a_group_moves_every_version_into_huge_pages(asked: FakeCollapse, tmp_path: Path) -> None:
    module = torch.nn.ModuleDict({"t": thermocline.Embedding(40_009, 64, rows=thermocline.RowConfig("fp32", cache=0.0))})
    thermocline.save(module, tmp_path)
    with ShardGroup(tmp_path, shards=2) as group:
        group._huge_pages._thread.join()
        assert len(asked.places) == 2 * 2  # each shard has half of 9.8 MiB
        group.load(tmp_path)
        group._huge_pages._thread.join()
        assert len(asked.places) == 2 * 2 * 2
    assert not group._huge_pages._thread.is_alive()
