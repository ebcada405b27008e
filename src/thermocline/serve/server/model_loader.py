"""Loads checkpoints as models over shards: the only module of the server that knows tables.

It imports torch and the tables when it loads, after the ports are open: a taken port is reported in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.checkpoint.format.manifest import NAME
from thermocline.errors import BadInput
from thermocline.serve.served_model import ServableModel

from .config import ServerLimits
from .metrics import ServerMetrics
from .model_repository import ModelRepository

if TYPE_CHECKING:
    from thermocline.serve.tables.row_split import TableSplit
    from thermocline.serve.tables.segments import ShardLayout


@dataclass(frozen=True)
class ShardConfig:
    """Number and device of shards, and how tables are split over them. Loads the models of a repository."""

    count: int = 4
    split: str = "hash"
    plan: Path | None = None
    heat: Path | None = None
    device: str = "cpu"

    def is_checkpoint(self, folder: Path) -> bool:
        """Whether a folder has a checkpoint's manifest."""
        return (folder / NAME).is_file()

    def load(self, name: str, version: str, folder: Path) -> ServableModel:
        """Tables of a checkpoint over shards: checksums verified, rows in place, kernels compiled and warm."""
        from thermocline.serve.tables.shard_group import ShardGroup  # deferred: imports torch

        return ShardGroup(folder, self.count, self.split, plan=self.plan, heat=self.heat, device=self.device, name=name)

    def companions(self, model: ServableModel) -> Sequence[ServableModel]:
        """The ranking model of a checkpoint that has one."""
        from thermocline.serve.ranking import companion_models  # deferred: imports torch

        return companion_models(model)

    def layout(self, folder: Path) -> ShardLayout:
        """Where every row would be, without loading it."""
        from thermocline.heat.profile import HeatProfile  # deferred: imports torch, as all below
        from thermocline.plan.model import Plan
        from thermocline.serve.tables.checkpoint_source import CheckpointSource
        from thermocline.serve.tables.segments import make_layout

        if not self.is_checkpoint(folder) and (inside := sorted({*folder.glob(f"*/{NAME}"), *folder.glob(f"*/*/{NAME}")})):
            folders = ", ".join(f"'{each.parent}'" for each in inside)
            raise BadInput(f"'{folder}' is a folder of checkpoints; inspect one of them: {folders}", path=folder)
        source = CheckpointSource(folder)
        plan = None if self.plan is None else Plan.load(self.plan)
        heat = None if self.heat is None else HeatProfile.load(self.heat)
        return make_layout(source.tables, source.splits(self.count, self.split, plan, heat), records=self.device == "cpu")


def make_repository(folder: Path, shards: ShardConfig, limits: ServerLimits) -> ModelRepository:
    """The model repository of a folder. Raises `BadInput` if the folder has no checkpoint."""
    repository = ModelRepository(folder, shards, limits, ServerMetrics())
    if not repository.names():
        way_out = "save one there with thermocline.save"
        raise BadInput(f"'{folder}' is neither a checkpoint nor a folder of checkpoints; {way_out}", path=folder)
    return repository


def describe(layout: ShardLayout) -> Mapping[str, Any]:
    """Shards and tables as numbers, for `serve inspect`."""
    tables: Sequence[Mapping[str, Any]] = [
        {
            "table": each.table.name,
            "rows": each.table.rows,
            "dim": each.table.dim,
            "features": list(each.table.features),
            "split": _split_words(each.split),
            "copied_rows": len(each.split.copied_H),
            "places_of_card": [each.split.places(shard) for shard in range(layout.shards)],
        }
        for each in layout.tables
    ]
    return {"cards": layout.shards, "bytes": layout.bytes, "bytes_of_card": list(layout.sizes_S), "tables": tables}


def _split_words(split: TableSplit) -> str:
    if split.scheme == "ranges":
        return "ranges of rows in order"
    return "blocks rotated by a hash" if split.rotations_B is None else "blocks rotated by heat"
