"""Compiling the CPU kernels: once per machine, in whatever folder can be written."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

from thermocline.kernels import compile_cpu
from thermocline.kernels.cpu_vectors import prefetch

_TOY = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from thermocline.kernels import compile_cpu
compile_cpu._MODULES = ()

@compile_cpu.kernel("int64(int64)")
def twice(x):
    return 2 * x

assert twice(21) == 42
print("folder", compile_cpu.cache_folder())
"""


def _start(script: Path, **variables: str) -> subprocess.Popen[str]:
    source = str(Path(compile_cpu.__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return out


def test_of_several_processes_one_compiles_and_says_so(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(_TOY)
    variables = {"THERMOCLINE_CACHE": str(tmp_path / "cache")}
    outputs = [_finish(each) for each in [_start(script, **variables) for _ in range(4)]]
    assert sum("compiling CPU kernels" in each for each in outputs) == 1
    assert "compiling" not in _finish(_start(script, **variables))
    assert all(str(tmp_path / "cache") in each for each in outputs)


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
    (tmp_path / "cpu_helper.py").write_text("x = 1")
    monkeypatch.setattr(compile_cpu, "__file__", str(tmp_path / "compile_cpu.py"))
    one = compile_cpu.source_hash()
    (tmp_path / "cpu_helper.py").write_text("x = 2")
    assert len({before, one, compile_cpu.source_hash()}) == 3


def test_another_checkout_of_the_same_sources_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpu_helper.py").write_text("x = 1")
        monkeypatch.setattr(compile_cpu, "__file__", str(tmp_path / name / "compile_cpu.py"))
        found.add(compile_cpu.source_hash())
    assert len(found) == 2


def test_kernels_of_other_versions_are_deleted_when_nobody_used_them_for_a_month(tmp_path: Path) -> None:
    names = ("mine", "old", "recent", "broken", "compiling", "loaded")
    folders = {name: tmp_path / f"cpu-{number:016x}" for number, name in enumerate(names)}
    other = tmp_path / "cpu-notes"  # not ours
    month = time.time() - compile_cpu.UNUSED
    for folder in (*folders.values(), other):
        (folder / "numba").mkdir(parents=True)
        for name in ("lock", "done", "numba/kernel.nbc"):
            (folder / name).touch()
        os.utime(folder / "done", (month - 99, month - 99))
    (folders["broken"] / "done").unlink()  # whoever compiled died
    os.utime(folders["broken"], (month - 99, month - 99))
    os.utime(folders["recent"] / "done", (month + 999, month + 999))
    assert compile_cpu._ready(folders["loaded"]) and not compile_cpu._ready(folders["broken"])
    with open(folders["compiling"] / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        compile_cpu._sweep(folders["mine"])
    left = {name for name, folder in folders.items() if folder.exists()}
    assert left == {"mine", "recent", "compiling", "loaded"} and other.exists()
    compile_cpu._sweep(folders["mine"])  # once per process is enough
    assert folders["compiling"].exists()


def test_second_use_takes_less_than_two_seconds_of_a_core() -> None:
    code = (
        "import time, torch; from thermocline.kernels import compile_cpu; start = time.process_time();"
        "compile_cpu.prepare(); print(time.process_time() - start)"
    )
    compile_cpu.prepare()
    source = str(Path(compile_cpu.__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    spent: list[float] = []
    while len(spent) < 5 and min(spent, default=2.0) >= 2.0:  # others on the same core make it slower, nobody makes it faster
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        spent.append(float(done.stdout))
    assert min(spent) < 2.0, spent


def test_lines_are_asked_for_into_the_second_level_cache() -> None:
    @numba.njit("void(int64)")
    def ask(address):
        prefetch(address)

    code = ask.inspect_llvm(ask.signatures[0])
    calls = [line for line in code.splitlines() if "call void @llvm.prefetch" in line]
    assert calls and all("i32 0, i32 2, i32 1)" in line for line in calls)  # reads, locality 2, data
