"""What is imported on first use: names of a package, so that its import loads neither torch nor Numba; and torch's compiler."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


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


def uncompiled(function: Function) -> Function:
    """`torch.compiler.disable`, which imports torch._dynamo (a second of a processor) only where something else has."""

    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        if not disabled:
            disabled.append(sys.modules["torch"].compiler.disable(function))
        return disabled[0](*arguments, **keywords)

    return call  # type: ignore[return-value]
