"""Reading of planning files: YAML or JSON into pydantic models, with the line and field of every problem.

Pydantic validates plain data and knows no lines. When it refuses a file, the file is parsed again into PyYAML's node tree,
which has the lines. Every problem is one line of the error: file, line, field, the given value, and the possible ones.

YAML is read as version 1.2: `no` and `on` are strings (tables have such names), dates are strings, 1e6 is a number.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from thermocline.errors import FormatError, did_you_mean, read_bytes

Location = tuple[str | int, ...]
Problems = Iterator[tuple[Location, str]]
Model = TypeVar("Model", bound=BaseModel)
Doubts = Callable[[Model], Problems]

_MOST_DIGITS = 20  # of a 64-bit number
_MOST_PROBLEMS = 20  # in one error
_MAX_BYTES = 1 << 26  # of a file: plans take a few kilobytes a table


class Contradiction(ValueError):
    """Fields that are valid alone but not together. Locations are relative to the model that raises it."""

    def __init__(self, problems: Sequence[tuple[Location, str]]) -> None:
        super().__init__("; ".join(message for _, message in problems))
        self.problems = problems


class FileModel(BaseModel):
    """An object of a planning file. Fields have Python names in code and the names of version 1 (`card`, `cards`) in files."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )

    @model_validator(mode="after")
    def _validate(self) -> FileModel:
        if found := list(self._contradictions()):
            raise Contradiction(found)
        return self

    def _contradictions(self) -> Problems:
        """Fields that do not fit together, and why."""
        yield from ()


def read_text(path: str | Path) -> str:
    try:
        return read_bytes(path, _MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        message = f"{path}: byte {error.start} is not UTF-8 text; a planning file is YAML or JSON"
        raise FormatError(message, path=str(path), position=error.start) from None


def read_file(kind: type[Model], path: str | Path) -> Model:
    """A model from a YAML or JSON file."""
    return read_model(kind, read_text(path), str(path))


def read_model(
    kind: type[Model], text: str, name: str, instead: Mapping[str, object] = {}, doubts: Doubts[Model] | None = None
) -> Model:
    """A model from text, which is JSON if `name` ends with .json, else YAML.

    Fields of `instead` replace those of the text; `doubts` is a further check of numbers that have no unit in the text.
    """
    data = _parse(text, name)
    if not isinstance(data, dict):
        what = {type(None): "empty", list: "a list", str: "a line of text"}.get(type(data), f"a {type(data).__name__}")
        message = f"{name}, line 1: the file is {what}; expected a mapping with the fields {', '.join(_fields(kind))}"
        raise FormatError(message, path=name, line=1)
    return read_data(kind, data | dict(instead), name, text, doubts)


def read_data(
    kind: type[Model], data: dict[str, Any], name: str, text: str | None = None, doubts: Doubts[Model] | None = None
) -> Model:
    """A model from plain data; `text` is its source, if lines are to be reported.

    Raises:
        FormatError: With `path`, `line` and `parameter` (the field) of the first problem, and all `problems`.
    """
    try:
        found = kind.model_validate(data)
        problems = [each for each in doubts(found) if not isinstance(_value(data, each[0]), str)] if doubts else []
    except ValidationError as error:
        problems = [problem for details in error.errors() for problem in _problems(kind, details)]
    if not problems:
        return found
    tree = _compose(text) if text is not None else None
    lines = [_sentence(name, tree, data, location, message) for location, message in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"{name}: {len(problems) - _MOST_PROBLEMS} more problems")
    raise FormatError(
        "\n".join(lines),
        path=name,
        line=_line(tree, problems[0][0]),
        parameter=_field(problems[0][0]),
        problems=tuple((_field(location), _line(tree, location)) for location, _ in problems),
    )


# -- text to data -----------------------------------------------------------------------------------------------------------


class _Yaml12Loader(yaml.SafeLoader):
    """YAML 1.2 numbers, booleans and null; everything else is a string."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the name that PyYAML reads


_Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), ["t", "f"])
_Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Yaml12Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(str(node.value)))


def parse_json(text: str, name: str) -> Any:
    """JSON in which every field is given once, and every number fits 64 bits."""
    try:
        return json.loads(
            text, object_pairs_hook=lambda pairs: _refuse_json_duplicates(pairs, name),
            parse_int=_integer, parse_float=_finite, parse_constant=_finite,
        )  # fmt: skip
    except json.JSONDecodeError as error:
        raise FormatError(f"{name}, line {error.lineno}: not JSON ({error.msg})", path=name, line=error.lineno) from None
    except FormatError:
        raise
    except (RecursionError, ValueError) as error:  # nested thousands deep, or a number of thousands of digits
        raise FormatError(f"{name}: the file cannot be read ({error})", path=name) from None


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS or not -(1 << 63) <= (found := int(digits)) < 1 << 63:
        raise ValueError(f"{digits[:_MOST_DIGITS]}... does not fit 64 bits")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"{text[:_MOST_DIGITS]} is not a finite number")
    return found


def _parse(text: str, name: str) -> Any:
    if name.endswith(".json"):
        return parse_json(text, name)
    try:
        node = yaml.compose(text, Loader=_Yaml12Loader)
        if node is None:
            return None
        _refuse_yaml_duplicates(node, name)
        return _Yaml12Loader("").construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        where = f", line {line}" if line else ""
        raise FormatError(f"{name}{where}: not YAML ({error.problem or error.context})", path=name, line=line) from None
    except yaml.YAMLError as error:
        raise FormatError(f"{name}: not YAML ({' '.join(str(error).split())})", path=name) from None
    except FormatError:
        raise
    except (RecursionError, ValueError) as error:  # nested thousands deep, or a number of thousands of digits
        raise FormatError(f"{name}: the file cannot be read ({error})", path=name) from None


def _refuse_json_duplicates(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise FormatError(f"{name}: field {twin} is given twice in one object; keep one", path=name, parameter=twin)
    return found


def _refuse_yaml_duplicates(root: yaml.Node, name: str) -> None:
    """PyYAML would silently keep the last of two equal fields."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and key.value in lines and key.value != "<<":
                    message = f"{name}, line {line}, field {key.value}: also given in line {lines[key.value]}; keep one"
                    raise FormatError(message, path=name, line=line, parameter=key.value)
                lines[str(key.value)] = line
                waiting.append(value)


# -- problems to sentences --------------------------------------------------------------------------------------------------


def _compose(text: str) -> yaml.Node | None:
    """The node tree of YAML or JSON. Tabs separate tokens in JSON only, and never occur inside its strings."""
    try:
        tree: yaml.Node | None = yaml.compose(text.replace("\t", " "), Loader=_Yaml12Loader)
        return tree
    except yaml.YAMLError:
        return None


def _line(root: yaml.Node | None, location: Location) -> int | None:
    """The line of a field, or of the nearest enclosing node that the file has."""
    node, line = root, None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if getattr(key, "value", None) == str(part)]
            if not pairs:
                break
            line, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line if line is not None else None if root is None else root.start_mark.line + 1


