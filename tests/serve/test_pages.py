"""Large pages under rows that are served: the same bytes, nothing kept, and no more than the system wants."""

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
from thermocline.serve import CardGroup
from thermocline.serve.tables import huge_pages as pages
from thermocline.serve.tables.huge_pages import GIVE_UP, LARGE, Enlarging
from thermocline.serve.tables.segments import Segment

ODD = 5 * LARGE + 12_345


class Asked:
    """Stands for the system: notes which pages it was asked for, and says no for a reason, or yes."""

    def __init__(self, reasons: tuple[int, ...] = ()) -> None:
        self.places: list[int] = []
        self._reasons = list(reasons)

    def __call__(self, address: int, size: int) -> bool:
        assert size == LARGE and address % LARGE == 0
        self.places.append(address)
        reason = self._reasons.pop(0) if self._reasons else 0
        ctypes.set_errno(reason)
        return reason == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch, *reasons: int) -> Asked:
    asked = Asked(reasons)
    monkeypatch.setattr(pages, "collapse", asked)
    monkeypatch.setattr(pages, "are_wanted", lambda: True)
    monkeypatch.setattr(pages, "PAUSE", 0)
    return asked


def address(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])


def in_large_pages(memory: np.ndarray) -> int:
    """Bytes of a mapping that are."""
    begin = f"{address(memory):x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(begin))
    found = next(line for line in lines[first:] if line.startswith("ShmemPmdMapped"))
    return int(found.split()[1]) << 10


def test_memory_begins_where_a_large_page_may_and_is_the_files() -> None:
    segment = Segment(ODD)
    assert address(segment.memory) % LARGE == 0 and len(segment.memory) == ODD
    segment.write(ODD - 3, np.array([1, 2, 3], np.uint8))
    segment.memory[7] = 9
    assert segment.memory[-3:].tolist() == [1, 2, 3] and os.pread(segment.descriptor, 1, 7) == b"\x09"


def test_memory_is_let_go_with_its_last_view() -> None:
    segment = Segment(ODD)
    at, view = address(segment.memory), segment.memory[LARGE:]
    del segment
    view[0] = 1  # yet there
    assert f"{at:x}-" in Path("/proc/self/maps").read_text()
    del view
    assert f"{at:x}-" not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_says_how_much_it_was() -> None:
    with pytest.raises(OSError, match=r"4,611,686,018,427,387,904 bytes"):
        pages.mapped(-1, (1 << 62) - LARGE)


def test_every_whole_page_is_asked_for_once(asked: Asked) -> None:
    segments = [Segment(ODD), Segment(LARGE - 1), Segment(LARGE)]
    Enlarging([segment.memory for segment in segments]).wait()
    first, _, last = (address(segment.memory) for segment in segments)
    assert asked.places == [*range(first, first + 5 * LARGE, LARGE), last]


def test_memory_that_is_let_go_is_not_kept_or_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    segments = [Segment(ODD), Segment(ODD)]
    at = [address(segment.memory) for segment in segments]

    began = threading.Event()

    def let_go(address: int, size: int) -> bool:
        began.wait()
        segments.clear()  # while its first page is worked on
        return asked(address, size)

    monkeypatch.setattr(pages, "collapse", let_go)
    enlarging = Enlarging([segment.memory for segment in segments])
    began.set()
    enlarging.wait()
    assert asked.places == at[:1]
    maps = Path("/proc/self/maps").read_text()
    assert not any(f"{each:x}-" in maps for each in at)


def test_a_system_that_does_not_know_how_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, segments = stand_in(monkeypatch, errno.EINVAL), [Segment(ODD), Segment(ODD)]
    Enlarging([segment.memory for segment in segments]).wait()
    assert len(asked.places) == 1


def test_a_system_without_room_is_left_alone_but_not_at_the_first_no(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = [errno.ENOMEM] * (GIVE_UP - 1) + [0] + [errno.EAGAIN] * GIVE_UP
    asked, segment = stand_in(monkeypatch, *reasons), Segment(4 * GIVE_UP * LARGE)
    Enlarging([segment.memory]).wait()
    assert len(asked.places) == 2 * GIVE_UP


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_told_to_stop_it_asks_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, segment = stand_in(monkeypatch), Segment(ODD)
    began, seconds = threading.Event(), itertools.count()

    def first_page(address: int, size: int) -> bool:
        began.set()
        return asked(address, size)

    monkeypatch.setattr(pages, "collapse", first_page)
    monkeypatch.setattr(pages, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))  # each page takes a second
    monkeypatch.setattr(pages, "PAUSE", 1 << 20)  # days; a wait for years is more than threads can be told
    enlarging = Enlarging([segment.memory])
    began.wait()
    enlarging.stop()
    assert len(asked.places) == 1


SETTINGS = [
    (LARGE, "always [madvise] never", True),
    (LARGE, "always madvise [never]", False),
    (512 << 20, "[always] madvise never", False),
    (None, "", False),
]


@pytest.mark.parametrize("size, setting, wanted", SETTINGS)
def test_the_systems_own_setting_counts(
    size: int | None, setting: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_SETTING", tmp_path)
    if size is not None:
        (tmp_path / "hpage_pmd_size").write_text(f"{size}\n")
        (tmp_path / "enabled").write_text(setting)
    assert pages.are_wanted() is wanted


def test_bytes_stay_the_same_in_large_pages() -> None:
    segment, expected = Segment(ODD), np.random.default_rng(1).integers(0, 256, ODD, np.uint8)
    segment.write(0, expected)
    if not pages.are_wanted() or not pages.collapse(address(segment.memory), LARGE):
        pytest.skip("this system gives no large pages")
    Enlarging([segment.memory]).wait()
    assert np.array_equal(segment.memory, expected)
    assert in_large_pages(segment.memory) >= LARGE


def test_a_group_puts_what_it_serves_into_large_pages_and_a_newer_version_too(asked: Asked, tmp_path: Path) -> None:
    module = torch.nn.ModuleDict({"t": thermocline.Embedding(40_009, 64, rows=thermocline.RowConfig("fp32", cache=0.0))})
    thermocline.save(module, tmp_path)
    with CardGroup(tmp_path, cards=2) as group:
        group._enlarging.wait()
        assert len(asked.places) == 2 * 2  # each card has half of 9.8 MiB
        group.load(tmp_path)
        group._enlarging.wait()
        assert len(asked.places) == 2 * 2 * 2
    assert not group._enlarging._thread.is_alive()
