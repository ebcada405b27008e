"""How hot each row is: counted, kept in files, merged, compared and shown."""

from __future__ import annotations

from .curve import Curve
from .profile import HeatProfile, TableHeat, merge

__all__ = ["Curve", "HeatProfile", "TableHeat", "merge"]
