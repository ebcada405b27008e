"""The JSON record that all benchmarks share.

    {"bench": "kernels", "machine": {...}, "versions": {...}, "commit": "1a2b3c4", "date": "2026-01-31T12:00:00+00:00",
     "rows": [{"case": "cpu/8x1M/zipf/int8/forward/1", "ours": 1.9, "peer": "fbgemm int8", "peer_value": 2.1,
               "unit": "ms", "ratio": 1.11, "asked": 1.0, "ok": true, "spread": 0.02}, ...]}

`ratio` above 1 means that we are better. `asked` comes from `benchmarks/asked.json`; `ok` says whether it holds, and is true
where nothing is asked. `ours` and `peer_value` are medians; `spread` is (p90 - p10) / median of ours. A run that is too small
to be judged (`--quick`, `--no-peers`) asks nothing of its rows.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Save = Callable[[dict[str, Any]], None]

PARTIAL = "THERMOCLINE_BENCH_PARTIAL"
_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "numba", "numpy", "thermocline")


class Recorder:
    """Collects rows, adds what is asked of each, and saves the record after every row."""

    def __init__(self, bench: str, report: Callable[[str], None], save: Save | None = None, judged: bool = True) -> None:
        self.report = report
        self.asked = read_asked(bench) if judged else {}
        self.record: dict[str, Any] = {
            "bench": bench,
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "judged": judged,
            "notes": [],
            "rows": [],
        }
        self._save = save or partial_writer()

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.record["rows"]
        return rows

    def add(
        self,
        case: str,
        ours: float | None,
        unit: str,
        peer: str | None = None,
        peer_value: float | None = None,
        ratio: float | None = None,
        spread: float | None = None,
        **further: Any,
    ) -> Row:
        """Add a measured row. `further` holds additional fields."""
        asked = self.asked.get(case)
        row = {
            "case": case, "ours": ours, "peer": peer, "peer_value": peer_value, "unit": unit, "ratio": ratio,
            "asked": asked, "ok": holds(ratio, asked), "spread": spread, **further,
        }  # fmt: skip
        self._keep(row)
        return row

    def fail(self, case: str, error: str) -> Row:
        """Add a row that could not be measured."""
        row = {
            "case": case, "ours": None, "peer": None, "peer_value": None, "unit": "ms", "ratio": None,
            "asked": self.asked.get(case), "ok": False, "spread": None, "error": brief(error),
        }  # fmt: skip
        self._keep(row)
        return row

    def note(self, text: str) -> None:
        """Add a remark for readers of the results."""
        self.record["notes"].append(text)
        self.report(text)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self.report(line(row))
        self._save(self.record)


def brief(error: BaseException | str, limit: int = 300) -> str:
    """An error in one line that fits a row."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def holds(ratio: float | None, asked: float | str | None) -> bool:
    """Whether a ratio meets a number. Benchmarks judge themselves what is asked in words."""
    if asked is None:
        return True
    return ratio is not None and not isinstance(asked, str) and ratio >= asked


def line(row: Row) -> str:
    """A row in one line."""
    if "error" in row:
        return f"SHORT  {row['case']}: {row['error']}"
    mark = "" if row["ok"] else "SHORT"
    ours = "-" if row["ours"] is None else f"{row['ours']:.4g}"
    text = f"{mark:5}  {row['case']:48} {ours:>10} {row['unit']}"
    if row["ratio"] is None:
        return text
    asked = "" if row["asked"] is None else f"(asked {row['asked']})"
    return f"{text}  {row['peer_value']:10.4g} {row['peer']}  {row['ratio']:.2f}x {asked}".rstrip()


def summary(record: dict[str, Any]) -> str:
    """All rows in a compact table, with a count of those that fall short."""
    rows: list[Row] = record["rows"]
    short = sum(not row["ok"] for row in rows)
    asked = sum(row["asked"] is not None for row in rows)
    return "\n".join([*map(line, rows), f"{len(rows)} rows, {asked} of them asked for, {short} short"])


def read_asked(bench: str) -> dict[str, float | str]:
    """What is asked of each case of a benchmark, from the working folder or else from this checkout."""
    for root in (Path.cwd(), _REPOSITORY):
        path = root / "benchmarks" / "asked.json"
        if path.is_file():
            entries = json.loads(path.read_text(encoding="utf-8")).get(bench, [])
            return {entry["case"]: entry["asked"] for entry in entries}
    return {}


def partial_writer() -> Save:
    """Writes the record to the file named by THERMOCLINE_BENCH_PARTIAL after every row, so that an aborted run keeps it."""
    target = os.environ.get(PARTIAL)
    if not target:
        return lambda record: None

    def write(record: dict[str, Any]) -> None:
        path = Path(target)
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)

    return write


def machine() -> dict[str, Any]:
    """CPU, cores, memory and GPU of this machine."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python, the packages and CUDA; peers add their own."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    import torch

    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """The commit of this checkout, marked "-dirty" if files differ; THERMOCLINE_COMMIT names it for a copy without history."""
    if named := os.environ.get("THERMOCLINE_COMMIT"):
        return named
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return f"{head}-dirty" if _git("status", "--porcelain") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()
