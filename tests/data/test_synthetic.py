"""The synthetic log: the same on every machine, skewed as it says, and with a truth that its labels follow."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
import torch

from support import has
from thermocline import BadInput
from thermocline.data.click_files import ClickFile
from thermocline.data.click_log import Clicks
from thermocline.data.metrics import auc
from thermocline.data.synthetic import CRITEO_ROWS, SyntheticLog, table_rows
from thermocline.data.write_log import write_parquet
from thermocline.data.zipf import Zipf


def fingerprint(clicks):
    digest = hashlib.sha256()
    for part in clicks:
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


GOLDEN = {20_000: "cf8ca05c15c53f8c", 1_000_000_000: "bad808e108985d79"}


@pytest.mark.parametrize("rows", GOLDEN)
def test_the_log_never_changes(rows):
    assert fingerprint(SyntheticLog(table_rows(rows), 2000, seed=7, first=12345).clicks(0, 1003)) == GOLDEN[rows]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("rows", GOLDEN)
def test_a_gpu_makes_the_same_log(rows):
    log = SyntheticLog(table_rows(rows), 2000, seed=7, first=12345, device="cuda")
    assert fingerprint(log.clicks(0, 1003)) == GOLDEN[rows]


def test_a_sample_does_not_depend_on_its_batch():
    log = SyntheticLog(table_rows(5000), 1000, seed=2)
    whole = log.clicks(0, 1000)
    for size in (1, 63, 300):
        batches = list(log.batches(size, first=3))
        assert all(torch.equal(a, b) for a, b in zip(Clicks.cat(batches), whole.narrow(3 * size, 1000), strict=True))
    shifted = SyntheticLog(log.rows, 400, seed=2, first=600).clicks(0, 400)
    assert all(torch.equal(a, b) for a, b in zip(shifted, whole.narrow(600, 400), strict=True))


def test_seeds_give_other_logs():
    one, other = (SyntheticLog(table_rows(5000), 100, seed=seed).clicks(0, 100) for seed in (0, 1))
    assert not torch.equal(one.ids_BF, other.ids_BF) and not torch.equal(one.dense_BI, other.dense_BI)


@pytest.mark.parametrize("total", [26, 1000, 20_000_000, sum(CRITEO_ROWS), 2_000_000_000])
def test_tables_add_up_to_the_rows_asked_for(total):
    rows = table_rows(total)
    assert sum(rows) == total and min(rows) >= 1
    assert rows[2] == max(rows)


def test_at_full_size_the_tables_are_criteos():
    assert table_rows(sum(CRITEO_ROWS)) == CRITEO_ROWS


@pytest.mark.parametrize("rows, exponent", [(1, 1.05), (3, 1.05), (65, 1.0), (1000, 1.05), (1000, 0.0), (5000, 1.3)])
def test_ids_follow_zipfs_law(rows, exponent):
    table = Zipf(rows, exponent, shift=17)
    bits = torch.randint(-(2**63), 2**63 - 1, (400_000,), generator=torch.Generator().manual_seed(1))
    order = torch.tensor([table.row_of_rank(rank) for rank in range(rows)])
    assert order.unique().numel() == rows  # a bijection
    counts = torch.bincount(table.draw(bits)[0], minlength=rows)[order].double()
    chance = torch.arange(1, rows + 1).double() ** -exponent
    expected = 400_000 * chance / chance.sum()
    # Inside a bin (2% of the rank wide) all are equally likely, which is 1% off at its ends.
    assert ((counts - expected).abs() < 5.5 * expected.sqrt() + 0.02 * expected).all()


def test_hot_rows_are_not_neighbours():
    table = Zipf(100_003, 1.05, shift=0)
    hot = sorted(table.row_of_rank(rank) for rank in range(100))
    assert min(b - a for a, b in pairwise(hot)) > 100


def test_rows_beyond_32_bits_of_bytes_are_reached():
    ids = SyntheticLog(table_rows(2_000_000_000), 5000, seed=1).clicks(0, 5000).ids_BF
    assert ids.min() >= 0 and (ids < torch.tensor(table_rows(2_000_000_000))).all()
    assert ids[:, 2].max() > 0.99 * table_rows(2_000_000_000)[2]


def test_labels_follow_the_true_probability():
    log = SyntheticLog(table_rows(20_000), 60_000, seed=4)
    label, p = log.clicks(0, 60_000).label_B.double(), log.probability(0, 60_000)
    assert abs(label.mean().item() - 0.2562) < 0.01
    for low in torch.arange(0, 1, 0.1).tolist():
        inside = (p >= low) & (p < low + 0.1)
        if inside.sum() > 200:
            spread = (p[inside] * (1 - p[inside])).mean().div(inside.sum()).sqrt()
            assert (label[inside].mean() - p[inside].mean()).abs() < 4 * spread
    assert 0.86 < auc(p, label > 0.5) < 0.92


def test_rare_rows_carry_more_signal_up_to_four_times():
    truth = SyntheticLog((50_000,), 0, seed=9)._truth
    ids, rarity = truth.ids(0, torch.arange(400_000))
    heat = torch.bincount(ids[:, 0], minlength=50_000)[ids[:, 0]] / 8  # 1 is that of the mean row
    assert (rarity[heat > 3] == 16).all() and rarity[heat < 0.13].float().mean() > 56 and rarity.max() == 64

    def spread(rows, rarity):
        rows = rows.unique()[:, None]
        return truth.logit(rows, torch.full_like(rows, rarity), torch.full((len(rows), 13), 512)).double().std().item()

    hot, cold = ids[heat > 1], ids[heat <= 1]
    assert spread(cold, 64) == pytest.approx(4 * spread(cold, 16), rel=1e-3)
    assert spread(hot, 16) == pytest.approx(spread(cold, 16), rel=0.05)  # apart from rarity, rows are alike


def test_a_written_log_reads_back_the_same(tmp_path):
    log = SyntheticLog(table_rows(9000), 70_001, seed=3)
    best = write_parquet(log, tmp_path / "log.parquet", lambda *_: None)
    read = Clicks.cat(list(ClickFile(tmp_path / "log.parquet").chunks()))
    assert all(torch.equal(a, b) for a, b in zip(read, log.clicks(0, 70_001), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["log.parquet"]
    assert best.auc == pytest.approx(auc(log.probability(0, 70_001), read.label_B > 0.5), abs=1e-6)


def test_what_cannot_be_made_is_refused():
    with pytest.raises(BadInput, check=has(parameter="rows", value=25)):
        table_rows(25)
    with pytest.raises(BadInput, check=has(parameter="rows")):
        SyntheticLog(table_rows(20_000_000_000), 1)
    with pytest.raises(BadInput, check=has(parameter="samples")):
        SyntheticLog((5,), -1)
