"""Hostile checkpoints, plans and heat files: each is refused with a clear error, or has the values of the good file."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest

import thermocline as tc
from benchmarks.fuzz import mutations
from benchmarks.fuzz.benchmark import REFUSED, SAME, CheckpointTarget, fuzz, make_heat
from support import has
from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import Plan


@pytest.mark.parametrize("name, count", [("checkpoint", 120), ("plan", 200), ("heat", 200)])
def test_spoiled_files_are_refused_or_have_the_values_of_the_good_one(name, count):
    found = fuzz(name, count, seed=5)
    assert not found["faults"], found["faults"][0]
    assert found["outcomes"][REFUSED] > count / 2 and found["outcomes"][SAME] > 0


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    made = CheckpointTarget(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


def change(manifest, what):
    save, section = manifest["saves"][0], manifest["saves"][0]["sections"][0]
    if what == "removed section":
        del save["sections"][0]
    elif what == "removed section with its file":
        save["files"] = [file for file in save["files"] if file["name"] == save["state"]]
        save["sections"] = []
    elif what in ("../../../etc/passwd", "/etc/passwd", "save-000001-00000000/../../x"):
        save["files"][0]["name"] = section["file"] = what
    elif what == "wrong size":
        save["files"][0]["bytes"] += 1
    elif what == "rows of another table":
        save["sections"][0]["key"], save["sections"][1]["key"] = save["sections"][1]["key"], save["sections"][0]["key"]
    elif what == "more rows":
        manifest["tables"][0]["rows"] += 1
    else:
        section["count"] = section["end"] = 10**12


@pytest.mark.parametrize(
    "what",
    [
        "removed section", "removed section with its file", "../../../etc/passwd", "/etc/passwd",
        "save-000001-00000000/../../x", "wrong size", "rows of another table", "more rows", "huge",
    ],
)  # fmt: skip
def test_a_signed_manifest_that_does_not_fit_its_files_is_refused(target, what):
    mutations.restore(target._good, target._bad)
    manifest = json.loads(json.dumps(target._manifest))
    change(manifest, what)
    (target._bad / "manifest.json").write_text(mutations.signed(manifest))
    with pytest.raises(tc.FormatError):
        target.group.load(target._bad)
    with pytest.raises(tc.FormatError):
        tc.load(target._bad)


@pytest.mark.parametrize("name", ["manifest.json", "rows", "state"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(target, name):
    mutations.restore(target._good, target._bad)
    (path,) = [target._bad / name] if name == "manifest.json" else target._bad.glob(f"save-000001-*/{name}*")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(tc.FormatError, check=has(path=path)):
        target.group.load(target._bad)


def test_numbers_of_thousands_of_digits_and_deep_plans_are_refused(tmp_path):
    for text in ('{"version": ' + "9" * 5000 + "}", "[" * 200_000, '{"version": 1, "cards": [1e999]}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(tc.FormatError, check=has(path=str(tmp_path / "plan.json"))):
            Plan.load(tmp_path / "plan.json")


def test_every_flipped_bit_of_a_heat_file_is_found_or_harmless(tmp_path):
    profile, path, draw = make_heat(), tmp_path / "heat.tc", random.Random(1)
    profile.save(path)
    data = np.frombuffer(path.read_bytes(), np.uint8)
    refused = 0
    for at in range(0, len(data), 37):
        flipped = data.copy()
        flipped[at] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped.tobytes())
        try:
            assert HeatProfile.load(path).sha256 == profile.sha256
        except tc.BadInput:
            refused += 1
    assert refused > len(data) / 37 * 0.8
