"""The command line in processes of its own: output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from forked import thermocline

# -- all of it (the habits of each verb are in test_cli_habits.py) --


def test_help_is_fast_and_does_not_load_torch():
    code = """
import atexit, sys, time
atexit.register(lambda: print("torch" in sys.modules, time.process_time(), file=sys.stderr))
sys.argv = ["thermocline", "--help"]
from thermocline.cli import main
main()
"""
    spent = []
    while len(spent) < 5 and min(spent, default=0.5) >= 0.5:  # other processes only make it slower
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        with_torch, seconds = done.stderr.split()
        assert with_torch == "False"
        spent.append(float(seconds))
    assert min(spent) < 0.5, spent  # seconds of a core


def test_version():
    from thermocline import __version__

    assert thermocline("--version").stdout == f"thermocline {__version__}\n"


def test_an_unknown_verb_is_bad_usage():
    assert thermocline("melt").returncode == 2


def test_ctrl_c_leaves_with_130():
    before = "import thermocline.cli.machine_checks as m\ndef check(): raise KeyboardInterrupt\nm.CHECKS = (check,)"
    done = thermocline("doctor", before=before)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_ctrl_c_that_an_import_turns_into_another_error_leaves_with_130():
    check = "import signal\ndef check():\n    try: signal.raise_signal(signal.SIGINT)\n    except KeyboardInterrupt: 1 // 0"
    done = thermocline("doctor", before=f"{check}\nimport thermocline.cli.machine_checks as m\nm.CHECKS = (check,)")
    assert done.returncode == 130 and not done.stderr


def test_ctrl_c_while_the_command_line_is_imported_leaves_with_130(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "thermocline", "doctor"], capture_output=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 130 and not done.stderr


BROKEN_DOCTOR = "import thermocline.cli.machine_checks as m\nm.CHECKS = (lambda: 1 // 0,)"


def test_an_internal_error_is_one_paragraph_and_code_3():
    done = thermocline("doctor", before=BROKEN_DOCTOR)
    assert done.returncode == 3
    assert done.stderr.startswith("thermocline: unexpected ZeroDivisionError")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["doctor", "--debug"], ["--debug", "doctor"]])
def test_debug_shows_the_traceback(arguments):
    assert "Traceback" in thermocline(*arguments, before=BROKEN_DOCTOR).stderr


def test_a_missing_result_folder_fails_before_the_run(tmp_path):
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


def test_every_problem_of_doctor_has_a_command(tmp_path):
    readonly = tmp_path / "file"
    readonly.write_text("not a folder")
    hide_numba = "sys.modules['numba'] = None"
    done = thermocline("doctor", "--json", "-", before=hide_numba, TRITON_CACHE_DIR=str(readonly))
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["Numba"]["state"] == "broken"
    assert checks["Numba"]["fix"].startswith("pip install")
    assert checks["Triton cache"]["state"] == "warn"
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")


def test_doctor_fixes_memory_limits_of_machines_with_a_gpu():
    found = """
import resource
from thermocline.cli import machine_checks
machine_checks._has_gpu = lambda: True
machine_checks._in_container = lambda: HERE
machine_checks.resource.getrlimit = lambda which: (1 << 23, 1 << 24)
machine_checks.shutil.disk_usage = lambda folder: type("Space", (), dict(total=1 << 26, free=1 << 25))
machine_checks.CHECKS = (machine_checks.check_locked_memory, machine_checks.check_shared_memory)
"""
    for inside, words in (("True", ["docker run --ulimit", "docker run --shm-size"]), ("False", ["limits.d", "remount"])):
        done = thermocline("doctor", "--json", "-", before=found.replace("HERE", inside))
        checks = json.loads(done.stdout)["checks"]
        assert [check["state"] for check in checks] == ["warn", "warn"]
        assert all(word in check["fix"] for word, check in zip(words, checks, strict=True))


ONE_KERNEL = """
from thermocline.kernels.cpu import compile as compile_cpu
compile_cpu._MODULES, compile_cpu._kernels = (), []

@compile_cpu.kernel("int64(int64)")
def twice(x):
    return 2 * x
"""


def test_doctor_compiles_kernels_ahead_of_use(tmp_path):
    for kernels in (1, 0):  # the second time they are loaded
        done = thermocline("doctor", "--compile", "--json", "-", before=ONE_KERNEL, THERMOCLINE_CACHE=str(tmp_path / "cache"))
        compiled = json.loads(done.stdout)["compiled"]
        assert compiled["kernels"] == kernels and compiled["folder"] == str(tmp_path / "cache") and compiled["cpu_seconds"] >= 0
    assert "compiled" not in json.loads(thermocline("doctor", "--json", "-").stdout)


@pytest.mark.parametrize("variable, name", [("THERMOCLINE_CACHE", "CPU kernels"), ("TRITON_CACHE_DIR", "Triton cache")])
def test_doctor_refuses_a_cache_that_others_can_change(variable, name, tmp_path):
    tmp_path.chmod(0o777)
    answer = json.loads(thermocline("doctor", "--json", "-", **{variable: str(tmp_path)}).stdout)
    (check,) = (check for check in answer["checks"] if check["name"] == name)
    assert check["state"] == "warn" and str(tmp_path) in check["fix"]


def test_quiet_doctor_prints_only_problems():
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
names = ('thermocline.kernels', 'thermocline.kernels.verify', 'thermocline.kernels.verify.run')
package, verify, module = (sys.modules.setdefault(name, types.ModuleType(name)) for name in names)
package.verify, verify.run, module.run = verify, module, run
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
