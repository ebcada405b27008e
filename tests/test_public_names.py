"""What users may import from `thermocline`: adding or removing a name is a decision, so it is written down here."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import thermocline
from support import has
from thermocline._lazy import homes

PUBLIC = homes("thermocline")
PUBLIC_NAMES = {
    "Adagrad",
    "Adam",
    "Arena",
    "BadGradient",
    "BadInput",
    "BadPublish",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FormatError",
    "IdMap",
    "IdOutOfRange",
    "PRECISIONS",
    "Plan",
    "Publisher",
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
    "publish",
    "replan",
    "resume",
    "revert_",
    "save",
    "save_async",
    "shard_",
    "synchronize",
    "unify",
}


def test_public_names_are_exactly_these():
    assert set(thermocline.__all__) == PUBLIC_NAMES
    assert set(PUBLIC) == PUBLIC_NAMES - {"__version__"}
    assert set(dir(thermocline)) == PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_every_public_name_can_be_loaded(name):
    assert getattr(thermocline, name) is not None


@pytest.mark.parametrize("folder", ["checkpoint", "distributed", "heat", "nn", "plan", "serve"])
def test_every_name_of_a_folder_can_be_loaded(folder):
    package = importlib.import_module(f"thermocline.{folder}")
    assert dir(package) == sorted(package.__all__) == sorted(homes(package.__name__))
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_a_misspelt_name_is_an_attribute_error():
    with pytest.raises(AttributeError, check=has(name="Embeding")):
        _ = thermocline.Embeding


def test_importing_the_package_does_not_import_torch():
    code = "import sys, thermocline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_error_of_a_caller_is_a_value_error():
    errors = [getattr(thermocline, name) for name, home in PUBLIC.items() if home == "thermocline.errors"]
    assert all(issubclass(error, thermocline.ThermoclineError) for error in errors)
    assert [error for error in errors if not issubclass(error, ValueError)] == [thermocline.ThermoclineError]
