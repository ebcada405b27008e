"""A trainer, and a server of its checkpoint in this process with a publish port on a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import thermocline
from thermocline.serve import ShardGroup
from thermocline.serve.publishing.listener import PublishListener

ROWS = {"a": 1009, "b": 63}


class Trainer:
    """Two tables that learn to be zero."""

    def __init__(self, folder: Path, rows: thermocline.RowConfig, seed: int = 0) -> None:
        self.folder, self._draw = folder, torch.Generator().manual_seed(seed)
        tables = [thermocline.Table("a", ROWS["a"], 16), thermocline.Table("b", ROWS["b"], 7)]
        self.model = thermocline.EmbeddingCollection(tables, rows=rows)

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            ids = torch.stack([torch.randint(rows, (33,), generator=self._draw) for rows in ROWS.values()], 1)
            self.model(ids).values().square().sum().backward()

    def expected(self) -> dict[str, torch.Tensor]:
        """The rows that a checkpoint of this moment serves."""
        thermocline.save(self.model, self.folder.parent / "expected")
        again = thermocline.load(self.folder.parent / "expected")
        assert isinstance(again, thermocline.EmbeddingCollection)
        again.flush()
        return {name: again.get_rows(name) for name in ROWS}


class Server:
    """A group of shards, and its publish port."""

    def __init__(self, folder: Path, secret: bytes, port: int = 0, shards: int = 2) -> None:
        self.group, self.publishes = (group := ShardGroup(folder, shards)), group.publishes
        self.port = port
        self.listen_again(secret)

    def listen_again(self, secret: bytes) -> None:
        self._listener = PublishListener(lambda name: self.publishes, "127.0.0.1", self.port, secret, None)
        self.port = self._listener.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def rows(self) -> dict[str, torch.Tensor]:
        return self.group.lookup({name: torch.arange(rows) for name, rows in ROWS.items()})

    def serves(self, expected: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(rows, expected[name]) for name, rows in self.rows().items())

    def close(self) -> None:
        self._listener.close()
        self.group.close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef0123456789abcdef")
    return path


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(precision: Any = "int8", **rows: Any) -> Trainer:
        trainer = Trainer(tmp_path / "checkpoint", thermocline.RowConfig(precision, **{"cache": 0.1, **rows}))
        trainer.train()
        return trainer

    return make


@pytest.fixture
def serve(secret: Path) -> Iterator[Callable[..., Server]]:
    """Start a server of a trainer's folder; it ends with the test."""
    with ExitStack() as stack:

        def start(trainer: Trainer, **options: Any) -> Server:
            if not trainer.folder.exists():
                thermocline.save(trainer.model, trainer.folder)
            server = Server(trainer.folder, secret.read_bytes(), **options)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def publish(secret: Path) -> Iterator[Callable[..., thermocline.Publisher]]:
    """Publish a trainer's model to servers; ends with the test."""
    with ExitStack() as stack:

        def start(trainer: Trainer, *servers: Server, **options: Any) -> thermocline.Publisher:
            to = [server.address for server in servers]
            options = {"interval": 0.0, "secret_file": secret, **options}
            publisher = thermocline.publish(trainer.model, trainer.folder, to=to, **options)
            stack.callback(publisher._end)
            return publisher

        yield start
