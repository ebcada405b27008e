"""torch's default dtype does not reach rows, kernels or answers: same bits as under fp32 defaults, and no buffer without dtype.

A buffer of another type is shorter than a compiled kernel assumes, which corrupted the heap.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import thermocline as tc
from support import has
from thermocline import formats as F
from thermocline.kernels import dispatch, quantize_rows
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.cpu.compile import addresses
from thermocline.kernels.exchange import cpu as exchange_cpu
from thermocline.kernels.exchange import reference as exchange_reference
from thermocline.kernels.gather import gpu as gather_gpu
from thermocline.kernels.gather import reference as gather_reference
from thermocline.kernels.quantize import gpu as quantize_gpu
from thermocline.kernels.quantize import reference as quantize_reference
from thermocline.kernels.sum_gradients import gpu as sum_gpu
from thermocline.kernels.sum_gradients import reference as sum_reference
from thermocline.rows.training import check_rounding
from thermocline.serve.tables.shard_group import ShardGroup

PACKAGE = Path(tc.__file__).parent
FOLDERS = ("kernels", "rows", "nn", "serve", "distributed", "checkpoint")
MAKERS = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "tensor"}
DEFAULTS = [torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=DEFAULTS, ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Another default dtype, for one test."""
    torch.set_default_dtype(request.param)
    try:
        yield request.param
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("defaults") / "saved"
    tables = [tc.Table("a", 101, 8), tc.Table("b", 57, 6, row_config=tc.RowConfig("int4"))]
    module = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=0.1))
    module(torch.randint(57, (63, 2))).values().square().mean().backward()
    tc.save(module, folder)
    return folder


@pytest.fixture(scope="module")
def group(saved: Path) -> Iterator[ShardGroup]:
    with ShardGroup(saved, shards=2, name="defaults") as group:
        yield group


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))


def ids_of(*shape: int, below: int = 97) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(5))


# -- kernels and rows -------------------------------------------------------------------------------------------------


def quantized(module: Any) -> list[Tensor]:
    found = []
    for format in range(len(F.NAMES)):
        codes_NB, meta_NW = module.quantize_rows(normal(7, 33), format, torch.tensor([3, 1]), torch.arange(7))
        found += [codes_NB, meta_NW, module.dequantize_rows(codes_NB, meta_NW, format, 33)]
    return found


def looked_up(gather: Any, sums: Any, modes: Sequence[int] = range(len(F.MODES))) -> list[Tensor]:
    arena = tc.Arena([tc.TableSpec(97, 6, "int8", "a"), tc.TableSpec(97, 9, "int4", "b")], slots=[5, 5])
    for table, dim in enumerate((6, 9)):
        arena.write(table, torch.arange(97), normal(97, dim, seed=table))
    ids_N, offsets, found = ids_of(63), torch.tensor([0, 20, 31, 40, 63]), []
    for mode in modes:
        bags = torch.tensor([0, 31, 63]) if mode == F.NONE else offsets
        call = LookupCall(ids_N, bags, normal(63) if mode == F.SUM else None, mode)
        out, winners = gather.gather_pool(arena.arrays, call)
        grad = torch.full_like(out, 3)
        found += [out, winners, *sums.sum_row_gradients(arena.layout, call, winners, grad)]
        if mode == F.SUM:
            found.append(gather.weight_gradient(arena.arrays, call, grad))
    return found


def trained_rows() -> list[Tensor]:
    found = []
    for optimizer in (tc.SGD(lr=0.1), tc.Adagrad(lr=0.1), tc.RowwiseAdagrad(lr=0.1), tc.Adam(lr=0.1)):
        check_rounding.cache_clear()
        arena = tc.Arena([tc.TableSpec(97, 6, "int8", "a"), tc.TableSpec(97, 6, "int2", "b")], slots=[5, 5], int8_slots=[0, 3])
        arena.randomize_(0.5, torch.Generator().manual_seed(1))
        trainer = tc.Trainer(arena, optimizer)
        for _ in range(3):
            tc.lookup(arena, ids_of(126), torch.arange(0, 127, 21), mode="mean", trainer=trainer).square().sum().backward()
        found += [arena.codes, arena.meta, *arena.cache, *trainer.states, arena.read(1, torch.arange(97))]
    return found


