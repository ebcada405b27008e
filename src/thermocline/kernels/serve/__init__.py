"""Look up rows of tables that are split over cards (see `fields.py` for where rows lie, `reference.py` for the definition)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from thermocline.kernels.dispatch import implementation_for

from .fields import Bags, Placed


def gather_pool(placed: Placed, bags: Bags, out: Tensor, fetch: Callable[[Any], object] | None = None) -> Tensor:
    """Look up and pool, every feature in one launch; writes `out`, and returns how many lookups each card answered.

    Shapes are the caller's promise (`thermocline.serve` makes them); rows are checked here. The last of the counts is the
    overlay's. A GPU counts nothing, and returns an empty tensor. `fetch`, on a CPU: takes the addresses of all rows and
    replaces those that are not of this process; what it returns is kept until they are read.
    """
    if fetch is not None:
        assert placed.fields_FN.device.type == "cpu"
        fetched_C: Tensor = implementation_for("serve", placed.fields_FN).gather_pool(placed, bags, out, fetch)
        return fetched_C
    tally_C: Tensor = implementation_for("serve", placed.fields_FN).gather_pool(placed, bags, out)
    return tally_C
