"""Triton's updates equal the reference bit for bit, given the same sums; update_bags is sums, then update_rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.sum_gradients import gpu as gpu_sums
from thermocline.kernels.update import gpu, reference

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
OPTIMIZERS = range(len(F.OPTIMIZERS))
FORMATS = range(len(F.NAMES))
DIMS = (1, 3, 48, 100, 128, 513)
TABLES = [(31, 4, "int8"), (17, 3, "int4"), (23, 6, "fp16"), (5, 4, "int2"), (12, 4, "int8"), (6, 5, "fp8")]


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.changed(), b.changed(), strict=True))


def _update_rows(module: Any, training: Any, rows_U: Tensor, grads_UW: Tensor, optimizer: int, stochastic: bool) -> None:
    t = training
    flat.update_rows(module, t.codes, t.meta, t.states, t.layout, rows_U, grads_UW, t.hyper, t.clock, optimizer, stochastic)


def _check_rows(
    training: Any, rows_U: Tensor, grads_UW: Tensor, optimizer: int, stochastic: bool, on: On, steps: int = 2
) -> None:
    """The second step starts from the rows, states and clock that the first left."""
    codes, meta = training.codes.clone(), training.meta.clone()
    ours = on(training)
    for scale in (1.0, -0.5)[:steps]:
        _update_rows(gpu, ours, on(rows_U), on(grads_UW * scale), optimizer, stochastic)
        _update_rows(reference, training, rows_U, grads_UW * scale, optimizer, stochastic)
        assert _same(ours, training)
    assert not (torch.equal(codes, training.codes) and torch.equal(meta, training.meta)), "nothing changed"


def _gradients(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_precision_with_every_optimizer(
    format: int, optimizer: int, make_arena: Make, make_training: Make, on: On
) -> None:
    dim = DIMS[(format + optimizer) % 3]
    training = make_training(make_arena([(29, dim, F.NAMES[format])], seed=format), optimizer)
    rows_U = torch.tensor([0, 1, 7, 8, 20, 28])
    _check_rows(training, rows_U, _gradients(6, dim), optimizer, (format + optimizer) % 2 == 1, on)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_precision_and_dimension(format: int, dim: int, make_arena: Make, make_training: Make, on: On) -> None:
    """Optimizers and roundings are dealt out over the cases; row-wise Adagrad, which sums over columns, meets all."""
    arena = make_arena([(9, dim, F.NAMES[format])], seed=dim)
    number = format + DIMS.index(dim)
    for optimizer in {F.ROWWISE_ADAGRAD, number % 4}:
        rows_U, grads_UW = torch.tensor([1, 4, 5]), _gradients(3, dim, seed=format)
        _check_rows(make_training(arena, optimizer, seed=number), rows_U, grads_UW, optimizer, number % 2 == 0, on, steps=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
def test_rows_of_many_tables_at_once(optimizer: int, make_arena: Make, make_training: Make, on: On) -> None:
    arena = make_arena(TABLES)
    rows_U = torch.arange(0, arena.rows, 2)
    grads_UW = _gradients(rows_U.numel(), arena.layout.tables.max_dim)
    _check_rows(make_training(arena, optimizer), rows_U, grads_UW, optimizer, True, on)


def test_rows_in_any_order(make_arena: Make, make_training: Make, on: On) -> None:
    training = make_training(make_arena([(90, 3, "int8")]), F.ADAM)
    rows_U = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:63]
    _check_rows(training, rows_U, _gradients(63, 3), F.ADAM, True, on)


@pytest.mark.parametrize("optimizer", [F.SGD, F.ADAM], ids=["sgd", "adam"])
def test_no_rows_only_advance_the_clock(optimizer: int, make_arena: Make, make_training: Make, on: On) -> None:
    training = make_training(make_arena(TABLES), optimizer)
    ours, none = on(training), torch.zeros(0, dtype=torch.int64)
    _update_rows(gpu, ours, on(none), on(torch.zeros(0, 6)), optimizer, True)
    _update_rows(reference, training, none, torch.zeros(0, 6), optimizer, True)
    assert _same(ours, training)


@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_rows_that_were_not_named_are_not_touched(format: int, make_arena: Make, make_training: Make, on: On) -> None:
    training = make_training(make_arena([(33, 5, F.NAMES[format])]), F.SGD)
    ours = on(training)
    _update_rows(gpu, ours, on(torch.tensor([16])), on(_gradients(1, 5) * 50), F.SGD, True)
    codes, wanted = ours.codes.cpu().view(33, -1), training.codes.view(33, -1)
    others = torch.arange(33) != 16
    assert torch.equal(codes[others], wanted[others]) and not torch.equal(codes[16], wanted[16])


# -- update_bags ------------------------------------------------------------------------------------------------------


def _check_bags(
    arena: Any, training: Any, lookup: Any, mode: int, optimizer: int, stochastic: bool, on: On, dtype: torch.dtype
) -> None:
    out, winners = flat.gather_pool(gather, arena.codes, arena.meta, arena.layout, *lookup, mode, torch.float32)
    grad = _gradients(*out.shape).to(dtype)
    lookup, winners, grad = on(lookup), on(winners), on(grad)
    apart, fused = on(training), on(training)
    rows_U, grads_UW = flat.sum_row_gradients(gpu_sums, apart.layout, *lookup, mode, winners, grad)
    _update_rows(gpu, apart, rows_U, grads_UW, optimizer, stochastic)
    t = fused
    flat.update_bags(
        gpu, t.codes, t.meta, t.states, t.layout, *lookup, mode, winners, grad, t.hyper, t.clock, optimizer, stochastic
    )
    assert _same(fused, apart)
    assert not torch.equal(fused.clock.cpu(), training.clock)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
@pytest.mark.parametrize("mode", range(len(F.MODES)), ids=F.MODES)
def test_updating_bags_is_summing_and_updating_rows(
    mode: int, optimizer: int, make_arena: Make, make_lookup: Make, make_training: Make, on: On
) -> None:
    arena = make_arena(TABLES[:4], [0, 1, 2, 0, 3])
    lookup = make_lookup(arena, None if mode == F.NONE else 4, 3, seed=mode, weighted=mode == F.SUM)
    training = make_training(arena, optimizer)
    dtype = (torch.float32, torch.float16, torch.bfloat16)[(mode + optimizer) % 3]
    _check_bags(arena, training, lookup, mode, optimizer, optimizer % 2 == 0, on, dtype)


@pytest.mark.parametrize("length", [5, 17, 129, 300])
def test_hot_rows_of_bags_are_summed_as_apart(
    length: int, make_arena: Make, make_lookup: Make, make_training: Make, on: On
) -> None:
    """Runs longer than a tile, a span, a chunk and two chunks, from a place between borders on."""
    arena = make_arena([(9, 2, "int8"), (9, 3, "int4")])
    ids = torch.cat([torch.tensor([0, 1, 2]), torch.full((length,), 3), torch.tensor([8, 8])])
    lookup = (ids.repeat(2), torch.arange(2 * ids.numel() + 1), None)
    training = make_training(arena, F.ROWWISE_ADAGRAD)
    _check_bags(arena, training, lookup, F.SUM, F.ROWWISE_ADAGRAD, True, on, torch.float32)


@pytest.mark.parametrize("batch", [0, 1, 63])
def test_bags_without_ids_only_advance_the_clock(
    batch: int, make_arena: Make, make_lookup: Make, make_training: Make, on: On
) -> None:
    arena = make_arena(TABLES)
    _check_bags(arena, make_training(arena, F.ADAM), make_lookup(arena, batch, 0), F.SUM, F.ADAM, True, on, torch.float32)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_bags(data: st.DataObject, make_arena: Make, make_lookup: Make, make_training: Make, on: On) -> None:
    table = st.tuples(st.integers(1, 30), st.integers(1, 5), st.sampled_from(F.NAMES))
    tables = data.draw(st.lists(table, min_size=1, max_size=3), "tables")
    features = data.draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=3), "features")
    mode = data.draw(st.sampled_from(range(len(F.MODES))), "mode")
    optimizer = data.draw(st.sampled_from(OPTIMIZERS), "optimizer")
    batch = None if mode == F.NONE else data.draw(st.sampled_from([0, 1, 5]), "batch")
    arena = make_arena(tables, features)
    lookup = make_lookup(arena, batch, data.draw(st.integers(0, 4), "longest"), seed=data.draw(st.integers(0, 99), "seed"))
    _check_bags(arena, make_training(arena, optimizer), lookup, mode, optimizer, True, on, torch.float32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
def test_rounding_bits_are_drawn_for_the_names_of_rows(optimizer: int, make_arena: Make, make_training: Make, on: On) -> None:
    arena = make_arena(TABLES)
    rows_U = torch.arange(0, arena.rows, 3)
    grads_UW, names_U = _gradients(rows_U.numel(), 6), torch.arange(rows_U.numel()).flip(0) * 5_000_000_017
    wanted = make_training(arena, optimizer)
    ours = on(make_training(arena, optimizer))
    for module, t, move in ((reference, wanted, lambda x: x), (gpu, ours, on)):
        place = (t.codes, t.meta, t.states, t.layout, move(rows_U), move(grads_UW), t.hyper, t.clock)
        flat.update_rows(module, *place, optimizer, True, None, None, move(names_U))
    assert _same(ours, wanted)
