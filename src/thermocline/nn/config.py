"""`RowConfig`, and the arena of a module that is built from it.

Bytes of a cache are divided so that every table of a module gets the same share. Float formats (fp32, fp16, bf16) get no cache
slots. `precision_tiers.py` describes dicts of precisions.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels.elastic.fields import BUCKET, BYTES_PER_ROW
from thermocline.rows.arena import Arena
from thermocline.rows.memory import free_bytes
from thermocline.rows.optimizers import RowOptimizer, RowwiseAdagrad
from thermocline.rows.precision import format_of
from thermocline.rows.staging import place_bytes
from thermocline.rows.table_spec import TableSpec

from .precision_tiers import Precision, Tiers, bytes_of, divide, fit, overhead, read_tiers

UPDATES = ("backward", "step")
DEFAULT_CACHE = 0.05
AUTO = "auto"

UNCACHED = ("fp32", "fp16", "bf16")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class TorchArguments(TypedDict, total=False):
    """Keyword arguments that modules share with `torch.nn`."""

    device: torch.device | str | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class RowConfig:
    """How a module stores and trains its rows.

    Args:
        precision: a format of `thermocline.PRECISIONS`; or shares of the rows by heat, as in
            `{"fp32": 0.01, "int8": 0.05, "int2": 0.94}`; or "auto", the best formats that fit into `budget`.
        cache: fp32 slots for hot rows: a share of the rows (float in [0, 1]) or bytes ("2GiB"). Default: 0.05 for formats that
            gain from a cache.
        budget: bytes for rows and cache ("2GiB"), or their ratio to fp32 rows ("1/8"); with precision "auto" only.
        policy: which rows stay in the cache: "lfu", "lru", "adaptive" or "fixed".
        optimizer: the fused optimizer of the rows.
        residency: "device", or "host" for rows in host memory with a cache on the GPU.
        staged: room on the GPU for prefetched rows, with residency "host": a share of the rows (float) or bytes ("2GiB").
        update: "backward" updates rows in the backward pass; "step" keeps their gradients for `fused_optimizer.step()`.
        seed: seed of stochastic rounding, an int of 64 bits.
        independent: whether ranks of a job may train unsharded rows: each its own copy, which then differ. Default: refused.

    Raises:
        BadInput: a field has a wrong type or value; `error.parameter` names it.

    Example::

        rows = thermocline.RowConfig(precision="int4", cache=0.01, optimizer=thermocline.Adam(lr=1e-3))
        bag = thermocline.EmbeddingBag(1_000_000, 64, mode="sum", rows=rows)
    """

    precision: Precision = "int8"
    cache: float | str | None = None
    budget: str | None = None
    policy: str = "lfu"
    optimizer: RowOptimizer = RowwiseAdagrad(lr=0.02)
    residency: str = "device"
    staged: float | str | None = None
    update: str = "backward"
    seed: int = 0
    independent: bool = False

    def __post_init__(self) -> None:
        for name, known in (("update", UPDATES), ("policy", F.POLICIES), ("residency", ("device", "host"))):
            if getattr(self, name) not in known:
                _refuse(name, getattr(self, name), f"use one of {', '.join(known)}")
        if not isinstance(self.optimizer, RowOptimizer):
            _refuse("optimizer", self.optimizer, "use thermocline.SGD, Adagrad, RowwiseAdagrad or Adam, as in SGD(lr=0.1)")
        if not (isinstance(self.seed, Integral) and -(1 << 63) <= self.seed < 1 << 63):
            _refuse("seed", self.seed, "use an int of 64 bits")
        object.__setattr__(self, "seed", int(self.seed))
        if not isinstance(self.independent, bool):
            _refuse("independent", self.independent, "use True or False")
        object.__setattr__(self, "cache", _size("cache", self.cache))
        object.__setattr__(self, "staged", _size("staged", self.staged))
        if self.budget is not None:
            parse_budget(self.budget, 0)
        if self.cache is not None and (self.precision == AUTO or isinstance(self.precision, Mapping)):
            _refuse("cache", self.cache, f"precision {self.precision!r} sets the cache slots: drop cache=")
        if self.staged is not None and self.residency != "host":
            _refuse("staged", self.staged, f"residency is {self.residency!r}; rows are staged with residency='host'")

    def rows_within(self, budget: str, dim: int) -> int:
        """The most rows that an elastic table of `dim` columns may have within a budget of bytes.

        Counted are rows, cache, optimizer state, and the 16 bytes a row for ids and their counts.

        Args:
            budget: bytes as text ("2GiB").
            dim: columns of the table.

        Returns:
            The rows, for `IdMap.elastic(rows)`.

        Raises:
            BadInput: the budget is no number of bytes, or is too small for one row.

        Example::

            config = thermocline.RowConfig("int8", cache=0.05)
            rows = config.rows_within("2GiB", 64)
            ids = thermocline.IdMap.elastic(rows, grow_from=100_000)
        """
        size = parse_bytes("budget", budget)
        rows = bisect_right(range(1, 1 + size // BYTES_PER_ROW), size, key=lambda rows: _bytes_of_elastic(rows, dim, self))
        if not rows:
            needed = _bytes_of_elastic(1, dim, self)
            _refuse("budget", budget, f"one row takes {needed} bytes", needed=needed, available=size)
        return rows


_FIELDS = tuple(field.name for field in fields(RowConfig))
_GONE = {
    "deterministic": "results are deterministic in every case; drop deterministic=",
    "storage": "write rows=thermocline.RowConfig(...)",
    "max_norm": "max_norm would rewrite rows in forward; use weight decay, or normalize the output",
    "norm_type": "norm_type belongs to max_norm, which would rewrite rows in forward; drop norm_type=",
    "scale_grad_by_freq": "use mode='mean', or an Adagrad optimizer, which damps frequent rows",
    "sparse": "gradients of rows are never dense; drop sparse=",
}
_TORCH_DEFAULTS = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}


def _refuse(name: str, value: Any, way: str, **fields: Any) -> NoReturn:
    raise BadInput(f"{name} is {value!r}; {way}", parameter=name, value=value, **fields)


def check_rows(rows: Any) -> None:
    """Raise unless `rows` is a `RowConfig`."""
    if not isinstance(rows, RowConfig):
        _refuse("rows", rows, "use thermocline.RowConfig, as in rows=thermocline.RowConfig(precision='int8')")


def read_torch_arguments(kind: str, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Device and dtype among the keyword arguments of a module; any other keyword is refused with its replacement."""
    for name, value in given.items():
        if name in _FIELDS:
            _refuse(name, value, f"{kind} takes it as rows=thermocline.RowConfig({name}={value!r})")
        if name in _GONE and (name not in _TORCH_DEFAULTS or value != _TORCH_DEFAULTS[name]):
            raise BadInput(f"{name} is not supported by {kind}; {_GONE[name]}", parameter=name, value=value)
        if name not in ("device", "dtype", *_GONE):
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
    return given.get("device"), given.get("dtype")


