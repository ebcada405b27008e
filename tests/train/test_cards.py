"""Plans carried out by runs, in one process: ids of files, rows that a plan has more or fewer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.quality.arms import QualityArm, Size, plan_of
from thermocline import BadInput
from thermocline.data.synthetic import SyntheticLog, table_rows
from thermocline.data.synthetic_sequences import SyntheticSequences, write_sequences
from thermocline.data.write_log import write_parquet
from thermocline.heat.log_files import profile_files
from thermocline.nn.prefetch import prefetch_loop
from thermocline.train import Cards, Run, SequenceRun, SequenceSettings, Settings
from thermocline.train.loop import Loop

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
    return Cards(plan=plan_of(QualityArm(tiers=True), sizes, heat, nodes=1), heat=heat)


def test_a_planned_dlrm_makes_rows_of_the_ids_of_a_file_as_one_without_a_plan(clicks):
    settings = Settings(data=clicks, hashed=37, dim=4, batch=64, bottom=(8,), top=(16,))
    cards = planned(clicks, NAMES, [37] * 26, 4)
    one, other = Run(settings, cards=cards).finish(), Run(settings).finish()
    assert one.auc == pytest.approx(other.auc, abs=1e-6) and one.train_loss == pytest.approx(other.train_loss, rel=1e-5)
    assert cards.sharding is not None


def test_a_vocabulary_becomes_a_map_of_the_tables_and_spare_rows_are_for_unknown_ids(clicks):
    settings = Settings(data=clicks, dim=4, batch=64, bottom=(8,), top=(16,))
    needed = settings.logs()[0].rows
    run = Run(settings, cards=planned(clicks, NAMES, [count + 3 for count in needed], 4))
    outcome = run.finish()
    assert 0.3 < outcome.auc < 0.9
    ids = run.model.embeddings.id_maps["C3"]
    assert ids.rows == needed[2] + 3 and int(ids(torch.tensor([10**9]))) >= needed[2] - 1
    with pytest.raises(BadInput, match=rf"'C1' has {needed[0] - 1} rows in the plan; the log has {needed[0] - 1} ids"):
        Run(settings, cards=planned(clicks, NAMES, [count - 1 for count in needed], 4))


def test_a_planned_sequence_model_is_the_one_without_a_plan(histories):
    settings = SequenceSettings(data=histories, dim=8, length=9, negatives=8, batch=31, epochs=1)
    rows = len(settings.log().catalogue_C) + 1
    cards = planned(histories, ["item"], [rows], 8)
    one, other = SequenceRun(settings, cards=cards), SequenceRun(settings)
    first, second = one.finish(), other.finish()
    assert (first.hit_rate, first.ndcg) == pytest.approx((second.hit_rate, second.ndcg), abs=1e-3)
    torch.testing.assert_close(
        one.model.embeddings.get_rows("item"), other.model.embeddings.get_rows("item"), rtol=1e-3, atol=1e-5
    )
    spare = SequenceRun(settings, cards=planned(histories, ["item"], [rows + 10], 8))
    assert spare.ids.rows == rows + 10 and spare.finish().hit_rate > 0
    with pytest.raises(BadInput, match="ids to train on"):
        SequenceRun(settings, cards=planned(histories, ["item"], [rows - 1], 8))


def test_a_plan_for_other_tables_is_refused(histories):
    settings = SequenceSettings(data=histories, dim=16, hashed=50)
    with pytest.raises(BadInput, match="50 x 16 in the model and 50 x 8 in the plan"):
        SequenceRun(settings, cards=planned(histories, ["item"], [50], 8))


def test_a_run_goes_on_without_its_plan_from_where_it_was(histories, tmp_path):
    settings = replace(SequenceSettings(data=histories, dim=8, hashed=50, batch=500, epochs=1), negatives=4)
    planned_run = SequenceRun(settings, tmp_path, cards=planned(histories, ["item"], [50], 8))
    outcome = planned_run.finish()
    again = SequenceRun(settings, tmp_path)
    assert again.finish().hit_rate == outcome.hit_rate
    assert torch.equal(again.model.embeddings.get_rows("item"), planned_run.model.embeddings.get_rows("item"))


@pytest.mark.parametrize("overlaps, coming", [((), []), (("ids", "rows"), ["B", "C"]), (None, ["B", "C"])])
def test_batches_come_ahead_but_where_the_step_of_a_plan_overlaps_nothing(overlaps, coming):
    told: list[str] = []
    plan = None if overlaps is None else SimpleNamespace(step=SimpleNamespace(overlaps=overlaps))
    prefetched = lambda batches, ids: prefetch_loop(batches, ids, lambda group: told.extend(group[0]), 1)  # noqa: E731
    network = SimpleNamespace(embeddings=SimpleNamespace(prefetched=prefetched))
    loop = SimpleNamespace(network=network, cards=Cards(plan=plan), batches=lambda: iter("abc"), looked_up=str.upper)
    assert list(Loop._ahead(loop)) == ["a", "b", "c"] and told == coming
