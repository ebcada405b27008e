"""Fields of parts and tables in a row exchange.

FIELDS of a part (the rows of one table in one tier): bytes and meta words of a row; offsets of codes (bytes), meta (words) and
rows of the part in the arena of this rank; columns and format; bytes of a gradient's column in a message: 4 (fp32), 2 (bf16),
or 1 (int8 as in stored rows, rounded to nearest: codes, then the scale; NaN in place of numbers that are not finite).

MAP_FIELDS of a table: first global row and end; the rank that owns the whole table, or -1; rows of tier 3; which rows have
copies, and which of those are on every rank (NONE, SOME by a bitmap, ALL); the two bitmaps, words and counts; rotations of
blocks, and bytes of one; the bits of its rows of tier 3; the numbers of its parts of tiers 1, 2 and 3.

Routes of the rows of a part: none; to the owner; to the rank of this node with the owner's local rank; or to the rank of the
owner's node with this rank's local rank, where the ranks of a group are counted by node.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Numbers = TypeVar("Numbers", int, Tensor, NDArray[np.int64])

FIELDS = ROW_BYTES, WORDS, CODES, META, ROW, DIM, FORMAT, GRADIENT = tuple(range(8))
MAP = FIRST, END, OWNER, COLD, COPIED, EVERYWHERE, WORDS2, BELOW2, WORDS1, BELOW1, TURNS, TURN, BITS, PART = tuple(range(14))
MAP_FIELDS = len(MAP) + 2
NONE, SOME, ALL = range(3)
COLUMN_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # of gradients and sums
NOWHERE, STRAIGHT, SAME_NODE, OTHER_NODES = range(4)


def vector_bytes(dim: Numbers, each: Numbers) -> Numbers:
    """Bytes of a gradient or sum in a message, given the bytes of its columns."""
    return dim * each + 4 * (each == 1)  # type: ignore[no-any-return]
