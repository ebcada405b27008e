"""What the server asks of a model, and nothing else: any object with these members can be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from thermocline.serve.protocol.tensors import Array


class TensorInfo(NamedTuple):
    """An input or output: its datatype in the protocol's words, and its shape, with -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class CardStatus(NamedTuple):
    """One card: whether it answers, what it holds, what it did."""

    number: int
    ready: bool
    bytes: int
    lookups: int
    pid: int


class Model(Protocol):
    """One version of a model, loaded and warm.

    `infer` answers one micro-batch, several requests with one launch; what is wrong with one of them comes back as an
    exception in its place and harms no other. Arrays of requests are read-only. It is called by one thread at a time, which
    may be another each time.

    Some members are used where they are there: `load`, `follow` and `beside` (`repository.py`), `waits` (`lane.py`), and
    `filler`, which writes rows of one input right into an answer (`shortcut.py`).
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def inputs(self) -> Sequence[TensorInfo]: ...

    @property
    def outputs(self) -> Sequence[TensorInfo]: ...

    def infer(self, requests: Sequence[Mapping[str, Array]]) -> Sequence[Mapping[str, Array] | Exception]: ...

    def cards(self) -> Sequence[CardStatus]: ...

    def close(self) -> None: ...
