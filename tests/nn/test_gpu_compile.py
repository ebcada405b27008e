"""torch.compile on a GPU: CUDA graphs of the dense part around lookups and updates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids_BL: Tensor) -> Tensor:
        out = self.tables(ids_BL)
        out = out if isinstance(out, Tensor) else out.values()
        return self.top(out.reshape(-1, 8)).square().mean()


def make(kind: str, rows: tc.RowConfig) -> Model:
    torch.manual_seed(3)
    if kind == "EmbeddingCollection":
        tables: nn.Module = tc.EmbeddingCollection([tc.Table("a", 1000, 4), tc.Table("b", 500, 4)], rows=rows, device="cuda")
    else:
        tables = getattr(tc, kind)(500, 8, padding_idx=3, rows=rows, device="cuda")
    return Model(tables).cuda()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("kind", ["EmbeddingBag", "Embedding", "EmbeddingCollection"])
def test_a_compiled_model_trains_as_an_eager_one(kind, precision, update, mode):
    torch._dynamo.reset()
    eager = make(kind, tc.RowConfig(precision, optimizer=tc.Adagrad(lr=0.1), update=update))
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, mode=mode, fullgraph=True)
    for step in range(8):
        ids = torch.randint(0, 500, (64 if step < 5 else 32, 2), generator=torch.Generator().manual_seed(step)).cuda()
        for model, call in ((eager, eager), (compiled, run)):
            torch.compiler.cudagraph_mark_step_begin()
            optimizers = [torch.optim.SGD(model.top.parameters(), lr=0.1), tc.fused_optimizer(model)]
            call(ids).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    tc.synchronize(compiled.tables.arena)
    assert compiled.tables.trainer.clock.tolist() == eager.tables.trainer.clock.tolist() == [0, 8]
    tolerance = 1e-4 if precision == "fp32" else 0.1  # a rounding that differs is a step of int8
    for table in range(len(eager.tables.arena.tables)):
        rows = [model.tables.read_table(table) for model in (eager, compiled)]
        torch.testing.assert_close(*rows, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_predicts_as_an_eager_one(mode):
    torch._dynamo.reset()
    model = make("EmbeddingCollection", tc.RowConfig()).eval()
    run = torch.compile(model, mode=mode, fullgraph=True)
    with torch.no_grad():
        for seed in range(6):
            ids = torch.randint(0, 500, (64, 2), generator=torch.Generator().manual_seed(seed)).cuda()
            torch.testing.assert_close(run(ids), model(ids))
