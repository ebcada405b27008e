"""Training the reference models on click logs: `thermocline train`, and the arms of the accuracy benchmark."""

from __future__ import annotations

from .loop import Outcome, Run, evaluate
from .settings import Settings

__all__ = ["Outcome", "Run", "Settings", "evaluate"]
