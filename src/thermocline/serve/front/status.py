"""Placeholder."""

from __future__ import annotations

from .desk import Desk


def status_json(desk: Desk) -> dict[str, object]:
    return {}


def status_page(desk: Desk) -> str:
    return ""
