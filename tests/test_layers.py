"""The architecture of the package: which layer may import which, no import cycles, and one meaning for each class name.

Each folder of the package is a layer; `MAY_IMPORT` lists the layers it may import. Imports are read from the source: at module
level, inside functions, under `TYPE_CHECKING`, and as literals given to `importlib.import_module`. A computed argument of
`import_module` could name any layer, so only modules in `COMPUTED_IMPORTS` may have one. A public name imported from the
package counts as imported from the module that defines it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import thermocline
from thermocline._lazy import homes

PUBLIC = homes("thermocline")
PACKAGE = Path(thermocline.__file__).parent

# Layer -> the layers it may import, next to `_lazy`, `errors` and `formats`, which all may.
MAY_IMPORT = {
    "_lazy": set(),
    "errors": set(),
    "formats": set(),
    "report": set(),
    "kernels": set(),
    "rows": {"kernels"},
    "data": {"ids", "heat"},
    "heat": {"report"},
    "ids": {"kernels"},
    "plan": {"heat", "report"},
    "nn": {"rows", "kernels", "ids", "heat"},
    "distributed": {"rows", "plan", "nn", "kernels", "heat", "ids", "report"},
    "checkpoint": {"rows", "plan", "nn", "kernels", "ids", "heat", "distributed"},
    "models": {"kernels"},
    "train": {"data", "models", "nn", "rows", "ids", "heat", "plan", "distributed", "report", "checkpoint"},
    "publishing": {"rows", "plan", "nn", "kernels", "distributed", "checkpoint", "serve"},
    "serve": {"rows", "ids", "plan", "checkpoint", "kernels", "heat", "report"},
}
LIBRARY = set(MAY_IMPORT)
MAY_IMPORT |= {"cli": LIBRARY, "__main__": {"cli"}}

# Modules that import by a computed name. Each stays within its own layer, but for the package's lazy exports.
COMPUTED_IMPORTS = {
    "_lazy.py",  # the module that defines a public name
    "kernels/dispatch.py",  # the implementation of a kernel for a device
    "kernels/cpu/compile.py",  # every CPU kernel, to compile it ahead of use
    "kernels/verify/checks.py",  # every implementation of a kernel, to compare it with the reference
    "cli/machine_checks.py",  # optional packages, to see whether they are installed
}

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
    return layer_of(PUBLIC.get(name, f"thermocline.{name}"))


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
        if reached not in ("_lazy", "errors", "formats") and reached not in MAY_IMPORT.get(layer, set())
    ]
    return strangers + reaching


def computed_imports(root: Path) -> list[str]:
    """Modules that give a computed name to `import_module` or `__import__`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                if not all(isinstance(argument, ast.Constant) for argument in given):
                    found.append(path.relative_to(root).as_posix())
    return sorted(set(found))


def module_level_imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported: not those in functions or under `TYPE_CHECKING`."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                pending += getattr(node, field, [])
            pending += [statement for handler in getattr(node, "handlers", []) for statement in handler.body]


def module_cycle(root: Path) -> list[str] | None:
    """Modules that import each other in a ring at module level, or None."""
    names = {path: ["thermocline", *path.relative_to(root).with_suffix("").parts] for path in root.rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = names[path][:-1]
        reached: set[str] = set()
        for node in module_level_imports(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                reached |= {alias.name for alias in node.names}
            else:
                source = absolute(node, package)
                members = {f"{source}.{alias.name}" for alias in node.names}
                reached |= {member if member in modules else source for member in members}
        graph[module] = {each for each in reached if each in modules and each != module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def repeated_classes(root: Path) -> dict[str, list[str]]:
    """Class names that several modules define, and those modules."""
    homes: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(path.relative_to(root).as_posix())
    return {name: sorted(files) for name, files in homes.items() if len(files) > 1}


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


def test_computed_imports_are_those_of_the_list():
    assert set(computed_imports(PACKAGE)) <= COMPUTED_IMPORTS


def test_no_modules_import_each_other_in_a_ring():
    assert module_cycle(PACKAGE) is None


def test_a_class_name_occurs_once_in_the_package():
    assert repeated_classes(PACKAGE) == {}


def test_no_module_reads_stack_frames():
    frames = re.compile(r"\b(_getframe|currentframe|f_back|f_globals|f_locals|f_code)\b")
    assert [path.name for path in PACKAGE.rglob("*.py") if frames.search(path.read_text())] == []


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


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module(f'thermocline.{name}')",
        "from importlib import import_module\nimport_module(name)",
        "import importlib\nimportlib.import_module(__name__.partition('.')[0])",
        "__import__('thermocline.' + name)",
        "import importlib\nimportlib.import_module(name='x' + y)",
    ],
)
def test_the_checker_catches_a_planted_computed_import(tmp_path, source):
    plant(tmp_path, "nn/pretrained.py", source)
    plant(tmp_path, "nn/torchrec.py", "from importlib import import_module\nimport_module('torchrec.modules')")
    assert computed_imports(tmp_path) == ["nn/pretrained.py"]


def test_the_checker_catches_a_planted_ring_of_modules(tmp_path):
    plant(tmp_path, "plan/__init__.py", "")
    plant(tmp_path, "plan/cost.py", "import os\nfrom .model import Plan")
    plant(tmp_path, "plan/model.py", "from thermocline.plan import make\nif TYPE_CHECKING:\n    from .cost import Cost")
    plant(tmp_path, "plan/make.py", "def make():\n    from .cost import Cost")
    assert module_cycle(tmp_path) is None
    plant(tmp_path, "plan/make.py", "try:\n    from .cost import Cost\nexcept ImportError:\n    pass")
    assert set(module_cycle(tmp_path) or []) == {f"thermocline.plan.{name}" for name in ("cost", "model", "make")}


def test_the_checker_catches_a_class_name_that_occurs_twice(tmp_path):
    plant(tmp_path, "plan/model.py", "class Plan:\n    class Row: ...")
    plant(tmp_path, "serve/rows.py", "class Row: ...")
    assert repeated_classes(tmp_path) == {"Row": ["plan/model.py", "serve/rows.py"]}
