"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def thermocline(*arguments, before="", cwd=None, **environment):
    """Run the command in a process of its own; `before` is Python to run there first."""
    code = f"import sys\n{before}\nsys.argv[0] = 'thermocline'\nfrom thermocline.cli import main\nmain()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


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


# -- all of it (the habits of each verb are in test_cli_habits.py) --


def test_help_comes_quickly_and_without_torch():
    tell = "import atexit, time; atexit.register(lambda: print('torch' in sys.modules, time.process_time(), file=sys.stderr))"
    spent = []
    while len(spent) < 5 and min(spent, default=1.0) >= 1.0:  # others on the same core make it slower, nobody makes it faster
        with_torch, seconds = thermocline("--help", before=tell).stderr.split()
        assert with_torch == "False"
        spent.append(float(seconds))
    assert min(spent) < 1, spent  # of a core; about 0.2 on an idle machine


def test_version():
    from thermocline import __version__

    assert thermocline("--version").stdout == f"thermocline {__version__}\n"


def test_an_unknown_verb_is_bad_usage():
    assert thermocline("melt").returncode == 2


def test_ctrl_c_leaves_with_130():
    before = "import thermocline.cli.doctor as d\ndef examine(): raise KeyboardInterrupt\nd.examine = examine"
    done = thermocline("doctor", before=before)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


BROKEN_DOCTOR = "import thermocline.cli.doctor as d\nd.examine = lambda: 1 // 0"


def test_a_fault_of_ours_is_one_paragraph_and_code_3():
    done = thermocline("doctor", before=BROKEN_DOCTOR)
    assert done.returncode == 3
    assert done.stderr.startswith("thermocline: unexpected ZeroDivisionError")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["doctor", "--debug"], ["--debug", "doctor"]])
def test_debug_shows_the_traceback(arguments):
    assert "Traceback" in thermocline(*arguments, before=BROKEN_DOCTOR).stderr


def test_a_result_with_nowhere_to_go_fails_at_once(tmp_path):
    done = thermocline("doctor", "--json", tmp_path / "no" / "such.json", before=BROKEN_DOCTOR)
    assert done.returncode == 2
    assert "does not exist" in " ".join(done.stderr.replace("│", " ").split())  # the box around it breaks lines anywhere


# -- doctor --


def test_doctor_writes_json_and_nothing_else_to_standard_output():
    done = thermocline("doctor", "--json", "-")
    answer = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in answer["checks"]}
    machine = {"NVIDIA driver", "locked memory", "shared memory", "cores", "free memory", "CPU kernels", "Triton cache"}
    assert {"Python", "torch", "CUDA", "Triton", "NCCL", "Numba", "serving"} | machine == set(states)
    assert set(states.values()) <= {"ok", "warn", "broken"}
    assert answer["ok"] == ("broken" not in states.values()) == (done.returncode == 0)


def test_whatever_doctor_finds_wrong_comes_with_a_command(tmp_path):
    readonly = tmp_path / "file"
    readonly.write_text("not a folder")
    hide_numba = "sys.modules['numba'] = None"
    done = thermocline("doctor", "--json", "-", before=hide_numba, TRITON_CACHE_DIR=str(readonly))
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["Numba"]["state"] == "broken"
    assert checks["Numba"]["mend"].startswith("pip install")
    assert checks["Triton cache"]["state"] == "warn"
    assert all(check["mend"] for check in checks.values() if check["state"] != "ok")


def test_doctor_says_how_to_mend_what_only_a_card_needs():
    found = """
import resource
from thermocline.cli import checkup
checkup._has_card = lambda: True
checkup._in_container = lambda: HERE
checkup.resource.getrlimit = lambda which: (1 << 23, 1 << 24)
checkup.shutil.disk_usage = lambda folder: type("Space", (), dict(total=1 << 26, free=1 << 25))
checkup.CHECKS = (checkup.check_locked_memory, checkup.check_shared_memory)
"""
    for inside, words in (("True", ["docker run --ulimit", "docker run --shm-size"]), ("False", ["limits.d", "remount"])):
        done = thermocline("doctor", "--json", "-", before=found.replace("HERE", inside))
        checks = json.loads(done.stdout)["checks"]
        assert [check["state"] for check in checks] == ["warn", "warn"]
        assert all(word in check["mend"] for word, check in zip(words, checks, strict=True))


def test_quiet_doctor_prints_only_what_is_wrong():
    done = thermocline("doctor", "--quiet", before="sys.modules['numba'] = None")
    assert "Numba" in done.stdout
    assert "Python" not in done.stdout


# -- verify --

STUB_VERIFY = """
import types
def run(device, progress):
    progress(1, 2, 'quantize')
    row = dict(kernel='quantize', case='int8 63x5', device=device or 'cpu', implementation='cpu',
               compared_with='reference', detail='')
    return [{**row, 'result': result} for result in RESULTS]
for name in ('thermocline.kernels', 'thermocline.kernels.verify.run'):
    sys.modules[name] = types.ModuleType(name)
sys.modules['thermocline.kernels'].verify = sys.modules['thermocline.kernels.verify.run']
sys.modules['thermocline.kernels.verify.run'].run = run
"""


