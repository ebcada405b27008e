"""Planning files: YAML or JSON, read into models, with the line and the field of everything that is wrong in them.

A file is read twice where it has to be: once into plain data, and, when a model refuses the data, once into the tree of its
nodes, which know their lines. Every problem is one line of the error: file, line, field, what is there and what is possible.

The YAML is that of version 1.2: `no` and `on` are words (tables have such names), a date is text, 1e6 is a number.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from thermocline.errors import FormatError

Place = tuple[str | int, ...]
Problems = Iterator[tuple[Place, str]]
Model = TypeVar("Model", bound=BaseModel)

_MOST = 20  # problems that are told at once


class Contradiction(ValueError):
    """Fields that are each possible and not together. Places are below the model that found it."""

    def __init__(self, problems: Sequence[tuple[Place, str]]) -> None:
        super().__init__("; ".join(says for _, says in problems))
        self.problems = problems


def check(model: Model, problems: Problems) -> Model:
    """The model, if it has no problems: for validators of models."""
    if found := list(problems):
        raise Contradiction(found)
    return model


def read_text(path: str | Path) -> str:
    """The text of a file, with an error that names it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: byte {error.start} is not UTF-8 text; it should be a YAML or JSON file") from None


def read_file(kind: type[Model], path: str | Path) -> Model:
    """A model from a file."""
    return read_model(kind, read_text(path), str(path))


def read_model(
    kind: type[Model],
    text: str,
    name: str,
    instead: Mapping[str, object] | None = None,
    doubts: Callable[[Model], Problems] | None = None,
) -> Model:
    """A model from text, some fields replaced. `name` is what errors call it; `doubts` may find more wrong with the model."""
    data = _parse(text, name)
    if not isinstance(data, dict):
        fields = ", ".join(kind.model_fields)
        raise FormatError(f"{name}, line 1: this is {_kind_of(data)}; a {kind.__name__} file has the fields {fields}")
    return read_data(kind, data | dict(instead or {}), name, text, doubts)


def read_data(
    kind: type[Model],
    data: dict[str, Any],
    name: str,
    text: str | None = None,
    doubts: Callable[[Model], Problems] | None = None,
) -> Model:
    """A model from plain data; `text` is what it was read from, where lines can be told."""
    try:
        found = kind.model_validate(data)
        problems = list(doubts(found)) if doubts else []
    except ValidationError as error:
        problems = [problem for details in error.errors() for problem in _problems(kind, details)]
    if not problems:
        return found
    tree = _compose(text) if text is not None else None
    lines = [_sentence(name, tree, data, place, says) for place, says in problems[:_MOST]]
    if len(problems) > _MOST:
        lines.append(f"{name}: and {len(problems) - _MOST} problems more")
    raise FormatError("\n".join(lines))


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at what was meant, or nothing."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# -- text to data -----------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of numbers, truth and nothing; all else is text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the name that PyYAML reads


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(str(node.value)))


