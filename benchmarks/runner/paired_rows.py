"""Rows and tables of paired experiments: what the accuracy, levers and quality benchmarks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.runner.noninferiority import Difference, interval
from benchmarks.runner.paired import RunResult
from benchmarks.runner.record import Row

Runs = dict[int, RunResult]  # by seed


def by_arm(results: Iterable[RunResult]) -> dict[int, dict[str, Runs]]:
    """Dimension -> arm -> runs."""
    found: dict[int, dict[str, Runs]] = {}
    for result in results:
        found.setdefault(result.dim, {}).setdefault(result.arm, {})[result.seed] = result
    return found


def difference(mine: Runs, fp32: Runs, when: str) -> Difference:
    """Arm minus fp32, paired by seed."""
    auc, logloss = (
        interval([run.measures[when][name] - fp32[seed].measures["trained"][name] for seed, run in mine.items()])
        for name in ("auc", "logloss")
    )
    return Difference(auc, logloss)


def mean(runs: Runs, when: str, name: str) -> float | None:
    """Over seeds; null where a run has none."""
    return finite([fmean(run.measures[when][name] for run in runs.values())])[0]


def finite(values: Iterable[float]) -> list[float | None]:
    """The same with null for what JSON cannot hold: a model that diverged has no AUC, one seed no interval."""
    return [value if math.isfinite(value) else None for value in values]


# -- tables --


def draw(
    record: dict[str, Any], compared: str, names: Sequence[str], cells: Callable[[Row], list[str]], only_short: bool
) -> Table:
    """Rows of paired differences under these names, those that fall short marked."""
    log = record["rows"][0]["case"].split("/")[0]
    title = f"{log} · {record['commit'] or 'unknown commit'} · {record['date']} · {compared} in 1e-4 [95% interval]"
    drawn = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", *names):
        justify: Literal["left", "right"] = "left" if name in ("", "arm", "verdict", "asked") else "right"
        drawn.add_column(name, justify=justify, no_wrap=name == "arm")
    for row in record["rows"]:
        short = not row["ok"]
        if short or not only_short:
            drawn.add_row("SHORT" if short else "", *map(escape, cells(row)), style="bold red" if short else None)
    return drawn


def span(found: Sequence[float | None] | None) -> str:
    """A mean and its interval in units of 1e-4."""
    if found is None:
        return ""
    mean, low, high = ("?" if value is None else f"{value * 1e4:+.1f}" for value in found)
    return f"{mean} [{low}, {high}]"


def seeds_cell(row: Row) -> str:
    """The number of seeds, and of those wanted if they are fewer."""
    return f"{row['seeds']} of {row['seeds_wanted']}" if _few(row) else str(row["seeds"])


def asked_cell(row: Row) -> str:
    """What is asked of a row; nothing is asked of one with too few seeds."""
    return row["asked"] or ("few seeds" if _few(row) else "")


def _few(row: Row) -> bool:
    return bool(row["seeds"] < row["seeds_wanted"])
