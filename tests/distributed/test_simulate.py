"""The simulator counts what the meters of real processes count."""

from __future__ import annotations

import numpy as np
import pytest
from cases import FEATURES, TABLES, batches, heat_of, joined, plan_of, table_plan

from thermocline.distributed.simulate import Cards, simulate
from thermocline.heat.logs import Bags


def cards_of(step, sizes):
    """The batches of some cards as the simulator takes them."""
    whole = joined(batches(step, sizes))
    return Cards({name: Bags(whole[name][0].numpy(), whole[name][1].numpy()) for name in FEATURES}, np.array(sizes))


def random_plan(seed, nodes, cards, heat):
    """Random tiers, exchanges and gradients; the last table whole on a card."""
    rng = np.random.default_rng(seed)
    tables = []
    for name, (rows, _, _) in TABLES.items():
        first, second = sorted(int(n) for n in rng.integers(0, rows + 1, 2))
        card = int(rng.integers(nodes * cards)) if name == "shop" and seed % 2 else None
        tiers = (0, 0) if card is not None else (first, second - first)
        table = table_plan(name, *tiers, "int8", ["flat", "node"][rng.integers(2)], card, ["", "fp32"][rng.integers(2)])
        tables.append(table.model_copy(update={"wire_gradients": ["fp32", "bf16"][rng.integers(2)]}))
    return plan_of(nodes, cards, tables, heat)


@pytest.mark.parametrize("nodes, cards, seed", [(2, 2, 1), (1, 4, 2), (4, 1, 3), (2, 4, 4), (4, 2, 5), (8, 1, 6)])
def test_bytes_and_messages_of_every_card_are_those_of_its_meter(on_ranks, nodes, cards, seed):
    heat = heat_of()
    plan = random_plan(seed, nodes, cards, heat)
    rng = np.random.default_rng(seed)
    sizes = [[int(n) for n in rng.integers(0, 6, nodes * cards)] for _ in range(3)]
    sizes[1] = [0] * (nodes * cards)  # none has anything
    found = on_ranks("drift_ranks.metered", nodes * cards, plan, heat, sizes)
    simulated = simulate(plan, heat, [[cards_of(step, each)] for step, each in enumerate(sizes)])
    for card, (lines, messages) in enumerate(found):
        assert simulated.sent(card) == lines
        assert np.array_equal(simulated.messages_CDL[card], messages)
