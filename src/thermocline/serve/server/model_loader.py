"""What the server loads: tables of checkpoints, over cards. The only module of the front that knows them; and it imports them
when it loads, after the ports are open: a port that is taken is known in a tenth of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.checkpoint.format.manifest import NAME
from thermocline.errors import BadInput

from .limits import Limits
from .metrics import Metrics
from .model_repository import Repository, check_folder
from .served_model import Model

if TYPE_CHECKING:
    from thermocline.serve.tables.segments import Arrangement


@dataclass(frozen=True)
class Cards:
    """How many cards there are, of which kind, and how tables are split over them."""

    count: int = 4
    split: str = "hash"
    plan: Path | None = None
    heat: Path | None = None
    device: str = "cpu"

    def load(self, name: str, version: str, folder: Path) -> Model:
        """A checkpoint's tables on the cards: checksums verified, rows in place, kernels compiled and warm."""
        from thermocline.serve.tables.shard_group import CardGroup

        return CardGroup(folder, self.count, self.split, plan=self.plan, heat=self.heat, device=self.device, name=name)

    def arrangement(self, folder: Path) -> Arrangement:
        """Where every row would lie."""
        from thermocline.heat.profile import HeatProfile
        from thermocline.plan.model import Plan
        from thermocline.serve.tables.checkpoint_source import Source
        from thermocline.serve.tables.segments import arrange

        if not is_checkpoint(folder) and (inside := sorted({*folder.glob(f"*/{NAME}"), *folder.glob(f"*/*/{NAME}")})):
            folders = ", ".join(f"'{each.parent}'" for each in inside)
            raise BadInput(f"'{folder}' is a folder of checkpoints; look into one of them: {folders}")
        source = Source(folder)
        plan = None if self.plan is None else Plan.load(self.plan)
        heat = None if self.heat is None else HeatProfile.load(self.heat)
        return arrange(source.tables, source.splits(self.count, self.split, plan, heat), records=self.device == "cpu")


def is_checkpoint(folder: Path) -> bool:
    return (folder / NAME).is_file()


def make_repository(folder: Path, cards: Cards, limits: Limits) -> Repository:
    """The repository of a folder, which must have something to serve."""
    repository = Repository(folder, cards.load, is_checkpoint, limits, Metrics())
    check_folder(folder, repository)
    return repository


def describe(arrangement: Arrangement) -> Mapping[str, Any]:
    """Cards and tables in numbers: what `serve inspect` prints."""
    tables: Sequence[Mapping[str, Any]] = [
        {
            "table": shelf.table.name,
            "rows": shelf.table.rows,
            "dim": shelf.table.dim,
            "features": list(shelf.table.features),
            "split": _words(shelf.split.way, shelf.split.turns_B is not None),
            "copied_rows": len(shelf.split.copied_H),
            "places_of_card": [shelf.split.places(card) for card in range(arrangement.cards)],
        }
        for shelf in arrangement.shelves
    ]
    return {
        "cards": arrangement.cards,
        "bytes": arrangement.bytes,
        "bytes_of_card": list(arrangement.sizes_C),
        "tables": tables,
    }


def _words(way: str, chosen: bool) -> str:
    """A split in words."""
    if way == "ranges":
        return "rows in order, a range on each card"
    return "runs of rows, turned as heat asks for" if chosen else "runs of rows, turned by a hash"
