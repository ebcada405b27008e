"""What users may import from `thermocline`: adding or removing a name is a decision, so it is written down here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import thermocline

PUBLIC_NAMES = {
    "Adagrad",
    "Adam",
    "Arena",
    "BadGradient",
    "BadInput",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FormatError",
    "IdMap",
    "IdOutOfRange",
    "PRECISIONS",
    "Plan",
    "RowConfig",
    "RowwiseAdagrad",
    "SGD",
    "Table",
    "TableSpec",
    "ThermoclineError",
    "Trainer",
    "__version__",
    "bytes_per_row",
    "convert_",
    "fused_optimizer",
    "load",
    "load_into",
    "lookup",
    "make_plan",
    "replan",
    "resume",
    "save",
    "save_async",
    "shard_",
    "synchronize",
    "unify",
}


def test_public_names_are_exactly_these():
    assert set(thermocline.__all__) == PUBLIC_NAMES
    assert set(thermocline.PUBLIC) == PUBLIC_NAMES - {"__version__"}
    assert set(dir(thermocline)) == PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_every_public_name_can_be_loaded(name):
    assert getattr(thermocline, name) is not None


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(thermocline.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == thermocline.PUBLIC


def test_a_misspelt_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Embeding"):
        _ = thermocline.Embeding


def test_importing_the_package_does_not_import_torch():
    code = "import sys, thermocline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_error_of_a_caller_is_a_value_error():
    errors = [getattr(thermocline, name) for name, home in thermocline.PUBLIC.items() if home == "thermocline.errors"]
    assert all(issubclass(error, thermocline.ThermoclineError) for error in errors)
    assert [error for error in errors if not issubclass(error, ValueError)] == [thermocline.ThermoclineError]
