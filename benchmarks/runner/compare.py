"""Compares two or more files of results, case by case: better, worse, or the same within their spread.

The first file is the reference. A change is how many times better a case is than there, whichever way its unit counts: 2.00x
is half the milliseconds, or twice the lookups per second. Changes within the spread of both measurements are called the same.
Values of different machines are not comparable, but their ratios to peers are: both are shown, and a note reports other
machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.runner.show import Report, Row
from thermocline.errors import BadInput

MORE_IS_BETTER = ("AUC", "hits a lookup")  # units, next to all that are "in a second"
LEAST = 0.02  # smallest reported change of a row without spread


@dataclass(frozen=True)
class ComparedCase:
    """One case in all files; None for a file without it."""

    bench: str
    name: str
    rows: tuple[Row | None, ...]

    @property
    def unit(self) -> str:
        return next(str(row["unit"]) for row in self.rows if row is not None)

    def change(self, at: int) -> float | None:
        """How many times better file `at` is than the first; None where one of them has no such number."""
        before, after = (None if row is None else row["ours"] for row in (self.rows[0], self.rows[at]))
        if not before or not after or before < 0 or after < 0:
            return None
        return float(after / before if more_is_better(self.unit) else before / after)

    def verdict(self, at: int) -> str:
        """`better`, `worse`, `same`, or "" if there is nothing to compare."""
        change = self.change(at)
        if change is None:
            return ""
        noise = max(LEAST, *(_spread(row) for row in (self.rows[0], self.rows[at])))
        return "same" if 1 / (1 + noise) <= change <= 1 + noise else "better" if change > 1 else "worse"


def more_is_better(unit: str) -> bool:
    return unit in MORE_IS_BETTER or unit.endswith("/s")


def _spread(row: Row | None) -> float:
    spread = row["spread"] if row is not None else None
    return float(spread) if isinstance(spread, int | float) else 0.0


@dataclass(frozen=True)
class Comparison:
    """All cases of all files, in the order of the first that has them."""

    reports: tuple[Report, ...]
    cases: tuple[ComparedCase, ...]

    @classmethod
    def of(cls, reports: Sequence[Report]) -> Comparison:
        if len(reports) < 2:
            raise BadInput(
                f"a comparison needs two files or more, found {len(reports)}; `show` prints one",
                parameter="files",
                value=len(reports),
            )
        found = [{(report.bench, str(row["case"])): row for row in report.rows} for report in reports]
        keys = dict.fromkeys(key for rows in found for key in rows)
        cases = tuple(ComparedCase(*key, tuple(rows.get(key) for rows in found)) for key in keys)
        if not any(case.change(at) is not None for case in cases for at in range(1, len(reports))):
            names = "; ".join(f"'{report.source}' has {len(report.rows)} of {report.bench}" for report in reports)
            raise BadInput(f"the files have no case in common: {names}; compare files of the same bench", parameter="cases")
        return cls(tuple(reports), cases)

    @property
    def names(self) -> list[str]:
        """Distinct names of the files."""
        stems = [report.source.rsplit("/", 1)[-1].removesuffix(".json") for report in self.reports]
        return stems if len(set(stems)) == len(stems) else [report.source for report in self.reports]

    def count(self, at: int) -> dict[str, int]:
        """Cases of file `at` by verdict."""
        verdicts = [case.verdict(at) for case in self.cases]
        return {word: verdicts.count(word) for word in ("better", "same", "worse")}

    def notes(self) -> Iterator[str]:
        """Differences of machine or versions between files."""
        first = self.reports[0]
        for name, other in zip(self.names[1:], self.reports[1:], strict=True):
            if other.machine != first.machine:
                yield f"{name} was measured on another machine: compare the ratios to the peers, not the values."
            elif other.versions != first.versions:
                changed = {
                    key for key in {*first.versions, *other.versions} if first.versions.get(key) != other.versions.get(key)
                }
                yield f"{name} has other versions of {', '.join(sorted(changed))}."

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        files = [
            {
                "file": report.source,
                "bench": report.bench,
                "machine": report.machine,
                "commit": report.commit,
                "date": report.date,
            }
            for report in self.reports
        ]
        return {"files": files, "notes": list(self.notes()), "cases": [self._line(case) for case in self.cases]}

    def _line(self, case: ComparedCase) -> dict[str, Any]:
        others = range(1, len(self.reports))
        return {
            "bench": case.bench, "case": case.name, "unit": case.unit,
            "values": [row and row["ours"] for row in case.rows], "ratios": [row and row["ratio"] for row in case.rows],
            "changes": [case.change(at) for at in others], "verdicts": [case.verdict(at) for at in others],
        }  # fmt: skip


def table(comparison: Comparison, only_changed: bool = False) -> Table:
    """For a terminal: a value of each file, and next to it how it compares with the first."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("case", overflow="fold")
    drawn.add_column("unit")
    for at, name in enumerate(comparison.names):
        drawn.add_column(escape(name), justify="right", overflow="fold")
        if at:
            drawn.add_column("", justify="right")
    for case in comparison.cases:
        verdicts = [case.verdict(at) for at in range(1, len(comparison.reports))]
        if only_changed and not {"better", "worse"} & set(verdicts):
            continue
        cells = [_value(case.rows[0])]
        for at, verdict in enumerate(verdicts, 1):
            cells += [_value(case.rows[at]), _change(case.change(at), verdict)]
        drawn.add_row(escape(case.name), escape(case.unit), *cells)
    return drawn


def _value(row: Row | None) -> str:
    return "-" if row is None or row["ours"] is None else f"{row['ours']:.4g}"


def _change(change: float | None, verdict: str) -> str:
    colour = {"better": "green", "worse": "bold red"}.get(verdict)
    words = "" if change is None else f"{change:.2f}x {verdict}"
    return f"[{colour}]{words}[/]" if colour else words
