"""`thermocline.resume`: go on where the last complete checkpoint is, or begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from .format.dense_state import Optimizers
from .format.folder import last
from .load import load
from .pending_saves import wait_for_saves
from .ranks import Team


def resume(folder: str | Path, model: nn.Module, *, optimizers: Optimizers = None) -> dict[str, Any] | None:
    """Fill a model and its optimizers from a folder, if it holds a checkpoint: the `progress` that was saved, or None.

    Whatever number of ranks saved it: build the model for the ranks there are, and resume. All ranks call this together.
    """
    wait_for_saves()
    path, team = Path(folder), Team.of(model)
    found = team.do(lambda: last(path) if team.rank == 0 else None)[0]
    if found is None:
        return None
    load(path, into=model, optimizers=optimizers)
    return dict(found.progress)
