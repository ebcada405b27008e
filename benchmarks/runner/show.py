"""Reads results of benchmarks, prints them, and checks them against the required cases.

Every benchmark writes one JSON object, see `record.py`. `asked` is a number or words, null where nothing is asked; `ok` says
whether it holds (null only where nothing is asked). The file of required cases,

    {"kernels": [{"case": "cpu/8x1M/zipf/int8/forward/1", "asked": 1.0}, ...], ...}

keeps a benchmark from leaving out its hard cases, and from asking less of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from thermocline.errors import FormatError

Row = Mapping[str, Any]
Asked = Mapping[str, Mapping[str, float | str | None]]


@dataclass(frozen=True)
class Report:
    """One file of results."""

    source: str
    bench: str
    machine: str
    date: str
    commit: str
    rows: Sequence[Row]
    versions: Mapping[str, str]

    def short(self) -> list[Row]:
        """Rows that fall short of what is asked."""
        return [row for row in self.rows if row["ok"] is False]

    def summary(self) -> dict[str, object]:
        """Summary for JSON."""
        cases = [row["case"] for row in self.short()]
        return {"file": self.source, "bench": self.bench, "rows": len(self.rows), "short": cases}


# -- reading --


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _or_null(test: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or test(value)


def _is_spread(value: object) -> bool:
    return _is_number(value) or (isinstance(value, list) and all(map(_is_number, value)))


def _is_asked(value: object) -> bool:
    return _is_text(value) or _is_number(value)


# Field -> (test of its value, the test in words).
ROW_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "case": (_is_text, "a text"),
    "ours": (_or_null(_is_number), "a number or null"),
    "peer": (_or_null(_is_text), "a text or null"),
    "peer_value": (_or_null(_is_number), "a number or null"),
    "unit": (_is_text, "a text"),
    "ratio": (_or_null(_is_number), "a number or null"),
    "asked": (_or_null(_is_asked), "a number, a text or null"),
    "ok": (_or_null(lambda value: isinstance(value, bool)), "true, false or null"),
    "spread": (_or_null(_is_spread), "a number, a list of numbers or null"),
}
FILE_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "bench": (_is_text, "a text"),
    "machine": (lambda value: isinstance(value, dict) or _is_text(value), "a text or an object"),
    "versions": (lambda value: isinstance(value, dict), "an object"),
    "commit": (_or_null(_is_text), "a text or null"),
    "date": (_is_text, "a text"),
    "rows": (lambda value: isinstance(value, list), "a list"),
}
ASKED_FIELDS = {"case": ROW_FIELDS["case"], "asked": (_is_asked, "a number or a text")}


def _check_fields(value: object, fields: Mapping[str, tuple[Callable[[object], bool], str]], where: str) -> None:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, found {_brief(value)}.")
    for field, (test, words) in fields.items():
        if field not in value:
            raise FormatError(f"{where}: field '{field}' is missing.")
        if not test(value[field]):
            raise FormatError(f"{where}: field '{field}' must be {words}, found {_brief(value[field])}.")


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from error


def load(path: Path) -> Report:
    """Read and check one file of results."""
    return parse(_read(path), str(path))


def parse(value: Any, source: str) -> Report:
    """Check results from `source`. Errors count rows from 1."""
    _check_fields(value, FILE_FIELDS, source)
    for number, row in enumerate(value["rows"], 1):
        where = f"{source}: row {number}"
        _check_fields(row, ROW_FIELDS, where)
        if row["asked"] is not None and row["ok"] is None:
            raise FormatError(f"{where}: field 'ok' is null, but {_brief(row['asked'])} is asked of '{row['case']}'.")
    return Report(
        source=source,
        bench=value["bench"],
        machine=_machine_line(value["machine"]),
        date=value["date"],
        commit=value["commit"] or "unknown commit",
        rows=value["rows"],
        versions=value["versions"],
    )


def _machine_line(machine: str | Mapping[str, object]) -> str:
    return machine if isinstance(machine, str) else ", ".join(f"{key} {value}" for key, value in machine.items())


def load_asked(path: Path) -> Asked:
    """Read the required cases: bench -> case -> asked."""
    value = _read(path)
    _check_fields(value, {}, str(path))
    for bench, entries in value.items():
        if not isinstance(entries, list):
            raise FormatError(f"{path}: '{bench}' must be a list, found {_brief(entries)}.")
        for number, entry in enumerate(entries, 1):
            _check_fields(entry, ASKED_FIELDS, f"{path}: '{bench}' entry {number}")
    return {bench: {entry["case"]: entry["asked"] for entry in entries} for bench, entries in value.items()}


# -- checking --


def problems(reports: Sequence[Report], asked: Asked) -> list[str]:
    """One sentence for each problem of these reports, taken together."""
    return [*_short_rows(reports), *_missing_cases(reports, asked), *_other_demands(reports, asked)]


def _short_rows(reports: Iterable[Report]) -> list[str]:
    return [
        f"{report.source}: {row['case']}: {_asked_text(row['asked'])} asked, {_ratio_text(row['ratio'])} measured"
        for report in reports
        for row in report.short()
    ]


def _missing_cases(reports: Sequence[Report], asked: Asked) -> list[str]:
    measured = {(report.bench, row["case"]) for report in reports for row in report.rows}
    benches = dict.fromkeys(report.bench for report in reports)
    return [
        f"{bench}: {case}: asked for, but in none of the files"
        for bench in benches
        for case in asked.get(bench, {})
        if (bench, case) not in measured
    ]


def _other_demands(reports: Iterable[Report], asked: Asked) -> list[str]:
    """Rows that were judged by another number than the required one."""
    return [
        f"{report.source}: {row['case']}: judged by {_asked_text(row['asked'])}, but {_asked_text(wanted)} is asked"
        for report in reports
        for row in report.rows
        if (wanted := asked.get(report.bench, {}).get(row["case"])) is not None and row["asked"] != wanted
    ]


# -- printing --


def table(report: Report, only_short: bool = False) -> Table:
    """The report as a table for a terminal."""
    title = f"{report.bench} · {report.machine} · {report.commit} · {report.date}"
    drawn = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("")
    drawn.add_column("case", overflow="fold")
    for name in ("ours", "peer's", "unit", "ratio", "asked", "spread"):
        drawn.add_column(name, justify="left" if name == "unit" else "right")
    drawn.add_column("peer")
    for row in report.short() if only_short else report.rows:
        short = row["ok"] is False
        drawn.add_row("SHORT" if short else "", *map(escape, _cells(row)), style="bold red" if short else None)
    return drawn


def _cells(row: Row) -> list[str]:
    return [
        row["case"],
        _number_text(row["ours"]),
        _number_text(row["peer_value"]),
        row["unit"],
        _ratio_text(row["ratio"]),
        _asked_text(row["asked"]) if row["asked"] is not None else "",
        _spread_text(row["spread"]),
        row["peer"] or "",
    ]


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _asked_text(asked: float | str | None) -> str:
    if asked is None:
        return "nothing"
    return asked if isinstance(asked, str) else f"{asked:g}x"


def _spread_text(spread: float | list[float] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread:.2g}" if isinstance(spread, int | float) else " to ".join(f"{value:.4g}" for value in spread)
