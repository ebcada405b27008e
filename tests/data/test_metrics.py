"""AUC, LogLoss and NE against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from support import has
from thermocline import BadInput
from thermocline.data.metrics import auc, measures


def counted(score, label):
    """The definition: all pairs of a click and a non-click, ties counting half."""
    above = score[label][:, None] - score[~label][None]
    return ((above > 0).double() + 0.5 * (above == 0)).mean().item()


@pytest.mark.parametrize("levels", [2, 7, 1000])
def test_auc_equals_the_count_of_all_pairs(levels):
    generator = torch.Generator().manual_seed(levels)
    score = torch.randint(0, levels, (997,), generator=generator).float() / 3
    label = torch.rand(997, generator=generator) < 0.2 + 0.3 * score / score.max()
    assert auc(score, label) == pytest.approx(counted(score, label), abs=1e-12)


def test_auc_at_its_ends():
    label = torch.tensor([True, True, False])
    assert auc(torch.tensor([3.0, 2.0, 1.0]), label) == 1
    assert auc(torch.tensor([1.0, 1.0, 1.0]), label) == 0.5
    assert auc(torch.tensor([0.0, 1.0, 2.0]), label) == 0
    assert math.isnan(auc(torch.tensor([0.0, 1.0, 2.0]), torch.ones(3) > 0))
    assert math.isnan(auc(torch.tensor([0.0, math.nan, 2.0]), label))


def test_batches_are_judged_as_one():
    generator = torch.Generator().manual_seed(0)
    logit, label = torch.randn(1000, generator=generator), (torch.rand(1000, generator=generator) < 0.3).float()
    measured = measures(logit.split(63), label.split(63))
    p, rate = torch.sigmoid(logit.double()), label.double().mean().item()
    loss = -(label * p.log() + (1 - label) * (1 - p).log()).mean().item()
    assert measured.auc == pytest.approx(counted(logit, label > 0.5), abs=1e-12)
    assert measured.logloss == pytest.approx(loss, abs=1e-9)
    assert measured.ne == pytest.approx(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), abs=1e-9)


def test_predicting_the_rate_has_an_entropy_of_one():
    logits, labels = torch.full((8,), math.log(3 / 5)), torch.tensor([1.0] * 3 + [0.0] * 5)
    assert measures([logits], [labels]).ne == pytest.approx(1, abs=1e-6)


def test_nothing_to_judge_is_an_error():
    with pytest.raises(BadInput, check=has(samples=0)):
        measures([], [])
    with pytest.raises(BadInput, check=has(parameter="logit_B")):
        measures([torch.zeros(2)], [torch.zeros(3)])
