"""The modules on a card: moved there, trained there, the same bits as on the CPU, and no wait on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

MAKE = [
    pytest.param(lambda **k: tc.EmbeddingBag(101, 7, mode="sum", **k), id="bag"),
    pytest.param(lambda **k: tc.EmbeddingBag(101, 7, mode="max", padding_idx=3, **k), id="max with padding"),
    pytest.param(lambda **k: tc.Embedding(101, 7, **k), id="embedding"),
    pytest.param(lambda **k: tc.EmbeddingCollection([tc.Table(n, 101, 7) for n in "abc"], **k), id="collection"),
]


def ids_of(seed: int) -> Tensor:
    """Distinct ids, so that no order of adding can tell the devices apart."""
    return torch.randperm(101, generator=torch.Generator().manual_seed(seed))[:99].view(33, 3)


def step(module: Any, ids: Tensor) -> None:
    out = module(ids)
    out = out if isinstance(out, Tensor) else out.values()
    out.backward(torch.linspace(-1, 1, out.numel(), device="cpu").view_as(out).to(out.device))
    module.fused_optimizer.step()
    module.fused_optimizer.zero_grad()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_module_moved_to_a_card_trains_to_the_bits_of_the_cpu(make, update, precision):
    torch.manual_seed(0)
    here = make(update=update, precision=precision, cache=0)
    there = make(update=update, precision=precision, cache=0)
    there.load_state_dict(here.state_dict())
    assert there.to("cuda") is there and there.arena.codes.is_cuda and there.trainer.states[0].is_cuda
    for seed in range(3):
        for module, device in ((here, "cpu"), (there, "cuda")):
            module.fused_optimizer.param_groups[0]["lr"] = 0.1 / (seed + 1)
            step(module, ids_of(seed).to(device))
    back = there.cpu().state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in here.state_dict().items())


def test_a_step_on_a_card_with_a_new_rate_does_not_wait():
    module = tc.EmbeddingBag(101, 7, mode="sum", device="cuda", cache=0)
    ids = ids_of(0).cuda()

    def step_once() -> None:
        module(ids).sum().backward()

    step_once()
    module.fused_optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.fused_optimizer.param_groups[0]["lr"] = 0.3
        step_once()
        module.fused_optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_converted_model_stays_on_its_card():
    model = nn.Sequential(nn.EmbeddingBag(101, 7), nn.Linear(7, 2)).cuda()
    tc.convert_(model)
    assert model[0].arena.codes.is_cuda
    model(ids_of(0).cuda()).sum().backward()


def test_near_slots_are_refused_by_name() -> None:
    module = tc.Embedding(101, 7, precision={"fp32": 0.1, "int8": 0.2, "int2": 0.7}, device="cuda")
    with pytest.raises(tc.BadInput, match="on CPUs only so far"):
        module(torch.zeros(3, dtype=torch.int64, device="cuda"))
