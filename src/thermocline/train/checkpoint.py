"""A folder that a run can be resumed from: tensors in safetensors, everything else in JSON.

    train.json               settings, where the run is, numbers of the optimizers, and the name of the tensors' file
    state-000001200.safetensors

Both are written aside and renamed, the tensors first: whatever moment the run dies in, `train.json` names a whole file. What it
names may be a little old, and repeating the steps since gives the same numbers.

On several cards each writes its own part (`state-000001200.1of4.safetensors`), and the first of them `train.json` once all
parts are there. Such a folder is resumed with the same plan and as many cards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInput, FormatError
from .cards import ALONE, Cards

_JSON = "train.json"
Progress = dict[str, Any]


class Folder:
    """Saves and loads a model, its optimizers and the progress of a run with these settings."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer],
        cards: Cards = ALONE,
    ) -> None:  # fmt: skip
        self.path, self.settings = path, json.loads(json.dumps(settings, default=str))
        self._model, self._optimizers, self._cards = model, optimizers, cards

    def save(self, progress: Progress) -> None:
        from safetensors.torch import save_file

        tensors = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items() if isinstance(tensor, Tensor)}
        numbers: dict[str, Any] = {}
        for name, optimizer in self._optimizers.items():
            numbers[name] = _take_apart(optimizer.state_dict(), name, tensors)
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"state-{progress['step']:09d}.safetensors"
        file = self._part(name)
        aside = file.with_suffix(".part")
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, aside)
        _settle(aside, file)
        self._cards.wait()
        if self._cards.first:
            aside = self.path / (_JSON + ".part")
            state = {"settings": self.settings, "progress": progress, "optimizers": numbers, "tensors": name}
            aside.write_text(json.dumps(state, indent=2))
            _settle(aside, self.path / _JSON)
        self._cards.wait()
        for old in self.path.glob(self._part("state-*").name):
            if old != file:
                old.unlink()

    def _part(self, name: str) -> Path:
        """This card's file of those that have this name."""
        cards = self._cards
        return self.path / (
            name if cards.size == 1 else f"{name.removesuffix('.safetensors')}.{cards.rank}of{cards.size}.safetensors"
        )

    def load(self) -> Progress | None:
        """Put everything back and return the progress; None if there is nothing yet."""
        try:
            state = json.loads((self.path / _JSON).read_text())
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"'{self.path / _JSON}' is not JSON: {error}; use another folder") from None
        self._check(state.get("settings", {}))
        from safetensors.torch import load_file

        tensors = load_file(self._part(state["tensors"]))
        own = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        self._model.load_state_dict(own)
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(_put_together(state["optimizers"][name], name, tensors))
        progress: Progress = state["progress"]
        return progress

    def _check(self, theirs: Mapping[str, Any]) -> None:
        for name, ours in self.settings.items():
            if theirs.get(name) != ours:
                raise BadInput(
                    f"'{self.path}' holds a run with {name} {theirs.get(name)}, not {ours};"
                    " repeat its command to resume it, or use another folder"
                )


def _settle(aside: Path, file: Path) -> None:
    """Make what was written to `aside` last, then give it its name."""
    with open(aside, "rb") as written:
        os.fsync(written.fileno())
    os.replace(aside, file)


def _take_apart(state: dict[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What JSON can hold of an optimizer's state; its tensors go into `tensors`."""
    rest: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        rest[str(number)] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        tensors |= {f"{name}.{number}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return {"state": rest, "param_groups": state["param_groups"]}


def _put_together(state: dict[str, Any], name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    whole: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in state["state"].items()}
    for key, tensor in tensors.items():
        owner, _, rest = key.partition(".")
        if owner == name:
            number, _, field = rest.partition(".")
            whole[int(number)][field] = tensor
    return {"state": whole, "param_groups": state["param_groups"]}
