"""How hot each row is: counted, kept in files, merged, compared and shown.

Profiles are values of numpy; what counts logs is loaded when it is first used, because it brings Numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .curve import Curve
from .profile import HeatProfile, TableHeat, merge

if TYPE_CHECKING:
    from .profile_files import profile_files
    from .profiler import Settings, profile_batches

__all__ = ["Curve", "HeatProfile", "Settings", "TableHeat", "merge", "profile_batches", "profile_files"]

_LATER = {"Settings": "profiler", "profile_batches": "profiler", "profile_files": "files"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module 'thermocline.heat' has no attribute '{name}'")
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
