"""Map raw ids to rows (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from thermocline.kernels.checks import check_bags
from thermocline.kernels.dispatch import implementation_for


def map_ids(fields_FM: Tensor, words: Tensor, counts: Tensor, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """Rows (int64) of the ids of all features, feature-major with features * batch + 1 offsets."""
    check_bags(fields_FM.shape[0], fields_FM.device, ids_N, offsets)
    rows_N: Tensor = implementation_for("ids", fields_FM).map_ids(fields_FM, words, counts, ids_N, offsets)
    return rows_N
