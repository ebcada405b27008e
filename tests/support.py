"""Helpers that tests of all layers share. Import as `from support import has`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pydantic import ValidationError

from thermocline import RowConfig
from thermocline.plan.io import Contradiction


def has(**fields: Any) -> Callable[[BaseException], bool]:
    """For `pytest.raises(BadInput, check=has(parameter="cache"))`: the error has these fields with these values."""
    return lambda error: all(getattr(error, name, None) == value for name, value in fields.items())


def mentions(*words: str) -> Callable[[BaseException], bool]:
    """For errors of torch without fields: the message has these names or numbers, in whatever sentence."""
    return lambda error: all(word in str(error) for word in words)


def contradicts(*location: str | int) -> Callable[[BaseException], bool]:
    """For pydantic's `ValidationError`: fields that are valid alone contradict each other at this location."""

    def check(error: BaseException) -> bool:
        assert isinstance(error, ValidationError)
        causes = [details.get("ctx", {}).get("error") for details in error.errors()]
        return location in [place for cause in causes if isinstance(cause, Contradiction) for place, _ in cause.problems]

    return check


def drawn_calls(figure: str, path: str) -> list[str]:
    """`file:function` of the calls that a figure of docs/pictures draws on a path, from top to bottom."""
    drawn = ElementTree.parse(Path(__file__).parents[1] / "docs" / "pictures" / f"{figure}.svg")
    return [str(text.text) for text in drawn.iter() if path in text.get("data-path", "").split()]


def module_arguments(**keywords: Any) -> dict[str, Any]:
    """Arguments of a module of thermocline: the fields of `RowConfig` among them become `rows`."""
    names = {field.name for field in fields(RowConfig)}
    rows = {name: value for name, value in keywords.items() if name in names}
    return {**{name: value for name, value in keywords.items() if name not in names}, "rows": RowConfig(**rows)}
