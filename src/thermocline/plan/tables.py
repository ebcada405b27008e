"""The tables file: the tables of a model, and the work of one training step or request (docs/planning_files.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from thermocline import formats as F
from thermocline.errors import BadInput, did_you_mean

from .cost.memory import FLOATS, parse_precision
from .fields import Count, Lookups, Seconds, Share
from .io import FileModel, Problems, read_file

Pooling = Literal["sum", "mean", "max", "none"]
Optimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]


def _precision(given: object) -> object:
    """Checks a name or shares of names before pydantic tries both types of the union, for one clear error."""
    if isinstance(given, str) and given not in F.NAMES:
        raise ValueError(f"{given!r} is not known{did_you_mean(given, F.NAMES)}; use one of {', '.join(F.NAMES)}")
    if isinstance(given, dict) and all(type(share) in (int, float) for share in given.values()):
        try:
            parse_precision(given)
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


class TableConfig(FileModel):
    """One table of a tables file.

    Example::

        table = TableConfig(name="item", rows=1_000_000, dim=128, features=("seen", "bought"))
    """

    name: Name = Field(description="unique name of the table")
    rows: Count = Field(description="rows, 1 or more")
    dim: Count = Field(le=F.MAX_DIM, description=f"columns of a row, 1 to {F.MAX_DIM}")
    pooling: Pooling = Field(default="sum", description="pooling of the rows of a sample; none returns every row")
    features: tuple[Name, ...] = Field(
        default=(), description="columns of the heat file that look up this table; default: its name"
    )
    lookups: Lookups | None = Field(
        default=None, description="lookups per sample, all features together; default: from the heat file"
    )
    precision: PrecisionField | None = Field(default=None, description="precision of the rows; default: the plan chooses")
    cache: Share | None = Field(default=None, description="share of the rows in fp32 slots, from 0 to 1")
    residency: Literal["card", "host"] | None = Field(
        default=None, description="memory of the rows: card (the GPU) or host; default: host if GPUs are too small"
    )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features that look up the table: those named, or one with the name of the table."""
        return self.features or (self.name,)

    def _contradictions(self) -> Problems:
        if self.cache and isinstance(self.precision, dict):
            given = f"cache is {self.cache:g}, but precision {self.precision}"
            yield ("cache",), f"{given} already says what is cached; drop one of them"
        elif self.cache and self.precision in FLOATS:
            out = "drop the cache, or use a precision of 8 bits or less"
            yield ("cache",), f"cache is {self.cache:g}, but rows in {self.precision} gain nothing from a cache; {out}"


class TablesConfig(FileModel):
    """The tables of a model, and the work of one step: the content of a tables file.

    Example::

        tables = TablesConfig.load("tables.yaml")
        tables = TablesConfig(batch=2048, tables=(TableConfig(name="item", rows=1_000_000, dim=128),))
    """

    version: Literal[1] = Field(default=1, description="version of this file format; 1")
    batch: Count = Field(description="samples per GPU and step, 1 or more")
    dense: Seconds = Field(default=0.0, description="forward and backward of the dense layers, such as 4ms")
    below: Seconds = Field(default=0.0, description="part of dense before the lookup and after its gradient, such as 1ms")
    optimizer: Optimizer = Field(default="rowwise_adagrad", description="optimizer of the rows")
    tables: tuple[TableConfig, ...] = Field(description="at least one table")

    def _contradictions(self) -> Problems:
        if not self.tables:
            yield ("tables",), "the list is empty; name at least one table"
        if self.below > self.dense:
            yield ("below",), f"{self.below:g} s is more than dense, {self.dense:g} s, which contains it"
        names: dict[str, int] = {}
        owners: dict[str, int] = {}
        for at, table in enumerate(self.tables):
            first = names.setdefault(table.name, at)
            if first != at:
                yield ("tables", at, "name"), f"tables[{first}] has the same name; every table needs its own"
                continue
            for feature in table.feature_names:
                owner = owners.setdefault(feature, at)
                if owner != at:
                    field = "features" if table.features else "name"
                    yield ("tables", at, field), self._two_owners(feature, owner, at)

    def _two_owners(self, feature: str, first: int, second: int) -> str:
        one, two = self.tables[first], self.tables[second]
        dims = f" of dimensions {one.dim} and {two.dim}" if one.dim != two.dim else ""
        return f"feature {feature!r} looks up {one.name!r} and {two.name!r}{dims}; a feature has one table: rename one feature"

    @classmethod
    def load(cls, path: str | Path) -> TablesConfig:
        """Load a tables file (YAML or JSON).

        Raises:
            FormatError: The file has wrong fields; the error names each with its line.
        """
        return read_file(cls, path)
