"""`save_pretrained` and `from_pretrained` of the modules: `thermocline.save` and `thermocline.load` under names people know.

Checkpoints are a layer above modules: they build them. So a module reaches them by their public names, when it is asked to, and
never imports them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from thermocline.errors import BadInput

M = TypeVar("M", bound=nn.Module)


def save_folder(module: nn.Module, folder: str | Path) -> None:
    """Save a module alone."""
    _public("save")(module, folder)


def load_folder(kind: type[M], folder: str | Path, **keywords: Any) -> M:
    """What was saved, if it is of this kind; a collection may be sharded."""
    loaded = _public("load")(folder, **keywords)
    if not isinstance(loaded, kind) and "plan" not in keywords:
        name = type(loaded).__name__
        raise BadInput(f"'{folder}' holds an {name}, not an {kind.__name__}; use {name}.from_pretrained, or thermocline.load")
    return loaded  # type: ignore[no-any-return]


def _public(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(__name__.partition(".")[0]), name)
    return found
