"""Runs of the sequence model: exact after a resume, and evaluated correctly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.accuracy.plain_tables import PlainItems
from support import has
from thermocline import BadInput
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.data.write_log import write_sequences
from thermocline.models import SequenceModel, initialize
from thermocline.train import ONE_RANK, SequenceRun, SequenceSettings, evaluate_sequences

SMALL = SequenceSettings(
    users=301, items=640, dim=8, length=9, negatives=16, batch=63, epochs=2, precision="int8", cache=0.05, dense_lr=3e-3
)


def test_resumed_a_run_ends_as_if_it_had_not_been_stopped(tmp_path):
    whole = SequenceRun(SMALL)
    expected = whole.finish()
    for last in (5, 17):
        run = SequenceRun(SMALL, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            run.finish(stop=lambda: run.position.step >= last)  # noqa: B023
    resumed = SequenceRun(SMALL, tmp_path)
    assert resumed.position.step == 17
    found = resumed.finish()
    assert replace(found, seconds=0) == replace(expected, seconds=0)
    for name, mine in resumed.model.state_dict().items():
        assert torch.equal(mine, whole.model.state_dict()[name]), name


def test_it_learns_what_heat_alone_does_not_know():
    settings = replace(SMALL, users=2000, epochs=3, precision="fp32", cache=0.0, length=20, dim=16)
    run = SequenceRun(settings)
    untrained = evaluate_sequences(run.model, run.log, run.ids)
    learned = run.finish()
    heat = torch.bincount(torch.from_numpy(run.log.training_items()), minlength=640)
    hottest = set(heat.topk(10).indices.tolist())
    (trials,) = run.log.test_batches(9999)
    popular = sum(item in hottest for item in trials.next_B.tolist()) / len(trials.next_B)
    assert untrained.hit_rate < 0.06 < popular < 0.25
    assert learned.hit_rate > 1.5 * popular and 0 < learned.ndcg < learned.hit_rate


def test_ranks_are_those_of_scoring_every_row():
    run = SequenceRun(replace(SMALL, epochs=1))
    run.finish()
    run.model.eval()
    with torch.no_grad():
        (trials,) = run.log.test_batches(9999)
        scores = run.model.encode(trials.items_N, trials.offsets) @ run.model.embeddings.get_rows("item").t()
    top = scores.topk(10, dim=1).indices
    hits = (top == trials.next_B[:, None]).any(1).double().mean().item()
    assert evaluate_sequences(run.model, run.log, run.ids).hit_rate == pytest.approx(hits)
    run.model.embeddings.set_rows("item", torch.arange(640), torch.zeros(640, 8))
    assert evaluate_sequences(run.model, run.log, run.ids).hit_rate == 0  # all rows alike is no answer


class PlainSettings(SequenceSettings):
    """The same model with a table of torch.nn."""

    def model(self, log, ranks=ONE_RANK):
        ids = self.id_map(log, ranks)
        tables = PlainItems(ids.rows, self.dim, self.lr, ids, log.column)
        initialize(tables, {"item": ids.rows}, self.dim, self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return SequenceModel(tables, self.dim, self.length, self.blocks, self.heads)


def test_int8_and_plain_rows_learn_as_fp32_ones_do():
    settings = replace(SMALL, users=1000, precision="fp32", cache=0.0)
    fp32, int8, plain = (
        SequenceRun(each).finish() for each in (settings, replace(SMALL, users=1000), PlainSettings(**vars(settings)))
    )
    assert plain.hit_rate == pytest.approx(fp32.hit_rate, abs=0.02)
    assert int8.hit_rate == pytest.approx(fp32.hit_rate, abs=0.03)
    assert int8.memory["codes"] * 4 == fp32.memory["codes"]


def test_a_file_gets_a_row_for_each_item_and_may_be_hashed(tmp_path):
    write_sequences(SyntheticSequences(301, 640), tmp_path / "log.parquet")
    settings = replace(SMALL, data=tmp_path / "log.parquet", epochs=1)
    run = SequenceRun(settings)
    found = run.finish()
    assert found.rows == len(run.log.catalogue_C) + 1 < 640
    assert SequenceRun(replace(settings, hashed=97)).finish().rows == 97


@pytest.mark.parametrize("change, what", [({"batch": 0}, "batch"), ({"length": 0}, "length")])
def test_impossible_settings_are_refused(change, what):
    with pytest.raises(BadInput, check=has(parameter=what)):
        SequenceRun(replace(SMALL, **change))
