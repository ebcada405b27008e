"""The training loop: one pass after the other over a log, a judgement after each, and a folder to resume from.

A run is exact: interrupted and resumed, it ends with the numbers it would have ended with. For that the loop stops between
steps only (`stop` is asked there), and everything a step depends on is in the folder or follows from the settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..data import Clicks, Log, Scores
from ..data.metrics import Measures
from ..errors import BadInput
from ..models import DLRM
from .board import Board
from .checkpoint import Folder
from .settings import Settings

EVALUATION_BATCH = 8192
LOG_STEPS = 100

ReportProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    auc: float
    logloss: float
    ne: float
    train_loss: float  # mean over the last epoch, while it was trained
    samples: int  # trained on, over all epochs
    rows: int
    memory: dict[str, int]  # bytes of the tables, by part
    stats: dict[str, int]
    seconds: float  # over all parts of a run that was resumed


@dataclass
class Position:
    """Where a run is: what a resumed run begins with."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    loss_sum: float = 0.0  # of this epoch, a sum over samples
    samples_in_epoch: int = 0
    seconds: float = 0.0
    measured: list[dict[str, float]] = field(default_factory=list)  # after each epoch


class Run:
    """A model in training. `settings` say all about it, but for `logs` or a `model` that are made already; then `finish()`."""

    def __init__(
        self,
        settings: Settings,
        checkpoint: Path | None = None,
        logs: tuple[Log, Log] | None = None,
        model: DLRM | None = None,
    ) -> None:
        self.settings = settings
        self.train_log, self.test_log = logs or settings.logs()
        if not self.train_log.samples or not self.test_log.samples:
            counts = f"{self.train_log.samples} samples to train on and {self.test_log.samples} to test"
            raise BadInput(f"the log has {counts}; both parts need some")
        self.model = model or settings.model(self.train_log)
        self.optimizers = make_optimizers(self.model, settings.dense_lr)
        self.folder = Folder(checkpoint, asdict(settings), self.model, self.optimizers) if checkpoint else None
        self.position = Position(**((self.folder and self.folder.load()) or {}))
        self._started = time.perf_counter() - self.position.seconds
        # The running sum stays on the device, where reading it would make every step wait for the card.
        self._loss_sum = torch.tensor(self.position.loss_sum, dtype=torch.float64, device=settings.device)

    def finish(
        self,
        progress: ReportProgress = lambda done, total, what: None,
        stop: Callable[[], bool] = lambda: False,
        logdir: Path | None = None,
        save_seconds: float = 60.0,
    ) -> Outcome:
        """Train to the end. Saves every so many seconds; when `stop()` says so, saves and raises KeyboardInterrupt."""
        at, saved = self.position, time.perf_counter()
        with Board(logdir, at.step) as board:
            while at.epoch < self.settings.epochs:
                for batch in self._batches():
                    self._step(batch, board)
                    done = at.epoch * self.train_log.samples + at.samples_in_epoch
                    progress(done, self.settings.epochs * self.train_log.samples, "samples")
                    if stop():
                        self._save()
                        raise KeyboardInterrupt
                    if time.perf_counter() - saved >= save_seconds:
                        self._save()
                        saved = time.perf_counter()
                self._end_epoch(board)
                self._save()
        return self.outcome()

    @property
    def loss(self) -> float:
        """Mean training loss of this epoch so far."""
        self.position.loss_sum = self._loss_sum.item()
        return self.position.loss_sum / max(1, self.position.samples_in_epoch)

    def _batches(self) -> Iterator[Clicks]:
        """What is left of this epoch, on the device. Rows of a batch are on their way while the one before is trained on."""
        prefetch = getattr(self.model.embeddings, "prefetch", None)
        ready: Clicks | None = None
        for batch in self.train_log.batches(self.settings.batch, self.position.epoch, self.position.step_in_epoch):
            coming = batch.to(self.settings.device)
            if ready is not None:
                if prefetch is not None:
                    prefetch(coming.ids_BF)
                yield ready
            ready = coming
        if ready is not None:
            yield ready

    def _step(self, batch: Clicks, board: Board) -> None:
        at = self.position
        loss = train_step(self.model, self.optimizers, batch)
        samples = len(batch.label_B)
        self._loss_sum += loss.double() * samples
        at.samples_in_epoch += samples
        at.step += 1
        at.step_in_epoch += 1
        if at.step % LOG_STEPS == 0:
            board.write(at.step, {"loss": self.loss, **board.rate(at.step, self.settings.batch), **describe(self.model)})

    def _end_epoch(self, board: Board) -> None:
        at = self.position
        measures = evaluate(self.model, self.test_log, self.settings.device)
        at.measured.append({**measures._asdict(), "train_loss": self.loss})
        board.write(at.step, {f"test/{name}": value for name, value in measures._asdict().items()})
        at.epoch, at.step_in_epoch, at.samples_in_epoch = at.epoch + 1, 0, 0
        self._loss_sum.zero_()

    def _save(self) -> None:
        if self.folder:
            self.position.loss_sum = self._loss_sum.item()
            self.position.seconds = time.perf_counter() - self._started
            self.folder.save(asdict(self.position))

    def outcome(self) -> Outcome:
        at = self.position
        assert at.epoch == self.settings.epochs
        if not self.folder:
            at.seconds = time.perf_counter() - self._started
        memory, stats = tables_of(self.model)
        samples = at.epoch * self.train_log.samples
        return Outcome(
            **at.measured[-1], samples=samples, rows=sum(self.train_log.rows), memory=memory, stats=stats, seconds=at.seconds
        )


def make_optimizers(model: DLRM, dense_lr: float) -> dict[str, torch.optim.Optimizer]:
    """Adam for the MLPs, and what the tables bring of their own."""
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("embeddings.")]
    optimizers: dict[str, torch.optim.Optimizer] = {"dense": torch.optim.Adam(dense, lr=dense_lr)}
    own = getattr(model.embeddings, "fused_optimizer", None)
    if own is not None:
        optimizers["rows"] = own
    return optimizers


def train_step(model: DLRM, optimizers: Mapping[str, torch.optim.Optimizer], batch: Clicks) -> Tensor:
    """One step; returns the mean loss of the batch."""
    model.train()
    loss = binary_cross_entropy_with_logits(model(batch.dense_BI, batch.ids_BF), batch.label_B)
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: DLRM, log: Log, device: str) -> Measures:
    """Judge the model on a log; changes nothing in it."""
    model.eval()
    scores = Scores()
    for batch in log.batches(EVALUATION_BATCH):
        batch = batch.to(device)
        scores.add(model(batch.dense_BI, batch.ids_BF), batch.label_B)
    return scores.measures()


def tables_of(model: DLRM) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes by part, statistics) of the tables, as far as they tell."""
    tables: Any = model.embeddings
    if not hasattr(tables, "memory"):
        return {"weights": sum(4 * parameter.numel() for parameter in tables.parameters())}, {}
    return dict(tables.memory().parts), dict(tables.stats())


def describe(model: DLRM) -> dict[str, float]:
    """The same as scalars to log."""
    memory, stats = tables_of(model)
    named = {f"memory/{part}": float(count) for part, count in memory.items()}
    return named | {f"tables/{name}": float(count) for name, count in stats.items()}
