"""What a model takes, held against what a request brings: the first check, the same for both protocols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thermocline.errors import BadInput
from thermocline.serve.protocol.tensors import DATATYPES, DTYPES, Array

from .served_model import Model

NAMED = 8  # of a model's inputs or outputs, in an error


class Signature:
    """A model's inputs and outputs, ready to be compared with."""

    def __init__(self, model: Model) -> None:
        self._name = model.name
        self._inputs: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            one.name: (DTYPES[one.datatype], one.shape) for one in model.inputs
        }
        self._needed = frozenset(one.name for one in model.inputs if not one.optional)
        self._outputs = frozenset(one.name for one in model.outputs)

    def check(self, inputs: Mapping[str, Array], outputs: tuple[str, ...], limit: int) -> int:
        """How many values the request has, or an error that says what is wrong with it."""
        values, known = 0, self._inputs
        for name, array in inputs.items():
            expected = known.get(name)
            if expected is None:
                raise BadInput(f"model {self._name!r} has no input {name[:100]!r}; it has {_some(known)}")
            dtype, shape = expected
            if array.dtype != dtype:
                raise BadInput(f"input {name!r} must be {DATATYPES[dtype]}, but {DATATYPES[array.dtype]} came")
            if not _fits(array.shape, shape):
                raise BadInput(f"input {name!r} must have shape {list(shape)} (-1: any size), but {list(array.shape)} came")
            values += array.size
        if not inputs:
            raise BadInput(f"the request has no inputs; model {self._name!r} takes {_some(known)}")
        if not self._needed <= inputs.keys():
            raise BadInput(f"input {min(self._needed - inputs.keys())!r} is missing")
        if values > limit:
            raise BadInput(f"the request has {values:,} values, the limit is {limit:,}; split it into several")
        for name in outputs:
            if name not in self._outputs:
                raise BadInput(f"model {self._name!r} has no output {name[:100]!r}; it has {_some(self._outputs)}")
        return values


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(
        size == wanted or wanted == -1 for size, wanted in zip(shape, expected, strict=True)
    )


def _some(names: Mapping[str, object] | frozenset[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(map(repr, listed[:NAMED])) + more if listed else "none"
