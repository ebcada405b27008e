"""Who may import whom. Each folder of the package is a layer, and `MAY_IMPORT` is the whole truth about them.

Imports are read from the source, wherever they stand: at the top, inside a function, under `TYPE_CHECKING`, or as a
literal given to `importlib.import_module`. A public name taken from the package itself counts as taken from its home.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import thermocline

PACKAGE = Path(thermocline.__file__).parent

# Layer -> the layers it may import, next to `errors` and `formats`, which all may.
MAY_IMPORT = {
    "errors": set(),
    "formats": set(),
    "report": set(),
    "kernels": set(),
    "rows": {"kernels"},
    "data": {"ids"},
    "heat": {"report"},
    "ids": {"kernels"},
    "plan": {"heat", "report"},
    "nn": {"rows", "kernels", "ids", "heat"},
    "distributed": {"rows", "plan", "nn", "kernels", "heat", "ids", "report"},
    "checkpoint": {"rows", "plan", "nn", "kernels", "ids", "heat", "distributed"},
    "models": {"kernels"},
    "train": {"data", "models", "nn", "rows", "ids", "heat", "plan", "distributed", "report", "checkpoint"},
    "serve": {"rows", "ids", "plan", "checkpoint", "kernels", "heat", "report"},
}
LIBRARY = set(MAY_IMPORT)
MAY_IMPORT |= {"demo": LIBRARY, "cli": LIBRARY | {"demo"}, "__main__": {"cli"}}

# `import thermocline` could reach anything, and no layer may.
ANYTHING = "anything"


def layer_of(module: str) -> str:
    """The layer of a full module name, such as 'rows' for 'thermocline.rows.table'."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ANYTHING


def layer_of_member(package: str, name: str) -> str:
    """The layer that `from package import name` reaches."""
    if package != "thermocline":
        return layer_of(package)
    if name == "__version__":  # a string in the package itself: allowed to all, as errors are
        return "errors"
    return layer_of(thermocline.PUBLIC.get(name, f"thermocline.{name}"))


def absolute(node: ast.ImportFrom, package: list[str]) -> str:
    """The full name of the module that a `from` import names; `package` is the package it stands in."""
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join(base + ([node.module] if node.module else []))


def layers_reached(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """The line and layer of everything of ours that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, package)
            if source.split(".")[0] == "thermocline":
                yield from ((node.lineno, layer_of_member(source, alias.name)) for alias in node.names)
            continue
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        else:
            continue
        yield from ((node.lineno, layer_of(name)) for name in names if str(name).split(".")[0] == "thermocline")


def edges(root: Path) -> Iterator[tuple[str, str, str]]:
    """(layer, layer it imports, where) for all modules under the package folder `root`, but for the package's own
    `__init__`, which names the home of every public name."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside == Path("__init__.py"):
            continue
        layer = inside.parts[0].removesuffix(".py")
        package = ["thermocline", *inside.parts[:-1]]
        for line, reached in layers_reached(ast.parse(path.read_text()), package):
            if reached != layer:
                yield layer, reached, f"{inside}:{line}"


def violations(root: Path) -> list[str]:
    """Every import that the table does not allow, as a sentence."""
    strangers = [
        f"{path.name} is not in the table of layers"
        for path in sorted(root.iterdir())
        if (path.suffix == ".py" or any(path.rglob("*.py"))) and path.stem not in MAY_IMPORT and path.name != "__init__.py"
    ]
    reaching = [
        f"{where}: {layer} must not import {reached}"
        for layer, reached, where in edges(root)
        if reached not in ("errors", "formats") and reached not in MAY_IMPORT.get(layer, set())
    ]
    return strangers + reaching


def cycle(root: Path) -> list[str] | None:
    """Layers that import each other in a ring, or None."""
    graph: dict[str, set[str]] = {}
    for layer, reached, _ in edges(root):
        graph.setdefault(layer, set()).add(reached)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_layer_reaches_where_it_should_not():
    assert violations(PACKAGE) == []


def test_no_layers_import_each_other_in_a_ring():
    assert cycle(PACKAGE) is None


def test_the_table_itself_has_no_ring():
    TopologicalSorter(MAY_IMPORT).prepare()


def plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


@pytest.mark.parametrize(
    "file, source",
    [
        ("kernels/gather/cpu.py", "from thermocline.rows import table"),
        ("kernels/gather/cpu.py", "from ...rows.table import Table"),
        ("kernels/gather/cpu.py", "from ... import rows"),
        ("kernels/__init__.py", "from ..rows import table"),
        ("plan/solver.py", "def solve():\n    import thermocline.kernels.gather as gather\n    return gather"),
        ("plan/solver.py", "import thermocline"),
        ("heat/counts.py", "if TYPE_CHECKING:\n    from thermocline.plan import Plan"),
        ("serve/server.py", "import importlib\nnn = importlib.import_module('thermocline.nn')"),
        ("utils/things.py", "import os"),
        ("things.py", "import os"),
    ],
)
def test_the_checker_catches_a_planted_violation(tmp_path, file, source):
    plant(tmp_path, "errors.py", "")
    plant(tmp_path, file, source)
    assert len(violations(tmp_path)) == 1


def test_the_checker_lets_allowed_imports_pass(tmp_path):
    plant(tmp_path, "__init__.py", "from thermocline.nn import EmbeddingBag")
    plant(tmp_path, "kernels/gather/cpu.py", "from ...errors import BadInput\nfrom . import reference")
    plant(tmp_path, "kernels/gather/gpu.py", "from thermocline import BadInput")
    plant(tmp_path, "rows/table.py", "import torch\nfrom thermocline.kernels import gather")
    plant(tmp_path, "cli/plan.py", "from thermocline import __version__\nfrom thermocline.plan import solver")
    assert violations(tmp_path) == []
    assert cycle(tmp_path) is None


def test_the_checker_catches_a_planted_ring(tmp_path):
    plant(tmp_path, "rows/table.py", "from thermocline.kernels import gather")
    plant(tmp_path, "kernels/gather.py", "from thermocline.nn import bag")
    plant(tmp_path, "nn/bag.py", "from thermocline.rows import table")
    assert set(cycle(tmp_path) or []) == {"rows", "kernels", "nn"}
