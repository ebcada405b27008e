"""The training loop: epochs over a log, an evaluation after each, and a folder to resume from.

A run is exact: interrupted and resumed, it ends with equal numbers. The loop stops only between steps, and everything that a
step depends on is in the folder or follows from the settings. All ranks run the loop together: when one of them stops or saves,
all do so after the same step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput
from thermocline.nn.prefetch import AT_ONCE
from thermocline.plan.run_file import MeasuredRun

from .ranks import ONE_RANK, TrainingRanks
from .run_folder import RunFolder
from .settings import RunSettings

LOG_STEPS = 100  # between two points of the curve; fewer in a short run, so that it has POINTS points
POINTS = 40
MAX_POINTS = 200  # when a long run has as many, every other point is dropped

ReportProgress = Callable[[int, int, str], None]
WriteScalars = Callable[[int, Mapping[str, float]], None]
Measured = dict[str, float]


class TrainingInterrupted(KeyboardInterrupt):
    """Training stopped on request; the message says how to resume."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Memory and time of a finished run."""

    train_loss: float  # mean over the last epoch
    samples: int  # over all epochs
    rows: int
    memory: dict[str, int]  # bytes of this rank's tables, by part
    stats: dict[str, int]
    seconds: float  # including the parts before a resume


@dataclass
class Position:
    """The position of a run, from which it resumes."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    loss_sum: float = 0.0  # of this epoch
    losses: int = 0  # of this epoch: a click has one, a history one for each predicted item
    seconds: float = 0.0
    measured: list[Measured] = field(default_factory=list)  # after each epoch
    curve: list[Measured] = field(default_factory=list)  # points for charts


@contextmanager
def open_board(logdir: Path | None, step: int) -> Iterator[WriteScalars]:
    """Write scalars of a step for TensorBoard to `logdir`, if given; drop steps after `step` of an interrupted run there."""
    if logdir is None:
        yield lambda step, scalars: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        words = "TensorBoard is not installed; run: pip install tensorboard, or omit --logdir"
        raise BadInput(words, parameter="logdir") from None

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(str(logdir), purge_step=step) as writer:
        yield write


B = TypeVar("B")
Result = TypeVar("Result")


class TrainLoop(ABC, Generic[B, Result]):
    """A model in training on `samples` samples an epoch. A subclass adds batches, losses and evaluation."""

    def __init__(
        self, settings: RunSettings, model: nn.Module, samples: int, checkpoint: Path | None, ranks: TrainingRanks = ONE_RANK
    ) -> None:
        self._settings, self.samples, self.ranks = settings, samples, ranks
        self.network = model
        ranks.wrap(model)
        self.optimizers = make_optimizers(model, settings.dense_lr)
        self.folder = RunFolder(checkpoint, asdict(settings), model, self.optimizers) if checkpoint else None
        self.position = self._resumed()
        self.run_json: MeasuredRun | None = None  # of the last epoch under a plan
        self._started = time.perf_counter() - self.position.seconds
        # The running sum stays on the device: reading it would make every step wait for the GPU. In a resumed run, the first
        # rank holds the sum of all ranks.
        before = self.position.loss_sum if ranks.first else 0.0
        self._loss_sum = torch.tensor(before, dtype=torch.float64, device=settings.device)
        self._last_point = self.position.loss_sum, self.position.losses
        steps = settings.epochs * -(-samples // (settings.batch * ranks.size))
        self._point_every = max(1, min(LOG_STEPS, steps // POINTS))

    def _resumed(self) -> Position:
        """The saved position; on another number of ranks, after the last full step before it."""
        saved = self.folder.load() if self.folder else None
        if saved is None:
            return Position()
        samples = saved.pop("cards") * saved["step_in_epoch"]
        return Position(**{**saved, "step_in_epoch": samples // self.ranks.size})

    @abstractmethod
    def batches(self) -> Iterator[B]:
        """Remaining batches of this rank in this epoch, on the device; one for every step, perhaps empty."""

    @abstractmethod
    def lookup_ids(self, batch: B) -> Any:
        """The input of the tables for a batch."""

    @abstractmethod
    def losses(self, batch: B) -> Tensor:
        """The losses of a batch, one for each prediction."""

    @abstractmethod
    def evaluate(self) -> Measured:
        """Test metrics over the samples of all ranks, which call this together."""

    @abstractmethod
    def result(self) -> Result:
        """Metrics, memory and time at the end of the run."""

    def finish(
        self,
        progress: ReportProgress = lambda done, total, what: None,
        stop: Callable[[], bool] = lambda: False,
        logdir: Path | None = None,
        save_seconds: float = 60.0,
    ) -> Result:
        """Train to the end. Saves every `save_seconds`; if `stop()` is true, saves and raises `TrainingInterrupted`."""
        at, saved = self.position, time.perf_counter()
        self._rated = at.step, saved
        with open_board(logdir if self.ranks.first else None, at.step) as write:
            while at.epoch < self._settings.epochs:
                began, first = time.perf_counter(), at.step
                for batch in self._prefetched():
                    self._step(batch, write)
                    done = min(self.samples, at.step_in_epoch * self._settings.batch * self.ranks.size)
                    progress(at.epoch * self.samples + done, self._settings.epochs * self.samples, "samples")
                    due = self.ranks.first and time.perf_counter() - saved >= save_seconds
                    stops, saves = self.ranks.add(stop(), due)
                    if stops or saves:
                        self._save()
                        saved = time.perf_counter()
                    if stops:
                        raise TrainingInterrupted(self._how_to_resume())
                step_seconds = (time.perf_counter() - began) / max(1, at.step - first)
                self.run_json = self.ranks.measured(self._settings.batch, step_seconds)
                self._end_epoch(write)
                self._save()
        if not self.folder:
            at.seconds = time.perf_counter() - self._started
        return self.result()

    def _how_to_resume(self) -> str:
        stopped = f"stopped after step {self.position.step:,}"
        if self.folder:
            return f"{stopped}, saved in '{self.folder.path}'; repeat the command to resume"
        return f"{stopped}; nothing was saved; give --checkpoint FOLDER to save"

    def _prefetched(self) -> Iterator[B]:
        """The batches, with rows of later batches prefetched if tables support it and it pays."""
        prefetched: Any = getattr(self.network.embeddings, "prefetched", None)
        if prefetched is None or not self.ranks.prefetches:
            return self.batches()
        ahead = 1 if self.ranks.size > 1 else AT_ONCE  # plans count the memory of one batch ahead
        return (batch for batch, _ in prefetched(self.batches(), ids=self.lookup_ids, at_once=ahead))

    @property
    def loss(self) -> float:
        """Mean training loss of this epoch so far; all ranks call this together."""
        (self.position.loss_sum,) = self.ranks.add(self._loss_sum.item())
        return self.position.loss_sum / max(1, self.position.losses)

    def _step(self, batch: B, write: WriteScalars) -> None:
        at = self.position
        loss_sum, count = train_step(self, batch)
        self._loss_sum += loss_sum
        at.losses += count
        at.step += 1
        at.step_in_epoch += 1
        if at.step % self._point_every == 0:
            self._add_point(write)

    def _add_point(self, write: WriteScalars) -> None:
        """Add a point to the curve, with loss and speed since the last point; TensorBoard gets the loss of the epoch so far."""
        at, (step, then), self._rated = self.position, self._rated, (self.position.step, time.perf_counter())
        rate = (at.step - step) * self._settings.batch * self.ranks.size / max(self._rated[1] - then, 1e-9)
        memory, stats = tables_of(self.network)
        scalars = {"loss": self.loss, "samples per second": rate}
        scalars |= {f"memory/{part}": float(count) for part, count in memory.items()}
        scalars |= {f"tables/{name}": float(count) for name, count in stats.items()} | self.ranks.traffic()
        write(at.step, scalars)
        since, losses = at.loss_sum - self._last_point[0], at.losses - self._last_point[1]
        self._last_point = at.loss_sum, at.losses
        at.curve.append({**scalars, "step": at.step, "loss": since / max(1, losses)})
        if len(at.curve) == MAX_POINTS:
            del at.curve[::2]

    def _end_epoch(self, write: WriteScalars) -> None:
        at = self.position
        found = self.evaluate()
        self.ranks.reset_meters()  # lookups of the evaluation do not belong to a step
        at.measured.append({**found, "train_loss": self.loss})
        write(at.step, {f"test/{name}": value for name, value in found.items()})
        at.epoch, at.step_in_epoch, at.losses = at.epoch + 1, 0, 0
        self._last_point = 0.0, 0
        self._loss_sum.zero_()

    def _save(self) -> None:
        if self.folder:
            (self.position.loss_sum,) = self.ranks.add(self._loss_sum.item())
            self.position.seconds = time.perf_counter() - self._started
            self.folder.save(asdict(self.position) | {"cards": self.ranks.size})

    def common_results(self, rows: int) -> dict[str, Any]:
        """Results that all models report."""
        at = self.position
        assert at.epoch == self._settings.epochs
        memory, stats = tables_of(self.network)
        about = {"samples": at.epoch * self.samples, "rows": rows, "memory": memory, "stats": stats, "seconds": at.seconds}
        return {**at.measured[-1], **about}


def make_optimizers(model: nn.Module, dense_lr: float) -> dict[str, torch.optim.Optimizer]:
    """Adam for dense parameters, and the fused optimizer of the tables."""
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("embeddings.")]
    optimizers: dict[str, torch.optim.Optimizer] = {"dense": torch.optim.Adam(dense, lr=dense_lr)}
    own: Any = getattr(model.embeddings, "fused_optimizer", None)
    if own is not None:
        optimizers["rows"] = own
    return optimizers


def train_step(loop: TrainLoop[B, Any], batch: B) -> tuple[Tensor, int]:
    """One step of all ranks; returns the sum of this rank's losses and the number of all ranks' losses."""
    loop.network.train()
    losses = loop.losses(batch)
    (total,) = loop.ranks.add(len(losses))
    loss_sum = losses.sum()
    loss = loss_sum * (loop.ranks.size / max(1, total))  # DDP averages gradients over ranks
    for optimizer in loop.optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in loop.optimizers.values():
        optimizer.step()
    return loss_sum.detach().double(), int(total)


def tables_of(model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part, and statistics of the tables."""
    tables: Any = model.embeddings
    if not hasattr(tables, "memory"):
        return {"weights": sum(4 * parameter.numel() for parameter in tables.parameters())}, {}
    return dict(tables.memory().parts), dict(tables.stats())
