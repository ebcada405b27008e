"""Bad input met by a GPU's kernels: the next call raises, says what is wrong, and nothing bad was read or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import pytest
import torch
from torch import Tensor

from support import has
from thermocline import formats as F
from thermocline.errors import BadGradient, BadInput, IdOutOfRange
from thermocline.kernels.gather import gpu as gpu_gather
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.sum_gradients import gpu as gpu_sums
from thermocline.kernels.update import gpu as gpu_update

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # NumPy's, in the interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
TABLES = [(31, 4, "int8"), (17, 3, "int4"), (23, 5, "fp32")]
NO_WINNERS = torch.zeros(0, dtype=torch.int32)
# Seven ids of three features with a batch of two; ids of feature 1 are at positions 3 and 4.
IDS, OFFSETS = [30, 0, 7, 16, 2, 22, 1], [0, 1, 3, 5, 5, 6, 7]


def _bad_id(id: int) -> Tensor:
    """The ids with a bad one at position 4, of feature 1, whose table has 17 rows."""
    ids = torch.tensor(IDS)
    ids[4] = id
    return ids


@pytest.fixture
def training(make_arena: Make, make_training: Make) -> Any:
    return make_training(make_arena(TABLES), F.ADAM)


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


@pytest.mark.parametrize("mode", range(len(F.MODES)), ids=F.MODES)
@pytest.mark.parametrize("id", [17, -1, 2**40])
def test_the_next_call_raises_and_other_bags_are_right(id: int, mode: int, training: Any, errors: Any, on: On) -> None:
    ours = on(training)
    offsets = torch.tensor([0, 3, 5, 7] if mode == F.NONE else OFFSETS)
    table = (ours.codes, ours.meta, ours.layout)
    out, _ = flat.gather_pool(gpu_gather, *table, *on((_bad_id(id), offsets, None)), mode, torch.float32, True)
    _settle(out)
    good = (torch.tensor(IDS), offsets, None)
    wanted, _ = flat.gather_pool(gather, training.codes, training.meta, training.layout, *good, mode, torch.float32)
    column = training.layout.tables.features[1][F.COLUMN]
    elsewhere = torch.ones_like(wanted, dtype=torch.bool)
    if mode == F.NONE:
        elsewhere[4] = False
    else:
        elsewhere[0, column : column + 3] = False  # the bag of the bad id
    torch.testing.assert_close(out.cpu()[elsewhere], wanted[elsewhere])
    assert out.isfinite().all()
    with pytest.raises(IdOutOfRange) as caught:
        flat.gather_pool(gpu_gather, *table, *on(good), mode, torch.float32, True)
    error = caught.value
    assert (error.feature, error.position, error.id, error.rows) == (1, 4, id, 17)
    again, _ = flat.gather_pool(gpu_gather, *table, *on(good), mode, torch.float32, True)
    torch.testing.assert_close(again.cpu(), wanted)


def test_a_bad_id_counts_as_nothing_in_its_bag(training: Any, errors: Any, on: On) -> None:
    ours = on(training)
    lookup = (_bad_id(17), torch.tensor(OFFSETS), None)
    out, _ = flat.gather_pool(gpu_gather, ours.codes, ours.meta, ours.layout, *on(lookup), F.SUM, torch.float32, True)
    without = (torch.tensor([*IDS[:4], *IDS[5:]]), torch.tensor([0, 1, 3, 4, 4, 5, 6]), None)
    wanted, _ = flat.gather_pool(gather, training.codes, training.meta, training.layout, *without, F.SUM, torch.float32)
    torch.testing.assert_close(out.cpu(), wanted)
    with pytest.raises(IdOutOfRange):
        errors.raise_pending()


def test_many_bad_ids_are_one_error(training: Any, errors: Any, on: On) -> None:
    ours = on(training)
    lookup = on((torch.full((7,), 99), torch.tensor(OFFSETS), None))
    out, _ = flat.gather_pool(gpu_gather, ours.codes, ours.meta, ours.layout, *lookup, F.SUM, torch.float32, True)
    assert not out.any()
    with pytest.raises(IdOutOfRange) as caught:
        errors.raise_pending()
    assert caught.value.id == 99
    errors.raise_pending()


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 3, 1, 5, 5, 6, 7],
        [-1, 1, 3, 5, 5, 6, 7],
        [0, 1, 3, 5, 5, 6, 8],
        [0, 1, 3, 5, 9, 6, 7],
        [1, 1, 3, 5, 5, 6, 7],
        [0, 1, 3, 5, 5, 6, 6],
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [F.SUM, F.MEAN, F.MAX], ids=["sum", "mean", "max"])
def test_bad_offsets_are_reported(mode: int, offsets: list[int], training: Any, errors: Any, on: On) -> None:
    ours = on(training)
    lookup = on((torch.tensor(IDS), torch.tensor(offsets), None))
    out, _ = flat.gather_pool(gpu_gather, ours.codes, ours.meta, ours.layout, *lookup, mode, torch.float32, True)
    _settle(out)
    assert out.isfinite().all()
    with pytest.raises(BadInput, check=has(parameter="offsets")):
        errors.raise_pending()


@pytest.mark.parametrize("offsets", [[0, 5, 3, 7], [1, 3, 5, 7], [0, 3, 5, 6]], ids=str)
def test_bad_offsets_of_unpooled_lookups_are_reported(offsets: list[int], training: Any, errors: Any, on: On) -> None:
    ours = on(training)
    lookup = on((torch.tensor(IDS), torch.tensor(offsets), None))
    out, _ = flat.gather_pool(gpu_gather, ours.codes, ours.meta, ours.layout, *lookup, F.NONE, torch.float32, True)
    _settle(out)
    with pytest.raises(BadInput, check=has(parameter="offsets")):
        errors.raise_pending()


@pytest.mark.parametrize("tables", [TABLES[:1], TABLES], ids=len)
def test_offsets_of_unpooled_lookups_without_ids_are_looked_at(tables: Any, make_arena: Make, errors: Any, on: On) -> None:
    arena, none = make_arena(tables), torch.zeros(0, dtype=torch.int64)
    table, ends = on((arena.codes, arena.meta, arena.layout)), torch.zeros(len(tables) + 1, dtype=torch.int64)
    out, _ = flat.gather_pool(gpu_gather, *table, *on((none, ends, None)), F.NONE, torch.float32, True)
    assert out.shape == (0, arena.layout.tables.max_dim)
    errors.raise_pending()
    ends[-1] = 5
    out, _ = flat.gather_pool(gpu_gather, *table, *on((none, ends, None)), F.NONE, torch.float32, True)
    _settle(out)
    with pytest.raises(BadInput, check=has(parameter="offsets", value=(0, 5))):
        errors.raise_pending()


@pytest.mark.parametrize("count", [9, 2**31])
def test_offsets_of_unpooled_lookups_past_the_ids_write_nothing(count: int, make_arena: Make, errors: Any, on: On) -> None:
    arena = make_arena([(31, 4, "int8")])
    table, lookup = on((arena.codes, arena.meta, arena.layout)), on((torch.tensor(IDS), torch.tensor([0, count]), None))
    out, _ = flat.gather_pool(gpu_gather, *table, *lookup, F.NONE, torch.float32, True)
    _settle(out)
    with pytest.raises(BadInput, check=has(parameter="offsets")):
        errors.raise_pending()


@pytest.mark.parametrize("bad", [0, 3, 6])
def test_bad_ids_update_no_row(bad: int, training: Any, errors: Any, on: On) -> None:
    """As if the bad id had not been looked up; the error of the lookup itself has been raised before."""
    ids, offsets = torch.tensor(IDS), torch.tensor(OFFSETS)
    ids[bad] = 99
    ours, other, grad = on(training), on(training), on(torch.ones(2, 12))
    t = ours
    flat.update_bags(
        gpu_update, t.codes, t.meta, t.states, t.layout, *on((ids, offsets, None)), F.SUM, on(NO_WINNERS), grad, t.hyper,
        t.clock, F.ADAM, True,
    )  # fmt: skip
    kept = torch.arange(7) != bad
    offsets = offsets - (offsets > bad).long()
    t = other
    flat.update_bags(
        gpu_update, t.codes, t.meta, t.states, t.layout, *on((ids[kept], offsets, None)), F.SUM, on(NO_WINNERS), grad, t.hyper,
        t.clock, F.ADAM, True,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(ours.changed(), other.changed(), strict=True))


@pytest.mark.parametrize(
    "offsets",
    [
        [1, 1, 3, 5, 5, 6, 7],
        [0, 1, 3, 5, 5, 6, 6],
        [0, 3, 1, 5, 5, 6, 7],
    ],
    ids=str,
)
def test_ids_outside_every_bag_update_no_row(offsets: list[int], training: Any, on: On) -> None:
    """Unwritten memory looks like row 1 here, which no id names: it must stay as it is, whatever else the call does."""
    ours, ids = on(training), torch.tensor([30, 0, 7, 16, 2, 22, 3])
    t = ours
    try:
        flat.update_bags(
            gpu_update, t.codes, t.meta, t.states, t.layout, *on((ids, torch.tensor(offsets), None)), F.SUM, on(NO_WINNERS),
            on(torch.ones(2, 12)), t.hyper, t.clock, F.ADAM, True,
        )  # fmt: skip
        error_buffer(t.codes).raise_pending()
    except BadInput:
        pass
    dim = training.layout.tables.distinct[0][F.DIM]
    assert torch.equal(t.states[0][dim : 2 * dim].cpu(), training.states[0][dim : 2 * dim])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("optimizer", [F.SGD, F.ROWWISE_ADAGRAD, F.ADAM])
def test_a_bad_gradient_names_the_row_and_leaves_it(
    optimizer: int, precision: str, value: float, make_arena: Make, make_training: Make, errors: Any, on: On
) -> None:
    training = make_training(make_arena([(9, 3, precision)]), optimizer)
    grads = torch.ones(3, 3)
    grads[1, 2] = value
    _row_5_is_refused(training, grads, optimizer, errors, on)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_row_that_a_step_makes_nan_in_every_column_is_refused(
    precision: str, make_arena: Make, make_training: Make, errors: Any, on: On
) -> None:
    """Zero divided by zero: no gradient so far, and nothing added to its root."""
    training = make_training(make_arena([(9, 3, precision)]), F.ROWWISE_ADAGRAD)
    training.hyper[F.EPS] = training.hyper[F.WEIGHT_DECAY] = 0.0
    training.states[0][5] = 0.0
    grads = torch.ones(3, 3)
    grads[1] = 0.0
    _row_5_is_refused(training, grads, F.ROWWISE_ADAGRAD, errors, on)


def _row_5_is_refused(training: Any, grads: torch.Tensor, optimizer: int, errors: Any, on: On) -> None:
    """Of the rows 2, 5 and 7: named, and left as it was, while the others are updated."""
    ours, other = on(training), on(training)
    rows, good = torch.tensor([2, 5, 7]), torch.tensor([0, 2])
    for t, which in ((ours, slice(None)), (other, good)):
        flat.update_rows(
            gpu_update,
            t.codes,
            t.meta,
            t.states,
            t.layout,
            on(rows[which]),
            on(grads[which]),
            t.hyper,
            t.clock,
            optimizer,
            True,
        )
        if t is ours:
            _settle(t.codes)
            with pytest.raises(BadGradient, check=has(row=5, step=8)) as caught:
                errors.raise_pending()
            assert (caught.value.row, caught.value.step) == (5, 8)
    assert all(torch.equal(a, b) for a, b in zip(ours.changed(), other.changed(), strict=True))


def test_sums_leave_bad_ids_out(training: Any, errors: Any, on: On) -> None:
    lookup = on((_bad_id(-5), torch.tensor(OFFSETS), None))
    rows, _ = flat.sum_row_gradients(gpu_sums, on(training.layout), *lookup, F.SUM, on(NO_WINNERS), on(torch.ones(2, 12)))
    firsts = [field[F.ROW] for field in training.layout.tables.features]
    wanted = [firsts[0] + 30, firsts[0], firsts[0] + 7, firsts[1] + 16, firsts[2] + 22, firsts[2] + 1]
    assert rows.tolist() == sorted(wanted)
