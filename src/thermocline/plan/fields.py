"""The kinds of numbers in planning files: what may be written for each, in files and in their JSON schemas.

Limits stand before the validators: only there do they reach the schema.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from .units import BYTES, RATES, SECONDS, read_bytes, read_rate, read_seconds

MOST_LOOKUPS = 1 << 20  # of a sample in one table


def _whole(given: object) -> object:
    if isinstance(given, (bool, str)):  # which pydantic would take for 1, or read
        raise ValueError(f"{given!r} is not a whole number")
    return given


def _number(given: object) -> object:
    if isinstance(given, (bool, str)):
        raise ValueError(f"{given!r} is not a number")
    return given


def _quantity(units: dict[str, float], least: str) -> dict[str, Any]:
    """Either a number, or text with a unit. `least` is "minimum" or "exclusiveMinimum": whether it may be 0."""
    names = "|".join(sorted(units))
    text = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*({names})\s*$"}
    return {"anyOf": [{"type": "number", least: 0}, text]}


Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_number)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Lookups = Annotated[float, Field(ge=0, le=MOST_LOOKUPS, allow_inf_nan=False), BeforeValidator(_number)]
Bytes = Annotated[int, BeforeValidator(read_bytes), Field(ge=0), WithJsonSchema(_quantity(BYTES, "minimum"))]
SomeBytes = Annotated[int, BeforeValidator(read_bytes), Field(gt=0), WithJsonSchema(_quantity(BYTES, "exclusiveMinimum"))]
Rate = Annotated[
    float,
    BeforeValidator(read_rate),
    Field(gt=0, allow_inf_nan=False),
    WithJsonSchema(_quantity(RATES, "exclusiveMinimum")),
]
Seconds = Annotated[
    float, BeforeValidator(read_seconds), Field(ge=0, allow_inf_nan=False), WithJsonSchema(_quantity(SECONDS, "minimum"))
]
