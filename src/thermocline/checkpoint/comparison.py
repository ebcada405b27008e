"""`diff`: compares two checkpoints by value, whatever plans, ranks and chains wrote them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from typing import TypeVar

import torch

from thermocline.errors import BadInput

from .reader import Checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class TableDiff:
    """A table of both checkpoints.

    Attributes:
        table: name of the table.
        total: rows of the table.
        precision: precisions in the first and in the second checkpoint.
        rows: rows whose values differ in a bit.
        largest: largest difference of two values.
        states: rows whose optimizer state differs; None if optimizers differ.

    Example:
        >>> {table.table: table.rows for table in diff("monday", "tuesday").tables}
        {'user': 1200, 'item': 0}
    """

    table: str
    total: int
    precision: tuple[str, str]
    rows: int
    largest: float
    states: int | None


@dataclass(frozen=True)
class Diff:
    """Differences between two checkpoints.

    Attributes:
        steps: steps of the two checkpoints.
        tables: differences of the tables that both have in one size.
        only: tables of the first, and of the second, alone.
        other_size: tables of different sizes.
        maps: features whose id maps differ.
        dense: dense tensors that differ or are missing in one.

    Example:
        >>> diff("monday", "monday").same
        True
    """

    steps: tuple[int, int]
    tables: tuple[TableDiff, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    other_size: tuple[str, ...]
    maps: tuple[str, ...]
    dense: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether both give the same model."""
        changed = any(each.rows or each.states for each in self.tables)
        return not (changed or any(self.only) or self.other_size or self.maps or self.dense)


def diff(first: str | Path, second: str | Path) -> Diff:
    """Compare two checkpoints row by row.

    Args:
        first: a checkpoint folder.
        second: another one.

    Returns:
        Counts of rows and names of tensors that differ; `same` is True if none do.

    Raises:
        BadInput: the checkpoints have no table in common.
        FormatError: a folder is no checkpoint, or a file is damaged.

    Example:
        >>> diff("monday", "tuesday").same
        False
    """
    both = Checkpoint.open(first), Checkpoint.open(second)
    for checkpoint in both:
        checkpoint.verify()
    one, other = ({table.name: table for table in checkpoint.manifest.tables} for checkpoint in both)
    shared = [name for name in one if name in other]
    if not shared:
        raise BadInput(f"'{first}' has the tables {', '.join(one)}, '{second}' {', '.join(other)}; none are in both", tables=())
    alike = [name for name in shared if (one[name].rows, one[name].dim) == (other[name].rows, other[name].dim)]
    return Diff(
        (both[0].manifest.step, both[1].manifest.step),
        tuple(_compare(*both, name) for name in alike),
        (tuple(n for n in one if n not in other), tuple(n for n in other if n not in one)),
        tuple(name for name in shared if name not in alike),
        _different(both[0].id_maps, both[1].id_maps, eq),
        _different(both[0].dense(), both[1].dense(), torch.equal),
    )


def _different(one: dict[str, T], other: dict[str, T], equal: Callable[[T, T], bool]) -> tuple[str, ...]:
    """Names that only one of two mappings has, or whose values differ."""
    same = {name for name in one.keys() & other.keys() if equal(one[name], other[name])}
    return tuple(sorted((one.keys() | other.keys()) - same))


def _compare(one: Checkpoint, other: Checkpoint, table: str) -> TableDiff:
    rows, largest = 0, 0.0
    for (_, mine_RD), (_, theirs_RD) in zip(one.values(table), other.values(table), strict=True):
        apart_R = (mine_RD.view(torch.int32) != theirs_RD.view(torch.int32)).any(dim=1)
        rows += int(apart_R.sum())
        largest = max(largest, float((mine_RD - theirs_RD).abs().max()))
    entries = one.manifest.table(table), other.manifest.table(table)
    precision = entries[0].precision, entries[1].precision
    return TableDiff(table, entries[0].rows, precision, rows, largest, _states(one, other, table))


def _states(one: Checkpoint, other: Checkpoint, table: str) -> int | None:
    modules = [each.manifest.module(each.manifest.table(table).module) for each in (one, other)]
    kinds = [(each.optimizer["name"], each.states) for each in modules]
    if kinds[0] != kinds[1] or one.manifest.table(table).precisions != other.manifest.table(table).precisions:
        return None  # blocks of other sizes cannot be compared
    changed = 0
    for (_, mine), (_, theirs) in zip(one.states(table), other.states(table), strict=True):
        apart = [(a != b) if a.dim() == 1 else (a != b).any(dim=1) for a, b in zip(mine, theirs, strict=True)]
        changed += int(torch.stack(apart).any(dim=0).sum()) if apart else 0
    return changed
