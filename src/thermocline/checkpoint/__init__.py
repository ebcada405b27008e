"""One checkpoint folder that opens on any number of ranks. `docs/checkpoints.md` describes the format.

Names are imported at first use: serving reads manifests without loading training code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .background_save import BackgroundSave, save_async
    from .compaction import compact
    from .comparison import Diff, TableDiff, diff
    from .conversion import convert
    from .interop import export_tables, import_tables
    from .loading import load, load_into, resume
    from .reader import Checkpoint
    from .save_job import save

_MODULES = {
    "background_save": ["BackgroundSave", "save_async"],
    "compaction": ["compact"],
    "comparison": ["Diff", "TableDiff", "diff"],
    "conversion": ["convert"],
    "interop": ["export_tables", "import_tables"],
    "loading": ["load", "load_into", "resume"],
    "reader": ["Checkpoint"],
    "save_job": ["save"],
}
__all__ = [
    "BackgroundSave",
    "Checkpoint",
    "Diff",
    "TableDiff",
    "compact",
    "convert",
    "diff",
    "export_tables",
    "import_tables",
    "load",
    "load_into",
    "resume",
    "save",
    "save_async",
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
