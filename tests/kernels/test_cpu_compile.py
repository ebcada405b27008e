"""Compiling the CPU kernels: once per machine, in whatever folder can be written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

from thermocline.kernels.cpu import compile as compile_cpu
from thermocline.kernels.cpu.vectors import prefetch

_TOY = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from thermocline.kernels.cpu import compile as compile_cpu
compile_cpu._MODULES = ()

@compile_cpu.kernel("int64(int64)")
def twice(x):
    return 2 * x

assert twice(21) == 42
print("folder", compile_cpu.cache_folder())
"""


def _start(script: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    source = str(Path(compile_cpu.__file__).parents[3])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.Popen([sys.executable, str(script), *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return out


def test_one_of_several_processes_compiles_and_logs_it(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(_TOY)
    variables = {"THERMOCLINE_CACHE": str(tmp_path / "cache")}
    outputs = [_finish(each) for each in [_start(script, **variables) for _ in range(4)]]
    assert sum("compiling CPU kernels" in each for each in outputs) == 1
    assert "compiling" not in _finish(_start(script, **variables))
    assert all(str(tmp_path / "cache") in each for each in outputs)


_FROM_A_FACTORY = """
import sys
import numpy as np
from thermocline.kernels.cpu import compile as compile_cpu
compile_cpu._MODULES = ()

def make(k):
    @compile_cpu.helper
    def folded(a):  # too much to be inlined
        s = 0.0
        for i in range(len(a)):
            s = s % 1000.0 + (a[i] * k if a[i] > 0.5 else -a[i] / (k + 1))
            for j in range(i):
                s += (a[j] * i) % (k + 7)
        return s
    return folded

two, three = make(2.0), make(3.0)
if "a" in sys.argv[1]:
    @compile_cpu.kernel("float64(float64[::1])")
    def a(x):
        return two(x) + two(x[1:])
if "b" in sys.argv[1]:
    @compile_cpu.kernel("float64(float64[::1])")
    def b(x):
        return three(x) + three(x[1:])
print(*(globals()[name](np.linspace(0, 1, 50)) for name in sys.argv[1]))
"""


@pytest.mark.parametrize("interrupted", [False, True], ids=["done", "interrupted"])
def test_functions_compiled_by_different_processes_are_not_confused(interrupted: bool, tmp_path: Path) -> None:
    """Numba numbers functions in each process: both helpers are the first function of a process, and have one name."""
    script = tmp_path / "factory.py"
    script.write_text(_FROM_A_FACTORY)

    def run(kernels: str, folder: str) -> list[float]:
        return [float(x) for x in _finish(_start(script, kernels, THERMOCLINE_CACHE=str(tmp_path / folder))).split()]

    wanted = run("ab", "together")
    assert wanted[0] != wanted[1]
    assert run("a", "apart") == wanted[:1]
    if interrupted:
        next((tmp_path / "apart").glob("*/done")).unlink()
    assert run("b", "apart") == wanted[1:]
    files = {path.name.split("-")[0] for path in (tmp_path / "apart").rglob("*.nbi")}
    assert files == ({"factory.b"} if interrupted else {"factory.a", "factory.b"})
    assert run("ab", "apart") == wanted


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    script, blocked = tmp_path / "toy.py", tmp_path / "blocked"
    script.write_text(_TOY)
    blocked.write_text("a file where the cache folder should be; even root cannot write under it")
    (tmp_path / "tmp").mkdir()
    out = _finish(
        _start(script, THERMOCLINE_CACHE=str(blocked), XDG_CACHE_HOME=str(blocked / "home"), TMPDIR=str(tmp_path / "tmp"))
    )
    assert f"folder {tmp_path / 'tmp'}" in out


def test_a_changed_helper_means_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = compile_cpu.source_hash()
    assert before == compile_cpu.source_hash()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "helper.py").write_text("x = 1")
    monkeypatch.setattr(compile_cpu, "__file__", str(tmp_path / "cpu" / "compile.py"))
    one = compile_cpu.source_hash()
    (tmp_path / "cpu" / "helper.py").write_text("x = 2")
    assert len({before, one, compile_cpu.source_hash()}) == 3


def test_another_checkout_of_the_same_sources_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = set()
    for name in ("one", "other"):
        (tmp_path / name / "cpu").mkdir(parents=True)
        (tmp_path / name / "cpu" / "helper.py").write_text("x = 1")
        monkeypatch.setattr(compile_cpu, "__file__", str(tmp_path / name / "cpu" / "compile.py"))
        found.add(compile_cpu.source_hash())
    assert len(found) == 2


def test_kernels_of_other_versions_are_deleted_after_a_month_unused(tmp_path: Path) -> None:
    names = ("mine", "old", "recent", "broken", "loaded")
    folders = {name: tmp_path / f"cpu-{number:016x}" for number, name in enumerate(names)}
    other = tmp_path / "cpu-notes"  # not ours
    month = time.time() - compile_cpu.UNUSED_SECONDS
    for folder in (*folders.values(), other):
        (folder / "numba").mkdir(parents=True)
        for name in ("lock", "done", "numba/kernel.nbc"):
            (folder / name).touch()
        os.utime(folder / "done", (month - 99, month - 99))
    (folders["broken"] / "done").unlink()  # the compiling process died
    os.utime(folders["broken"], (month - 99, month - 99))
    os.utime(folders["recent"] / "done", (month + 999, month + 999))
    assert compile_cpu._is_complete(folders["loaded"]) and not compile_cpu._is_complete(folders["broken"])
    compile_cpu._delete_unused(folders["mine"])
    left = {name for name, folder in folders.items() if folder.exists()}
    assert left == {"mine", "recent", "loaded"} and other.exists()
    folders["old"].mkdir()
    os.utime(folders["old"], (month - 99, month - 99))
    compile_cpu._delete_unused(folders["mine"])  # once per process is enough
    assert folders["old"].exists()


def test_second_use_takes_less_than_two_seconds_of_a_core() -> None:
    code = (
        "import time, torch; from thermocline.kernels.cpu import compile as compile_cpu; start = time.process_time();"
        "compile_cpu.prepare(); print(time.process_time() - start)"
    )
    compile_cpu.prepare()
    source = str(Path(compile_cpu.__file__).parents[3])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    spent: list[float] = []
    while len(spent) < 5 and min(spent, default=2.0) >= 2.0:  # other processes only make it slower
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        spent.append(float(done.stdout))
    assert min(spent) < 2.0, spent


def test_prefetch_fills_the_second_level_cache() -> None:
    @numba.njit("void(int64)")
    def fetch(address):
        prefetch(address)

    code = fetch.inspect_llvm(fetch.signatures[0])
    calls = [line for line in code.splitlines() if "call void @llvm.prefetch" in line]
    assert calls and all("i32 0, i32 2, i32 1)" in line for line in calls)  # reads, locality 2, data