class TableRequest(NamedTuple):
    """A requested table; `slots` (fp32, int8) and `group` are set by a plan."""

    rows: int
    dim: int
    precision: Precision
    name: str = "table"
    slots: tuple[int, int] | None = None
    group: int = 0


def _size(name: str, size: Any) -> float | str | None:
    """A share as a Python float (a manifest cannot hold numpy's), or bytes as text."""
    if size is None:
        return None
    if isinstance(size, str):
        parse_bytes(name, size, "a share of the rows, such as 0.05, or ")
        return size
    if isinstance(size, Integral) or not isinstance(size, Real) or not 0 <= float(size) <= 1:
        _refuse(name, size, "use a share of the rows (a float in [0, 1]) or bytes (a str such as '2GiB')")
    return float(size)


def make_arena(
    shapes: Sequence[TableRequest], features: Sequence[int], device: torch.device | str | None, rows: RowConfig
) -> tuple[Arena, tuple[Tiers, ...]]:
    """The arena of a module and the tiers of its tables."""
    tiers = choose_tiers(shapes, rows)
    tables = [TableSpec(s.rows, s.dim, t.base, s.name, s.group) for s, t in zip(shapes, tiers, strict=True)]
    slots, near = (
        tuple(count if s.slots is None else s.slots[kind] for count, s in zip(counts, shapes, strict=True))
        for kind, counts in enumerate((divide(tables, [t.full for t in tiers]), divide(tables, [t.near for t in tiers])))
    )
    place = torch.get_default_device() if device is None else torch.device(device)
    staged = None if rows.staged is None else _staged_share(rows.staged, tables, slots, near)
    _check_fits(tables, slots, near, place, rows, staged or 0.0)
    arena = Arena(tables, features, place, slots, rows.policy, rows.residency, near)
    arena.staged = staged
    return arena, tiers


