"""Plans carried out by runs, in one process: ids of files, rows that a plan has more or fewer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.quality.arms import QualityArm, Size, plan_of
from support import has
from thermocline import BadInput
from thermocline.data.synthetic import SyntheticLog, table_rows
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.data.write_log import write_parquet, write_sequences
from thermocline.heat.log_files import profile_files
from thermocline.nn.prefetch import prefetch_loop
from thermocline.train import DLRMRun, DLRMSettings, SequenceRun, SequenceSettings, TrainingRanks
from thermocline.train.loop import TrainLoop

NAMES = [f"C{n + 1}" for n in range(26)]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    file = tmp_path_factory.mktemp("clicks") / "log.parquet"
    write_parquet(SyntheticLog(table_rows(400), 900, seed=1), file, lambda *_: None)
    return file


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    file = tmp_path_factory.mktemp("histories") / "log.parquet"
    write_sequences(SyntheticSequences(101, 320), file)
    return file


def planned(file, columns, rows, dim):
    heat = profile_files([file], columns)
    sizes = {name: Size(count, dim, (name,), 50) for name, count in zip(columns, rows, strict=True)}
    return TrainingRanks(plan=plan_of(QualityArm(tiers=True), sizes, heat, nodes=1), heat=heat)


def test_planned_dlrm_maps_ids_like_one_without_a_plan(clicks):
    settings = DLRMSettings(data=clicks, hashed=37, dim=4, batch=64, bottom=(8,), top=(16,))
    ranks = planned(clicks, NAMES, [37] * 26, 4)
    one, other = DLRMRun(settings, ranks=ranks).finish(), DLRMRun(settings).finish()
    assert one.auc == pytest.approx(other.auc, abs=1e-6) and one.train_loss == pytest.approx(other.train_loss, rel=1e-5)
    assert ranks.sharding is not None


def test_vocabulary_becomes_an_id_map_with_spare_rows_for_unknown_ids(clicks):
    settings = DLRMSettings(data=clicks, dim=4, batch=64, bottom=(8,), top=(16,))
    needed = settings.logs()[0].rows
    run = DLRMRun(settings, ranks=planned(clicks, NAMES, [count + 3 for count in needed], 4))
    outcome = run.finish()
    assert 0.3 < outcome.auc < 0.9
    ids = run.model.embeddings.id_maps["C3"]
    assert ids.rows == needed[2] + 3 and int(ids(torch.tensor([10**9]))) >= needed[2] - 1
    with pytest.raises(BadInput, check=has(table="C1", planned=needed[0] - 1, needed=needed[0])):
        DLRMRun(settings, ranks=planned(clicks, NAMES, [count - 1 for count in needed], 4))


def test_a_planned_sequence_model_is_the_one_without_a_plan(histories):
    settings = SequenceSettings(data=histories, dim=8, length=9, negatives=8, batch=31, epochs=1)
    rows = len(settings.log().catalogue_C) + 1
    ranks = planned(histories, ["item"], [rows], 8)
    one, other = SequenceRun(settings, ranks=ranks), SequenceRun(settings)
    first, second = one.finish(), other.finish()
    assert (first.hit_rate, first.ndcg) == pytest.approx((second.hit_rate, second.ndcg), abs=1e-3)
    torch.testing.assert_close(
        one.model.embeddings.get_rows("item"), other.model.embeddings.get_rows("item"), rtol=1e-3, atol=1e-5
    )
    spare = SequenceRun(settings, ranks=planned(histories, ["item"], [rows + 10], 8))
    assert spare.ids.rows == rows + 10 and spare.finish().hit_rate > 0
    with pytest.raises(BadInput, check=has(table="item", planned=rows - 1, needed=rows)):
        SequenceRun(settings, ranks=planned(histories, ["item"], [rows - 1], 8))


def test_a_plan_for_other_tables_is_refused(histories):
    settings = SequenceSettings(data=histories, dim=16, hashed=50)
    with pytest.raises(BadInput, check=has(table="item", needed=(50, 8), available=(50, 16))):
        SequenceRun(settings, ranks=planned(histories, ["item"], [50], 8))


def test_run_resumes_without_its_plan(histories, tmp_path):
    settings = replace(SequenceSettings(data=histories, dim=8, hashed=50, batch=500, epochs=1), negatives=4)
    planned_run = SequenceRun(settings, tmp_path, ranks=planned(histories, ["item"], [50], 8))
    outcome = planned_run.finish()
    again = SequenceRun(settings, tmp_path)
    assert again.finish().hit_rate == outcome.hit_rate
    assert torch.equal(again.model.embeddings.get_rows("item"), planned_run.model.embeddings.get_rows("item"))


@pytest.mark.parametrize("overlaps, coming", [((), []), (("ids", "rows"), ["B", "C"]), (None, ["B", "C"])])
def test_batches_are_prefetched_unless_the_planned_step_overlaps_nothing(overlaps, coming):
    told: list[str] = []
    plan = None if overlaps is None else SimpleNamespace(step=SimpleNamespace(overlaps=overlaps))
    prefetched = lambda batches, ids, at_once: prefetch_loop(batches, ids, lambda group: told.extend(group[0]), 1)  # noqa: E731
    network = SimpleNamespace(embeddings=SimpleNamespace(prefetched=prefetched))
    loop = SimpleNamespace(network=network, ranks=TrainingRanks(plan=plan), batches=lambda: iter("abc"), lookup_ids=str.upper)
    assert list(TrainLoop._prefetched(loop)) == ["a", "b", "c"] and told == coming
