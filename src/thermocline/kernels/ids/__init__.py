"""Map raw ids to rows (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from . import reference


def map_ids(fields_FM: Tensor, words: Tensor, counts: Tensor, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """Rows (int64) of the ids of all features, feature-major with features * batch + 1 offsets."""
    return reference.map_ids(fields_FM, words, counts, ids_N, offsets)
