"""`module.weight` is a copy that reads as any tensor and refuses writes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import thermocline as tc
from support import has


@pytest.fixture
def module() -> tc.Embedding:
    torch.manual_seed(0)
    return tc.Embedding(9, 4, rows=tc.RowConfig("fp32"))


@pytest.mark.parametrize(
    "write",
    [
        nn.init.xavier_uniform_,
        nn.init.normal_,
        nn.init.zeros_,
        nn.init.kaiming_uniform_,
        lambda w: w.uniform_(-1, 1),
        lambda w: w.data.normal_(),
        lambda w: w.detach().zero_(),
        lambda w: w[2].fill_(0.0),
        lambda w: w.view(-1).mul_(2),
        lambda w: w.__setitem__(3, 0.0),
        lambda w: w.__iadd__(1.0),
        lambda w: w.copy_(torch.zeros(9, 4)),
        lambda w: w.requires_grad_(False),
        lambda w: setattr(w, "data", torch.zeros(9, 4)),
        lambda w: setattr(w, "requires_grad", False),
        lambda w: torch.add(torch.ones(9, 4), 1.0, out=w),
        lambda w: torch.nn.utils.vector_to_parameters(torch.zeros(36), [w]),
        lambda w: w.register_hook(torch.neg),
        lambda w: w.register_post_accumulate_grad_hook(torch.neg),
        lambda w: w.retain_grad(),
    ],
)
def test_writes_in_place_are_refused_and_change_nothing(module, write):
    before = module.weight.clone()
    with torch.no_grad(), pytest.raises(tc.BadInput, check=has(parameter="weight")):
        write(module.weight)
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize(
    "value", [torch.zeros(9, 4), nn.Parameter(torch.zeros(9, 4)), None], ids=["tensor", "parameter", "none"]
)
def test_an_assignment_is_refused(module, value):
    with pytest.raises(tc.BadInput, check=has(parameter="weight")):
        module.weight = value


def test_results_of_reading_are_ordinary_tensors_that_can_be_written(module):
    weight = module.weight
    for made in (weight.clone(), weight + 1, weight.to(torch.float64), weight[[1, 2]], copy.deepcopy(weight), weight.mean(0)):
        assert type(made) is torch.Tensor
        made.zero_()
    assert isinstance(weight, torch.Tensor) and weight.shape == (9, 4) and weight.dtype == torch.float32
    assert torch.equal(torch.from_numpy(weight.numpy()), weight) and weight.tolist()[0][0] == weight[0, 0].item()
    assert torch.equal(pickle.loads(pickle.dumps(weight)), weight)
    assert torch.equal(nn.functional.embedding(torch.tensor([3]), weight), weight[3:4])
    assert repr(weight).startswith("tensor(") and torch.equal(torch.cat([weight, weight])[:9], weight)


def test_the_weight_of_one_module_fills_another(module):
    other, third = tc.Embedding(9, 4, rows=tc.RowConfig("fp32")), tc.Embedding.from_pretrained(module.weight, rows=module.rows)
    other.load_state_dict({"weight": module.weight})
    assert torch.equal(other.weight, module.weight) and torch.equal(third.weight, module.weight)
    other.set_rows(torch.arange(9), module.weight * 2)
    assert torch.equal(other.weight, module.weight * 2)