def test_verify_passes_when_nothing_failed():
    done = thermocline("verify", before="RESULTS = ['equal', 'close', 'skipped']" + STUB_VERIFY)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "2 passed, 0 failed, 1 skipped"
    assert done.stderr == ""


def test_verify_fails_when_anything_failed(tmp_path):
    target = tmp_path / "verify.json"
    before = "RESULTS = ['equal', 'FAILED']" + STUB_VERIFY
    done = thermocline("verify", "--quiet", "--device", "cuda", "--json", target, before=before)
    assert done.returncode == 1
    assert "FAILED" in done.stdout and "equal" not in done.stdout
    answer = json.loads(target.read_text())
    assert answer["ok"] is False
    assert [check["device"] for check in answer["checks"]] == ["cuda", "cuda"]


def test_verify_knows_two_devices():
    assert thermocline("verify", "--device", "abacus").returncode == 2


# -- bench show --


def test_show_prints_a_table_and_marks_short_rows(tmp_path):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4", ok=False))
    done = thermocline("bench", "show", file)
    assert done.returncode == 0
    assert "made-up" in done.stdout and "0123abc" in done.stdout
    lines = {line.split()[-9 if "SHORT" in line else 0]: line for line in done.stdout.splitlines() if "cpu/" in line}
    assert ["SHORT" in line for line in lines.values()] == [False, True]


def test_check_passes_on_complete_files_taken_together(tmp_path, asked):
    first = write_results(tmp_path / "a.json", row("cpu/a/int8"))
    second = write_results(tmp_path / "b.json", row("cpu/b/int4"), row("extra", ok=None, asked=None, ratio=None))
    done = thermocline("bench", "show", first, second, "--check", "--asked", asked)
    assert done.returncode == 0, done.stdout


def test_check_fails_on_a_missing_case(tmp_path, asked):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"))
    done = thermocline("bench", "show", file, "--check", "--asked", asked)
    assert done.returncode == 1
    assert "cpu/b/int4: asked for, but in none of the files" in done.stdout
    assert "solver" not in done.stdout


def test_check_fails_on_a_short_row(tmp_path, asked):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4", ok=False))
    done = thermocline("bench", "show", file, "--check", "--asked", asked, "--json", "-")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["reports"][0]["short"] == ["cpu/b/int4"]
    assert len(answer["problems"]) == 1


def test_check_fails_on_a_row_that_asks_less_of_itself(tmp_path, asked):
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4", asked=0.5))
    done = thermocline("bench", "show", file, "--check", "--asked", asked)
    assert done.returncode == 1
    assert "judged by 0.5x, but 1x is asked" in done.stdout


def test_check_finds_the_asked_cases_of_the_project_it_stands_in(tmp_path, asked):
    (tmp_path / "benchmarks").mkdir()
    asked.rename(tmp_path / "benchmarks" / "asked.json")
    file = write_results(tmp_path / "a.json", row("cpu/a/int8"), row("cpu/b/int4"))
    assert thermocline("bench", "show", file, "--check", cwd=tmp_path).returncode == 0


BAD_RESULTS = {
    "not JSON": ('{"bench": ', "not JSON"),
    "not an object": ("[]", "expected an object"),
    "no rows": ('{"bench": "kernels"}', "field 'machine' is missing"),
}


@pytest.mark.parametrize("text, message", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_a_bad_file_is_one_paragraph_and_code_2(tmp_path, text, message):
    file = tmp_path / "bad.json"
    file.write_text(text)
    done = thermocline("bench", "show", file)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(f"thermocline: {file}: ") and message in done.stderr
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
    done = thermocline("bench", "show", file)
    assert done.returncode == 2
    assert f"{file}: row 2: " in done.stderr and message in done.stderr


def test_a_missing_file_is_named(tmp_path):
    done = thermocline("bench", "show", tmp_path / "nowhere.json")
    assert done.returncode == 2
    assert done.stderr == f"thermocline: {tmp_path / 'nowhere.json'}: No such file or directory\n"


# -- bench kernels --

STUB_BENCH = """
import types
def run(**options):
    print(*(options[name] for name in ('device', 'filter', 'quick', 'peers', 'peer_python')), file=sys.stderr)
    return RESULTS
sys.modules['benchmarks.kernels'] = types.ModuleType('benchmarks.kernels')
sys.modules['benchmarks.kernels'].run = run
"""


def test_bench_kernels_writes_and_shows_what_was_measured(tmp_path):
    results = json.loads(write_results(tmp_path / "made.json", row("cpu/a/int8")).read_text())
    target = tmp_path / "out.json"
    options = ["--device", "cpu", "--filter", "int8", "--quick", "--no-peers", "--json", target]
    done = thermocline("bench", "kernels", *options, before=f"RESULTS = {results!r}" + STUB_BENCH)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "cpu int8 True False None\n"
    assert "cpu/a/int8" in done.stdout
    assert json.loads(target.read_text()) == results
