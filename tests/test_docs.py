"""Documentation tests: code blocks run, commands parse, links resolve.

Every fenced block has one of these languages:

    ```python           runs in an empty folder
    ```python PACKAGE   runs where PACKAGE is installed; localhost:8001 is a server that the test starts
    ```py               needs more than a test has (a Ray cluster): compiles
    ```sh               lines that begin with `thermocline` or `python -m benchmarks` parse, with the options they name;
                        after a line <!-- run --> they run, in one folder for each page, in order
    ```yaml, ```json    parse; title="NAME" writes the block to NAME for the commands of the page
    ```, ```text        output, formats, drawings
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml

import thermocline
from benchmarks.cli import app as benchmarks_app
from thermocline import PRECISIONS, bytes_per_row
from thermocline.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(<!-- run -->\n)?( *)```([^\n]*)\n(.*?)^\2```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """What stands between two fences, and after the first."""

    page: str
    number: int
    run: bool
    language: str
    rest: str
    text: str

    @property
    def name(self):
        return f"{self.page}-{self.number}"


def blocks_of(page):
    found = enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
    cut = ((n, run, info.partition(" "), text) for n, (run, _, info, text) in found)
    return [
        Block(page.relative_to(ROOT).as_posix().removeprefix("docs/"), n, bool(run), language, rest, text)
        for n, run, (language, _, rest), text in cut
    ]


BLOCKS = [block for page in [*PAGES, ROOT / "CONTRIBUTING.md"] for block in blocks_of(page)]


def of(*languages):
    return [pytest.param(block, id=block.name) for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", of("python"))
def test_every_python_block_runs(block, capsys, tmp_path, monkeypatch):
    if block.rest and importlib.util.find_spec(block.rest) is None:
        compile(block.text, block.name, "exec")
        pytest.skip(f"no {block.rest} here, so {block.name} is compiled only; CONTRIBUTING.md says how to get it")
    monkeypatch.chdir(tmp_path)  # what blocks save
    with serving(tmp_path / "checkpoint") if SERVER in block.text else nullcontext(SERVER) as address:
        exec(compile(block.text.replace(SERVER, address), block.name, "exec"), {"__name__": "block"})


SERVER = "localhost:8001"


@contextmanager
def serving(folder):
    """A server of tables named and shaped as those of the demo, but smaller; where it listens for gRPC."""
    from examples.demo import query_server as ask

    tables = [thermocline.Table(name, 100, 64) for name in ("user", *(f"C{n}" for n in range(1, 27)))]
    thermocline.save(thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.05)), folder)
    with ask.serving(folder, 2) as address:
        yield address


@pytest.mark.parametrize("block", of("py"))
def test_what_needs_more_than_a_test_has_is_python_at_least(block):
    compile(block.text, block.name, "exec")


@pytest.mark.parametrize("block", of("yaml", "json"))
def test_files_that_are_shown_can_be_read(block):
    assert yaml.safe_load(block.text) if block.language == "yaml" else json.loads(block.text)


CLIENTS = ("java", "go", "cpp")  # tests/serve/server/test_clients_page.py


def test_every_block_is_of_a_kind_that_is_tested():
    assert {block.language for block in BLOCKS} <= {"python", "py", "sh", "yaml", "json", "text", "", *CLIENTS}
    assert len(BLOCKS) > 50


COMMAND = re.compile(r"(\S+=\S+ )*((\S*/)?thermocline |(\S*/)?python3? -m benchmarks )")


def lines_of(block):
    """The commands of this project in a shell block, as words. `python -m benchmarks` is one word: `benchmarks`."""
    lines = [line.strip() for line in block.text.replace("\\\n", " ").splitlines()]
    ours = [re.sub(r"(\S*/)?python3? -m benchmarks ", "benchmarks ", line) for line in lines if COMMAND.match(line)]
    return [shlex.split(line, comments=True) for line in ours]


@pytest.mark.parametrize("block", [one for one in of("sh", "text", "") if lines_of(one.values[0])])
def test_the_command_line_understands_what_pages_tell_to_type(block):
    for words in lines_of(block):
        while "=" in words[0]:
            words.pop(0)
        command = typer.main.get_command(benchmarks_app if words[0] == "benchmarks" else app)
        words = words[1:]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        context = command.make_context("", list(words), resilient_parsing=True)
        given, _, _ = command.make_parser(context).parse_args(list(words))
        missing = [one.name for one in command.params if one.required and given.get(one.name) is None]
        assert not missing or words == ["--help"], f"thermocline {command.name} needs {missing}"


# Runs lines of our command one after another in one process: torch is loaded once.
RUN_LINES = """
import json, sys
from thermocline.cli import main
for words in json.loads(sys.stdin.read()):
    sys.argv = words
    try:
        main()
    except SystemExit as left:
        if left.code:
            sys.exit(f"{' '.join(words)} left with {left.code}")
"""


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.run}))
def test_commands_that_a_page_has_run_do_run(page, tmp_path):
    calls = []
    for block in (block for block in BLOCKS if block.page == page):
        if title := re.search(r'title="(.*?)"', block.rest):
            (tmp_path / title[1]).write_text(block.text)
        if block.run:
            calls += lines_of(block)
    environment = {**os.environ, "NO_COLOR": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    run = {"input": json.dumps(calls), "capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run([sys.executable, "-c", RUN_LINES], **run)
    assert done.returncode == 0, done.stderr
    assert len(calls) > 2 and "Traceback" not in done.stderr


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


def test_the_page_of_numbers_is_what_the_results_say():
    make = [sys.executable, "benchmarks/numbers_page.py"]
    done = subprocess.run([*make, "--check"], cwd=ROOT)
    assert done.returncode == 0, "docs/numbers.md is not what benchmarks/results say; run: python benchmarks/numbers_page.py"


def test_the_picture_of_the_readme_is_what_the_results_say():
    done = subprocess.run([sys.executable, "benchmarks/readme_picture.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "the picture is not what benchmarks/results say; run: python benchmarks/readme_picture.py"


# -- the site --


def pages_in(navigation):
    for entry in navigation:
        for below in entry.values():
            yield from pages_in(below) if isinstance(below, list) else [below]


def test_every_page_has_its_place_in_the_site():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(pages_in(site["nav"]))
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(page.relative_to(docs).as_posix() for page in PAGES if docs in page.parents)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file) if file else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor and found.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}, target


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs here; install it with: pip install 'thermocline[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").glob("*.html"):
        fetched = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="?(https?://[^"> ]*)', page.read_text(encoding="utf-8"))
        assert fetched == [], page.name
