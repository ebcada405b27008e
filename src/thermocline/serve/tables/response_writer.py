"""Rows of one feature, written right where an answer will be: in the bytes that a protocol sends.

For large answers that saves a copy, and for small ones all that lies between a request and its rows. It stands for one version
and one number of ids, and says so when another version is served: whoever asks then takes the way that all requests can take.
It keeps no version in memory: those who keep it may do so for longer than rows are served.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from thermocline.kernels.serve.cpu import Rows


class Filler:
    """Writes `count` rows to an address, and counts them in `tally_C`, as long as their version `is_served`."""

    def __init__(self, version: str, rows: Rows, count: int, tally_C: NDArray[np.int64], is_served: Callable[[], bool]) -> None:
        self.version, self.shape = version, (count, rows.dim)
        self._rows = weakref.ref(rows)  # which its version keeps
        self._count, self._tally_C, self._is_served = count, tally_C, is_served
        self._tally: int = tally_C.__array_interface__["data"][0]

    def is_served(self) -> bool:
        """Whether this version is served yet."""
        return self._rows() is not None and self._is_served()

    def fill(self, ids: int, out: int) -> bool:
        """Ids and rows by their addresses. False: another version is served, or not every row can be had."""
        rows = self._rows()
        return rows is not None and self._is_served() and rows.fill(ids, self._count, out, self._tally)
