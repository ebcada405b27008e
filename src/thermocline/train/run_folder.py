"""The folder of a run: a checkpoint of `thermocline.save` whose `progress` holds the settings and the position of the run.

A run resumes from the last save. Repeating the steps since gives equal numbers; on another device or number of ranks, sums are
added in another order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thermocline.checkpoint import resume, save
from thermocline.checkpoint.format.folder import current_manifest
from thermocline.checkpoint.format.module_entries import find_modules
from thermocline.errors import BadInput, FormatError

_OLD = "train.json"  # of runs before there was one format
_FREE = ("device", "residency")  # settings that may change when a run resumes
Progress = dict[str, Any]


class RunFolder:
    """Saves and loads a model, its optimizers and the progress of a run."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings, default=str))
        self._model, self._optimizers = model, optimizers
        find_modules(model)  # raises for a model of plain tables before it is trained

    def save(self, progress: Progress) -> None:
        save(self._model, self.path, optimizers=self._optimizers, progress={"settings": self.settings, "run": progress})

    def load(self) -> Progress | None:
        """Restore the run and return its progress; None if the folder is empty. All ranks call this together."""
        if (self.path / _OLD).exists():
            way_out = "finish it with the version that began it, or use another folder"
            raise FormatError(f"'{self.path}' holds a run in an older format ({_OLD}); {way_out}", path=self.path / _OLD)
        saved = current_manifest(self.path)
        if saved is None:
            return None
        self._check(saved.progress)
        progress = resume(self.path, self._model, optimizers=self._optimizers)
        return None if progress is None else dict(progress["run"])

    def _check(self, progress: Mapping[str, Any]) -> None:
        if "settings" not in progress or "run" not in progress:
            words = f"'{self.path}' holds a checkpoint that `thermocline train` did not write; use another folder"
            raise BadInput(words, parameter="checkpoint", path=self.path)
        saved = progress["settings"]
        for name, value in self.settings.items():
            if name not in _FREE and name in saved and saved[name] != value:
                words = f"'{self.path}' holds a run with {name} {saved[name]}, not {value}"
                way_out = "repeat its command to resume it, or use another folder"
                raise BadInput(f"{words}; {way_out}", parameter=name, value=value, saved=saved[name])
