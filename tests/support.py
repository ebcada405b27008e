"""Helpers that tests of all layers share. Import as `from support import has`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def has(**fields: Any) -> Callable[[BaseException], bool]:
    """For `pytest.raises(BadInput, check=has(parameter="cache"))`: the error has these fields with these values."""
    return lambda error: all(getattr(error, name, None) == value for name, value in fields.items())
