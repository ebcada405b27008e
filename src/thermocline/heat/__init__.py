"""Heat: how often each row is looked up. Counted from logs, stored in files, merged, compared and shown.

Names are imported on first use, because counting brings Numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline._lazy import lazy_exports

if TYPE_CHECKING:
    from .curve import Curve
    from .log_files import ProfilingInterrupted, profile_files
    from .page import heat_page
    from .profile import HeatProfile, TableHeat, merge
    from .profiler import ProfilerSettings, profile_batches
    from .show import compare_profiles

__all__ = [
    "Curve", "HeatProfile", "ProfilerSettings", "ProfilingInterrupted", "TableHeat", "compare_profiles", "heat_page", "merge",
    "profile_batches", "profile_files",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
