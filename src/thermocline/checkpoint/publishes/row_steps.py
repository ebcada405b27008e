"""Small changes of rows, in a few bytes each: what a byte budget sends in place of whole rows.

Training moves the rows of a model in few directions: one of 16 has most of a change. So changes are turned to the directions in
which rows moved, where most coefficients round to zero, and compressed (`bz2`: 10% smaller than `zlib`). Steps are finer for
rows that are looked up more. Both sides add the same numbers to the same row as stored, in the same order, and round it to its
format. The log of the folder has the row whole.
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.kernels import dequantize_rows, quantize_rows

from .row_delta import RowDelta

FORMATS = (F.FP32, F.FP16, F.BF16, F.FP8, F.INT8, F.INT8_AFFINE)  # int4 rows are small, and coarser than a step
_UNIT = np.float32(127.0)  # of a direction
MOST_CODES = 1 << 26  # of a publish
STEP_BYTES = 9  # of a step beside its codes: gap and exponent
_LARGEST_STEP = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class RowSteps:
    """Changes of rows of tables with the same columns.

    A row changes by the sum of its codes times the directions / 127, times its step, which is `step * 2**exponent`.
    """

    tables: Sequence[tuple[str, int]]  # names, and how many rows of each follow
    rows_K: NDArray[np.int64]  # ascending within a table
    exponents_K: NDArray[np.int8]
    codes_DK: NDArray[np.int8]
    directions_DD: NDArray[np.int8]
    step: float

    @property
    def size(self) -> int:
        """The codes, and as many bytes as rows and directions have."""
        return step_codes(len(self.rows_K), len(self.codes_DK))

    @cached_property
    def pieces(self) -> list[bytes]:
        """Rows, exponents and codes, compressed, and the directions. The high bytes of gaps between rows are mostly zeros."""
        gaps_8K = np.diff(self.rows_K, prepend=0).view(np.uint8).reshape(-1, 8).T
        pieces = gaps_8K, self.exponents_K, self.codes_DK.T, self.directions_DD
        return [bz2.compress(np.ascontiguousarray(piece).tobytes()) for piece in pieces]

    @classmethod
    def decode(cls, tables: Sequence[tuple[str, int]], dim: int, step: float, pieces: Sequence[bytes]) -> RowSteps:
        """The inverse of `pieces`. Raises ValueError if the pieces are damaged."""
        rows = sum(count for _, count in tables)
        if min((count for _, count in tables), default=0) < 0 or not 0 < dim <= F.MAX_DIM or not 0 < step <= _LARGEST_STEP:
            raise ValueError(f"steps of {rows} rows of {dim} columns by {step}")
        sizes = 8 * rows, rows, dim * rows, dim * dim
        gaps, exponents_K, codes, directions = (_inflate(*each) for each in zip(pieces, sizes, strict=True))
        rows_K = np.cumsum(np.ascontiguousarray(gaps.reshape(8, rows).T).view(np.int64).reshape(-1))
        return cls(tables, rows_K, exponents_K, codes.reshape(rows, dim).T, directions.reshape(dim, dim), step)

    def parts(self) -> Iterator[tuple[str, slice]]:
        """Each table, and where its rows are."""
        at = 0
        for name, count in self.tables:
            yield name, slice(at, at + count)
            at += count

    def applied(self, base: Mapping[str, RowDelta], formats: Mapping[str, int]) -> dict[str, RowDelta]:
        """The rows of each table as stored, after the change. `base`: the same rows before."""
        changes_KD, dim, found = self.changes(), len(self.codes_DK), dict[str, RowDelta]()
        for name, part in self.parts():
            before, format = base[name], formats[name]
            if not len(before.codes_KB):
                found[name] = before
                continue
            values_KD = dequantize_rows(torch.from_numpy(before.codes_KB), torch.from_numpy(before.meta_KW), format, dim)
            codes_KB, meta_KW = quantize_rows(values_KD + torch.from_numpy(changes_KD[part]), format)
            found[name] = RowDelta(self.rows_K[part], codes_KB.numpy(), meta_KW.numpy())
        return found

    def changes(self) -> NDArray[np.float32]:
        """The change of each row: one product after another, as the bits of a matrix product differ between machines."""
        step_K = np.ldexp(np.float32(self.step) / _UNIT, self.exponents_K.astype(np.int32))
        found_KD = np.zeros((len(self.rows_K), len(self.codes_DK)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for codes_K, direction_D in zip(self.codes_DK, self.directions_DD, strict=True):
                moved_M = np.flatnonzero(codes_K)
                found_KD[moved_M] += (codes_K[moved_M] * step_K[moved_M])[:, None] * direction_D.astype(np.float32)
        return found_KD


def step_codes(rows: int, dim: int) -> int:
    """The bytes of steps before they are compressed."""
    return rows * (dim + STEP_BYTES) + dim * dim


def directions_of(changes_KD: NDArray[np.float32]) -> NDArray[np.int8]:
    """The directions of changes, the one that has most of them first."""
    _, vectors_DD = np.linalg.eigh(changes_KD.T @ changes_KD)
    found_DD: NDArray[np.int8] = np.rint(vectors_DD.T[::-1] * _UNIT).astype(np.int8)
    return found_DD


def coefficients(changes_KD: NDArray[np.float32], directions_DD: NDArray[np.int8]) -> NDArray[np.float32]:
    """How far each change goes in each direction, [D, K]."""
    found_DK: NDArray[np.float32] = np.linalg.lstsq(directions_DD.T / _UNIT, changes_KD.T, rcond=None)[0]
    return found_DK


def _inflate(data: bytes, size: int) -> NDArray[np.int8]:
    inflating = bz2.BZ2Decompressor()
    try:
        found = inflating.decompress(data, size + 1)
    except OSError as error:
        raise ValueError(f"steps are damaged: {error}") from None
    if len(found) != size or not inflating.eof:
        raise ValueError(f"steps have {len(found)} bytes, not {size}")
    return np.frombuffer(found, np.int8)
