"""The schemas that are shipped are those of the models, and say the same about files as the models do."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from support import has
from thermocline.errors import BadInput
from thermocline.plan import schema, units
from thermocline.plan.io import _parse
from thermocline.plan.topology import PRESETS, presets

TABLES = {"batch": 1, "tables": [{"name": "a", "rows": 1, "dim": 1}]}
TYPES = {
    "object": dict,
    "array": (list, tuple),
    "string": str,
    "number": (int, float),
    "integer": int,
    "null": type(None),
    "boolean": bool,
}


def accepts(rule, value, defs) -> bool:
    """As much of JSON Schema as our schemas use."""
    if "$ref" in rule:
        rule = defs[rule["$ref"].rsplit("/", 1)[1]] | {k: v for k, v in rule.items() if k != "$ref"}
    if "anyOf" in rule and not any(accepts(option, value, defs) for option in rule["anyOf"]):
        return False
    if "type" in rule and (
        not isinstance(value, TYPES[rule["type"]]) or (isinstance(value, bool) and rule["type"] != "boolean")
    ):
        return False
    if value not in rule.get("enum", [value]) or value != rule.get("const", value):
        return False
    if isinstance(value, str):
        return bool(re.search(rule.get("pattern", ""), value)) and len(value) >= rule.get("minLength", 0)
    if isinstance(value, (int, float)):
        above = value >= rule.get("minimum", value) and value > rule.get("exclusiveMinimum", value - 1)
        return above and value <= rule.get("maximum", value)
    if isinstance(value, (list, tuple)):
        return all(accepts(rule.get("items", {}), item, defs) for item in value)
    if isinstance(value, dict):
        known, more = rule.get("properties", {}), rule.get("additionalProperties", {})
        if not set(rule.get("required", [])) <= set(value) or (more is False and set(value) - set(known)):
            return False
        return all(accepts(known.get(name, more), item, defs) for name, item in value.items())
    return True


def valid(kind, data) -> bool:
    whole = json.loads(schema.shipped(kind))
    return accepts(whole, data, whole.get("$defs", {}))


@pytest.mark.parametrize("kind", schema.MODELS)
def test_the_shipped_schema_is_the_one_of_the_model(kind):
    again = "the model has changed: run python -m thermocline.plan.schema"
    assert json.loads(schema.shipped(kind)) == schema.generate(kind), again


def test_no_other_schema_is_shipped():
    found = {entry.name for entry in schema.SCHEMAS.iterdir()}
    assert found == {schema.file_name(kind) for kind in schema.MODELS}


@pytest.mark.parametrize("name", presets())
def test_presets_keep_to_the_schema_as_they_are_written(name):
    text = (PRESETS / f"{name}.yaml").read_text()
    assert valid("topology", _parse(text, "preset.yaml"))
    assert not valid("topology", _parse(text.replace("bandwidth:", "bandwith:"), "preset.yaml"))


@pytest.mark.parametrize(
    "change, good",
    [
        ({}, True),
        ({"dense": "4ms"}, True),
        ({"precision": "int8"}, True),
        ({"precision": {"fp32": 0.1, "int8": 0.9}, "pooling": "none"}, True),
        ({"rows": 0}, False),
        ({"dim": 4096}, False),
        ({"precision": "int9"}, False),
        ({"precision": {"fp32": 3}}, False),
        ({"name": ""}, False),
        ({"cache": 1.5}, False),
        ({"rows": "many"}, False),
        ({"dense": "4 parsecs"}, False),
        ({"version": 2}, False),
        ({"optimizer": "lamb"}, False),
    ],
)
def test_schema_and_model_agree_on_tables(change, good):
    whole = {key: change[key] for key in change if key in ("dense", "version", "optimizer")}
    table = {key: change[key] for key in change if key not in whole}
    data = TABLES | whole | {"tables": [TABLES["tables"][0] | table]}
    assert valid("tables", data) == good
    if good:
        schema.MODELS["tables"].model_validate(data)
    else:
        with pytest.raises(ValueError):
            schema.MODELS["tables"].model_validate(data)


@pytest.mark.parametrize(
    "kind, read", [("memory", units.read_bytes), ("bandwidth", units.read_rate), ("latency", units.read_seconds)]
)
def test_schema_and_reader_agree_on_units(kind, read):
    defs = json.loads(schema.shipped("topology"))["$defs"]
    rule = next(model["properties"][kind] for model in defs.values() if kind in model["properties"])
    texts = [
        "1",
        "1B",
        "2.5GB",
        "2.GB",
        " 3 MiB ",
        "1e3kB",
        "4KB/s",
        "5Gbit/s",
        "6us",
        "7 ms",
        "GB",
        "-1GB",
        "1gb",
        "1µs",
        "1 s",
        "",
    ]
    for text in texts:
        try:
            read(text)
            readable = True
        except BadInput:
            readable = False
        assert accepts(rule, text, {}) == readable, text


def test_an_unknown_schema_is_refused_with_the_known_ones():
    with pytest.raises(BadInput, check=has(parameter="kind", available=("tables", "topology", "plan", "run"))):
        schema.shipped("heat")


def test_the_yaml_of_a_preset_is_what_any_reader_finds():
    for entry in PRESETS.iterdir():
        text = entry.read_text()
        theirs, ours = yaml.safe_load(text), _parse(text, entry.name)
        assert theirs | {"date": str(theirs["date"])} == ours