def _parse(text: str, name: str) -> Any:
    try:
        if name.endswith(".json"):
            return json.loads(text, object_pairs_hook=lambda pairs: _no_twins(pairs, name))
        return _parse_yaml(text, name)
    except json.JSONDecodeError as error:
        raise FormatError(f"{name}, line {error.lineno}: this is not JSON ({error.msg})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise FormatError(f"{name}{line}: this is not YAML ({error.problem or error.context})") from None
    except yaml.YAMLError as error:
        raise FormatError(f"{name}: this is not YAML ({' '.join(str(error).split())})") from None
    except FormatError:
        raise
    except (RecursionError, ValueError) as error:  # nested thousands deep, or a number of thousands of digits
        raise FormatError(f"{name}: this cannot be read ({error})") from None


def _parse_yaml(text: str, name: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twins(node, name)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _no_twins(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise FormatError(f"{name}: field {twin} is given twice in one object; keep one of them")
    return found


def _refuse_twins(root: yaml.Node, name: str) -> None:
    """One field twice: YAML would take the last and say nothing."""
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
                    raise FormatError(
                        f"{name}, line {line}, field {key.value}: given before, in line {lines[key.value]}; keep one of them"
                    )
                lines[str(key.value)] = line
                waiting.append(value)


def _kind_of(data: object) -> str:
    return {type(None): "an empty file", list: "a list", str: "a line of text"}.get(type(data), f"a {type(data).__name__}")


# -- problems to sentences --------------------------------------------------------------------------------------------------


def _compose(text: str) -> yaml.Node | None:
    """The tree of a text that is known to be YAML or JSON. Tabs are JSON's alone, and never inside its strings."""
    loader = _Loader(text.replace("\t", " "))
    try:
        return loader.get_single_node()
    except yaml.YAMLError:
        return None
    finally:
        loader.dispose()


def _line(root: yaml.Node | None, place: Place) -> int | None:
    """The line of a field, or of the nearest thing around it that the file has."""
    node, line = root, None
    for part in place:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if getattr(key, "value", None) == str(part)]
            if not pairs:
                break
            line, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line if line is not None else None if root is None else root.start_mark.line + 1


def _sentence(name: str, tree: yaml.Node | None, data: Any, place: Place, says: str) -> str:
    line = _line(tree, place)
    where = name if line is None else f"{name}, line {line}"
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    called = _called(data, place)
    owner = f" ({str(place[0])[:-1]} {called!r})" if called else ""
    return f"{where}, field {field}{owner}: {says}" if field else f"{where}: {says}"


def _called(data: Any, place: Place) -> str | None:
    """The name of the list's entry that a place lies in: tables are better known by name than by number."""
    if len(place) < 2 or not isinstance(place[1], int):
        return None
    entry = data[place[0]][place[1]]
    return str(entry["name"]) if isinstance(entry, dict) and "name" in entry else None


def _problems(kind: type[BaseModel], details: ErrorDetails) -> Problems:
    place: Place = tuple(part for part in details["loc"])
    error = details.get("ctx", {}).get("error")
    if isinstance(error, Contradiction):
        yield from (((*place, *below), says) for below, says in error.problems)
    else:
        yield place, _says(kind, details, place)


def _says(kind: type[BaseModel], details: ErrorDetails, place: Place) -> str:
    """What is wrong, and what is possible."""
    given, limits = details["input"], details.get("ctx", {})
    known = _fields_around(kind, place)
    wanted = known.get(str(place[-1]), "") if place else ""
    hint = f"; it is {wanted}" if wanted else ""
    match details["type"]:
        case "extra_forbidden":
            return f"there is no such field{nearest(str(place[-1]), known)}; there are {', '.join(known)}"
        case "missing":
            return f"is missing{hint}"
        case "greater_than":
            return f"{given!r} is not above {limits['gt']}{hint}"
        case "greater_than_equal":
            return f"{given!r} is below {limits['ge']}{hint}"
        case "less_than_equal":
            return f"{given!r} is above {limits['le']}{hint}"
        case "literal_error":
            return f"{given!r} is not known{nearest(str(given), _words(limits['expected']))}; use {limits['expected']}"
        case "value_error":
            return f"{limits['error']}{hint}"
        case _:
            return f"{given!r} does not do ({details['msg'][0].lower()}{details['msg'][1:]}){hint}"


def _words(expected: str) -> list[str]:
    return re.findall(r"'([^']*)'", expected)


def _fields_around(kind: type[BaseModel], place: Place) -> dict[str, str]:
    """The fields of the model that a place lies in, and what each of them is."""
    model: type[BaseModel] | None = kind
    for part in place[:-1]:
        if model is not None and isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return {name: field.description or "" for name, field in model.model_fields.items()} if model else {}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None` or `tuple[Model, ...]`."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := _model_in(inner))), None)
