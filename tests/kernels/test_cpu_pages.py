"""Memory in large pages is ordinary memory."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from thermocline.kernels.cpu.huge_pages import huge_page_zeros


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("count", [0, 1, 1000, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32], ids=str)
def test_it_holds_zeros_of_the_asked_type(count: int, dtype: torch.dtype) -> None:
    made = huge_page_zeros(count, dtype)
    assert made.shape == (count,) and made.dtype == dtype and not made.any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_when_it_is_written() -> None:
    before = _resident()
    made = huge_page_zeros(1 << 29, torch.uint8)
    made[1 << 28] = 1
    assert not made[:1000].any() and _resident() - before < 1 << 26
    made[: 1 << 27] = 1
    assert _resident() - before > 1 << 26


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for huge pages")
def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    assert not huge_page_zeros(3_000_001, torch.int32).any()
