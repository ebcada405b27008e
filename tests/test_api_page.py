"""The API reference: `docs/api.md` lists exactly the public names, and every docstring has the sections that apply.

Public names are those of `thermocline` and of the `__init__` of its public packages. The page lists a name that two of them
export once, under the shorter path. A docstring has

* a line for every parameter in `Args:`, or for every field of a record in `Attributes:` (or in the field's description),
* `Returns:` unless the function returns None,
* `Raises:` if it has parameters, unless it is in `RAISE_NOTHING`,
* an example that is valid Python, if it is not a command line.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
PACKAGES = ("thermocline", *(f"thermocline.{name}" for name in ("nn", "plan", "distributed", "checkpoint", "serve", "heat")))
RAISE_NOTHING = {
    "thermocline.nn.Pooled", "thermocline.nn.Unpooled", "thermocline.plan.FeatureColumn", "thermocline.plan.estimate_memory",
    "thermocline.plan.explain", "thermocline.plan.fingerprint", "thermocline.plan.plan_page", "thermocline.plan.unify",
    "thermocline.distributed.calibrate", "thermocline.heat.compare_profiles", "thermocline.heat.heat_page",
}  # fmt: skip
MADE_BY_THE_LIBRARY = {
    "thermocline.Publisher",
    "thermocline.distributed.ShardedCollection",
}  # private constructors


def public():
    """Path -> object, once for each object."""
    found = {}
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            value = getattr(package, name)
            if not any(value is other for other in found.values()):
                found[f"{package.__name__}.{name}"] = value
    return found


PUBLIC = public()
DOCUMENTED = [path for path, value in PUBLIC.items() if callable(value)]


def test_the_page_lists_exactly_the_public_names():
    listed = re.findall(r"^::: (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(PUBLIC)


@pytest.mark.parametrize("path", [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.py")], ids=lambda path: path.name)
def test_docs_and_examples_import_public_packages_only(path):
    inside = rf"^ *(?:from|import) ((?:{'|'.join(map(re.escape, PACKAGES[1:]))})\.[\w.]+)"
    assert re.findall(inside, path.read_text(encoding="utf-8"), re.MULTILINE) == []


def sections(text):
    """Title -> indented text of the sections of a docstring."""
    found = re.findall(r"^(Args|Attributes|Returns|Yields|Raises|Example)::?\n((?:(?:    .*)?(?:\n|\Z))+)", text, re.MULTILINE)
    return {title: textwrap.dedent(body).strip("\n") for title, body in found}


def names_in(section):
    return re.findall(r"^(\w+):", section, re.MULTILINE)


def parameters_of(value):
    """The parameters of a function or constructor; none for a class that inherits the constructor of an exception."""
    if inspect.isclass(value) and issubclass(value, BaseException) and "__init__" not in vars(value):
        return []
    return [name for name in inspect.signature(value).parameters if name != "self"]


@pytest.mark.parametrize("path", DOCUMENTED)
def test_every_parameter_and_field_is_described(path):
    value = PUBLIC[path]
    found = sections(inspect.cleandoc(value.__doc__))
    if "Args" in found:
        assert names_in(found["Args"]) == parameters_of(value)
    elif inspect.isclass(value) and issubclass(value, BaseModel):
        described = {field for field, info in value.model_fields.items() if info.description}
        assert described | set(names_in(found.get("Attributes", ""))) == set(value.model_fields)
    elif is_dataclass(value):
        assert names_in(found["Attributes"]) == parameters_of(value)
    elif parameters_of(value) and path not in MADE_BY_THE_LIBRARY:
        assert inspect.isclass(value) and names_in(found["Attributes"])


@pytest.mark.parametrize("path", DOCUMENTED)
def test_results_and_errors_are_described(path):
    value = PUBLIC[path]
    found = sections(inspect.cleandoc(value.__doc__))
    if inspect.isfunction(value):
        returns = inspect.signature(value).return_annotation
        assert ("Returns" in found) == (returns not in (None, "None"))
    if "Args" in found:
        assert ("Raises" in found) == (path not in RAISE_NOTHING)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_every_public_name_has_an_example(path):
    example = sections(inspect.cleandoc(PUBLIC[path].__doc__))["Example"]
    if ">>>" in example:
        example = "\n".join(line[4:] for line in example.splitlines() if line.startswith((">>> ", "... ")))
    if not example.startswith("torchrun"):
        ast.parse(example)
