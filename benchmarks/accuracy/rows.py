"""Runs of the accuracy benchmark -> rows of its record, and a table of them.

A row is one arm at one dimension: `ours` is its mean AUC, `peer_value` that of fp32 with the same seeds, `verdict` the result
of the rule. With fewer seeds than the rule wants, nothing is asked. Further fields:

    seeds, seeds_wanted            logloss, fp32_logloss
    auc_difference, logloss_difference           [mean, low, high], paired by seed, arm minus fp32
    flushed                        the same two and their verdict after a flush of the cache
    worse                          whether a loss of any size is significant
    memory_ratio (_with_state)     to fp32 rows, all memory counted; zeroed-89% counts only the rows it keeps
    hit_rate, table_rows, seconds (of a run, median: the first compiles)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.accuracy.arms import FP32, KEPT, AccuracyArm
from benchmarks.runner.noninferiority import Difference
from benchmarks.runner.paired import RunResult, note_commits
from benchmarks.runner.paired_rows import Runs, asked_cell, by_arm, difference, draw, finite, mean, seeds_cell, span
from benchmarks.runner.record import Recorder, Row


def write(recorder: Recorder, log: str, kind: str, arms: Sequence[AccuracyArm], results: Iterable[RunResult]) -> None:
    """Add a row for every arm and dimension."""
    results = list(results)
    for dim, runs in by_arm(results).items():
        fp32 = runs[FP32.name]
        for arm in arms:
            mine, when = (fp32, "zeroed") if arm.zeroed else (runs[arm.name], "trained")
            case, wanted = f"{log}/D{dim}/{arm.name}", arm.seeds(kind)
            fields = _fields(arm, mine, fp32, when) | {"seeds_wanted": wanted}
            if arm != FP32:
                asked = recorder.asked.get(case) if len(mine) >= wanted else None
                fields |= {"asked": asked} | _judged(difference(mine, fp32, when), asked)
            auc, fp32_auc = mean(mine, when, "auc"), mean({seed: fp32[seed] for seed in mine}, "trained", "auc")
            recorder.add(case, auc, "AUC", peer=None if arm == FP32 else FP32.name, peer_value=fp32_auc, **fields)
    note_commits(recorder, results)


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


# -- the table --


def table(record: dict[str, Any], only_short: bool = False) -> Table:
    """The record as a table for a terminal; differences in units of 1e-4, with * where a loss is significant."""
    names = ("arm", "seeds", "AUC", "difference", "LogLoss", "difference", "AUC difference, flushed")
    further = ("memory", "with state", "hits", "seconds", "verdict", "asked")
    return draw(record, "differences to fp32", (*names, *further), _cells, only_short)


def _cells(row: Row) -> list[str]:
    flushed = row["flushed"]
    return [
        row["case"].split("/", 1)[1],
        seeds_cell(row),
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
        asked_cell(row),
    ]
