"""Writes `docs/numbers.md` from the files in `benchmarks/results`, so that no number on that page was typed by hand.

    python benchmarks/numbers_page.py            writes the page
    python benchmarks/numbers_page.py --check    leaves with 1 if the page is not what it would write (a test does this)

Every file gets a heading, the command that repeats it, its notes, and its rows: those of which something is asked, or all
where nothing is. Of very many only the ones that fall short are listed, and the rest counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "numbers.md"
LISTED = 40  # rows of a file that are listed; of more, only those that fall short

OPENING = """# Numbers and how to repeat them

Every number that this project states is a row of a JSON file in `benchmarks/results/`, with the machine, versions, commit
and date it was measured with. This page is made from those files by `python benchmarks/numbers_page.py`; a test fails when it
is not. Rows that fall short of what was asked stay on it.

- *ratio*: above 1 means that we are better than the peer, which was measured in the same run unless the notes say otherwise.
- *asked*: what was asked of the row before it was measured (`benchmarks/asked.json`); *holds* says whether it is so.

Repeat one with the command above its table, and look at all of them with

```sh
python -m benchmarks show benchmarks/results/*.json --check
python -m benchmarks compare benchmarks/results/kernels_cpu_2026-11-15.json kernels_cpu.json --report compared.html
```

The second sets your run beside ours, or two of yours beside each other: better, worse, or the same within their spread.

On two cores repeat with nothing else running: the ratios hold on a busy machine too, the milliseconds do not.
"""

# Arguments of a run that its file does not tell, by how the name of the file begins.
ARGUMENTS = {
    "accuracy_criteo": "--data criteo.parquet",
    "accuracy_movielens": "--data movielens.parquet",
    "accuracy_movielens_cache": "--dim 64 --filter int8-stochastic",
    "accuracy_movielens_split": "--dim 64 --filter split",
    "accuracy_synthetic_h200": "--samples 20000000 --rows 20000000 --dim 16 --device cuda",
    "hits": "--data criteo.parquet --data movielens.parquet",
    "kernels_cpu": "--device cpu",
    "kernels_h200": "--device cuda",
    "levers_criteo": "--data criteo.parquet",
    "levers_synthetic": "--samples 100000",
    "memory_cpu": "--device cpu",
    "memory_h200": "--device cuda",
    "online_criteo-diginetica": "--data logs --log criteo --log diginetica",
    "step_cpu": "--device cpu",
    "step_h200": "--device cuda",
    "sweep_cpu": "--device cpu",
    "sweep_h200": "--device cuda",
}


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    files = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    parts = [OPENING, *_overview(files)]
    for stem, found in files.items():
        parts += _section(stem, found)
    return "\n".join(parts) + "\n"


def _overview(files: Mapping[str, Any]) -> Iterator[str]:
    yield "| file | machine | measured | asked | hold |\n|---|---|---|---|---|"
    for stem, found in files.items():
        asked = [row for row in found["rows"] if row["asked"] is not None]
        hold = sum(row["ok"] is True for row in asked)
        anchor = stem.replace(".", "").lower()
        yield f"| [{stem}](#{anchor}) | {_machine(found)} | {len(found['rows'])} | {len(asked)} | {hold} |"


def _machine(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    return str(machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores")


def _section(stem: str, found: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield f"\n## {stem}\n\n{_machine(found)}; {versions}; commit {found['commit']}, {found['date'][:10]}.\n"
    yield f"```sh\n{_command(stem, found)}\n```\n"
    if found["notes"]:
        yield "\n".join(f"- {note}" for note in found["notes"]) + "\n"
    rows = [row for row in found["rows"] if row["asked"] is not None] or found["rows"]
    listed = rows if len(rows) <= LISTED else [row for row in rows if row["ok"] is False]
    if len(listed) < len(rows):
        yield f"{len(rows):,} rows are asked of, {len(rows) - len(listed):,} hold" + (":\n" if listed else ".")
        if not listed:
            return
    yield "| case | ours | peer | its | unit | ratio | asked | holds |\n|---|---|---|---|---|---|---|---|"
    for row in listed:
        cells = (row["ours"], row["peer"] or "", row["peer_value"], row["unit"], row["ratio"], row["asked"])
        holds = {True: "yes", False: "**no**", None: ""}[row["ok"] if row["asked"] is not None else None]
        yield f"| {row['case']} | {' | '.join(map(_cell, cells))} | {holds} |"


def _command(stem: str, found: Mapping[str, Any]) -> str:
    """What to type."""
    arguments = [words for begins, words in ARGUMENTS.items() if stem.startswith(begins)]
    return " ".join(["python -m benchmarks", found["bench"], *arguments, f"--json {stem.split('_2')[0]}.json"])


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
