"""Number types of planning files: how each is written in a file, and its JSON schema.

Limits come before the validators, because only there does pydantic add them to the schema.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from .units import BYTES, RATES, SECONDS, read_bytes, read_rate, read_seconds

MOST_LOOKUPS = 1 << 20  # per sample and table


def _number(given: object) -> object:
    if isinstance(given, (bool, str)):  # pydantic would convert both
        raise ValueError(f"{given!r} is not a number")
    return given


def _quantity(units: dict[str, float], least: str) -> dict[str, Any]:
    """Schema of a number, or text with a unit. `least`: "minimum" where 0 is allowed, else "exclusiveMinimum"."""
    names = "|".join(sorted(units))
    text = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*({names})\s*$"}
    return {"anyOf": [{"type": "number", least: 0}, text]}


Count = Annotated[int, Field(ge=1), BeforeValidator(_number)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_number)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Lookups = Annotated[float, Field(ge=0, le=MOST_LOOKUPS, allow_inf_nan=False), BeforeValidator(_number)]
Bytes = Annotated[int, BeforeValidator(read_bytes), Field(ge=0), WithJsonSchema(_quantity(BYTES, "minimum"))]
PositiveBytes = Annotated[int, BeforeValidator(read_bytes), Field(gt=0), WithJsonSchema(_quantity(BYTES, "exclusiveMinimum"))]
Rate = Annotated[
    float,
    BeforeValidator(read_rate),
    Field(gt=0, allow_inf_nan=False),
    WithJsonSchema(_quantity(RATES, "exclusiveMinimum")),
]
Seconds = Annotated[
    float, BeforeValidator(read_seconds), Field(ge=0, allow_inf_nan=False), WithJsonSchema(_quantity(SECONDS, "minimum"))
]
