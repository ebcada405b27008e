"""Look up rows of tables that are split over cards (see `fields.py` for where rows lie, `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import serving
from .fields import Bags, Placed


def gather_pool(placed: Placed, bags: Bags, out: Tensor) -> Tensor:
    """Look up and pool, every feature in one launch; writes `out`, and returns how many lookups each card answered.

    Shapes are the caller's promise (`thermocline.serve` makes them); rows are checked here. The last of the counts is the
    overlay's. A GPU counts nothing, and returns an empty tensor.
    """
    tally_C: Tensor = serving("serve", placed.fields_FN).gather_pool(placed, bags, out)
    return tally_C
