"""`python -m benchmarks` as a user meets it: processes of its own, their output and their exit codes."""

from __future__ import annotations

import json

import pytest

from forked import Forked


def run(*arguments, before="", cwd=None):
    """Run the command in a process of its own; `before` is Python to run there first."""
    code = f"import runpy, sys\n{before}\nsys.argv[0] = 'benchmarks'\nrunpy.run_module('benchmarks', run_name='__main__')"
    return Forked(code, *arguments, cwd=cwd, NO_COLOR="1", COLUMNS="100").finish()


def row(case, ok=True, asked=1.0, **changes):
    return {
        "case": case, "ours": 1.5, "peer": "fbgemm", "peer_value": 1.8, "unit": "ms",
        "ratio": 1.2 if ok else 0.8, "asked": asked, "ok": ok, "spread": 0.03, **changes,
    }  # fmt: skip


def write_results(path, *rows, **changes):
    value = {
        "bench": "kernels", "machine": {"cpu": "made-up", "cores": 2}, "versions": {"torch": "2.13.0"},
        "commit": "0123abc", "date": "2026-01-02T03:04:05Z", "rows": list(rows), **changes,
    }  # fmt: skip
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def asked(tmp_path):
    """What is asked: two cases of `kernels`, and one of a bench that no file here is about."""
    path = tmp_path / "asked.json"
    kernels = [{"case": "cpu/a/int8", "asked": 1.0}, {"case": "cpu/b/int4", "asked": 1.0}]
    path.write_text(json.dumps({"kernels": kernels, "plan": [{"case": "solver", "asked": "under 1 s"}]}))
    return path


# -- show --


def test_show_prints_a_table_and_marks_short_rows(tmp_path):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4", ok=False))
    done = run("show", file)
    assert done.returncode == 0
    assert "made-up" in done.stdout and "0123abc" in done.stdout
    lines = {line.split()[-9 if "SHORT" in line else 0]: line for line in done.stdout.splitlines() if "cpu/" in line}
    assert ["SHORT" in line for line in lines.values()] == [False, True]


def test_check_passes_on_complete_files_taken_together(tmp_path, asked):
    first = write_results(tmp_path / "a.json", row("cpu/a/int8"))
    second = write_results(tmp_path / "b.json", row("cpu/b/int4"), row("extra", ok=None, asked=None, ratio=None))
    done = run("show", first, second, "--check", "--asked", asked)
    assert done.returncode == 0, done.stdout


def test_check_fails_on_a_missing_case(tmp_path, asked):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"))
    done = run("show", file, "--check", "--asked", asked)
    assert done.returncode == 1
    assert "cpu/b/int4: asked for, but in none of the files" in done.stdout
    assert "solver" not in done.stdout


def test_check_fails_on_a_short_row(tmp_path, asked):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4", ok=False))
    done = run("show", file, "--check", "--asked", asked, "--json", "-")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["reports"][0]["short"] == ["cpu/b/int4"]
    assert len(answer["problems"]) == 1


def test_check_fails_on_a_row_that_asks_less_of_itself(tmp_path, asked):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4", asked=0.5))
    done = run("show", file, "--check", "--asked", asked)
    assert done.returncode == 1
    assert "judged by 0.5x, but 1x is asked" in done.stdout


def test_check_finds_the_asked_cases_of_the_project_it_stands_in(tmp_path, asked):
    (tmp_path / "benchmarks").mkdir()
    asked.rename(tmp_path / "benchmarks" / "asked.json")
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4"))
    assert run("show", file, "--check", cwd=tmp_path).returncode == 0


BAD_RESULTS = {
    "not JSON": ('{"bench": ', "not JSON"),
    "not an object": ("[]", "expected an object"),
    "no rows": ('{"bench": "kernels"}', "field 'machine' is missing"),
}


@pytest.mark.parametrize("text, message", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_a_bad_file_is_one_paragraph_and_code_2(tmp_path, text, message):
    file = tmp_path / "bad.json"
    file.write_text(text)
    done = run("show", file)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(f"benchmarks: {file}: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


BAD_ROWS = {
    "missing": ({k: v for k, v in row("x").items() if k != "unit"}, "field 'unit' is missing"),
    "text for a number": (row("x", ours="fast"), "field 'ours' must be a number or null, found \"fast\""),
    "true for a number": (row("x", ratio=True), "field 'ratio' must be"),
    "NaN": (row("x", ratio=float("nan")), "field 'ratio' must be"),
    "asked without an answer": (row("x", ok=None), "field 'ok' is null"),
}


@pytest.mark.parametrize("bad, message", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_by_number_and_field(tmp_path, bad, message):
    file = write_results(tmp_path / "a.json", row("fine"), bad)
    done = run("show", file)
    assert done.returncode == 2
    assert f"{file}: row 2: " in done.stderr and message in done.stderr


def test_a_missing_file_is_named(tmp_path):
    done = run("show", tmp_path / "nowhere.json")
    assert done.returncode == 2
    assert done.stderr == f"benchmarks: {tmp_path / 'nowhere.json'}: No such file or directory\n"


# -- kernels --

STUB_BENCH = """
import types
def run(**options):
    print(*(options[name] for name in ('device', 'filter', 'quick', 'peers', 'peer_python')), file=sys.stderr)
    return RESULTS
sys.modules['benchmarks.kernels.benchmark'] = types.ModuleType('benchmarks.kernels.benchmark')
sys.modules['benchmarks.kernels.benchmark'].run = run
"""


def test_bench_kernels_writes_and_shows_what_was_measured(tmp_path):
    results = json.loads(write_results(tmp_path / "made.json", row("cpu/a/int8")).read_text())
    target = tmp_path / "out.json"
    options = ["--device", "cpu", "--filter", "int8", "--quick", "--no-peers", "--json", target]
    done = run("kernels", *options, before=f"RESULTS = {results!r}" + STUB_BENCH)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "cpu int8 True False None\n"
    assert "cpu/a/int8" in done.stdout
    assert json.loads(target.read_text()) == results
