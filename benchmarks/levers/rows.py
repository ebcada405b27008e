"""Runs of the levers benchmark -> rows of its record, and a table of them.

A row is one arm at one dimension: `ours` is its mean AUC, `peer_value` that of `full` with the same seeds, `verdict` the
result of the rule. Arms that choose sizes are also paired with the uniform cut of equal bytes, which is what "better" refers
to; everything else refers to `full`. Further fields:

    seeds, seeds_wanted, logloss
    auc_difference, logloss_difference     [mean, low, high], paired by seed, arm minus `full`
    against_uniform                        the same two, arm minus the uniform cut, and the AUC of the uniform cut
    table_rows, bytes, map_bytes           bytes of rows, optimizer state and maps; of the maps alone
    memory_ratio (_with_state)             to `full`
    predicted_bytes, saved, harm, fallback predictions of the lever
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.levers.arms import FULL, ZEROED, LeverArm
from benchmarks.runner.noninferiority import BETTER, SEEDS, Difference
from benchmarks.runner.paired import RunResult, note_commits
from benchmarks.runner.paired_rows import Runs, asked_cell, by_arm, difference, draw, finite, mean, seeds_cell, span
from benchmarks.runner.record import Recorder, Row

PREDICTED = ("predicted_bytes", "saved", "harm", "fallback")


def write(recorder: Recorder, log: str, arms: Sequence[LeverArm], results: Iterable[RunResult]) -> None:
    """Add a row for every arm and dimension."""
    results = list(results)
    for dim, runs in by_arm(results).items():
        full = runs[FULL.name]
        for arm in arms:
            mine, when = (full, "zeroed") if arm == ZEROED else (runs[arm.name], "trained")
            case = f"{log}/D{dim}/{arm.name}"
            fields = _fields(mine, when)
            if arm != FULL:
                asked = recorder.asked.get(case) if len(mine) >= SEEDS else None
                uniform = runs[arm.uniform.name] if arm.uniform else None
                fields |= {"asked": asked} | _judged(mine, full, uniform, when, asked)
            peer = None if arm == FULL else FULL.name
            recorder.add(case, mean(mine, when, "auc"), "AUC", peer=peer, peer_value=mean(full, "trained", "auc"), **fields)
    note_commits(recorder, results)


def _fields(mine: Runs, when: str) -> Row:
    runs = list(mine.values())
    told = {name: fmean(run.stats[name] for run in runs) for name in PREDICTED if name in runs[0].stats}
    return {
        "seeds": len(runs),
        "seeds_wanted": SEEDS,
        "logloss": mean(mine, when, "logloss"),
        "table_rows": runs[0].rows,
        "bytes": fmean(run.stats["bytes"] for run in runs),
        "map_bytes": fmean(run.stats["map_bytes"] for run in runs),
        "memory_ratio": fmean(run.memory_ratio for run in runs),
        "memory_ratio_with_state": fmean(run.memory_ratio_with_state for run in runs),
        "seconds": median(run.seconds for run in runs),
        **told,
    }


def _judged(mine: Runs, full: Runs, uniform: Runs | None, when: str, asked: float | str | None) -> Row:
    found = difference(mine, full, when)
    fields = {**_told(found), "verdict": found.verdict, "worse": found.worse}
    if uniform:
        beside = difference(mine, uniform, when)
        fields |= {"against_uniform": _told(beside) | {"uniform_auc": mean(uniform, "trained", "auc")}}
        if asked == BETTER:
            found = beside
    return fields | {"ok": found.meets(asked) if isinstance(asked, str) else True}


def _told(found: Difference) -> Row:
    return {"auc_difference": finite(found.auc), "logloss_difference": finite(found.logloss)}


# -- the table --


def table(record: dict[str, Any], only_short: bool = False) -> Table:
    """The record as a table for a terminal; differences in units of 1e-4, with * where a loss is significant."""
    names = ("arm", "seeds", "AUC", "to full", "LogLoss, to full", "AUC, to uniform", "rows", "MB", "smaller", "harm")
    return draw(record, "differences", (*names, "verdict", "asked"), _cells, only_short)


def _cells(row: Row) -> list[str]:
    arm = row["case"].split("/", 1)[1]
    if row["unit"] != "AUC":  # launches
        return [
            arm,
            "",
            f"{row['ours']:g} {row['unit']}",
            f"{row['peer_value']:g} {row['peer']}",
            *[""] * 7,
            row["asked"] or "",
        ]
    beside = row.get("against_uniform", {}).get("auc_difference")
    return [
        arm,
        seeds_cell(row),
        "-" if row["ours"] is None else f"{row['ours']:.4f}",
        span(row.get("auc_difference")) + ("*" if row.get("worse") else ""),
        span(row.get("logloss_difference")),
        span(beside),
        f"{row['table_rows']:,}",
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['memory_ratio_with_state']:.2f}x",
        f"{row['harm']:.1%}" if "harm" in row else "",
        row.get("verdict", ""),
        asked_cell(row),
    ]