def arena_text(arena: Arena) -> Tensor:
    """Sizes, precisions, slots and policy as text, which a `state_dict` holds and loading compares."""
    text = "; ".join(f"{t.rows} x {t.dim} {t.precision}" for t in arena.tables)
    if arena.pools:
        kinds = [f"{p.slots} slots for {p.dim} {F.NAMES[p.format]}, {p.int8_slots} of them near" for p in arena.pools]
        text += f"; {'; '.join(kinds)}; {F.POLICIES[arena.layout.tables.policy]}"
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def choose_tiers(shapes: Sequence[TableRequest], rows: RowConfig) -> tuple[Tiers, ...]:
    """The tiers of each table: those of its dict, its share of the cache, or with "auto" what remains of the budget."""
    share = cache_share(DEFAULT_CACHE if rows.cache is None else rows.cache, shapes)

    def tiers_of(s: TableRequest) -> Tiers:
        if isinstance(s.precision, Mapping):
            return read_tiers(s.precision)
        if s.slots is not None:
            return Tiers(s.precision, *(count / s.rows for count in s.slots))
        return Tiers(s.precision, 0.0 if s.precision in (*UNCACHED, AUTO) else share)

    tiers = [tiers_of(s) for s in shapes]
    sizes = [s[:2] for s, t in zip(shapes, tiers, strict=True) if t.base == AUTO]
    if (rows.budget is None) == bool(sizes):
        _refuse("budget", rows.budget, "precision 'auto' needs it, as in RowConfig('auto', budget='2GiB'); others take none")
    if rows.budget is not None:
        fixed = [t for t in tiers if t.base != AUTO]
        tables = [TableSpec(s.rows, s.dim, t.base) for s, t in zip(shapes, tiers, strict=True) if t.base != AUTO]
        taken = bytes_of(tables, divide(tables, [t.full for t in fixed]), divide(tables, [t.near for t in fixed]))
        found = fit(sizes, parse_budget(rows.budget, sum(4 * s.rows * s.dim for s in shapes)), taken + overhead(tables))
        tiers = [found if t.base == AUTO else t for t in tiers]
    return tuple(tiers)


def bytes_needed(
    tables: Sequence[TableSpec], slots: Sequence[int], optimizer: RowOptimizer, near: Sequence[int] | None = None
) -> int:
    """Bytes of rows, cache and optimizer state."""
    states = sum(t.rows * (4 * optimizer.states_per_row + 4 * t.dim * optimizer.states_per_column) for t in tables)
    return states + bytes_of(tables, slots, near or [0] * len(tables))


def _bytes_of_elastic(rows: int, dim: int, config: RowConfig) -> int:
    """Bytes of an elastic table: those of its ids, too."""
    (tiers,) = choose_tiers([TableRequest(rows, dim, config.precision)], config)
    tables = [TableSpec(rows, dim, tiers.base)]
    slots, near = divide(tables, [tiers.full]), divide(tables, [tiers.near])
    return bytes_needed(tables, slots, config.optimizer, near) + overhead(tables) + BYTES_PER_ROW * (rows + BUCKET)


def _check_fits(
    tables: Sequence[TableSpec], slots: Sequence[int], near: Sequence[int], device: torch.device, rows: RowConfig,
    staged: float,
) -> None:  # fmt: skip
    """Raise before allocation if the tables do not fit, with precisions that would."""
    needed, free = bytes_needed(tables, slots, rows.optimizer, near), free_bytes(device)
    if rows.residency == "host" and device.type == "cuda":
        _check_fits_host(tables)
        needed -= _bytes_of_codes(tables)
        needed += int(staged * _bytes_to_stage(tables, slots))
    if free is None or needed <= free:
        return
    ways = []
    first = rows.cache if isinstance(rows.cache, float) else DEFAULT_CACHE
    for precision, share in (("int8", first), ("int4", first), ("int4", 0.01), ("int2", 0.01)):
        smaller = [TableSpec(t.rows, t.dim, precision) for t in tables]
        size = bytes_needed(smaller, divide(smaller, [share] * len(smaller)), rows.optimizer)
        if size <= free:
            ways.append(f"precision={precision!r}, cache={share!r} ({size / 2**30:.2f} GiB)")
    way = f"what would fit: {'; '.join(ways[:2])}" if ways else "no precision fits; use more devices, or fewer rows"
    raise BadInput(
        f"the tables need {needed / 2**30:.2f} GiB with optimizer state; {device} has {free / 2**30:.2f} GiB free, "
        f"{(needed - free) / 2**30:.2f} GiB are missing; {way}",
        needed=needed, available=free, device=device,
    )  # fmt: skip


