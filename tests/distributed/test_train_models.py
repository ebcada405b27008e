"""`train` on several ranks equals one process on all batches for any plan, and can be resumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from train_ranks import CLICKS, HISTORIES, train_clicks, train_sequence

from thermocline.checkpoint import Checkpoint

RANKS = 2


def test_a_sharded_sequence_model_learns_what_one_process_does(on_ranks):
    assert HISTORIES.log().samples % (RANKS * HISTORIES.batch) == 3  # the last step has 3 for one rank, none for the other
    found = on_ranks("train_sequence", RANKS, HISTORIES, True, "", [])
    alone = train_sequence(0, 1, replace(HISTORIES, batch=RANKS * HISTORIES.batch), False, "", [])
    assert found[0][:3] == pytest.approx(found[1][:3]) and found[0][5] == alone[5]
    for mine in found:
        assert mine[:3] == pytest.approx(alone[:3], rel=1e-3)
        np.testing.assert_allclose(mine[3], alone[3], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(mine[4], alone[4], rtol=1e-3, atol=1e-4)
    measured = found[0][6]
    assert measured.steps == alone[5] // HISTORIES.epochs and len(measured.ranks) == RANKS
    assert {line.direction for line in measured.traffic} == {"ids", "rows", "gradients", "sync"}


def test_a_sharded_run_is_resumed_bit_for_bit(on_ranks, tmp_path):
    settings = replace(HISTORIES, users=31)
    found = on_ranks("train_twice", RANKS, settings, str(tmp_path / "run"))
    whole = [one for one, _ in found]
    for one, other in found:
        assert one[:3] == other[:3] and (one[3] == other[3]).all() and (one[4] == other[4]).all()
    checkpoint = Checkpoint.open(tmp_path / "run")
    assert checkpoint.manifest.progress["run"]["step"] == whole[0][5] > 5 and checkpoint.manifest.saves[0].ranks == RANKS
    checkpoint.verify()


def test_a_sharded_dlrm_learns_what_one_process_does(on_ranks):
    found = on_ranks("train_clicks", RANKS, CLICKS, True)
    alone = train_clicks(0, 1, replace(CLICKS, batch=RANKS * CLICKS.batch), False)
    for mine in found:
        assert mine[:3] == pytest.approx(alone[:3], rel=1e-4)
        for rows, theirs in zip(mine[3], alone[3], strict=True):
            np.testing.assert_allclose(rows, theirs, rtol=1e-3, atol=1e-4)
