"""`docs/planning_files.md`: its examples are valid, and it names every field that a file may have."""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from thermocline.plan.run_file import MeasuredRun
from thermocline.plan.schema import MODELS
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology, presets

PAGE = (Path(__file__).parents[2] / "docs" / "planning_files.md").read_text()
KINDS = {"# tables.yaml": TablesConfig, "# cluster.yaml": Topology, "{": MeasuredRun}
EXAMPLES = re.findall(r"```(yaml|json)\n(.*?)```", PAGE, re.DOTALL)


def test_every_input_file_has_an_example():
    assert {text.splitlines()[0] for _, text in EXAMPLES} == set(KINDS)


@pytest.mark.parametrize("ending, text", EXAMPLES)
def test_examples_are_valid(tmp_path, ending, text):
    (tmp_path / f"example.{ending}").write_text(text)
    KINDS[text.splitlines()[0]].load(tmp_path / f"example.{ending}")


def models_in(kind: type[BaseModel]) -> set[type[BaseModel]]:
    """A model, and those of its fields."""
    found = {kind}
    waiting = [field.annotation for field in kind.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
            found |= models_in(annotation)
        else:
            waiting += typing.get_args(annotation)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_every_field_is_on_the_page(kind):
    title = {"tables": "Tables", "topology": "Topology", "plan": "Plan", "run": "Run"}[kind]
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    own = models_in(MODELS[kind]) - (models_in(Topology) if kind == "plan" else set())
    fields = {field.serialization_alias or name for model in own for name, field in model.model_fields.items()}
    assert fields - set(re.findall(r"`([a-z_]+)`", section)) == set()


def test_the_page_names_every_preset():
    assert [name for name in presets() if f"`{name}`" not in PAGE] == []


def test_the_errors_on_the_page_are_the_real_ones(tmp_path):
    (tmp_path / "tables.yaml").write_text(
        "batch: 1\ntables:\n  - {name: item, rows: 1,\n     dim: 4096,\n     prescision: int8}\n"
    )
    with pytest.raises(ValueError) as error:
        TablesConfig.load(tmp_path / "tables.yaml")
    shown = re.findall(r"^    (tables\.yaml, line .*)$", PAGE, re.MULTILINE)
    found = [line.replace(f"{tmp_path}/", "") for line in str(error.value).splitlines()]
    assert len(shown) == len(found) == 2
    assert all(line.startswith(example.removesuffix(" ...")) for line, example in zip(found, shown, strict=True))


def test_the_run_on_the_page_is_json_as_a_program_reads_it():
    (text,) = [text for ending, text in EXAMPLES if ending == "json"]
    assert MeasuredRun.model_validate(json.loads(text)).ranks[1].host == 0
