"""The tables a plan is for, and the work of one training step or one request on them.

version: 1
batch: 2048            # samples a card and step
dense: 4ms             # forward and backward of the dense part, which exchange may hide behind
below: 1ms             # of it, what is computed before rows are looked up, and after their gradients are known
optimizer: rowwise_adagrad
tables:
  - name: item
    rows: 1000000
    dim: 128
    pooling: none      # sum, mean, max, or none: every row is returned (sequences)
    features: [item, history]   # names in the heat file that look up this table; its own name if left away
    lookups: 20        # of one sample in all; from the heat file if left away
    precision: int8    # chosen by the plan if left away; so is the cache
    cache: 0.05
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator

from thermocline import formats as F
from thermocline.errors import BadInput

from .cost.memory import FLOATS, read_store
from .fields import Count, Lookups, Seconds, Share
from .io import Problems, check, nearest, read_file
from .topology import STRICT

Pooling = Literal["sum", "mean", "max", "none"]
Optimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]


def _precision(given: object) -> object:
    """A name, or shares of names; refused here, before pydantic tries it as each of the two."""
    if isinstance(given, str) and given not in F.NAMES:
        raise ValueError(f"{given!r} is not known{nearest(given, F.NAMES)}; use one of {', '.join(F.NAMES)}")
    if isinstance(given, dict) and all(type(share) in (int, float) for share in given.values()):
        try:
            read_store(given)
        except BadInput as error:
            raise ValueError(str(error).removeprefix("precision is ")) from None
    elif not isinstance(given, str):
        raise ValueError(f"{given!r} is neither a name nor shares of the rows, such as {{fp32: 0.01, int8: 0.99}}")
    return given


_PRECISION_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "enum": list(F.NAMES)},
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}},
    ]
}
PrecisionField = Annotated[str | dict[str, float], BeforeValidator(_precision), WithJsonSchema(_PRECISION_SCHEMA)]
Name = Annotated[str, Field(min_length=1)]


class TableFile(BaseModel):
    """One table as users describe it."""

    model_config = STRICT
    name: Name = Field(description="of the table, each another")
    rows: Count = Field(description="1 or more")
    dim: Count = Field(le=F.MAX_DIM, description=f"columns of a row, 1 to {F.MAX_DIM}")
    pooling: Pooling = Field(default="sum", description="of the rows of a sample; none: every row is returned")
    features: tuple[Name, ...] = Field(default=(), description="names in the heat file that look up this table; its own name")
    lookups: Lookups | None = Field(default=None, description="of one sample in all; from the heat file if left away")
    precision: PrecisionField | None = Field(default=None, description="of the rows; chosen by the plan if left away")
    cache: Share | None = Field(default=None, description="the share of the rows in fp32 slots, from 0 to 1")

    @property
    def looked_up_by(self) -> tuple[str, ...]:
        """The features of the table: those named, or the one of its own name."""
        return self.features or (self.name,)

    @model_validator(mode="after")
    def _agrees(self) -> TableFile:
        return check(self, self._contradictions())

    def _contradictions(self) -> Problems:
        if self.cache and isinstance(self.precision, dict):
            yield (
                ("cache",),
                f"cache is {self.cache:g} and precision {self.precision}, which says what is cached; drop one of them",
            )
        elif self.cache and self.precision in FLOATS:
            out = "drop the cache, or use a precision of 8 bits or less"
            yield ("cache",), f"cache is {self.cache:g} and precision {self.precision}, whose rows gain nothing from one; {out}"


class Tables(BaseModel):
    """All tables of a model, and what one step asks of them. `dense` is in seconds."""

    model_config = STRICT
    version: Literal[1] = Field(default=1, description="of this file format; 1")
    batch: Count = Field(description="samples a card and step, 1 or more")
    dense: Seconds = Field(default=0.0, description="forward and backward of the dense part, such as 4ms")
    below: Seconds = Field(
        default=0.0, description="of dense, what comes before the lookup and after its gradient, such as 1ms"
    )
    optimizer: Optimizer = Field(default="rowwise_adagrad", description="of the rows")
    tables: tuple[TableFile, ...] = Field(description="at least one table")

    @model_validator(mode="after")
    def _agrees(self) -> Tables:
        return check(self, self._contradictions())

    def _contradictions(self) -> Problems:
        if not self.tables:
            yield ("tables",), "there are none; name at least one"
        if self.below > self.dense:
            yield ("below",), f"{self.below:g} s is more than dense, {self.dense:g} s, which it is a part of"
        names: dict[str, int] = {}
        owners: dict[str, int] = {}
        for at, table in enumerate(self.tables):
            first = names.setdefault(table.name, at)
            if first != at:
                yield ("tables", at, "name"), f"tables[{first}] has this name too; every table needs its own"
                continue
            for feature in table.looked_up_by:
                owner = owners.setdefault(feature, at)
                if owner != at:
                    field = "features" if table.features else "name"
                    yield ("tables", at, field), self._two_owners(feature, owner, at)

    def _two_owners(self, feature: str, first: int, second: int) -> str:
        one, two = self.tables[first], self.tables[second]
        dims = f" of dimensions {one.dim} and {two.dim}" if one.dim != two.dim else ""
        return f"feature {feature!r} looks up {one.name!r} and {two.name!r}{dims}; a feature has one table: name another"

    @classmethod
    def load(cls, path: str | Path) -> Tables:
        """A tables file."""
        return read_file(cls, path)
