"""The kept ids of a pruned table, in the smaller of two forms.

    form      bytes                                 finding the row of an id
    sorted    8 per id                              binary search
    bitmap    1.06 bits per id in the range         bit of the id; ones before it, from a running count and at most 8 words

The row of an id is its rank among the kept ids, smallest first, so no row number is stored. The ids alone decide the form, so
equal sets have equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput, FormatError
from thermocline.kernels.ids import bitmap
from thermocline.kernels.ids.fields import BLOCK_WORDS

FORMS = ("sorted", "bitmap")
_BLOCK_BYTES = 8 * BLOCK_WORDS + 4
_MOST = 1 << 31  # ids in a bitmap: its running counts are 32-bit


@dataclass(frozen=True, eq=False)
class KeptIds:
    """A set of ids. `words`: the sorted ids, or bits from id `low` to id `high` in whole blocks."""

    form: str
    words: Tensor  # int64
    count: int
    low: int
    high: int

    @classmethod
    def of(cls, ids: Tensor | NDArray[Any] | Iterable[int]) -> KeptIds:
        """From ids in any order, each once."""
        ids_K = _sorted(ids)
        count = len(ids_K)
        low, high = (int(ids_K[0]), int(ids_K[-1])) if count else (0, -1)
        blocks = -(-(high - low + 1) // bitmap.BLOCK_BITS)
        if count < _MOST and blocks * _BLOCK_BYTES < 8 * count:
            return cls("bitmap", torch.from_numpy(bitmap.pack(ids_K - low, high - low + 1)), count, low, high)
        return cls("sorted", torch.from_numpy(ids_K), count, low, high)

    @property
    def ids(self) -> Tensor:
        """The ids in the order of their rows."""
        if self.form == "sorted":
            return self.words
        return torch.from_numpy(bitmap.unpack(self.words.numpy()) + self.low)

    @cached_property
    def block_counts(self) -> Tensor:
        """The kept ids before each block of a bitmap; empty for sorted ids."""
        if self.form == "sorted":
            return torch.empty(0, dtype=torch.int32)
        return torch.from_numpy(bitmap.block_counts(self.words.numpy()))

    @property
    def bytes(self) -> int:
        """Bytes with the running counts."""
        return 8 * len(self.words) + (4 * (len(self.words) // BLOCK_WORDS) if self.form == "bitmap" else 0)

    @cached_property
    def sha256(self) -> str:
        """The sha256 of form number, count, low, high and words, all as little-endian int64: equal for equal sets."""
        head = np.array([FORMS.index(self.form), self.count, self.low, self.high], "<i8")
        return hashlib.sha256(head.tobytes() + self.words.numpy().astype("<i8", copy=False).tobytes()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"form": self.form, "count": self.count, "low": self.low, "high": self.high, "sha256": self.sha256}

    @classmethod
    def from_json(cls, json: dict[str, Any], words: Tensor) -> KeptIds:
        """Restores the result of `to_json` with its array."""
        if json.get("form") not in FORMS:
            message = f"kept ids are in the form {json.get('form')!r}; this version reads {' and '.join(FORMS)}"
            raise FormatError(message, parameter="form")
        if words.dtype != torch.int64 or words.dim() != 1:
            raise FormatError(f"kept ids are {words.dim()}-D {words.dtype}; use flat int64", parameter="kept")
        kept = cls(json["form"], words.detach().cpu().contiguous(), json["count"], json["low"], json["high"])
        if kept.sha256 != json["sha256"]:
            message = f"kept ids have the sha256 {kept.sha256[:12]}, not {json['sha256'][:12]}: damaged, or of another map"
            raise FormatError(message, parameter="sha256")
        if not kept._fits():
            message = f"{kept.count} kept ids from {kept.low} to {kept.high} do not fit their {len(words)} words"
            raise FormatError(message, parameter="kept")
        return kept

    def _fits(self) -> bool:
        """Whether the words hold as many ids as `count`, from `low` to `high`, as kernels rely on."""
        words, span = self.words.numpy(), self.high - self.low + 1
        if self.form == "sorted":
            ends = (words[0], words[-1]) if len(words) else (0, -1)
            return len(words) == self.count and ends == (self.low, self.high) and bool((words[1:] > words[:-1]).all())
        if not 0 < self.count <= span or len(words) != -(-span // bitmap.BLOCK_BITS) * BLOCK_WORDS or self.count >= _MOST:
            return False
        ids_K = bitmap.unpack(words)
        return len(ids_K) == self.count and (ids_K[0], ids_K[-1]) == (0, span - 1)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, KeptIds) and self.count == other.count and self.sha256 == other.sha256)

    def __hash__(self) -> int:
        return hash((self.count, self.low, self.high))


def _sorted(ids: Tensor | NDArray[Any] | Iterable[int]) -> NDArray[np.int64]:
    """The ids as a new sorted array."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    try:  # numpy's own conversion takes 1.5 for 1
        given = ids if isinstance(ids, np.ndarray) else np.fromiter(map(index, ids), dtype=np.int64)
    except (TypeError, OverflowError) as error:
        raise BadInput(f"kept ids are 64-bit integers, -2^63 to 2^63 - 1 ({error})", parameter="kept") from None
    if given.dtype.kind not in "iu" or given.ndim != 1 or given.dtype == np.uint64:
        message = f"kept ids are {given.ndim}-D {given.dtype}; use a flat list of int64, uint64 ids as .view('int64')"
        raise BadInput(message, parameter="kept", value=given.dtype)
    ids_K = np.sort(given.astype(np.int64))
    twice_K = ids_K[1:] == ids_K[:-1]
    if twice_K.any():
        duplicate = int(ids_K[int(twice_K.argmax())])
        raise BadInput(f"id {duplicate} is kept twice; use numpy.unique", parameter="kept", value=duplicate)
    return ids_K
