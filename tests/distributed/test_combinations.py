"""Combinations with `shard_`, drawn at random, equal one process bit for bit; the page lists what works."""

from __future__ import annotations

from pathlib import Path

import combination_ranks
import numpy as np
import pytest
from cases import TABLES, heat_of, plan_of, table_plan

HEAT, STEPS = heat_of(), 9
PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
CHOICES = {
    "module": ["collection", "plain"],
    "update": ["backward", "step"],
    "residency": ["device", "host"],
    "precision": ["int8", "int4"],
    "replicas": [1, 2],
    "ahead": [0, 1, 3],
    "exchange": ["flat", "node"],
    "nodes": [1, 2],
    "micro": [1, 2],
}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}


def plan_for(choices, ranks, seed):
    rng, each = np.random.default_rng(seed), ranks // choices["replicas"]
    tables = []
    for name, (rows, dim, features) in TABLES.items():
        first, second = (int(n) for n in rng.integers(0, rows // 2, 2) * rng.integers(0, 2, 2))
        shape = (rows, dim, features[:1]) if choices["module"] == "plain" else None
        tables.append(table_plan(name, first, second, choices["precision"], choices["exchange"], shape=shape))
    nodes = min(choices["nodes"], each)
    return plan_of(nodes, each // nodes, tables, HEAT)


def test_the_draws_have_every_pair_of_choices():
    found = {(a, d[a], b, d[b]) for d in map(drawn, range(32)) for a in CHOICES for b in CHOICES}
    assert all((a, x, b, y) in found for a in CHOICES for b in CHOICES if a != b for x in CHOICES[a] for y in CHOICES[b])


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(8, 32))])
def test_a_combination_trains_what_one_process_trains(on_ranks, seed):
    choices = drawn(seed)
    found = on_ranks("combination_ranks.train", 4, choices, plan_for(choices, 4, seed), HEAT, STEPS)
    wanted = combination_ranks.train(0, 1, choices, None, None, STEPS, ranks=4)
    for rows in found:
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(rows, wanted, strict=True)), choices


def test_the_page_lists_every_choice():
    page = PAGE.read_text()
    table = page[page.index("## Combinations") : page.index("## Resuming")]
    words = ["collections", "EmbeddingBag", 'update="step"', "prefetched", 'residency="host"', "replicas", "tiers of precision"]
    assert not [word for word in words if word not in table]
