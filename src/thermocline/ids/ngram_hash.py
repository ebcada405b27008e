"""The rows of n-grams: a fixed map from tokens to rows of one table, evaluated by `kernels/ngrams`.

A slot is one head of one order. The table is divided into equal parts, one for each slot, and slot s hashes its n-grams to the
rows of part s with the key of salt * 65536 + s (the keys of `SaltedHash`). Rejected: rows that all slots share (heads of one
n-gram would meet), and prime part sizes in place of a good hash (a division for each row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.kernels.ids.reference import signed
from thermocline.kernels.ngrams.reference import VERSION
from thermocline.kernels.ops import ngram_rows_anywhere

from .idmap import MOST_ROWS, SaltedHash

MOST_SLOTS = 1 << 16
_WORDS = 1 << 31


@dataclass(frozen=True)
class NGramHash:
    """The map from tokens to rows of an n-gram table: the same in every version, on every device and in every process.

    At each token the n-grams end that contain it and the tokens before; later tokens never count. An n-gram does not reach
    before the start of its sequence, nor across an excluded token: there it is shorter. Excluded tokens have no n-gram.

    Args:
        rows: rows of the table; each order and head gets an equal part of them.
        vocabulary: number of tokens; others than 0 to vocabulary - 1 raise.
        orders: lengths of the n-grams.
        heads: independent hashes of each n-gram.
        exclude: tokens in no n-gram: padding, and separators of packed documents.
        salt: chooses the hashes; give every table its own.

    Raises:
        BadInput: a field has a wrong type or value; `error.parameter` names it.

    Example::

        ngrams = thermocline.nn.NGramHash(1_000_000, vocabulary=50_257, orders=(2, 3), heads=4, exclude=(50_256,))
        ngrams(torch.tensor([[11, 12, 13]])).shape  # [1, 3, 8]: a row for each token, order and head
    """

    rows: int
    vocabulary: int
    orders: tuple[int, ...] = (2, 3)
    heads: int = 1
    exclude: tuple[int, ...] = ()
    salt: int = 0

    def __post_init__(self) -> None:
        for name, most in (("rows", MOST_ROWS), ("vocabulary", _WORDS), ("heads", MOST_SLOTS)):
            if not (isinstance(value := getattr(self, name), Integral) and 1 <= int(value) <= most):
                _refuse(name, value, f"use an int from 1 to {most}")
            object.__setattr__(self, name, int(value))
        for name, first, last in (("orders", 1, 64), ("exclude", 0, self.vocabulary - 1)):
            numbers = getattr(self, name)
            if not (
                isinstance(numbers, Sequence) and all(isinstance(n, Integral) and first <= int(n) <= last for n in numbers)
            ):
                _refuse(name, numbers, f"use a tuple of ints from {first} to {last}")
            object.__setattr__(self, name, tuple(sorted({int(n) for n in numbers})))
        if not isinstance(self.salt, Integral):
            _refuse("salt", self.salt, "use an int")
        object.__setattr__(self, "salt", int(self.salt))
        if not 1 <= self.slots <= MOST_SLOTS:
            _refuse("orders", self.orders, f"they have {self.slots} slots with {self.heads} heads; use 1 to {MOST_SLOTS}")
        if self.part < 1:
            needed = self.slots + bool(self.exclude)
            message = f"rows is {self.rows}; {len(self.orders)} orders of {self.heads} heads need at least {needed}"
            raise BadInput(message, parameter="rows", value=self.rows, needed=needed)

    @property
    def slots(self) -> int:
        """Rows of each token."""
        return len(self.orders) * self.heads

    @property
    def part(self) -> int:
        """Rows of each slot. A row after the last part stands for excluded tokens."""
        return (self.rows - bool(self.exclude)) // self.slots

    def arrays(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Keys of the slots, and excluded tokens, as the kernel takes them."""
        salts = range(self.salt * MOST_SLOTS, self.salt * MOST_SLOTS + self.slots)
        keys = [signed(SaltedHash(self.part, salt).key) for salt in salts]
        made = (torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (keys, self.exclude))
        return next(made), next(made)

    def __call__(self, tokens: Tensor, arrays: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Rows of the n-grams that end at each token, by order, then head.

        Args:
            tokens: integers [batch, length]; of several devices, and in workers of a DataLoader.
            arrays: those of `arrays`, where they are kept.

        Returns:
            int64 [batch, length, slots].

        Raises:
            BadInput: the tokens are not [batch, length], or shorter than the longest n-gram.
            IdOutOfRange: a token is not in the vocabulary.
        """
        if not isinstance(tokens, Tensor):
            _refuse("tokens", type(tokens).__name__, "use a tensor [batch, length] of torch.int32 or torch.int64")
        keys, excluded = self.arrays(tokens.device) if arrays is None else arrays
        return ngram_rows_anywhere(keys, excluded, tokens, self.orders, self.vocabulary, self.part)

    def to_json(self) -> dict[str, Any]:
        """What decides the rows, for `json.dumps`."""
        return {"version": VERSION} | {name: value for name, value in asdict(self).items() if name != "vocabulary"}


def _refuse(name: str, value: Any, way: str) -> NoReturn:
    raise BadInput(f"{name} is {value!r}; {way}", parameter=name, value=value)
