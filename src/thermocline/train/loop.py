"""The training loop: one pass after the other over a log, a judgement after each, and a folder to resume from.

A run is exact: interrupted and resumed, it ends with the numbers it would have ended with. For that the loop stops between
steps only (`stop` is asked there), and everything a step depends on is in the folder or follows from the settings.

`Loop` knows steps, ranks, saving and logging; a run of a model adds its batches, its losses and how it is judged. On several
cards all ranks go through the loop together: what one of them decides (to stop, to save) all of them do after the same step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from thermocline.plan.run_file import MeasuredRun as MeasuredRun

from .checkpoint import Folder
from .distributed import ALONE, Cards
from .tensorboard import Board

LOG_STEPS = 100  # between two points of the curve; fewer in a short run, so that it has POINTS of them
POINTS = 40
KEPT = 200  # points of a long run: from then on every other one is dropped, again and again

ReportProgress = Callable[[int, int, str], None]
Measured = dict[str, float]


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop; the message says what there is to go on from."""


class LoopSettings(Protocol):
    """What the loop needs of a run's settings."""

    @property
    def batch(self) -> int: ...  # samples of a card and step

    @property
    def epochs(self) -> int: ...

    @property
    def dense_lr(self) -> float: ...

    @property
    def device(self) -> str: ...


@dataclass
class Position:
    """Where a run is: what a resumed run begins with."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    loss_sum: float = 0.0  # of this epoch, over all losses
    losses: int = 0  # how many: a click has one, a history one for each item that is predicted
    seconds: float = 0.0
    measured: list[Measured] = field(default_factory=list)  # after each epoch
    curve: list[Measured] = field(default_factory=list)  # every so many steps, for pictures


B = TypeVar("B")
Ended = TypeVar("Ended")


class Loop(ABC, Generic[B, Ended]):
    """A model in training on `samples` samples an epoch; then `finish()`."""

    def __init__(
        self, settings: LoopSettings, model: nn.Module, samples: int, checkpoint: Path | None, cards: Cards = ALONE
    ) -> None:
        self.loop, self.samples, self.cards = settings, samples, cards
        self.network = model
        cards.wrap(model)
        self.optimizers = make_optimizers(model, settings.dense_lr)
        said = asdict(settings)  # type: ignore[call-overload]
        self.folder = Folder(checkpoint, said, model, self.optimizers) if checkpoint else None
        self.position = self._resumed()
        self.run_json: MeasuredRun | None = None  # of the last epoch, where there is a plan
        self._started = time.perf_counter() - self.position.seconds
        # The running sum stays on the device, where reading it would make every step wait for the card. Of a resumed run on
        # several cards, the first has what all had.
        before = self.position.loss_sum if cards.first else 0.0
        self._loss_sum = torch.tensor(before, dtype=torch.float64, device=settings.device)
        self._noted = self.position.loss_sum, self.position.losses  # at the last point of the curve
        steps = settings.epochs * -(-samples // (settings.batch * cards.size))
        self._note_every = max(1, min(LOG_STEPS, steps // POINTS))

    def _resumed(self) -> Position:
        """Where the folder says that the run is; on another number of cards, after the last of their steps before that."""
        saved = self.folder.load() if self.folder else None
        if saved is None:
            return Position()
        samples = saved.pop("cards") * saved["step_in_epoch"]
        return Position(**{**saved, "step_in_epoch": samples // self.cards.size})

    # -- what a model adds --------------------------------------------------------------------------------------------------

    @abstractmethod
    def batches(self) -> Iterator[B]:
        """What is left of this epoch of this rank's samples, on the device; a batch for every step, maybe an empty one."""

    @abstractmethod
    def looked_up(self, batch: B) -> Any:
        """What the tables are given for a batch."""

    @abstractmethod
    def losses(self, batch: B) -> Tensor:
        """The losses of a batch, one for each thing predicted."""

    @abstractmethod
    def judge(self) -> Measured:
        """How good the model is now, over the samples of all ranks; all ranks call this together."""

    @abstractmethod
    def outcome(self) -> Ended:
        """How the run ended."""

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def finish(
        self,
        progress: ReportProgress = lambda done, total, what: None,
        stop: Callable[[], bool] = lambda: False,
        logdir: Path | None = None,
        save_seconds: float = 60.0,
    ) -> Ended:
        """Train to the end. Saves every so many seconds; when `stop()` says so, saves and raises `Interrupted`."""
        self._train(progress, stop, logdir, save_seconds)
        return self.outcome()

    def _train(self, progress: ReportProgress, stop: Callable[[], bool], logdir: Path | None, save_seconds: float) -> None:
        at, saved = self.position, time.perf_counter()
        with Board(logdir if self.cards.first else None, at.step) as board:
            while at.epoch < self.loop.epochs:
                began, first = time.perf_counter(), at.step
                for batch in self._ahead():
                    self._step(batch, board)
                    progress(at.epoch * self.samples + self._done, self.loop.epochs * self.samples, "samples")
                    due = self.cards.first and time.perf_counter() - saved >= save_seconds
                    stops, saves = self.cards.add(stop(), due)
                    if stops or saves:
                        self._save()
                        saved = time.perf_counter()
                    if stops:
                        raise Interrupted(self._kept())
                self.run_json = self.cards.measured(self.loop.batch, (time.perf_counter() - began) / max(1, at.step - first))
                self._end_epoch(board)
                self._save()
        if not self.folder:
            at.seconds = time.perf_counter() - self._started

    def _kept(self) -> str:
        stopped = f"stopped after step {self.position.step:,}"
        if self.folder:
            return f"{stopped}, saved in '{self.folder.path}'; the same command goes on from there"
        return f"{stopped}; nothing was saved, as no folder was given: --checkpoint FOLDER"

    def _ahead(self) -> Iterator[B]:
        """The batches. Rows of later ones are on their way while one is trained on, where tables can do that and it pays."""
        prefetched: Any = getattr(self.network.embeddings, "prefetched", None)
        if prefetched is None or not self.cards.ahead:
            return self.batches()
        return (batch for batch, _ in prefetched(self.batches(), ids=self.looked_up))

    @property
    def loss(self) -> float:
        """Mean training loss of this epoch so far; all ranks ask together."""
        (self.position.loss_sum,) = self.cards.add(self._loss_sum.item())
        return self.position.loss_sum / max(1, self.position.losses)

    @property
    def _done(self) -> int:
        """Samples of this epoch that all ranks have trained on."""
        return min(self.samples, self.position.step_in_epoch * self.loop.batch * self.cards.size)

    def _step(self, batch: B, board: Board) -> None:
        at = self.position
        loss_sum, count = train_step(self, batch)
        self._loss_sum += loss_sum
        at.losses += count
        at.step += 1
        at.step_in_epoch += 1
        if at.step % self._note_every == 0:
            self._note(board)

    def _note(self, board: Board) -> None:
        """A point of the curve. Its loss is that of the steps since the last; the board's, of the epoch so far."""
        at = self.position
        rate = board.rate(at.step, self.loop.batch * self.cards.size)
        scalars = {"loss": self.loss, **rate, **describe(self.network), **self.cards.traffic()}
        board.write(at.step, scalars)
        since, losses = at.loss_sum - self._noted[0], at.losses - self._noted[1]
        self._noted = at.loss_sum, at.losses
        at.curve.append({**scalars, "step": at.step, "loss": since / max(1, losses)})
        if len(at.curve) == KEPT:
            del at.curve[::2]

    def _end_epoch(self, board: Board) -> None:
        at = self.position
        found = self.judge()
        self.cards.reset_meters()  # what is looked up to judge is no part of a step
        at.measured.append({**found, "train_loss": self.loss})
        board.write(at.step, {f"test/{name}": value for name, value in found.items()})
        at.epoch, at.step_in_epoch, at.losses = at.epoch + 1, 0, 0
        self._noted = 0.0, 0
        self._loss_sum.zero_()

    def _save(self) -> None:
        if self.folder:
            (self.position.loss_sum,) = self.cards.add(self._loss_sum.item())
            self.position.seconds = time.perf_counter() - self._started
            self.folder.save(asdict(self.position) | {"cards": self.cards.size})

    def ended(self, rows: int) -> dict[str, Any]:
        """What outcomes of all models have in common."""
        at = self.position
        assert at.epoch == self.loop.epochs
        memory, stats = tables_of(self.network)
        trained = at.epoch * self.samples
        return {
            **at.measured[-1], "samples": trained, "rows": rows, "memory": memory, "stats": stats, "seconds": at.seconds,
        }  # fmt: skip


