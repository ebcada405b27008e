"""Serving: tables split over cards, and a server that speaks the Open Inference Protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frozen_tables import FrozenTables
    from .remote.shard_host import hold_cards
    from .tables.shard_group import CardGroup

__all__ = ["CardGroup", "FrozenTables", "hold_cards"]


def __getattr__(name: str) -> Any:
    """Names are loaded when they are used: a card's process needs no torch."""
    if name == "CardGroup":
        from .tables.shard_group import CardGroup

        return CardGroup
    if name == "FrozenTables":
        from .frozen_tables import FrozenTables

        return FrozenTables
    if name == "hold_cards":
        from .remote.shard_host import hold_cards

        return hold_cards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
