"""One checkpoint folder that opens on any number of ranks. `docs/checkpoints.md` describes the format.

Names are imported at first use: serving reads manifests without loading training code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline._lazy import lazy_exports

if TYPE_CHECKING:
    from .background_save import BackgroundSave, save_async
    from .compaction import compact
    from .comparison import Diff, TableDiff, diff
    from .conversion import convert
    from .interop import export_tables, import_tables
    from .loading import load, load_into, resume
    from .reader import Checkpoint
    from .row_files import export_rows, import_rows
    from .save_job import save

__all__ = [
    "BackgroundSave", "Checkpoint", "Diff", "TableDiff", "compact", "convert", "diff", "export_rows", "export_tables",
    "import_rows", "import_tables", "load", "load_into", "resume", "save", "save_async",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
