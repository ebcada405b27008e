"""Averages of models: means of stored codes are no rows, and averages of parameters leave rows out. Both raise."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thermocline as tc
from support import has

IDS = torch.tensor([[1, 2], [3, 3]])


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(tc.EmbeddingBag(31, 8, mode="sum", rows=tc.RowConfig("int8", cache=0.1)), nn.Linear(8, 1))
    model(IDS).sum().backward()
    return model


def by_product(mine, theirs):  # as ModelEmaV2 of timm
    for a, b in zip(mine.values(), theirs.values(), strict=True):
        a.copy_(0.9 * a + 0.1 * b)


def by_lerp(mine, theirs):  # as ModelEmaV3
    for a, b in zip(mine.values(), theirs.values(), strict=True):
        a.lerp_(b.to(a.dtype), 0.1) if a.is_floating_point() else a.copy_(b)


def by_foreach(mine, theirs):
    floats = [name for name, value in mine.items() if value.is_floating_point()]
    torch._foreach_lerp_([mine[name] for name in floats], [theirs[name] for name in floats], 0.1)


def by_shadow(mine, theirs):
    for name, value in {name: value.clone().float() for name, value in mine.items()}.items():
        value.mul_(0.9).add_(theirs[name], alpha=0.1)


def by_mean(mine, theirs):
    return {name: torch.stack([value, theirs[name]]).float().mean(0).to(value.dtype) for name, value in mine.items()}


@pytest.mark.parametrize("average", [by_product, by_lerp, by_foreach, by_shadow, by_mean], ids=lambda f: f.__name__)
def test_an_average_of_state_dicts_raises(average):
    mine, theirs = (make(seed)[0].state_dict() for seed in range(2))
    with pytest.raises(tc.BadInput, check=has(parameter="state_dict")):
        average(mine, theirs)


def test_values_of_a_state_dict_are_copied_compared_and_stored_as_tensors():
    model = make()
    state, file = model.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for found in (torch.load(file, weights_only=True), copy.deepcopy(state), {k: v.cpu().clone() for k, v in state.items()}):
        assert all(type(found[name]) is torch.Tensor and torch.equal(value, found[name]) for name, value in state.items())
    other = make(1)
    for name, value in other.state_dict().items():
        value.copy_(state[name])
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize(
    "settings", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}], ids=["mean", "ema"]
)
def test_an_averaged_model_takes_frozen_rows_only(settings):
    model = make()
    with pytest.raises(tc.BadInput, check=has(parameter="model")):
        AveragedModel(model, **settings).update_parameters(model)
    model.requires_grad_(False)[1].requires_grad_(True)
    averaged = AveragedModel(model, **settings)
    for _ in range(3):
        averaged.update_parameters(model)
    assert torch.equal(averaged(IDS), model(IDS))
    dense = AveragedModel(model[1], **settings)
    dense.update_parameters(model[1])
