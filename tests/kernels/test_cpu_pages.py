"""Memory in large pages is ordinary memory."""

from __future__ import annotations

import pytest
import torch

from thermocline.kernels.cpu.huge_pages import huge_page_zeros


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("count", [0, 1, 1000, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32], ids=str)
def test_it_holds_zeros_of_the_asked_type(count: int, dtype: torch.dtype) -> None:
    made = huge_page_zeros(count, dtype)
    assert made.shape == (count,) and made.dtype == dtype and not made.any()
