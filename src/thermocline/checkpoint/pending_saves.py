"""Saves that are being written in the background of this process: another save, or a load, waits for them first."""

from __future__ import annotations

from typing import Protocol


class Awaited(Protocol):
    def wait(self) -> None: ...


SAVES: list[Awaited] = []


def wait_for_saves() -> None:
    """Until all of them are visible; raises what one of them has met."""
    while SAVES:
        SAVES[0].wait()
