"""The kinds of numbers in planning files: what may be written for each, in files and in their JSON schemas."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from .units import BYTES, RATES, SECONDS, read_bytes, read_rate, read_seconds


def _whole(given: object) -> object:
    if isinstance(given, (bool, str)):  # which pydantic would take for 1, or read
        raise ValueError(f"{given!r} is not a whole number")
    return given


def _number(given: object) -> object:
    if isinstance(given, (bool, str)):
        raise ValueError(f"{given!r} is not a number")
    return given


def _quantity(units: dict[str, float]) -> dict[str, Any]:
    """Either a number, or text with a unit."""
    names = "|".join(sorted(units))
    text = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*({names})\s*$"}
    return {"anyOf": [{"type": "number", "minimum": 0}, text]}


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(read_bytes), Field(ge=0), WithJsonSchema(_quantity(BYTES))]
Rate = Annotated[float, BeforeValidator(read_rate), Field(gt=0, allow_inf_nan=False), WithJsonSchema(_quantity(RATES))]
Seconds = Annotated[float, BeforeValidator(read_seconds), Field(ge=0, allow_inf_nan=False), WithJsonSchema(_quantity(SECONDS))]
