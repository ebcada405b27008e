"""Runs of the accuracy benchmark -> rows of its record, and a table of them.

A row is one arm at one dimension: `ours` is its mean AUC, `peer_value` that of fp32 with the same seeds, and `verdict` what
the rule says. What is asked of it, in the rule's words, holds or not; with fewer seeds than the rule wants nothing is asked.
Next to the common fields:

    seeds, seeds_wanted            logloss, fp32_logloss
    auc_difference, logloss_difference           [mean, low, high], paired by seed, arm minus fp32
    flushed                        the same two and their verdict after the cache was put back into the table, rounded
    worse                          whether a loss is certain, however small
    memory_ratio (_with_state)     to fp32 rows, everything counted; of zeroed-89%, as if the rows kept were all
    hit_rate, table_rows, seconds (of a run, median: the first compiles)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.accuracy.arms import FP32, KEPT, AccuracyArm
from benchmarks.runner.noninferiority import Difference, interval
from benchmarks.runner.paired import RunResult, note_commits
from benchmarks.runner.record import Recorder, Row

Runs = dict[int, RunResult]  # by seed


def write(recorder: Recorder, log: str, kind: str, arms: Sequence[AccuracyArm], results: Iterable[RunResult]) -> None:
    """Add a row for every arm and dimension."""
    runs: dict[tuple[int, str], Runs] = {}
    for result in results:
        runs.setdefault((result.dim, result.arm), {})[result.seed] = result
    for dim in dict.fromkeys(dim for dim, _ in runs):
        fp32 = runs[dim, FP32.name]
        for arm in arms:
            mine, when = (fp32, "zeroed") if arm.zeroed else (runs[dim, arm.name], "trained")
            case, wanted = f"{log}/D{dim}/{arm.name}", arm.seeds(kind)
            fields = _fields(arm, mine, fp32, when) | {"seeds_wanted": wanted}
            if arm != FP32:
                asked = recorder.asked.get(case) if len(mine) >= wanted else None
                fields |= {"asked": asked} | _judged(difference(mine, fp32, when), asked)
            auc, fp32_auc = mean(mine, when, "auc"), mean({seed: fp32[seed] for seed in mine}, "trained", "auc")
            recorder.add(case, auc, "AUC", peer=None if arm == FP32 else FP32.name, peer_value=fp32_auc, **fields)
    note_commits(recorder, [result for of_arm in runs.values() for result in of_arm.values()])


def difference(mine: Runs, fp32: Runs, when: str) -> Difference:
    """Arm minus fp32, paired by seed."""
    auc, logloss = (
        interval([run.measures[when][name] - fp32[seed].measures["trained"][name] for seed, run in mine.items()])
        for name in ("auc", "logloss")
    )
    return Difference(auc, logloss)


def _fields(arm: AccuracyArm, mine: Runs, fp32: Runs, when: str) -> Row:
    runs = list(mine.values())
    lookups = sum(run.stats.get("lookups", 0) for run in runs)
    kept = 1 / KEPT if arm.zeroed else None
    return {
        "seeds": len(runs),
        "logloss": mean(mine, when, "logloss"),
        "fp32_logloss": mean({seed: fp32[seed] for seed in mine}, "trained", "logloss"),
        "flushed": _told(difference(mine, fp32, "flushed")) if arm.cached else None,
        "memory_ratio": kept or fmean(run.memory_ratio for run in runs),
        "memory_ratio_with_state": kept or fmean(run.memory_ratio_with_state for run in runs),
        "hit_rate": sum(run.stats["hits"] for run in runs) / lookups if lookups else None,
        "table_rows": runs[0].rows,
        "seconds": median(run.seconds for run in runs),
    }


def _judged(found: Difference, asked: float | str | None) -> Row:
    ok = found.meets(asked) if isinstance(asked, str) else True
    return {**_told(found), "worse": found.worse, "ok": ok}


def _told(found: Difference) -> Row:
    return {
        "auc_difference": finite(found.auc),
        "logloss_difference": finite(found.logloss),
        "verdict": found.verdict,
    }


def mean(runs: Runs, when: str, name: str) -> float | None:
    """Over seeds; null where a run has none."""
    return finite([fmean(run.measures[when][name] for run in runs.values())])[0]


def finite(values: Iterable[float]) -> list[float | None]:
    """The same with null for what JSON cannot hold: a model that diverged has no AUC, one seed no interval."""
    return [value if math.isfinite(value) else None for value in values]


# -- the table --


def table(record: dict[str, Any], only_short: bool = False) -> Table:
    """The record as a table for a terminal; differences in units of 1e-4, with * where a loss is certain."""
    names = ("arm", "seeds", "AUC", "difference", "LogLoss", "difference", "AUC difference, flushed")
    further = ("memory", "with state", "hits", "seconds", "verdict", "asked")
    return draw(record, "differences to fp32", (*names, *further), _cells, only_short)


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


def _cells(row: Row) -> list[str]:
    flushed = row["flushed"]
    few = row["seeds"] < row["seeds_wanted"]
    return [
        row["case"].split("/", 1)[1],
        f"{row['seeds']} of {row['seeds_wanted']}" if few else str(row["seeds"]),
        "-" if row["ours"] is None else f"{row['ours']:.4f}",
        span(row.get("auc_difference")) + ("*" if row.get("worse") else ""),
        "-" if row["logloss"] is None else f"{row['logloss']:.4f}",
        span(row.get("logloss_difference")),
        f"{span(flushed['auc_difference'])} {flushed['verdict']}" if flushed else "",
        f"{row['memory_ratio']:.2f}x",
        f"{row['memory_ratio_with_state']:.2f}x",
        "" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}",
        f"{row['seconds']:.1f}",
        row.get("verdict", ""),
        row["asked"] or ("few seeds" if few else ""),
    ]


def span(found: Sequence[float | None] | None) -> str:
    """A mean and its interval in units of 1e-4."""
    if found is None:
        return ""
    mean, low, high = ("?" if value is None else f"{value * 1e4:+.1f}" for value in found)
    return f"{mean} [{low}, {high}]"
