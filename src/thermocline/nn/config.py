"""How a module keeps its rows: the keywords that all modules share, and the one place where they become an arena.

A cache is asked for as a share of the rows (`0.05`) or as bytes (`"2GiB"`, or a plain int), for all tables of a module
together. Bytes are divided so that every table gets the same share. Rows that are floats already (fp32, fp16, bf16) gain
nothing from a full-precision copy and get no slots. `tiers.py` has the other way to ask for slots: a dict of precisions.
Room for staged rows (`staged`) is asked for in the same two ways.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import torch

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.rows.arena import Arena
from thermocline.rows.memory import free_bytes
from thermocline.rows.optimizers import RowOptimizer, RowwiseAdagrad
from thermocline.rows.precision import format_of
from thermocline.rows.staging import place_bytes
from thermocline.rows.table_spec import TableSpec

from .precision_tiers import Precision, Tiers, bytes_of, divide, fit, overhead, read_tiers

UPDATES = ("backward", "step")
DEFAULT_OPTIMIZER = RowwiseAdagrad(lr=0.02)
DEFAULT_CACHE = 0.05
AUTO = "auto"

_UNCACHED = ("fp32", "fp16", "bf16")
_OURS = __name__.partition(".")[0] + "."
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True)
class Storage:
    """The keywords of a module that say how rows are stored and trained. Without `cache`: DEFAULT_CACHE, where it matters."""

    precision: Precision = "int8"
    cache: float | int | str | None = None
    policy: str = "lfu"
    optimizer: RowOptimizer = DEFAULT_OPTIMIZER
    residency: str = "device"
    update: str = "backward"
    seed: int = 0
    budget: int | str | None = None
    staged: float | int | str | None = None

    def __post_init__(self) -> None:
        _one_of("update", self.update, UPDATES)
        _one_of("policy", self.policy, F.POLICIES)
        _one_of("residency", self.residency, ("device", "host"))
        if not isinstance(self.optimizer, RowOptimizer):
            raise BadInput(
                f"optimizer is a {type(self.optimizer).__name__}; rows are trained by thermocline.SGD, Adagrad, "
                "RowwiseAdagrad or Adam, as in optimizer=thermocline.SGD(lr=0.1)"
            )
        if not (isinstance(self.seed, Integral) and -(1 << 63) <= self.seed < 1 << 63):
            raise BadInput(f"seed is {self.seed!r}; use an int of 64 bits")
        object.__setattr__(self, "seed", int(self.seed))
        for name in ("cache", "budget", "staged"):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        if self.cache is not None and (self.precision == AUTO or isinstance(self.precision, Mapping)):
            raise BadInput(f"cache is {self.cache!r} and precision {self.precision!r}, which says what is cached; drop cache=")
        if self.staged is not None and self.residency != "host":
            raise BadInput(f"staged is {self.staged!r} and residency {self.residency!r}; rows are staged with residency='host'")


class Shape(NamedTuple):
    """A table as a user asked for it; or with the slots, full and near, and the group that a plan gives it."""

    rows: int
    dim: int
    precision: Precision
    name: str = "table"
    slots: tuple[int, int] | None = None
    group: int = 0


def _plain(name: str, size: float | int | str | None) -> float | int | str | None:
    """A size as Python has it: what numpy has cannot be written into a manifest."""
    if size is None or isinstance(size, str):
        return size
    if not isinstance(size, Real):
        raise BadInput(f"{name} is {size!r}; use a number, or bytes such as '2GiB'")
    return int(size) if isinstance(size, Integral) else float(size)


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise BadInput(f"{name} is {value!r}; use one of {', '.join(known)}")


def make_arena(
    shapes: Sequence[Shape], features: Sequence[int], device: torch.device | str | None, storage: Storage
) -> tuple[Arena, tuple[Tiers, ...]]:
    """The arena of a module, and the tiers of its tables. Modules make their arenas nowhere else."""
    tiers = choose_tiers(shapes, storage)
    tables = [TableSpec(s.rows, s.dim, t.base, s.name, s.group) for s, t in zip(shapes, tiers, strict=True)]
    slots, near = divide(tables, [t.full for t in tiers]), divide(tables, [t.near for t in tiers])
    slots, near = (
        tuple(each if s.slots is None else s.slots[kind] for each, s in zip(shares, shapes, strict=True))
        for kind, shares in enumerate((slots, near))
    )
    place = torch.get_default_device() if device is None else torch.device(device)
    staged = None if storage.staged is None else _staged_share(storage.staged, tables, slots, near)
    _check_fits(tables, slots, near, place, storage, staged or 0.0)
    arena = Arena(tables, features, place, slots, storage.policy, storage.residency, near)
    arena.staged = staged
    return arena, tiers


def choose_tiers(shapes: Sequence[Shape], storage: Storage) -> tuple[Tiers, ...]:
    """What each table gets: as its dict says, or its share of the cache; "auto" what the others leave of the budget."""
    cache = DEFAULT_CACHE if storage.cache is None else storage.cache
    share = _cache_share(cache, shapes)
    _check_cache(cache, share, shapes)
    share = min(share, 1.0)
    tiers = [
        read_tiers(s.precision)
        if isinstance(s.precision, Mapping)
        else Tiers(s.precision, *(count / s.rows for count in s.slots))
        if s.slots is not None
        else Tiers(s.precision, 0.0 if s.precision in (*_UNCACHED, AUTO) else share)
        for s in shapes
    ]
    open_, fixed = ([n for n, t in enumerate(tiers) if (t.base == AUTO) == auto] for auto in (True, False))
    if (storage.budget is None) == bool(open_):
        raise BadInput(
            f"budget is {storage.budget!r}; precision 'auto' needs the bytes that rows and cache may "
            "take, as in precision='auto', budget='2GiB', and other precisions take no budget"
        )
    if storage.budget is not None:
        tables = [TableSpec(shapes[n].rows, shapes[n].dim, tiers[n].base) for n in fixed]
        taken = bytes_of(tables, divide(tables, [tiers[n].full for n in fixed]), divide(tables, [tiers[n].near for n in fixed]))
        found = fit([shapes[n][:2] for n in open_], bytes_asked("budget", storage.budget), taken + overhead(tables))
        tiers = [found if t.base == AUTO else t for t in tiers]
    return tuple(tiers)


def bytes_needed(
    tables: Sequence[TableSpec], slots: Sequence[int], optimizer: RowOptimizer, near: Sequence[int] | None = None
) -> int:
    """Bytes of rows, cache and optimizer state."""
    states = sum(t.rows * (4 * optimizer.states_per_row + 4 * t.dim * optimizer.states_per_column) for t in tables)
    return states + bytes_of(tables, slots, near or [0] * len(tables))


def _check_fits(
    tables: Sequence[TableSpec], slots: Sequence[int], near: Sequence[int], device: torch.device, storage: Storage,
    staged: float,
) -> None:  # fmt: skip
    """Say what is missing, and what would fit, before a table is half made."""
    needed, free = bytes_needed(tables, slots, storage.optimizer, near), free_bytes(device)
    if storage.residency == "host" and device.type == "cuda":
        needed -= sum(t.rows * F.row_bytes(format_of(t.precision), t.dim) for t in tables)
        needed += int(staged * _bytes_to_stage(tables, slots))
    if free is None or needed <= free:
        return
    ways = []
    first = DEFAULT_CACHE if storage.cache is None else storage.cache
    for precision, cache in (("int8", first), ("int4", first), ("int4", 0.01), ("int2", 0.01)):
        smaller = [TableSpec(t.rows, t.dim, precision, t.name) for t in tables]
        shapes = [Shape(t.rows, t.dim, precision) for t in tables]
        share = min(_cache_share(cache, shapes), 1.0)
        size = bytes_needed(smaller, divide(smaller, [share] * len(smaller)), storage.optimizer)
        if size <= free and not _row_too_large(cache, shapes):
            ways.append(f"precision={precision!r}, cache={cache!r} ({_gib(size)})")
    out = f"what would fit: {'; '.join(ways[:2])}" if ways else "no precision fits here; use more cards, or fewer rows"
    raise BadInput(
        f"the tables need {_gib(needed)} (rows, cache and optimizer state) but {device} has {_gib(free)} free: "
        f"{_gib(needed - free)} are missing; {out}"
    )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _cache_share(cache: float | int | str, shapes: Sequence[Shape]) -> float:
    """The share of rows that a cache has room for, of the tables that it is for; more than 1 where it is larger than they."""
    if isinstance(cache, str):
        cache = bytes_asked("cache", cache, "a share of the rows, such as 0.05, or ")
    if not cache >= 0:
        raise BadInput(f"cache is {cache}; it must be 0 (none) or more")
    return cache / max(1, sum(4 * s.rows * s.dim for s in _cached(shapes))) if isinstance(cache, int) else cache


def _cached(shapes: Sequence[Shape]) -> list[Shape]:
    """The tables that a cache is for."""
    return [s for s in shapes if isinstance(s.precision, str) and s.precision not in (*_UNCACHED, AUTO)]


def _check_cache(cache: float | int | str, share: float, shapes: Sequence[Shape]) -> None:
    """Refuse a cache that has no room for a row, and say when it has room for more than all of them."""
    if row := _row_too_large(cache, shapes):
        raise BadInput(f"cache is {cache}, in bytes; one row takes {row}. A share of the rows is a float, such as 1.0 or 0.05")
    if share > 1 and (cached := _cached(shapes)):
        rows = sum(s.rows for s in cached)
        warnings.warn(
            f"cache={cache!r} has room for more than the {rows:,} rows; it will hold all of them", stacklevel=_caller()
        )


def _row_too_large(cache: float | int | str, shapes: Sequence[Shape]) -> int:
    """Bytes of the smallest row, if a cache in bytes has no room for it; else 0."""
    size = bytes_asked("cache", cache) if isinstance(cache, (int, str)) else 0
    row = min((4 * s.dim for s in _cached(shapes)), default=0)
    return row if 0 < size < row else 0


def _caller() -> int:
    """How far above who asks the first line outside of this package is, for warnings to name."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def _bytes_to_stage(tables: Sequence[TableSpec], slots: Sequence[int]) -> int:
    """Bytes on the card of all rows that can be staged."""
    cached = [table for table, count in zip(tables, slots, strict=True) if count]
    return sum(t.rows * place_bytes(format_of(t.precision), t.dim) for t in cached)


def _staged_share(staged: float | int | str, tables: Sequence[TableSpec], slots: Sequence[int], near: Sequence[int]) -> float:
    """The share of rows that find room in the staging area; at most all of them."""
    if any(near) or not any(slots):
        raise BadInput(f"staged is {staged!r}, but prefetching needs a cache of fp32 rows alone, as in cache=0.05")
    if isinstance(staged, str):
        staged = bytes_asked("staged", staged, "a share of the rows, such as 0.2, or ")
    if not staged > 0:
        raise BadInput(f"staged is {staged}; it must be more than 0, or None: room for three batches")
    return min(staged / _bytes_to_stage(tables, slots) if isinstance(staged, int) else staged, 1.0)


def bytes_asked(name: str, given: int | str, otherwise: str = "") -> int:
    """A number of bytes, from an int or from text such as "2GiB"."""
    if isinstance(given, (int, float)):
        return int(given)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", given)
    if match is None or match[2] not in _UNITS:
        raise BadInput(f"{name} is {given!r}; use {otherwise}bytes, such as '512MiB' or '2GiB'")
    return int(float(match[1]) * _UNITS[match[2]])
