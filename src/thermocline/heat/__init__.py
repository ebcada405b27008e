"""Heat: how often each row is looked up. Counted from logs, stored in files, merged, compared and shown.

Names are imported on first use, because counting brings Numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .curve import Curve
from .profile import HeatProfile, TableHeat, merge

if TYPE_CHECKING:
    from .log_files import ProfilingInterrupted, profile_files
    from .page import heat_page
    from .profiler import ProfilerSettings, profile_batches
    from .show import compare_profiles

__all__ = [
    "Curve",
    "HeatProfile",
    "ProfilerSettings",
    "ProfilingInterrupted",
    "TableHeat",
    "compare_profiles",
    "heat_page",
    "merge",
    "profile_batches",
    "profile_files",
]

_HOMES = {
    "ProfilerSettings": "profiler",
    "ProfilingInterrupted": "log_files",
    "compare_profiles": "show",
    "heat_page": "page",
    "profile_batches": "profiler",
    "profile_files": "log_files",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'thermocline.heat' has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
