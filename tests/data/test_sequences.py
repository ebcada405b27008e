"""Histories: how logs are read, cut and split, and what the made ones hold."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from support import has
from thermocline import BadInput, FormatError
from thermocline.data.metrics import Ranking, rank_sums
from thermocline.data.sequence_files import open_sequences
from thermocline.data.sequences import SequenceLog
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.data.write_log import write_sequences
from thermocline.heat.log_columns import id_of_text

DATA = Path(os.environ.get("THERMOCLINE_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def log_of(*histories, **settings):
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in histories])])
    return SequenceLog(np.concatenate([np.array(each, np.int64) for each in histories]), offsets, **settings)


def samples_of(log, size=3, epoch=0, **rest):
    found = []
    for batch in log.batches(size, epoch, **rest):
        found += [tuple(part.tolist()) for part in batch.items_N.split(batch.offsets.diff().tolist())]
    return found


def write(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_the_last_item_is_held_out_and_every_other_is_predicted_once():
    log = log_of([1, 2, 3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13], length=3, negatives=2)
    assert sorted(samples_of(log)) == [(1, 2, 3, 4), (4, 5, 6), (8, 9), (11, 12)]
    (trials,) = log.test_batches(9)
    assert trials.next_B.tolist() == [7, 13]
    assert trials.items_N.tolist() == [4, 5, 6, 11, 12] and trials.offsets.tolist() == [0, 3, 5]
    assert log.catalogue_C.tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert log.id_map()(torch.tensor([1, 12, 7, 13])).tolist() == [0, 10, 11, 11]


def test_each_epoch_has_an_order_of_its_own_and_can_be_entered_anywhere():
    log = SyntheticSequences(users=50, items=64).log(length=5)
    first, second = samples_of(log), samples_of(log, epoch=1)
    assert first != second and sorted(first) == sorted(second)
    assert samples_of(log, first=4) == first[12:]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_every_batch_and_some_end_with_none(ranks):
    log = SyntheticSequences(users=31, items=64).log(length=50, negatives=3)
    whole = list(log.batches(ranks * 4))
    parts = [list(log.batches(4, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert {len(each) for each in parts} == {len(whole)}
    for joined, *mine in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([part.items_N for part in mine]), joined.items_N)
        assert torch.equal(torch.cat([part.negatives_BK for part in mine]), joined.negatives_BK)
        assert torch.equal(torch.cat([part.chance_N for part in mine]), joined.chance_N)
    trials = [torch.cat([each.next_B for each in log.test_batches(5, rank, ranks)]) for rank in range(ranks)]
    whole_next = torch.cat([each.next_B for each in log.test_batches(5)])
    assert sorted(torch.cat(trials).tolist()) == sorted(whole_next.tolist()) and len(whole_next) == 31


def test_negatives_are_drawn_as_often_as_their_chance_says():
    log = log_of([1, 1, 1, 1, 1, 1, 2, 2, 9], [3, 3, 3, 9], length=2, negatives=2000)
    (batch,) = log.batches(99)
    share = {item: (batch.negatives_BK == item).double().mean().item() for item in (1, 2, 3, 9)}
    chance = dict(zip(batch.negatives_BK.flatten().tolist(), batch.chance_BK.flatten().exp().tolist(), strict=True))
    assert chance == pytest.approx({1: 6 / 11, 2: 2 / 11, 3: 3 / 11})
    assert share == pytest.approx({1: 6 / 11, 2: 2 / 11, 3: 3 / 11, 9: 0}, abs=0.02)


def test_of_many_histories_some_are_judged_and_always_the_same():
    made = SyntheticSequences(users=200, items=64)
    log, again = made.log(judged=31), made.log(judged=31, seed=7)
    assert log.trials == 31
    assert torch.equal(next(log.test_batches(99)).next_B, next(again.test_batches(99)).next_B)


def test_interactions_in_any_order_become_histories_in_the_order_of_time(tmp_path):
    file = write(tmp_path / "log.parquet", user=[5, 2, 5, 2, 5, 2], item=[1, 2, 3, 4, 5, 6], ts_ms=[9, 3, 7, 1, 8, 2])
    log = open_sequences(file, length=9, negatives=1)
    assert sorted(samples_of(log)) == [(3, 5), (4, 6)] and next(log.test_batches(9)).next_B.tolist() == [2, 1]
    assert log.column == "item"


@pytest.mark.parametrize("times", ["2026-01-0{} 12:00:00", "2026-01-0{}", "{}.25", "{}"])
def test_csv_with_other_names_text_items_and_any_time_is_read(tmp_path, times):
    visits = [("ann", "tea", 3), ("bob", "rum", 1), ("ann", "jam", 1), ("bob", "tea", 2), ("ann", "rum", 2), ("bob", "jam", 3)]
    lines = [f"{who},{what},{times.format(when)}" for who, what, when in visits]
    (tmp_path / "log.csv").write_text("\n".join(["visitor,product,at", *lines, "bad"]) + "\n")
    log = open_sequences(tmp_path / "log.csv", ("visitor", "product", "at"), skip_bad=1, length=9, negatives=1)
    tea, jam, rum = map(id_of_text, ("tea", "jam", "rum"))
    assert sorted(samples_of(log)) == sorted([(jam, rum), (rum, tea)]) and log.column == "product"
    with pytest.raises(BadInput, check=has(parameter="columns")):
        open_sequences(tmp_path / "log.csv", ("visitor", "product"))


def test_lists_are_histories_as_they_are(tmp_path):
    log = open_sequences(write(tmp_path / "log.parquet", items=[[3, 1, 2], [], None, [7, 7, 7, 8]]), negatives=1)
    assert sorted(samples_of(log)) == [(3, 1), (7, 7, 7)] and log.column == "items"


def test_a_log_is_the_same_from_its_file(tmp_path):
    made = SyntheticSequences(users=40, items=64, drift=0.5)
    count = write_sequences(made, tmp_path / "log.parquet")
    read, log = open_sequences(tmp_path / "log.parquet"), made.log()
    assert count == len(read.items_N)
    assert (read.items_N == log.items_N).all() and (read.offsets == log.offsets).all()


@pytest.mark.parametrize(
    "columns, kind, fields",
    [
        ({"user": [1], "item": [2]}, FormatError, {"columns": ("user", "item"), "parameter": "columns"}),
        ({"user": [1], "item": [0.5], "time": [1]}, FormatError, {"column": "item"}),
        ({"user": [1], "item": ["a"], "time": ["soon"]}, FormatError, {"column": "time"}),
        ({"user": [1], "item": [None], "time": [1]}, FormatError, {"column": "item"}),
        ({"items": [1, 2]}, FormatError, {"column": "items"}),
        ({"items": [[1, 2]]}, BadInput, {}),
    ],
)
def test_files_that_are_no_log_are_refused(tmp_path, columns, kind, fields):
    path = write(tmp_path / "log.parquet", **columns)
    with pytest.raises(kind, check=has(path=str(path), **fields)):
        open_sequences(path)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(BadInput, check=has(path="nowhere.parquet")):
        open_sequences("nowhere.parquet")


@pytest.mark.skipif(not DATA.is_dir(), reason="no folder of real logs; THERMOCLINE_DATA names it")
@pytest.mark.parametrize("name, items", [("amazon_beauty_seq", 12092), ("gowalla_bags", 40981), ("retail_baskets", 14293)])
def test_real_logs_are_read_as_they_are(name, items):
    log = open_sequences(DATA / f"{name}.parquet")
    assert len(log.catalogue_C) == items and log.trials == 10_000
    assert next(log.batches(63)).samples == 63


# -- made histories --


def test_made_histories_have_successors_tastes_and_zipf():
    made = SyntheticSequences(users=3000, items=3200)
    user, item, time = made.interactions()
    same = user[1:] == user[:-1]
    before, after = item[:-1][same], item[1:][same]
    assert (time[1:] > time[:-1])[same].all()
    follows = (made.successor(before) == after).double().mean().item()
    tastes = (before % 32 == after % 32).double().mean().item()
    assert 0.35 < follows < 0.45 and 0.80 < tastes < 0.90
    heat = torch.bincount(item, minlength=3200).sort(descending=True)[0].double()
    assert 0.04 < heat[:10].sum() / heat.sum() < 0.15 and 0.35 < heat[:160].sum() / heat.sum() < 0.7
    lengths = torch.bincount(user)
    assert lengths.min() == 3 and 18 < lengths.double().mean() < 22


def test_drift_moves_heat_on():
    def hot(made, late):
        _, item, time = made.interactions()
        chosen = time.argsort()[len(time) // 2 :] if late else time.argsort()[: len(time) // 4]
        return set(torch.bincount(item[chosen], minlength=3200).topk(100).indices.tolist())

    still, moving = SyntheticSequences(3000, 3200), SyntheticSequences(3000, 3200, drift=0.5)
    assert len(hot(still, False) & hot(still, True)) > 75 > 55 > len(hot(moving, False) & hot(moving, True))


def test_ranks_are_judged_at_ten():
    found = Ranking.of(rank_sums(torch.tensor([0, 9, 10, 2])))
    assert found.hit_rate == 0.75 and found.trials == 4
    assert found.ndcg == pytest.approx((1 + 1 / np.log2(11) + 1 / 2) / 4)
    with pytest.raises(BadInput, check=has(samples=0)):
        Ranking.of(rank_sums(torch.tensor([])))
