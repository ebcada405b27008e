"""Names of a package that are imported on first use, so that importing the package does not load torch, Numba or pydantic."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def homes(package: str) -> dict[str, str]:
    """Public name -> the module that defines it, as the `TYPE_CHECKING` block of a package's `__init__` imports them."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: "." * node.level + (node.module or "") for node in imports for alias in node.names}


def lazy_exports(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    To add a public name: import it under `TYPE_CHECKING`, where type checkers look too, and list it in `__all__`.
    """
    module, home = sys.modules[package], homes(package)

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name], package), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted(module.__all__)
