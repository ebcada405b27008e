"""Every script in `examples/` runs, small."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"

# Arguments of each script's `main` that make it short, and the words that it must print.
SMALL = {
    "convert_model": ({"steps": 3}, "3.1x smaller"),
    "dlrm_one_card": ({"samples": 4000}, "by heat"),
    "plan_cluster": ({"count": 3}, "tier 3"),
    "serve_and_query": ({"steps": 2}, "equal to the rows of the checkpoint"),
    "train_and_serve": ({"changes": 1}, "trained and served"),
    "lightning_trainer": ({"samples": 600}, "codes"),
    "memory_llama": ({"steps": 2}, "MemoryQwen: equal after loading"),
}
NEEDS = {
    "lightning_trainer": "lightning",
    "memory_llama": "transformers",
    "serve_and_query": "tritonclient",
    "train_and_serve": "tritonclient",
}
UNDER_TORCHRUN = {"sequence_many_gpus"}  # tests/distributed/test_example.py


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_at_most_eight_scripts_and_all_are_run_here():
    names = {file.stem for file in FOLDER.glob("*.py")}
    assert names == set(SMALL) | UNDER_TORCHRUN
    assert len(names) <= 8


@pytest.mark.parametrize("name", SMALL)
def test_the_example_runs(name, capsys, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"no {NEEDS[name]} here; CONTRIBUTING.md says how to get it")
    monkeypatch.chdir(tmp_path)
    arguments, words = SMALL[name]
    load(name).main(**arguments)
    assert words in capsys.readouterr().out
