"""Changed rows of one table, as stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowDelta:
    """Changed rows of one table: ascending numbers, and their bytes as stored."""

    rows_K: NDArray[np.int64]
    codes_KB: NDArray[np.uint8]
    meta_KW: NDArray[np.int32]

    @property
    def bytes(self) -> int:
        return self.rows_K.nbytes + self.codes_KB.nbytes + self.meta_KW.nbytes


def are_rows(rows_K: NDArray[np.int64], rows: int) -> bool:
    """Whether numbers are rows of a table, ascending and each once. Differences would wrap around."""
    return not len(rows_K) or bool(rows_K[0] >= 0 and rows_K[-1] < rows and (rows_K[1:] > rows_K[:-1]).all())


def merge_deltas(deltas: Sequence[RowDelta]) -> RowDelta:
    """Consecutive deltas as one. The last value of a row wins."""
    if len(deltas) == 1:
        return deltas[0]
    rows_K = np.concatenate([delta.rows_K for delta in deltas])
    _, last_K = np.unique(rows_K[::-1], return_index=True)  # the first occurrence from the end
    at_K = len(rows_K) - 1 - last_K
    codes_KB, meta_KW = (np.concatenate(each) for each in zip(*((d.codes_KB, d.meta_KW) for d in deltas), strict=True))
    return RowDelta(rows_K[at_K], codes_KB[at_K], meta_KW[at_K])
