"""Look up rows of tables that are split over shards (layout: `fields.py`, definition: `reference.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.kernels.dispatch import implementation_for

from .fields import ServedBags, ShardedTables


def gather_pool(placed: ShardedTables, bags: ServedBags, out: Tensor, fetch: Callable[[Any], object] | None = None) -> Tensor:
    """Look up and pool the bags of all features in one launch; checks rows, not shapes.

    Args:
        fetch: CPU only; replaces the addresses of rows in other processes. Its result is kept alive until the rows are read.

    Returns:
        Lookups of each shard and of the overlay; empty on a GPU.
    """
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise BadInput(f"answers are written to contiguous fp32, not {out.dtype}", parameter="out", value=out.dtype)
    further = () if fetch is None else (fetch,)
    tally_C: Tensor = implementation_for("serve", placed.fields_FN).gather_pool(placed, bags, out, *further)
    return tally_C
