"""How a module keeps its rows: the keywords that all modules share, and the one place where they become an arena.

A cache is asked for as a share of the rows (`0.05`) or as bytes (`"2GiB"`, or a plain int), for all tables of a module
together. Bytes are divided so that every table gets the same share. Rows that are floats already (fp32, fp16, bf16) gain
nothing from a full-precision copy and get no slots.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import BadInput
from ..kernels import formats as F
from ..rows.arena import Arena, TableSpec
from ..rows.cache import SLOT_BYTES
from ..rows.memory import free_bytes
from ..rows.optimizers import RowOptimizer, RowwiseAdagrad
from ..rows.precision import format_of

UPDATES = ("backward", "step")
DEFAULT_OPTIMIZER = RowwiseAdagrad(lr=0.02)

_UNCACHED = ("fp32", "fp16", "bf16")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True)
class Storage:
    """The keywords of a module that say how rows are stored and trained."""

    precision: str = "int8"
    cache: float | int | str = 0.05
    policy: str = "lfu"
    optimizer: RowOptimizer = DEFAULT_OPTIMIZER
    residency: str = "device"
    update: str = "backward"
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("update", self.update, UPDATES)
        _one_of("policy", self.policy, F.POLICIES)
        _one_of("residency", self.residency, ("device", "host"))
        if not isinstance(self.optimizer, RowOptimizer):
            raise BadInput(
                f"optimizer is a {type(self.optimizer).__name__}; rows are trained by thermocline.SGD, Adagrad, "
                "RowwiseAdagrad or Adam, as in optimizer=thermocline.SGD(lr=0.1)"
            )


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise BadInput(f"{name} is {value!r}; use one of {', '.join(known)}")


def make_arena(
    tables: Sequence[TableSpec], features: Sequence[int], device: torch.device | str | None, storage: Storage
) -> tuple[Arena, tuple[int, ...]]:
    """The arena of a module and the cache slots of each of its tables. Modules make their arenas nowhere else."""
    slots = cache_slots(storage.cache, tables)
    place = torch.get_default_device() if device is None else torch.device(device)
    _check_fits(tables, slots, place, storage)
    return Arena(tables, features, place, slots, storage.policy, storage.residency), slots


def bytes_needed(tables: Sequence[TableSpec], slots: Sequence[int], optimizer: RowOptimizer) -> int:
    """Bytes of rows, cache and optimizer state."""
    rows = sum(t.bytes + t.rows * (4 * optimizer.states_per_row + 4 * t.dim * optimizer.states_per_column) for t in tables)
    return rows + sum(count * (4 * t.dim + SLOT_BYTES) for t, count in zip(tables, slots, strict=True))


def _check_fits(tables: Sequence[TableSpec], slots: Sequence[int], device: torch.device, storage: Storage) -> None:
    """Say what is missing, and what would fit, before a table is half made."""
    needed, free = bytes_needed(tables, slots, storage.optimizer), free_bytes(device)
    if storage.residency == "host" and device.type == "cuda":
        needed -= sum(t.rows * F.row_bytes(format_of(t.precision), t.dim) for t in tables)
    if free is None or needed <= free:
        return
    ways = []
    for precision, cache in (("int8", storage.cache), ("int4", storage.cache), ("int4", 0.01), ("int2", 0.01)):
        smaller = [TableSpec(t.rows, t.dim, precision, t.name) for t in tables]
        size = bytes_needed(smaller, cache_slots(cache, smaller), storage.optimizer)
        if size <= free:
            ways.append(f"precision={precision!r}, cache={cache!r} ({_gib(size)})")
    out = f"what would fit: {'; '.join(ways[:2])}" if ways else "no precision fits here; use more cards, or fewer rows"
    raise BadInput(
        f"the tables need {_gib(needed)} (rows, cache and optimizer state) but {device} has {_gib(free)} free: "
        f"{_gib(needed - free)} are missing; {out}"
    )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def cache_slots(cache: float | int | str, tables: Sequence[TableSpec]) -> tuple[int, ...]:
    """Slots of each table, from a share of its rows or from bytes for all tables."""
    cached = [table.precision not in _UNCACHED for table in tables]
    share = _share(cache, sum(4 * t.rows * t.dim for t, c in zip(tables, cached, strict=True) if c))
    if share > 1 and any(cached):
        rows = sum(t.rows for t, c in zip(tables, cached, strict=True) if c)
        warnings.warn(f"cache={cache!r} has room for {share:.3g} times the {rows} rows; it will hold all of them", stacklevel=4)
    slots = [int(min(share, 1.0) * t.rows) if c else 0 for t, c in zip(tables, cached, strict=True)]
    # Tables of one kind share their slots: what small ones lose to rounding, the largest of the kind brings.
    for kind in {(t.dim, t.precision) for t, c in zip(tables, cached, strict=True) if c}:
        same = [n for n, t in enumerate(tables) if (t.dim, t.precision) == kind]
        largest = max(same, key=lambda n: tables[n].rows)
        slots[largest] += int(min(share, 1.0) * sum(tables[n].rows for n in same)) - sum(slots[n] for n in same)
    return tuple(slots)


def _share(cache: float | int | str, full_bytes: int) -> float:
    """The share of rows that a cache holds; `full_bytes` is what all rows take in fp32."""
    if isinstance(cache, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*", cache)
        if match is None or match[2] not in _UNITS:
            raise BadInput(f"cache is {cache!r}; use a share of the rows, such as 0.05, or bytes, such as '512MiB' or '2GiB'")
        cache = int(float(match[1]) * _UNITS[match[2]])
    if not cache >= 0:
        raise BadInput(f"cache is {cache}; it must be 0 (none) or more")
    if isinstance(cache, int):
        return cache / max(1, full_bytes)
    return cache
