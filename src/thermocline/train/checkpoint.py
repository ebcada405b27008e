"""The folder of a run: a checkpoint as `thermocline.save` writes it; its progress is the settings of the run and where it is.

So whatever opens checkpoints opens it: `thermocline checkpoint inspect`, `serve`, `load`. A run is resumed from the last
complete save, whatever moment the one before died in, and repeating the steps since gives the same numbers; on another device
or another number of cards too, where sums are added in another order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thermocline.checkpoint.format.folder import last
from thermocline.checkpoint.format.module_entries import find
from thermocline.checkpoint.resume import resume
from thermocline.checkpoint.save import save
from thermocline.errors import BadInput, FormatError

_OLD = "train.json"  # of runs before there was one format for all
_ANY = ("device", "residency")  # settings that a run may be resumed with others of
Progress = dict[str, Any]


class Folder:
    """Saves and loads a model, its optimizers and the progress of a run with these settings."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings, default=str))
        self._model, self._optimizers = model, optimizers
        find(model)  # refuses a model of plain tables before it is trained

    def save(self, progress: Progress) -> None:
        save(self._model, self.path, optimizers=self._optimizers, progress={"settings": self.settings, "run": progress})

    def load(self) -> Progress | None:
        """Put everything back and return the progress; None if there is nothing yet. All ranks call this together."""
        if (self.path / _OLD).exists():
            raise FormatError(
                f"'{self.path}' holds a run in the format of an older thermocline ({_OLD}), which is not read any more; finish "
                "it with the version that began it, or begin anew in another folder"
            )
        saved = last(self.path)
        if saved is None:
            return None
        self._check(saved.progress)
        progress = resume(self.path, self._model, optimizers=self._optimizers)
        return None if progress is None else dict(progress["run"])

    def _check(self, progress: Mapping[str, Any]) -> None:
        if "settings" not in progress or "run" not in progress:
            raise BadInput(f"'{self.path}' holds a checkpoint, but none of `thermocline train`; use another folder")
        theirs = progress["settings"]
        for name, ours in self.settings.items():
            if name not in _ANY and theirs.get(name) != ours:
                raise BadInput(
                    f"'{self.path}' holds a run with {name} {theirs.get(name)}, not {ours};"
                    " repeat its command to resume it, or use another folder"
                )