def _field(location: Location) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _sentence(name: str, tree: yaml.Node | None, data: Any, location: Location, message: str) -> str:
    line, field = _line(tree, location), _field(location)
    where = name if line is None else f"{name}, line {line}"
    entry = _entry_name(data, location)
    owner = f" ({str(location[0])[:-1]} {entry!r})" if entry else ""
    return f"{where}, field {field}{owner}: {message}" if field else f"{where}: {message}"


def _value(data: Any, location: Location) -> Any:
    for part in location:
        data = data[part]
    return data


def _entry_name(data: Any, location: Location) -> str | None:
    """The name of the list entry that contains a location: users know tables by name, not by number."""
    if len(location) < 2 or not isinstance(location[1], int):
        return None
    entry = data[location[0]][location[1]]
    return str(entry["name"]) if isinstance(entry, dict) and "name" in entry else None


def _problems(kind: type[BaseModel], details: ErrorDetails) -> Problems:
    location: Location = tuple(part for part in details["loc"])
    error = details.get("ctx", {}).get("error")
    if isinstance(error, Contradiction):
        yield from (((*location, *below), message) for below, message in error.problems)
    else:
        yield location, _message(kind, details, location)


def _message(kind: type[BaseModel], details: ErrorDetails, location: Location) -> str:
    """What is wrong, and what is possible."""
    given, limits = details["input"], details.get("ctx", {})
    known = _fields_around(kind, location)
    wanted = known[str(location[-1])].description if location and location[-1] in known else None
    hint = f"; expected: {wanted}" if wanted else ""
    match details["type"]:
        case "extra_forbidden":
            return f"there is no such field{did_you_mean(str(location[-1]), known)}; the fields are {', '.join(known)}"
        case "missing":
            return f"is missing{hint}"
        case "greater_than":
            return f"{given!r} is not above {limits['gt']}{hint}"
        case "greater_than_equal":
            return f"{given!r} is below {limits['ge']}{hint}"
        case "less_than_equal":
            return f"{given!r} is above {limits['le']}{hint}"
        case "literal_error":
            words = re.findall(r"'([^']*)'", limits["expected"])
            return f"{given!r} is not known{did_you_mean(str(given), words)}; use {limits['expected']}"
        case "value_error":
            return f"{limits['error']}{hint}"
        case _:
            return f"{given!r} is not valid ({details['msg'][0].lower()}{details['msg'][1:]}){hint}"


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model by their names in files."""
    return {field.serialization_alias or name: field for name, field in model.model_fields.items()}


def _fields_around(kind: type[BaseModel], location: Location) -> dict[str, FieldInfo]:
    """The fields of the model that contains a location."""
    fields = _fields(kind)
    for part in location[:-1]:
        if part in fields:
            model = _model_in(fields[str(part)].annotation)
            fields = _fields(model) if model else {}
    return fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None` or `tuple[Model, ...]`."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := _model_in(inner))), None)
