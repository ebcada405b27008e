"""Compiling the CPU kernels: once per machine, in whatever folder can be written."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numba
import pytest
import torch
from numba.core.bytecode import FunctionIdentity

import thermocline as tc
from forked import Forked
from forked import script as start
from thermocline.kernels.cpu import compile as compile_cpu
from thermocline.kernels.cpu.cache_folder import private_folder, refusal
from thermocline.kernels.cpu.vectors import prefetch
from thermocline.kernels.gather import cpu as gather_cpu

_TOY = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from thermocline.kernels.cpu import compile as compile_cpu
compile_cpu._MODULES, compile_cpu._kernels = (), []

@compile_cpu.kernel("int64(int64)")
def twice(x):
    return 2 * x

assert twice(21) == 42
print("folder", compile_cpu.cache_folder())
"""


def _finish(process: Forked) -> str:
    done = process.finish()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_of_several_processes_compiles_and_logs_it(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(_TOY)
    variables = {"THERMOCLINE_CACHE": str(tmp_path / "cache")}
    outputs = [_finish(each) for each in [start(script, **variables) for _ in range(4)]]
    assert sum("compiling CPU kernels" in each for each in outputs) == 1
    assert "compiling" not in _finish(start(script, **variables))
    assert all(str(tmp_path / "cache") in each for each in outputs)


_FROM_A_FACTORY = """
import sys
import numpy as np
from thermocline.kernels.cpu import compile as compile_cpu
compile_cpu._MODULES, compile_cpu._kernels = (), []

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
        return [float(x) for x in _finish(start(script, kernels, THERMOCLINE_CACHE=str(tmp_path / folder))).split()]

    wanted = run("ab", "together")
    assert wanted[0] != wanted[1]
    assert run("a", "apart") == wanted[:1]
    if interrupted:
        next((tmp_path / "apart").glob("*/done")).unlink()
    assert run("b", "apart") == wanted[1:]
    files = {path.name for path in (tmp_path / "apart").rglob("*.kernel")}
    assert files == ({"__main__.b.kernel"} if interrupted else {"__main__.a.kernel", "__main__.b.kernel"})
    assert run("ab", "apart") == wanted


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    script, blocked = tmp_path / "toy.py", tmp_path / "blocked"
    script.write_text(_TOY)
    blocked.write_text("a file where the cache folder should be; even root cannot write under it")
    (tmp_path / "tmp").mkdir()
    out = _finish(
        start(script, THERMOCLINE_CACHE=str(blocked), XDG_CACHE_HOME=str(blocked / "home"), TMPDIR=str(tmp_path / "tmp"))
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


def test_another_checkout_of_the_same_sources_shares_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = set()
    for name in ("one", "other"):
        (tmp_path / name / "cpu").mkdir(parents=True)
        (tmp_path / name / "cpu" / "helper.py").write_text("x = 1")
        monkeypatch.setattr(compile_cpu, "__file__", str(tmp_path / name / "cpu" / "compile.py"))
        found.add(compile_cpu.source_hash())
    assert len(found) == 1


def test_another_checkout_loads_kernels_compiled_by_the_first(tmp_path: Path) -> None:
    outputs = []
    for name in ("one", "other"):
        script = tmp_path / name / "toy.py"
        script.parent.mkdir()
        script.write_text(_TOY)
        outputs.append(_finish(start(script, THERMOCLINE_CACHE=str(tmp_path / "cache"))))
    assert ["compiling" in each for each in outputs] == [True, False]


@pytest.mark.parametrize("what", ["processor", "group"])
def test_another_processor_or_group_means_another_folder(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compile_cpu.source_hash()
    if what == "processor":
        monkeypatch.setattr(compile_cpu, "_processor", lambda: ("another",))
        assert compile_cpu.source_hash() != before
    else:
        assert compile_cpu.source_hash("serve") != before


def test_functions_are_numbered_from_a_random_number_while_compiling() -> None:
    def first() -> int:
        with compile_cpu._own_numbers():
            return FunctionIdentity.from_function(first).unique_id

    ordinary = FunctionIdentity.from_function(first).unique_id
    assert len({first(), first(), first()}) == 3 and min(first(), first(), first()) > 1 << 30
    assert FunctionIdentity.from_function(first).unique_id == ordinary + 1


def test_kernels_of_a_server_are_compiled_apart_from_those_of_training() -> None:
    compile_cpu.prepare()
    modules: dict[str, set[str]] = {}
    for each in compile_cpu._kernels:
        modules.setdefault(each.group, set()).add(each.function.__module__.split(".")[2])
    assert {name: modules[name] for name in compile_cpu.OWN_GROUPS} == {name: {name} for name in compile_cpu.OWN_GROUPS}
    assert modules[compile_cpu.FORMATS] == {"gather"}
    assert modules[compile_cpu.TRAIN] >= {"cache", "cpu", "gather", "sum_gradients", "update"}


def test_compiling_is_announced_once_where_stderr_is_no_terminal(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(_TOY.replace("logging.basicConfig(level=logging.INFO, stream=sys.stdout)", ""))
    for _ in range(2):
        _finish(start(script, stderr=tmp_path / "err", THERMOCLINE_CACHE=str(tmp_path / "cache")))
    lines = (tmp_path / "err").read_text().splitlines()
    assert len(lines) == 1 and str(tmp_path / "cache") in lines[0]


def test_progress_is_shown_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(_TOY)
    ours, theirs = os.openpty()
    _finish(start(script, stderr=os.ttyname(theirs), THERMOCLINE_CACHE=str(tmp_path / "cache")))
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # of a terminal that no process has open
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert b"0 of 1 kernels" in shown and b"1 of 1 kernels" in shown


# -- folders that others can change -----------------------------------------------------------------------------------


def _spoil(folder: Path, how: str) -> None:
    if how == "link":
        real = folder.with_name("real")
        folder.rename(real)
        folder.symlink_to(real)
    elif how == "writable":
        folder.chmod(0o770)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    else:
        os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("how", ["link", "writable", "another user's"])
@pytest.mark.parametrize("inner", [False, True], ids=["place", "folder"])
def test_a_folder_that_others_can_change_is_refused(how: str, inner: bool, tmp_path: Path) -> None:
    places = [tmp_path / "first", tmp_path / "second"]
    folder = private_folder(map(str, places), "cpu-0")
    assert folder == places[0] / "cpu-0"
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    spoilt = folder if inner else folder.parent
    assert refusal(spoilt) is None
    _spoil(spoilt, how)
    assert refusal(spoilt)
    assert private_folder(map(str, places), "cpu-0") == places[1] / "cpu-0"


def test_without_a_folder_of_our_own_kernels_go_to_a_new_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = private_folder([str(tmp_path / "place")], "cpu-0")
    assert found.parent == tmp_path and found.name != "place" and stat.S_IMODE(found.stat().st_mode) == 0o700
    assert str(tmp_path / "place") in capsys.readouterr().err


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


def test_lookups_of_fp32_and_int8_rows_do_not_wait_for_those_of_other_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise MemoryError

    monkeypatch.setattr(gather_cpu, "_pool_tiles", refuse)
    ids = torch.tensor([[1, 2]])
    for rows in (tc.RowConfig("fp32"), tc.RowConfig("int8", cache=0.5)):
        assert tc.EmbeddingBag(9, 4, mode="sum", rows=rows)(ids).shape == (1, 4)
    with pytest.raises(MemoryError):
        tc.EmbeddingBag(9, 4, mode="sum", rows=tc.RowConfig("int4"))(ids)
