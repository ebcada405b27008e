"""Thermocline: embedding tables that do not fit, with heat deciding each row's precision, copies and place.

Public names are loaded when first used, so that `import thermocline` (and with it the command line) does not pay for
torch. To add one: a line in `PUBLIC`, its name in `__all__`, and the same import under `TYPE_CHECKING`, where editors
and type checkers look. A test keeps the three equal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.errors import BadGradient, BadInput, FormatError, IdOutOfRange, ThermoclineError

__version__ = "0.1.0"

# Public name -> the module that defines it.
PUBLIC = {
    "BadGradient": "thermocline.errors",
    "BadInput": "thermocline.errors",
    "FormatError": "thermocline.errors",
    "IdOutOfRange": "thermocline.errors",
    "ThermoclineError": "thermocline.errors",
}

__all__ = ["BadGradient", "BadInput", "FormatError", "IdOutOfRange", "ThermoclineError", "__version__"]


if not TYPE_CHECKING:  # a type checker would take any misspelt name for an attribute

    def __getattr__(name: str) -> object:
        if name not in PUBLIC:
            raise AttributeError(f"module 'thermocline' has no attribute '{name}'")
        value = getattr(importlib.import_module(PUBLIC[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
