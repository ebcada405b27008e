"""Several reads of a module in one backward pass, on a card: the bits of the CPU, without a wait, on any stream, captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thermocline as tc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

ROWS, DIM = 101, 7


def ids_of(seed: int) -> Tensor:
    """Distinct ids, so that a row has one gradient of each lookup: no order of adding can tell the devices apart."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:63]


def table(**keywords: Any) -> tc.Embedding:
    torch.manual_seed(0)
    return tc.Embedding(ROWS, DIM, rows=tc.RowConfig(optimizer=tc.Adagrad(lr=0.1), cache=0.0, **keywords))


def step(module: tc.Embedding, seed: int, reads_weight: bool = False) -> None:
    device, size = module.arena.device, 63 * DIM
    grads = [torch.linspace(-1, last, size).view(63, DIM).to(device) for last in (1.0, 2.0)]
    outs = [module(ids_of(seed + part).to(device)) for part in range(2)]
    if reads_weight:
        outs.append(module.weight[5:50])
        grads.append(torch.linspace(-2, 2, 45 * DIM).view(45, DIM).to(device))
    torch.autograd.backward(outs, grads)
    module.fused_optimizer.step()
    module.fused_optimizer.zero_grad()


@pytest.mark.parametrize("reads_weight", [False, True], ids=["lookups", "weight"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_reads_of_one_pass_train_to_the_bits_of_the_cpu(precision, update, reads_weight):
    here, there = table(precision=precision, update=update), table(precision=precision, update=update).cuda()
    for seed in range(3):
        for module in (here, there):
            step(module, 2 * seed, reads_weight)
    assert there.trainer.clock.tolist() == [0, 3]
    close = {"rtol": 1e-6, "atol": 1e-6} if reads_weight else {"rtol": 0.0, "atol": 0.0}  # three terms in any order
    torch.testing.assert_close(there.weight.detach().cpu(), here.weight.detach(), **close)


def test_two_lookups_of_one_pass_do_not_wait():
    module, given = table().cuda(), [ids_of(part).cuda() for part in range(2)]

    def train() -> None:
        (module(given[0]).sum() + module(given[1]).sum()).backward()

    train()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert module.trainer.clock.tolist() == [0, 2]


def test_lookups_of_other_streams_are_applied_after_their_gradients():
    here, there, stream = table(precision="fp32").cuda(), table(precision="fp32").cuda(), torch.cuda.Stream()
    large = torch.randn(2048, 2048, device="cuda")
    for seed in range(3):
        given = [ids_of(seed + part).cuda() for part in range(2)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy = large @ large @ large  # the gradient of this lookup comes late
            side = there(given[0]) * (1 + 0 * busy[:63, :DIM])
        torch.cuda.current_stream().wait_stream(stream)
        (side.square().sum() + there(given[1]).square().sum()).backward()
        (here(given[0]).square().sum() + here(given[1]).square().sum()).backward()
    torch.testing.assert_close(there.weight.detach(), here.weight.detach())


def test_a_captured_step_with_two_lookups_replays():
    eager, captured = table().cuda(), table().cuda()
    given = [ids_of(part).cuda() for part in range(2)]

    def train(module: tc.Embedding) -> None:
        (module(given[0]).square().sum() + module(given[1]).square().sum()).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for module in (eager, captured):
            for _ in range(3):
                train(module)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(captured)
    for _ in range(3):
        graph.replay()
        train(eager)
    assert torch.equal(captured.weight, eager.weight)
