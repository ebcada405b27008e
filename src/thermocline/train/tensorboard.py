"""Scalars of a run for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thermocline.errors import BadInput


class Board:
    """Writes scalars to `logdir`, if given; drops steps after `step` that an interrupted run left there."""

    def __init__(self, logdir: Path | None, step: int) -> None:
        self._writer: Any = None
        self._step, self._time = step, time.perf_counter()
        if logdir is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise BadInput(
                "TensorBoard is not installed; run: pip install tensorboard, or omit --logdir", parameter="logdir"
            ) from None
        self._writer = SummaryWriter(str(logdir), purge_step=step)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def rate(self, step: int, batch: int) -> dict[str, float]:
        """Samples per second since the last call."""
        now = time.perf_counter()
        rate = (step - self._step) * batch / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return {"samples per second": rate}

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer:
            self._writer.close()
