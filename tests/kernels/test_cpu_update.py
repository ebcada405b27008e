"""Updates on the CPU: the bits of the reference, from summed gradients and from bags."""

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
from thermocline.errors import BadGradient, BadInput, IdOutOfRange
from thermocline.kernels.cpu.sort import sort_lookups
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.sum_gradients import reference as sums
from thermocline.kernels.update import cpu, reference
from thermocline.rows.arena import Arena

pytestmark = pytest.mark.usefixtures("poisoned_scratch")

Make = Callable[..., Any]
TABLE = st.tuples(st.sampled_from([1, 2, 70, 3000]), st.integers(1, 300), st.sampled_from(F.NAMES))
MODES = range(len(F.MODES))
OPTIMIZERS = range(len(F.OPTIMIZERS))
FORMATS = range(len(F.NAMES))
TABLES = [(31, 8, "int8"), (17, 3, "int4"), (2000, 20, "fp16"), (5, 200, "int2"), (1, 64, "int8"), (40, 128, "fp32")]
FEATURES = [0, 1, 2, 0, 3, 4, 2, 5]


def _gradient(arena: Arena, lookup: Any, mode: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(winners, a gradient of the output)."""
    out, winners = flat.gather_pool(gather, arena.codes, arena.meta, arena.layout, *lookup, mode, torch.float32)
    return winners, torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))


def _equal(got: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got.changed(), wanted.changed(), strict=True))


def _check(arena: Arena, lookup: Any, mode: int, optimizer: int, stochastic: bool, make_training: Make) -> None:
    """Reference, update_rows and update_bags from the same start end in the same bits."""
    winners, grad = _gradient(arena, lookup, mode)
    rows_U, grads_UW = flat.sum_row_gradients(sums, arena.layout, *lookup, mode, winners, grad)
    wanted, by_row, by_bag = (make_training(arena, optimizer) for _ in range(3))
    for module, made in ((reference, wanted), (cpu, by_row)):
        place = (made.codes, made.meta, made.states, made.layout)
        flat.update_rows(module, *place, rows_U, grads_UW, made.hyper, made.clock, optimizer, stochastic)
    place = (by_bag.codes, by_bag.meta, by_bag.states, by_bag.layout)
    flat.update_bags(cpu, *place, *lookup, mode, winners, grad, by_bag.hyper, by_bag.clock, optimizer, stochastic)
    assert _equal(by_row, wanted)
    assert _equal(by_bag, wanted)


def test_the_clock_advances_as_in_the_reference(make_arena: Make, make_training: Make) -> None:
    one, other = (make_training(make_arena([(3, 4, "fp32")]), F.ADAM) for _ in range(2))
    cpu.advance(one.clock, one.hyper)
    reference.advance(other.clock, other.hyper)
    assert _equal(one, other)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_format_and_optimizer(
    format: int, optimizer: int, stochastic: bool, make_arena: Make, make_lookup: Make, make_training: Make
) -> None:
    for dim in (1, 3, 48, 100, 128, 513):
        arena = make_arena([(41, dim, F.NAMES[format])], seed=dim)
        _check(arena, make_lookup(arena, 13, 4), F.SUM, optimizer, stochastic, make_training)


@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
def test_many_tables_in_every_mode(optimizer: int, mode: int, make_arena: Make, make_lookup: Make, make_training: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    for batch, longest in ((1, 0), (2, 3), (63, 6), (300, 12)):
        lookup = make_lookup(arena, None if mode == F.NONE else batch, longest, seed=batch, weighted=mode == F.SUM)
        _check(arena, lookup, mode, optimizer, True, make_training)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    tables=st.lists(TABLE, min_size=1, max_size=4),
    batch=st.sampled_from([0, 1, 63]),
    longest=st.integers(0, 20),
    mode=st.sampled_from(MODES),
    optimizer=st.sampled_from(OPTIMIZERS),
    stochastic=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_batch(
    tables: Any, batch: int, longest: int, mode: int, optimizer: int, stochastic: bool, seed: int,
    make_arena: Make, make_lookup: Make, make_training: Make,
) -> None:  # fmt: skip
    arena = make_arena(tables, [*range(len(tables)), 0], seed=seed)
    lookup = make_lookup(arena, None if mode == F.NONE else batch, longest, seed=seed)
    _check(arena, lookup, mode, optimizer, stochastic, make_training)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_skewed_ids_do_not_change_a_bit(
    threads: int, make_arena: Make, make_lookup: Make, make_training: Make
) -> None:
    arena = make_arena([(20_000, 20, "int8")])  # one table: its rows are shared between threads
    ids, offsets, _ = make_lookup(arena, 3000, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for skewed in (ids, torch.where(ids % 3 > 0, 7, ids), torch.full_like(ids, 19_999)):
            _check(arena, (skewed, offsets, None), F.SUM, F.ROWWISE_ADAGRAD, True, make_training)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_gradients_are_summed_in_fp32(
    dtype: torch.dtype, make_arena: Make, make_lookup: Make, make_training: Make
) -> None:
    arena = make_arena(TABLES, FEATURES)
    for longest in (2, 12):  # gradients stay where they are, or are packed by feature
        lookup = make_lookup(arena, 30, longest, full=True)
        winners, grad = _gradient(arena, lookup, F.SUM)
        one, other = (make_training(arena, F.SGD) for _ in range(2))
        for made, given_grad in ((one, grad.to(dtype)), (other, grad.to(dtype).float())):
            place = (made.codes, made.meta, made.states, made.layout)
            flat.update_bags(cpu, *place, *lookup, F.SUM, winners, given_grad, made.hyper, made.clock, F.SGD, True)
        assert _equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode, longest", [(F.NONE, 3), (F.SUM, 2), (F.SUM, 12)])
def test_the_gradient_of_one_feature_is_not_copied(dtype, mode, longest, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena([(300, 40, "int8")])
    ids, offsets, _ = make_lookup(arena, None if mode == F.NONE else 30, longest)
    grad = torch.zeros(len(ids) if mode == F.NONE else 30, 40, dtype=dtype)
    _, read = sort_lookups(arena.layout, ids, offsets, None, mode, grad)
    assert read.data_ptr() == grad.data_ptr() and read.dtype == dtype


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_spares_its_row_and_is_told(
    poison: float, optimizer: int, make_arena: Make, make_training: Make
) -> None:
    arena = make_arena([(9, 20, "int8"), (9, 70, "int4"), (9, 5, "fp32")])
    lookup = (torch.tensor([3, 5, 4, 5, 8, 2]), torch.tensor([0, 1, 2, 3, 4, 5, 6]), None)
    winners, grad = _gradient(arena, lookup, F.SUM)
    clean = make_training(arena, optimizer)
    place = (clean.codes, clean.meta, clean.states, clean.layout)
    flat.update_bags(cpu, *place, *lookup, F.SUM, winners, grad, clean.hyper, clean.clock, optimizer, True)
    grad[1, 7] = grad[0, 90 + 2] = poison  # arena rows of table 0 and 2; tables lie by dimension
    refused = {arena.layout.tables.features[0][F.ROW] + 5, arena.layout.tables.features[2][F.ROW] + 8}
    spoilt = make_training(arena, optimizer)
    before = [t.clone() for t in spoilt.changed()]
    place = (spoilt.codes, spoilt.meta, spoilt.states, spoilt.layout)
    with pytest.raises(BadGradient) as error:
        flat.update_bags(cpu, *place, *lookup, F.SUM, winners, grad, spoilt.hyper, spoilt.clock, optimizer, True)
    assert error.value.row == min(refused) and error.value.step == int(spoilt.clock[F.STEP])
    rows_U, grads_UW = flat.sum_row_gradients(sums, arena.layout, *lookup, F.SUM, winners, grad)
    wanted = make_training(arena, optimizer)
    place = (wanted.codes, wanted.meta, wanted.states, wanted.layout)
    with pytest.raises(BadGradient) as error:
        flat.update_rows(reference, *place, rows_U, grads_UW, wanted.hyper, wanted.clock, optimizer, True)
    assert error.value.row == min(refused)
    assert _equal(spoilt, wanted)
    assert not _equal(spoilt, clean) and not all(map(torch.equal, before, spoilt.changed()))


@pytest.mark.parametrize("optimizer", [F.ADAGRAD, F.ROWWISE_ADAGRAD, F.ADAM], ids=lambda o: F.OPTIMIZERS[o])
@pytest.mark.parametrize("dim", [1, 20, 64, 130])
def test_a_gradient_whose_square_overflows_spares_its_row(
    dim: int, optimizer: int, make_arena: Make, make_training: Make
) -> None:
    arena = make_arena([(9, dim, "int8")])
    rows_U, grads_UW = torch.tensor([2, 5, 7]), torch.ones(3, dim)
    grads_UW[1, dim // 2] = 2e22  # its square is infinite: the step would be zero and so would all later ones
    both = [make_training(arena, optimizer) for _ in range(2)]
    for module, made in zip((reference, cpu), both, strict=True):
        place = (made.codes, made.meta, made.states, made.layout)
        with pytest.raises(BadGradient) as error:
            flat.update_rows(module, *place, rows_U, grads_UW, made.hyper, made.clock, optimizer, True)
        assert error.value.row == 5
    assert _equal(*both)
    per_row = 1 if optimizer == F.ROWWISE_ADAGRAD else dim
    for new, old in zip(both[1].states, make_training(arena, optimizer).states, strict=True):
        kept_R = (new.view(9, per_row) == old.view(9, per_row)).all(1)
        assert kept_R.tolist() == [row not in (2, 7) for row in range(9)]


@pytest.mark.parametrize("broken", ["id", "offsets"])
def test_bad_input_leaves_everything_unwritten(broken: str, make_arena: Make, make_lookup: Make, make_training: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    ids, offsets, _ = make_lookup(arena, 100, 4, full=True)
    winners, grad = _gradient(arena, (ids, offsets, None), F.SUM)
    training = make_training(arena, F.ADAM)
    before = [t.clone() for t in training.changed()]
    position = int(offsets[300]) + 2
    if broken == "id":
        ids[position] = 31
    else:
        offsets[777] = offsets[776] - 1
    place = (training.codes, training.meta, training.states, training.layout)
    with pytest.raises(BadInput) as error:
        flat.update_bags(cpu, *place, ids, offsets, None, F.SUM, winners, grad, training.hyper, training.clock, F.ADAM, True)
    if broken == "id":
        assert isinstance(error.value, IdOutOfRange)
        assert (error.value.feature, error.value.position, error.value.rows) == (3, position, 31)
    assert all(map(torch.equal, before, training.changed()))


def test_rows_of_no_table_are_passed_over(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(9, 4, "int8")])
    training = make_training(arena, F.SGD)
    place = (training.codes, training.meta, training.states, training.layout)
    flat.update_rows(cpu, *place, torch.tensor([9, 100, -1]), torch.ones(3, 4), training.hyper, training.clock, F.SGD, False)
    assert torch.equal(training.codes, arena.codes) and torch.equal(training.meta, arena.meta)


def test_rounding_bits_are_drawn_for_the_names_of_rows(make_arena: Make, make_training: Make) -> None:
    for optimizer in OPTIMIZERS:
        arena = make_arena(TABLES, FEATURES)
        rows_U = torch.arange(0, arena.rows, 2)
        grads_UW = torch.randn(rows_U.numel(), 200, generator=torch.Generator().manual_seed(7))
        names_U = torch.arange(rows_U.numel()).flip(0) * 5_000_000_017
        wanted, named, plain = (make_training(arena, optimizer) for _ in range(3))
        for module, made, names in ((reference, wanted, names_U), (cpu, named, names_U), (cpu, plain, None)):
            place = (made.codes, made.meta, made.states, made.layout, rows_U, grads_UW, made.hyper, made.clock)
            flat.update_rows(module, *place, optimizer, True, None, None, names)
        assert _equal(named, wanted) and not _equal(named, plain)
        assert all(torch.equal(a, b) for a, b in zip(named.states, plain.states, strict=True))


def test_a_refused_row_is_reported_by_its_name(make_arena: Make, make_training: Make) -> None:
    training = make_training(make_arena([(9, 4, "int8")]), F.SGD)
    grads_UW = torch.tensor([[1.0] * 4, [float("nan")] * 4])
    for module in (cpu, reference):
        with pytest.raises(BadGradient) as caught:
            place = (training.codes, training.meta, training.states, training.layout)
            flat.update_rows(
                module, *place, torch.tensor([2, 5]), grads_UW, training.hyper, training.clock, F.SGD, True, None, None,
                torch.tensor([70, 1 << 40]),
            )  # fmt: skip
        assert caught.value.row == 1 << 40