def exchanged(module: Any) -> list[Tensor]:
    fields_KF = torch.tensor([[5 + 4, 1, 0, 0, 0, 5, F.INT8, 4], [9, 1, 0, 0, 0, 9, F.INT8, 2]])
    part_N = ids_of(63, below=2)
    message = module.pack_gradients(normal(63, 9), fields_KF, part_N, torch.arange(63))
    return [message, module.unpack_gradients(message, fields_KF, part_N, 9), *module.distinct_rows(ids_of(63), 97)]


RUNS: Mapping[str, Callable[[], list[Tensor]]] = {
    "quantize": lambda: quantized(dispatch),
    "quantize reference": lambda: quantized(quantize_reference),
    "quantize gpu": lambda: quantized(quantize_gpu),
    "lookup": lambda: looked_up(dispatch, dispatch),
    "lookup reference": lambda: looked_up(gather_reference, sum_reference),
    "lookup gpu": lambda: looked_up(gather_gpu, sum_gpu, [F.SUM]),
    "training": trained_rows,
    "exchange": lambda: exchanged(exchange_cpu),
    "exchange reference": lambda: exchanged(exchange_reference),
}


@cache
def under_fp32(name: str) -> list[Tensor]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return RUNS[name]()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", RUNS)
def test_kernels_and_rows_give_the_same_bits(name: str, default: torch.dtype) -> None:
    if name.endswith("gpu") and torch.cuda.is_available():
        pytest.skip("these arrays are on the CPU, for Triton's interpreter")
    wanted = under_fp32(name)
    for got, expected in zip(RUNS[name](), wanted, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)


# -- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("optimizer", [tc.Adagrad(lr=0.1), tc.RowwiseAdagrad(lr=0.1)], ids=["adagrad", "rowwise"])
def test_modules_learn_the_same_bits(precision: str, update: str, optimizer: Any, default: torch.dtype) -> None:
    learned = []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        rows = tc.RowConfig(precision, optimizer=optimizer, update=update)
        bag = tc.EmbeddingBag(97, 6, mode="mean", padding_idx=3, rows=rows, dtype=torch.float32)
        bag.set_rows(torch.arange(97), normal(97, 6))
        for _ in range(3):
            (bag(ids_of(21, 3)) * normal(21, 6)).sum().backward()
            bag.fused_optimizer.step()
            bag.fused_optimizer.zero_grad()
        learned.append((bag.get_rows(torch.arange(97)), bag.weight[:]))
    for wanted, got in zip(*learned, strict=True):
        assert got.dtype == torch.float32 and torch.equal(wanted, got)


def test_a_module_built_before_the_default_changes_keeps_its_types() -> None:
    bag = tc.EmbeddingBag(1000, 16, mode="sum")
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(20):
            assert bag.get_rows(torch.arange(200)).dtype == bag.weight.dtype == torch.float32
        assert bag(ids_of(21, 3)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_outputs_follow_the_default_at_construction_as_in_torch(default: torch.dtype) -> None:
    modules = [tc.Embedding(97, 6), tc.EmbeddingCollection([tc.Table("a", 97, 6)]), torch.nn.Embedding(97, 6)]
    outputs = [modules[0](ids_of(5)), modules[1](ids_of(5, 1)).values(), modules[2](ids_of(5))]
    assert [out.dtype for out in outputs] == [default] * 3
    torch.nn.Linear(6, 2)(outputs[0]).sum().backward()
    assert (modules[0].weight.dtype, modules[0].get_rows(ids_of(5)).dtype) == (default, torch.float32)


# -- checkpoints and serving ------------------------------------------------------------------------------------------


def test_checkpoints_give_the_same_rows(saved: Path, default: torch.dtype, tmp_path: Path) -> None:
    tc.save(tc.load(saved), tmp_path / "again")
    loaded = [tc.load(folder) for folder in (saved, tmp_path / "again")]
    torch.set_default_dtype(torch.float32)
    wanted = tc.load(saved)
    for name, rows in (("a", 101), ("b", 57)):
        for module in loaded:
            assert torch.equal(module.get_rows(name, torch.arange(rows)), wanted.get_rows(name, torch.arange(rows)))


def test_serving_gives_the_same_answers(saved: Path, group: ShardGroup, default: torch.dtype) -> None:
    ids_BF = torch.arange(57)[:, None].expand(57, 2)
    answer, frozen = group.lookup({"a": np.arange(57), "b": np.arange(57)}), group.module()(ids_BF)
    torch.set_default_dtype(torch.float32)
    module = tc.load(saved)
    module.flush()  # cached rows are served rounded
    wanted = module(ids_BF).values()
    assert frozen.dtype == torch.float32 and torch.equal(frozen, wanted)
    for name, columns in (("a", slice(0, 8)), ("b", slice(8, 14))):
        assert answer[name].dtype == torch.float32 and torch.equal(answer[name], wanted[:, columns])


# -- kernels refuse other arrays --------------------------------------------------------------------------------------


def test_kernels_take_contiguous_arrays_of_their_type_only() -> None:
    assert addresses("qf", torch.arange(3), None)[1] == 0
    for wrong in (torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float32).T, np.zeros(3)):
        with pytest.raises(tc.BadInput, check=has(parameter="array", needed=torch.float32)):
            addresses("f", wrong)


