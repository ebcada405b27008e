"""The cells of `matrix.py`: each trains as an eager module does, or raises the error that docs/matrix.md states."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import thermocline as tc
from nn import matrix
from nn.matrix import REFUSALS, Cell, cells, covering, verdict
from support import has
from thermocline.nn import backward_pass

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
ROWS, DIM, STEPS = 31, 8, 4
PRECISION = {
    "fp32": {"precision": "fp32"},
    "int8 with cache": {"precision": "int8", "cache": 0.2},
    "by heat": {"precision": {"fp32": 0.1, "int8": 0.2, "int2": 0.7}},
}
CAPTURES = torch.cuda.is_available()


class Model(nn.Module):
    """Tables and a dense part, which may be wrapped."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Linear(DIM, 3, bias=False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        out = self.tables(ids_BL)
        if not isinstance(out, Tensor):
            out = out["a"] + out["b"]
        return self.top(out.mean(1) if out.dim() == 3 else out).square().mean()


class TwoBags(nn.Module):
    """What a collection of two tables is in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(2))

    def forward(self, ids_BF: Tensor) -> dict[str, Tensor]:
        return {"a": self.a(ids_BF[:, :1]), "b": self.b(ids_BF[:, 1:])}


def make(cell: Cell, device: str = "cpu") -> Model:
    torch.manual_seed(1)
    rows = tc.RowConfig(**PRECISION[cell.precision], optimizer=tc.Adagrad(lr=0.1), update=cell.update, residency=cell.residency)
    if cell.module == "EmbeddingCollection":
        tables = tc.EmbeddingCollection([tc.Table(name, ROWS, DIM) for name in "ab"], rows=rows, device=device)
    else:
        tables = getattr(tc, cell.module)(ROWS, DIM, rows=rows, device=device)
    return Model(tables).to(device)


def twin(model: Model) -> Model:
    """The same model of torch's modules, on the CPU, with the same rows."""
    torch.manual_seed(1)
    tables = model.tables
    if isinstance(tables, tc.EmbeddingCollection):
        plain = TwoBags()
        weights = {f"{name}.weight": tables.read_table(n).cpu() for n, name in enumerate("ab")}
    else:
        plain = nn.EmbeddingBag(ROWS, DIM) if isinstance(tables, tc.EmbeddingBag) else nn.Embedding(ROWS, DIM)
        weights = {"weight": tables.read_table(0).cpu()}
    plain.load_state_dict(weights)
    found = Model(plain)
    found.top.load_state_dict(model.top.state_dict())
    return found


def batches(device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(0, ROWS, (6, 2), generator=draw).to(device) for _ in range(STEPS)]


def rows_optimizer(model: Model) -> torch.optim.Optimizer:
    plain = not isinstance(model.tables, tc.nn.rows_module.RowsModule)
    return torch.optim.Adagrad(model.tables.parameters(), lr=0.1) if plain else tc.fused_optimizer(model)


def steps(model: Model, call: Callable[[Tensor], Tensor], use: str, given: list[Tensor]) -> None:
    """Train on batches."""
    dense, rows = torch.optim.SGD(model.top.parameters(), lr=0.1), rows_optimizer(model)
    kind = given[0].device.type
    scaler = torch.amp.GradScaler(kind, init_scale=8.0, enabled=use == "GradScaler")
    for ids_BL in given:
        parts = ids_BL.chunk(2) if use == "accumulation" else [ids_BL]
        for part in parts:
            with torch.autocast(kind, torch.bfloat16, enabled=use == "GradScaler"):
                loss = call(part) / len(parts)
            scaler.scale(loss).backward()
        if use == "GradScaler":
            scaler.unscale_(dense), scaler.unscale_(rows)
        if use == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(dense), scaler.step(rows)
        scaler.update()
        dense.zero_grad(), rows.zero_grad()


