"""The wheel and the sdist: reproducible, complete, and without the benchmarks in the wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import thermocline

pytest.importorskip("hatchling", reason="no hatchling here; install it with: pip install hatchling")

ROOT = Path(__file__).parents[1]
PARTS = (
    "src",
    "docs",
    "examples",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "Makefile",
    "constraints.txt",
    "mkdocs.yml",
)


def build(folder):
    """Build wheel and sdist from a copy of the tree, so that no other file gets in."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / part)
    make = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(make, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("first"))


def test_the_wheel_has_exactly_the_files_of_the_package(built):
    wheel, _ = built
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "thermocline"
    expected = {
        f"thermocline/{file.relative_to(package).as_posix()}"
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in inside if ".dist-info/" not in name} == expected
    assert not [name for name in inside if "bench" in name]
    assert "thermocline/py.typed" in inside
    assert wheel.name == f"thermocline-{thermocline.__version__}-py3-none-any.whl"


def test_the_wheel_has_command_and_license_and_the_sdist_has_docs_and_benchmarks(built):
    wheel, sdist = built
    files = zipfile.ZipFile(wheel)
    info = f"thermocline-{thermocline.__version__}.dist-info"
    assert "thermocline = thermocline.__main__:main" in files.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in files.namelist()
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "docs/index.md", "mkdocs.yml", "src/thermocline/py.typed"} <= names
    assert {"benchmarks/__main__.py", "benchmarks/asked.json", "benchmarks/runner/record.py"} <= names


def test_two_builds_of_one_tree_are_equal(built, tmp_path):
    again = build(tmp_path / "second")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in built]


@pytest.mark.slow
@pytest.mark.skipif("THERMOCLINE_INSTALL" not in os.environ, reason="installs torch; `make dist` runs it")
def test_a_wheel_in_an_empty_environment_runs(built, tmp_path):
    wheel, _ = built
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", f"{wheel}[serve]"]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command = python.with_name("thermocline")
    doctor = subprocess.run([command, "doctor", "--json", "-"], capture_output=True, text=True, cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert json.loads(doctor.stdout)["ok"] is True
    code = "import sys; sys.argv[1:] = ['--help']; from thermocline.cli import app; app(standalone_mode=False)"
    probe = f"{code}; print('torch' in sys.modules, file=sys.stderr)"
    shown = subprocess.run([python, "-c", probe], capture_output=True, text=True, cwd=tmp_path)
    assert shown.stderr.strip() == "False"
