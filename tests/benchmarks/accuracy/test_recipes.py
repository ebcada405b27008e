"""The recorded settings fit the models they were tuned for."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.accuracy.recipes import CRITEO, LARGE, MOVIELENS
from thermocline.train import DLRMSettings


@pytest.mark.parametrize("recipe", [CRITEO, MOVIELENS, LARGE])
def test_a_recipe_changes_only_what_was_tuned(recipe):
    before = DLRMSettings(dim=64, seed=5, precision="int4")
    after = asdict(recipe.apply(before))
    assert after | asdict(before) == asdict(before)
    assert {name: after[name] for name in vars(recipe)} == vars(recipe)