def renewed(model: Model, cell: Cell, device: str) -> Model:
    """A model to continue with."""
    if cell.use == "deepcopy":
        return copy.deepcopy(model)
    if cell.use == "pickle":
        return pickle.loads(pickle.dumps(model))
    if cell.use == "resume":
        file, other = io.BytesIO(), make(cell, device)
        torch.save(model.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
        return other
    return model


def captured(model: Model, cell: Cell) -> Callable[[list[Tensor]], None]:
    """Train by replays of a captured step. Two batches warm up, as a capture needs it."""

    def run(given: list[Tensor]) -> None:
        static, aside = given[0].clone(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            steps(model, model, cell.use, given[:1])
        torch.cuda.current_stream().wait_stream(aside)
        gc.collect()  # a graph of an earlier test that is destroyed during a capture would end it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps(model, model, cell.use, [static])
        for ids_BL in given[1:]:
            static.copy_(ids_BL)
            graph.replay()

    return run


@contextmanager
def two_ranks() -> Iterator[None]:
    """One of two ranks, without the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(cell: Cell, device: str, backend: str = "aot_eager") -> Model:
    """Train a cell, and return its model."""
    torch._dynamo.reset()

    def trained(model: Model, given: list[Tensor]) -> None:
        if cell.run == "CUDA graph":
            captured(model, cell)(given)
        else:
            whole = verdict(cell) != "ranks"  # torch's wrappers break the graph
            call = torch.compile(model, backend=backend, fullgraph=whole) if cell.run == "torch.compile" else model
            steps(model, call, cell.use, given)

    model, given = make(cell, device), batches(device)
    if cell.use in ("resume", "deepcopy", "pickle"):
        trained(model, given[: STEPS // 2])
        model = renewed(model, cell, device)
        trained(model, given[STEPS // 2 :])
    elif verdict(cell) == "ranks":
        with two_ranks(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrap = fully_shard if cell.use.startswith("FSDP2") else nn.parallel.DistributedDataParallel
            model.top = wrap(model.top)
            trained(model, given)
    else:
        trained(model, given)
    return model


@functools.cache
def reference(module: str, precision: str, update: str, use: str, device: str) -> dict[str, Tensor]:
    """The state of an eager module on the device; torch's own modules agree, where rows are fp32."""
    use = use if verdict(Cell(module, precision, "device", update, "eager", use)) is None else "single step"
    plainly = use if use in REFUSALS else "single step"
    cell = Cell(module, precision, "device", update, "eager", plainly)
    plain = twin(make(cell, device))  # a GPU draws other initial rows than the CPU
    model = train(cell, device)
    if precision == "fp32":
        steps(plain, plain, plainly, batches())
        for (name, mine), theirs in zip(dense_rows(model).items(), plain.tables.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)
    return model.state_dict()


def dense_rows(model: Model) -> dict[str, Tensor]:
    return {table.name: model.tables.read_table(n).cpu() for n, table in enumerate(model.tables.arena.tables)}


def check(cell: Cell) -> None:
    device = "cuda" if cell.run == "CUDA graph" else "cpu"
    refused = verdict(cell)
    if refused is not None:
        error = REFUSALS[refused]
        with pytest.raises(tc.BadInput, check=has(parameter=error.parameter)) as caught:
            train(cell, device, backend="eager")
        assert error.value is None or caught.value.value == error.value
        return
    found = train(cell, device).state_dict()
    wanted = reference(cell.module, cell.precision, cell.update, cell.use, device)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        if name.endswith("cache_steps") and cell.run == "CUDA graph":
            continue  # a count of the host, which takes no part in replays
        if name.startswith("top") and cell.run != "eager":
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(value.cpu(), wanted[name].cpu()), name


def name_of(cell: Cell) -> str:
    return ", ".join(cell)


EVERY = list(cells())
ON_GPU = [cell for cell in EVERY if cell.run == "CUDA graph"]
WORKING = [cell for cell in EVERY if verdict(cell) is None and cell.run != "CUDA graph"]
REFUSED = [cell for cell in EVERY if verdict(cell) is not None and cell.run != "CUDA graph"]
# a compiled model takes seconds to refuse: each way once
USUAL = [*covering(WORKING), *(cell for cell in REFUSED if cell.run == "eager")]
USUAL += covering([cell for cell in REFUSED if cell.run != "eager"])
OTHERS = [cell for cell in [*WORKING, *REFUSED] if cell not in USUAL]


@pytest.mark.parametrize("cell", USUAL, ids=name_of)
def test_a_cell_works_or_is_refused(cell: Cell) -> None:
    check(cell)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", OTHERS, ids=name_of)
def test_every_other_cell_works_or_is_refused(cell: Cell) -> None:
    check(cell)


@pytest.mark.gpu
@pytest.mark.skipif(not CAPTURES, reason="needs a GPU")
@pytest.mark.parametrize("cell", ON_GPU, ids=name_of)
def test_a_captured_cell_works_or_is_refused(cell: Cell) -> None:
    check(cell)


def test_every_pair_of_values_is_run() -> None:
    def pairs(some: list[Cell]) -> set[Any]:
        return {(a, cell[a], b, cell[b]) for cell in some for a in range(6) for b in range(a)}

    assert pairs(USUAL) == pairs([*WORKING, *REFUSED])
    assert {*USUAL, *OTHERS, *ON_GPU} == set(EVERY)


def test_the_page_is_current() -> None:
    """`python tests/nn/matrix.py > docs/matrix.md` renews it."""
    assert PAGE.read_text() == matrix.page()


def test_what_waits_for_the_gpu_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[1, 2]])
    step, padded = tc.Embedding(9, 4, rows=tc.RowConfig(update="step")), tc.Embedding(9, 4, padding_idx=1)
    out, weight = step(ids), tc.Embedding(9, 4).weight
    monkeypatch.setattr(backward_pass, "is_captured", lambda device: True)
    for run, parameter in [(lambda: out.sum().backward(), "update"), (lambda: padded(ids), "padding_idx")]:
        with pytest.raises(tc.BadInput, check=has(parameter=parameter, tool="torch.cuda.graph")):
            run()
    with pytest.raises(tc.BadInput, check=has(parameter="weight", tool="torch.cuda.graph")):
        weight.sum().backward()