def make_optimizers(model: nn.Module, dense_lr: float) -> dict[str, torch.optim.Optimizer]:
    """Adam for the dense part, and what the tables bring of their own."""
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("embeddings.")]
    optimizers: dict[str, torch.optim.Optimizer] = {"dense": torch.optim.Adam(dense, lr=dense_lr)}
    own: Any = getattr(model.embeddings, "fused_optimizer", None)
    if own is not None:
        optimizers["rows"] = own
    return optimizers


def train_step(loop: Loop[B, Any], batch: B) -> tuple[Tensor, int]:
    """One step of all ranks; the sum of this rank's losses, and the number of all ranks'."""
    loop.network.train()
    losses = loop.losses(batch)
    (total,) = loop.cards.add(len(losses))
    loss_sum = losses.sum()
    loss = loss_sum * (loop.cards.size / max(1, total))  # ranks average their gradients: this makes the mean that of all
    for optimizer in loop.optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in loop.optimizers.values():
        optimizer.step()
    return loss_sum.detach().double(), int(total)


def tables_of(model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes by part, statistics) of the tables, as far as they tell."""
    tables: Any = model.embeddings
    if not hasattr(tables, "memory"):
        return {"weights": sum(4 * parameter.numel() for parameter in tables.parameters())}, {}
    return dict(tables.memory().parts), dict(tables.stats())


def describe(model: nn.Module) -> dict[str, float]:
    """The same as scalars to log."""
    memory, stats = tables_of(model)
    named = {f"memory/{part}": float(count) for part, count in memory.items()}
    return named | {f"tables/{name}": float(count) for name, count in stats.items()}
