"""What is sent under NCCL, as far as one card can tell: a rank exchanges with itself, as several would with each other.

Every test has a process of its own, which is killed when it ends: a collective that hangs is the failure of one test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_ranks
import numpy as np
import pytest
import torch
from cases import TABLES
from rank_pool import caller, started
from test_gpu_shards import HEAT, TWO, check, check_alike, planned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")

BOTH = "cpu:gloo,cuda:nccl"
SLOTS = {2: (5, 0), 3: (6, 0)}


@pytest.fixture
def on_card(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """Call a function of `gpu_ranks.py`, whose name comes after that of a backend, on one rank."""
    pool = started(gpu_ranks.work, 1, ["thermocline.distributed.shard", "thermocline.checkpoint.save_job"])
    yield caller(next(pool), tmp_path, 240.0)
    pool.close()


def two_precisions(slots=None, pooled_by="asker"):
    """A plan for one rank that uses the exchange: tiers of two precisions."""
    exchanges = dict.fromkeys(TABLES, "flat")
    plan = planned(1, 1, TWO, "int8", exchanges, slots, first_precision="fp32")
    return plan.model_copy(
        update={"tables": tuple(t.model_copy(update={"pooled_by": pooled_by, "wire_rows": "fp32"}) for t in plan.tables)}
    )


@pytest.mark.parametrize("backend", ["nccl", BOTH])
def test_all_types_and_shapes_arrive_from_any_stream(on_card, backend):
    (compared,) = on_card(f"{backend} collectives", 1, "cuda")
    assert compared == 2 * (5 * 6 * 2 + 40)


@pytest.mark.parametrize("backend", ["nccl", BOTH])
def test_one_rank_that_sends_to_itself_trains_what_a_cpu_trains(on_card, backend):
    check(on_card(f"{backend} both", 1, planned(1, 1, TWO, "int8"), HEAT, {}, 8))
    check(on_card(f"{backend} both_alone", 1, two_precisions(SLOTS), HEAT, {"policy": "adaptive"}, 8))


@pytest.mark.parametrize("pooled_by", ["asker", "owner"])
def test_exchanges_behind_the_caller_are_those_of_gloo_on_a_cpu(on_card, pooled_by):
    """Which is off where there are several cards: one rank cannot be out of step with itself."""
    settings = {"policy": "adaptive", "overlap": True, "ahead": True}
    check(on_card(f"{BOTH} alone", 1, "both", two_precisions(SLOTS, pooled_by), HEAT, settings, 12))


def test_rows_migrate_and_go_on(on_card):
    plans = [two_precisions(SLOTS), two_precisions({3: (9, 0)}, "owner")]
    ((cpu, card),) = on_card(f"{BOTH} alone", 1, "moved", plans, HEAT, {"policy": "adaptive"})
    check_alike(cpu, card)


def test_the_dense_part_trains_in_ddp_beside_it(on_card):
    plan = planned(1, 1, TWO, "fp32", dict.fromkeys(TABLES, "flat"), first_precision="fp16")
    ((cpu, card),) = on_card(f"{BOTH} alone", 1, "with_ddp", plan, HEAT)
    assert all(np.allclose(one, other, atol=5e-3) for one, other in zip(cpu, card, strict=True))


FLAT = planned(1, 1, {name: (rows // 2, 0) for name, (rows, _, _) in TABLES.items()}, "int8", dict.fromkeys(TABLES, "flat"))


def test_a_step_waits_for_sizes_and_for_nothing_else(on_card):
    """Also for the number of distinct rows in tier 1, which was sent to the host in forward."""
    (read,) = on_card("nccl gpu_quiet.quiet", 1, FLAT, HEAT)
    assert read == [1, 1] * 2


@pytest.mark.parametrize("pooled_by", ["asker", "owner"])
def test_errors_of_kernels_arrive_with_the_next_headers(on_card, pooled_by):
    plan = FLAT if pooled_by == "asker" else two_precisions(pooled_by=pooled_by)
    (told,) = on_card("nccl gpu_quiet.told", 1, plan, HEAT)
    assert "'item'" in told[1] and "BadGradient" in told[4] and "of table" in told[4] and "BadOffsets" in told[5]
    assert not any(told[step] for step in (0, 2, 3, 6))


@pytest.mark.parametrize("slots", [None, SLOTS], ids=["rows", "slots"])
def test_gradients_on_a_stream_of_their_own_change_no_bit(on_card, slots):
    check(on_card("nccl gpu_quiet.on_a_stream", 1, two_precisions(slots), HEAT, {"policy": "adaptive"}, 8))
