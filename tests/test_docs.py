"""What the documents show must run, and what they state must be so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thermocline import PRECISIONS, bytes_per_row

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what blocks save
    exec(compile(block, "block", "exec"), {"__name__": "block"})


def test_the_readme_stays_under_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_row_format_page_states_the_bytes_of_every_precision(precision):
    page = (ROOT / "docs" / "row_format.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("| `") and f"`{precision}`" in line.split("|")[1]]
    columns = [cell.strip().split(", ") for cell in line.split("|")[1:-1]]
    names = [name.strip("`") for name in columns[0]]
    at = names.index(precision)
    for dim, cell in ((64, columns[4]), (128, columns[5])):
        assert int(cell[at if len(cell) > 1 else 0]) == bytes_per_row(precision, dim)
