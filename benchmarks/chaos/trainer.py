"""The trainer of the chaos benchmark, a process that may be killed at any time: `python -m benchmarks.chaos.trainer ...`.

Before a publish or a save can become visible, what it must answer is in a file: all rows of the static table, and the rows of
every id of the elastic one, read from the model and not from what is published.

    expected/save-3.npz     what save 3 answers; `run` says which run of the trainer wrote it
    expected/2/17.npz       what publish 17 of run 2 answers
    now                     run and number of the last publish, as JSON; `final` is written when the trainer was asked to end
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thermocline
from thermocline.checkpoint.reader import Checkpoint
from thermocline.errors import ThermoclineError

ROWS, UNIVERSE, OWN, DIM = 5_003, 3_001, 1_000, 16
STEP_S, INTERVAL_S, SAVE_STEPS, KEPT = 0.05, 0.2, 60, 400


class Trainer:
    """A run of the trainer: goes on from the last save of the folder, if there is one."""

    def __init__(self, folder: Path, state: Path) -> None:
        self._folder, self._expected = folder, state / "expected"
        self._expected.mkdir(parents=True, exist_ok=True)
        self.run = 1 + sum(each.is_dir() for each in self._expected.iterdir())
        (self._expected / str(self.run)).mkdir()
        self._draw = torch.Generator().manual_seed(self.run)
        if (folder / "manifest.json").exists():
            found = thermocline.load(folder)
            assert isinstance(found, thermocline.EmbeddingCollection)
            self.model = found
        else:
            ids = thermocline.IdMap.elastic(OWN, half_life=5)
            tables = [thermocline.Table("a", ROWS, DIM), thermocline.Table("b", OWN, DIM, ids=ids)]
            self.model = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.0))

    def step(self) -> None:
        """Train on any rows, and on ids of a window that slides over the universe, so that most ids come and go."""
        ids_B = torch.randint(ROWS, (64,), generator=self._draw)
        first = int(time.time() * 100) % UNIVERSE
        born_B = (first + torch.randint(UNIVERSE // 3, (64,), generator=self._draw)) % UNIVERSE
        self.model(torch.stack([ids_B, born_B], 1)).values().square().sum().backward()

    def expect(self, name: str) -> None:
        """Write what a publish or a save of this moment must answer."""
        self.model.eval()
        with torch.no_grad():
            a, b, offsets = torch.arange(ROWS), torch.arange(UNIVERSE), torch.arange(ROWS + 1)
            rows = self.model({"a": (a, offsets), "b": (torch.arange(ROWS) % UNIVERSE, offsets)})
        self.model.train()
        known = self.model.elastic("b").rows_of(b) >= 0
        write_npz(
            self._expected / f"{name}.npz",
            a=rows["a"].numpy(),
            b=rows["b"][:UNIVERSE].numpy(),
            known=known.numpy(),
            run=self.run,
        )

    def expect_save(self) -> None:
        number = 0
        with suppress(ThermoclineError, OSError):
            number = Checkpoint.open(self._folder).number
        self.expect(f"save-{number + 1}")

    def forget(self, number: int) -> None:
        (self._expected / f"{self.run}/{number}.npz").unlink(missing_ok=True)


def write_npz(path: Path, **arrays: Any) -> None:
    """Write a file that is complete if it is there."""
    with open(path.with_suffix(".part"), "wb") as file:
        np.savez(file, **arrays)
    os.replace(path.with_suffix(".part"), path)


def main(folder: Path, state: Path, address: str, secret: Path) -> None:
    trainer, steps, ended = Trainer(folder, state), 0, state / "stop"
    trainer.expect_save()
    publisher = thermocline.publish(trainer.model, folder, to=address, secret_file=secret, interval=INTERVAL_S)
    while not ended.exists():
        trainer.step()
        trainer.expect(f"{trainer.run}/{publisher.number + 1}")
        if publisher.step():
            trainer.forget(publisher.number - KEPT)
            write_now(state / "now", run=trainer.run, number=publisher.number)
        steps += 1
        if steps % SAVE_STEPS == 0:
            trainer.expect_save()
            thermocline.save(trainer.model, folder, incremental=True)
        time.sleep(STEP_S)
    for number in (1, 2):  # `flush` publishes, and `close` does
        trainer.expect(f"{trainer.run}/{publisher.number + number}")
    served = publisher.flush(60.0)
    publisher.close(60.0)
    write_now(state / "final", run=trainer.run, number=publisher.number, served=served, share=publisher.share)


def write_now(path: Path, **fields: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(fields))
    os.replace(part, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