@pytest.mark.parametrize(
    "field, change, parameter",
    [
        ("codes", lambda codes: codes[:-64].clone(), "codes"),
        ("codes", lambda codes: codes.repeat_interleave(2)[::2], "codes"),
        ("meta", lambda meta: meta.long(), "meta words"),
        ("values", lambda values: values.bfloat16(), "cached values"),
        ("values", lambda values: values[:-1].clone(), "cached values"),
        ("near", lambda near: near.float(), "int8 slots"),
        ("states", lambda state: state.double(), "optimizer state"),
        ("states", lambda state: state[:-1].clone(), "optimizer state"),
        ("hyper", lambda hyper: hyper.float(), "hyperparameters"),
        ("clock", lambda clock: clock.int(), "clock"),
    ],
)
def test_arrays_of_another_type_or_length_are_refused(field: str, change: Any, parameter: str) -> None:
    arena = tc.Arena([tc.TableSpec(97, 64, "int8", "a")], slots=[5])
    optimizer, rows = tc.Trainer(arena, tc.RowwiseAdagrad(lr=0.1)).arrays, arena.arrays
    if field in rows._fields:
        rows = rows._replace(**{field: change(getattr(rows, field))})
    elif field in optimizer._fields:
        held: Any = getattr(optimizer, field)
        optimizer = optimizer._replace(**{field: [change(held[0])] if field == "states" else change(held)})
    else:
        assert rows.cache is not None
        rows = rows._replace(cache=rows.cache._replace(**{field: change(getattr(rows.cache, field))}))
    with pytest.raises(tc.BadInput, check=has(parameter=parameter)):
        dispatch.update_rows(rows, optimizer, torch.arange(3), normal(3, 64))


def test_codes_and_winners_of_another_type_are_refused() -> None:
    codes_NB, meta_NW = quantize_rows(normal(5, 6), F.INT8)
    for codes, meta in ((codes_NB.int(), meta_NW), (codes_NB[:, 1:], meta_NW), (codes_NB, meta_NW[:3])):
        with pytest.raises(tc.BadInput, check=has(parameter="codes")):
            dispatch.dequantize_rows(codes, meta, F.INT8, 6)
    arena = tc.Arena([tc.TableSpec(97, 6, "fp32", "a")])
    call = LookupCall(ids_of(5), torch.tensor([0, 2, 5]), None, F.MAX)
    for winners in (torch.zeros(2, 6, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)):
        with pytest.raises(tc.BadInput, check=has(parameter="winners")):
            dispatch.sum_row_gradients(arena.layout, call, winners, normal(2, 6))


# -- lint -------------------------------------------------------------------------------------------------------------


def untyped(source: str) -> list[int]:
    """Lines that make a tensor without `dtype=`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if ast.unparse(call.func) in {f"torch.{name}" for name in MAKERS} and "dtype" not in {k.arg for k in call.keywords}
    ]


def test_every_buffer_states_its_dtype() -> None:
    files = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
    found = [f"{path.relative_to(PACKAGE)}:{line}" for path in files for line in untyped(path.read_text())]
    assert len(files) > 100 and not found


def test_the_lint_finds_a_planted_buffer() -> None:
    assert untyped("a = torch.empty(3)\nb = torch.full((2,), 1.0, device=d)\nc = torch.zeros(3, dtype=torch.int64)") == [1, 2]
