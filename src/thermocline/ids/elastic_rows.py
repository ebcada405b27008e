"""The rule of an elastic map: how ids share and leave the rows of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NoReturn

from thermocline.errors import BadInput
from thermocline.kernels.elastic import fields as K

EVICTIONS = ("lfu", "lru")
MOST_STEPS = 1 << 30


@dataclass(frozen=True)
class ElasticRows:
    """How ids share and leave the rows of a table; `IdMap.elastic` documents the fields."""

    rows: int
    admit_after: int = 1
    shared: int = 16
    evict: str = "lfu"
    half_life: int = 100
    ttl: int | None = None
    salt: int = 0
    init: float | None = None
    admit_chance: float = 1.0
    max_age: float | None = None
    grow_from: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("shared", 0, 1 << 20), ("admit_after", 1, K.MOST), ("half_life", 1, MOST_STEPS)):
            _check_int(name, getattr(self, name), low, high)
        _check_int("rows", self.rows, self.others + 1, 1 << 31, f": {self.others} shared rows, and one for each id")
        if self.grow_from is not None:
            _check_int(
                "grow_from", self.grow_from, self.others + 1, int(self.rows), ": rows at first, of those that it may have"
            )
            object.__setattr__(self, "grow_from", int(self.grow_from))
        if self.ttl is not None:
            _check_int("ttl", self.ttl, 1, MOST_STEPS, ", training steps")
        if self.evict not in EVICTIONS:
            raise BadInput(f"evict is {self.evict!r}; use one of {', '.join(EVICTIONS)}", parameter="evict", value=self.evict)
        if not isinstance(self.salt, Integral):
            raise BadInput(f"salt is {self.salt!r}; use an int", parameter="salt", value=self.salt)
        if self.init is not None and not (isinstance(self.init, Real) and 0 <= float(self.init) < float("inf")):
            raise BadInput(f"init is {self.init!r}; use the bound of uniform first values", parameter="init", value=self.init)
        _check_number("admit_chance", self.admit_chance, 1.0, "the chance of a lookup to give its id a row, above 0 to 1")
        if self.max_age is not None:
            _check_number("max_age", self.max_age, math.inf, "a time, in the unit of elastic().advance(now)")
        for name in ("rows", "admit_after", "shared", "half_life"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "salt", int(self.salt) & ((1 << 64) - 1))
        object.__setattr__(self, "ttl", None if self.ttl is None else int(self.ttl))
        object.__setattr__(self, "init", None if self.init is None else float(self.init))

    @property
    def own(self) -> int:
        """Rows that ids have to themselves."""
        return self.rows - self.others

    @property
    def others(self) -> int:
        """Rows that all other ids read: shared ones, or one of zeros."""
        return max(1, self.shared)

    @property
    def grows(self) -> bool:
        """Whether the table begins with a part of its rows."""
        return self.grow_from is not None

    @property
    def open(self) -> int:
        """Rows of each bucket with which the table begins."""
        return K.BUCKET if self.grow_from is None else min(K.BUCKET, -(-K.BUCKET * (self.grow_from - self.others) // self.own))

    @property
    def bound(self) -> float:
        """Bound of the first values of rows."""
        return self.own**-0.5 if self.init is None else self.init


def _check_int(name: str, value: object, low: int, high: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise BadInput(f"{name} is {value!r}; use an int from {low} to {high}{why}", parameter=name, value=value, needed=low)


def _check_number(name: str, value: object, most: float, use: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= most or math.isinf(float(value)):
        raise BadInput(f"{name} is {value!r}; use {use}", parameter=name, value=value)


def refuse_elastic(where: str, way: str, **fields: object) -> NoReturn:
    """Raise for a combination that elastic ids do not have yet."""
    raise BadInput(f"elastic ids do not work {where} yet; {way}, or use IdMap.hashed", parameter="ids", **fields)


def refuse_export(elastic: bool) -> None:
    """Raise for state dicts of other libraries, which would have rows without their ids."""
    if elastic:
        refuse_elastic("in state dicts of other libraries", "save a checkpoint")