def _bytes_of_codes(tables: Sequence[TableSpec], precision: str | None = None) -> int:
    return sum(t.rows * F.row_bytes(format_of(precision or t.precision), t.dim) for t in tables)


def _check_fits_host(tables: Sequence[TableSpec]) -> None:
    """Raise before allocation if codes do not fit into host memory, with precisions that would."""
    host = torch.device("cpu")
    needed, free = _bytes_of_codes(tables), free_bytes(host)
    if free is None or needed <= free:
        return
    sizes = {precision: _bytes_of_codes(tables, precision) for precision in ("int8", "int4", "int2")}
    ways = [f"precision={precision!r} ({size / 2**30:.2f} GiB)" for precision, size in sizes.items() if size <= free]
    way = f"what would fit: {'; '.join(ways)}" if ways else "no precision fits; use more hosts, or fewer rows"
    raise BadInput(
        f"rows in host memory need {needed / 2**30:.2f} GiB; {free / 2**30:.2f} GiB are free, "
        f"{(needed - free) / 2**30:.2f} GiB are missing; {way}",
        needed=needed, available=free, device=host,
    )  # fmt: skip


def cache_share(cache: float | str, shapes: Sequence[TableRequest]) -> float:
    """The share of the rows of all tables with a cache that fits into `cache`, at most 1."""
    if isinstance(cache, float):
        return cache
    cached = [s for s in shapes if isinstance(s.precision, str) and s.precision not in (*UNCACHED, AUTO)]
    size, row = parse_bytes("cache", cache), min((4 * s.dim for s in cached), default=0)
    if 0 < size < row:
        _refuse("cache", cache, f"one row takes {row} bytes", needed=row, available=size)
    return min(1.0, size / max(1, sum(4 * s.rows * s.dim for s in cached)))


def _bytes_to_stage(tables: Sequence[TableSpec], slots: Sequence[int]) -> int:
    """Bytes on the GPU of all rows that can be staged."""
    cached = [table for table, count in zip(tables, slots, strict=True) if count]
    return sum(t.rows * place_bytes(format_of(t.precision), t.dim) for t in cached)


def _staged_share(staged: float | str, tables: Sequence[TableSpec], slots: Sequence[int], near: Sequence[int]) -> float:
    """The share of the rows that fit into the staging area, at most 1."""
    if any(near) or not any(slots):
        _refuse("staged", staged, "prefetching needs a cache with fp32 slots only, as in cache=0.05")
    size = parse_bytes("staged", staged) / _bytes_to_stage(tables, slots) if isinstance(staged, str) else staged
    if size == 0:
        _refuse("staged", staged, "use more than 0, or None for room for three batches")
    return min(size, 1.0)


def parse_budget(text: Any, fp32: int) -> int:
    """The bytes of a budget: "2GiB", or a ratio such as "1/8" of the bytes of fp32 rows."""
    ratio = re.fullmatch(r"\s*([0-9]+)\s*/\s*([1-9][0-9]*)\s*", text) if isinstance(text, str) else None
    if ratio is not None and 0 < int(ratio[1]) <= int(ratio[2]):
        return fp32 * int(ratio[1]) // int(ratio[2])
    return parse_bytes("budget", text, "a ratio to fp32 rows such as '1/8', or ")


def parse_bytes(name: str, text: Any, alternative: str = "") -> int:
    """The number of bytes that a text such as "2GiB" stands for."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        _refuse(name, text, f"use {alternative}bytes as a str, such as '512MiB' or '2GiB'")
    return int(float(match[1]) * _UNITS[match[2]])
