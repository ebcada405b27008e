"""Bad input raises, says what is wrong, and writes nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import flat
import pytest
import torch
from torch import Tensor

from support import has
from thermocline import formats as F
from thermocline import kernels
from thermocline.errors import BadGradient, BadInput, FormatError, IdOutOfRange
from thermocline.kernels.gather import gpu as gpu_gather
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.gpu.errors import error_buffer

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


def _calls(training: Any, grad: Tensor, winners: Tensor = NO_WINNERS, mode: int = F.SUM) -> dict[str, Callable[..., Any]]:
    """Every kernel that takes a lookup, as a function of (ids, offsets, weights)."""
    t = training
    return {
        "gather_pool": lambda *lookup: flat.gather_pool(kernels, t.codes, t.meta, t.layout, *lookup, mode),
        "weight_gradient": lambda ids, offsets, _: flat.weight_gradient(kernels, t.codes, t.meta, t.layout, ids, offsets, grad),
        "sum_row_gradients": lambda *lookup: flat.sum_row_gradients(kernels, t.layout, *lookup, mode, winners, grad),
        "update_bags": lambda *lookup: flat.update_bags(
            kernels, t.codes, t.meta, t.states, t.layout, *lookup, mode, winners, grad, t.hyper, t.clock, F.ADAM, True
        ),
    }


EVERY = ("gather_pool", "weight_gradient", "sum_row_gradients", "update_bags")


@pytest.fixture
def training(make_arena: Make, make_training: Make) -> Any:
    return make_training(make_arena(TABLES), F.ADAM)


def _raises(training: Any, kernel: str, error: type[Exception], fields: dict[str, Any], *lookup: Any, mode: int = F.SUM) -> Any:
    """The error, with these fields, of a call that must change nothing."""
    before, grad = training.changed(), torch.ones(2, 12)
    with pytest.raises(error, check=has(**fields)) as caught:
        _calls(training, grad, mode=mode)[kernel](*lookup)
    assert isinstance(caught.value, ValueError)
    assert all(torch.equal(a, b) for a, b in zip(before, training.changed(), strict=True)), "something was written"
    return caught.value


# -- ids and offsets, on a CPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("id", [17, -1, 10**12, -(2**62)])
def test_an_id_out_of_range_names_its_place_and_the_rows(id: int, kernel: str, training: Any) -> None:
    error = _raises(training, kernel, IdOutOfRange, {"rows": 17, "position": 4}, _bad_id(id), torch.tensor(OFFSETS), None)
    assert (error.feature, error.position, error.id, error.rows) == (1, 4, id, 17)
    assert error.table == "t1" and "position 4" in str(error) and str(id) in str(error)


@pytest.mark.parametrize("mode", range(len(F.MODES)), ids=F.MODES)
def test_an_id_out_of_range_raises_in_every_mode(mode: int, training: Any) -> None:
    offsets = torch.tensor([0, 3, 5, 7] if mode == F.NONE else OFFSETS)
    error = _raises(training, "gather_pool", IdOutOfRange, {"position": 4}, _bad_id(17), offsets, None, mode=mode)
    assert (error.feature, error.position) == (1, 4)


def test_the_first_of_several_bad_ids_is_named(training: Any) -> None:
    ids = torch.tensor([30, 31, -7, 17, 2, 22, 1])
    error = _raises(training, "gather_pool", IdOutOfRange, {"position": 1}, ids, torch.tensor(OFFSETS), None)
    assert (error.feature, error.id, error.rows) == (0, 31, 31)


def test_an_id_that_int32_cannot_hold_is_not_cut_to_a_good_one(training: Any) -> None:
    _raises(training, "gather_pool", IdOutOfRange, {"id": 2**32}, _bad_id(2**32), torch.tensor(OFFSETS), None)


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize(
    ("offsets", "position"),
    [
        ([0, 3, 1, 5, 5, 6, 7], 2),
        ([1, 1, 3, 5, 5, 6, 7], 0),
        ([-1, 1, 3, 5, 5, 6, 7], 0),
        ([0, 1, 3, 5, 5, 6, 6], 6),
        ([0, 1, 3, 5, 5, 6, 8], 6),
        ([0, 1, 3, 5, 9, 6, 7], 5),
        ([0, 1, 3, -5, 5, 6, 7], 3),
        ([0], 0),
    ],
    ids=str,
)
def test_offsets_that_do_not_divide_the_ids_raise(kernel: str, offsets: list[int], position: int, training: Any) -> None:
    fields = {"parameter": "offsets", "position": position, "value": offsets[position]}
    _raises(training, kernel, BadInput, fields, torch.tensor(IDS), torch.tensor(offsets), None)


@pytest.mark.parametrize(
    "offsets", [[0, 5, 3, 7], [1, 3, 5, 7], [0, 3, 5, 6], [0, 3, 5, 9], [0, 9, 5, 7], [0, -1, 5, 7]], ids=str
)
def test_offsets_of_unpooled_lookups_that_do_not_divide_the_ids_raise(offsets: list[int], training: Any) -> None:
    lookup = (torch.tensor(IDS), torch.tensor(offsets), None)
    _raises(training, "gather_pool", BadInput, {"parameter": "offsets"}, *lookup, mode=F.NONE)


@pytest.mark.parametrize("mode", [F.SUM, F.NONE], ids=["sum", "none"])
@pytest.mark.parametrize("count", [0, 2, 3, 6])
def test_a_number_of_offsets_that_fits_no_batch_raises(count: int, mode: int, training: Any) -> None:
    offsets = torch.zeros(count, dtype=torch.int64)
    fields = {"parameter": "offsets", "value": count}
    _raises(training, "gather_pool", BadInput, fields, torch.tensor(IDS), offsets, None, mode=mode)


@pytest.mark.parametrize("mode", range(len(F.MODES)), ids=F.MODES)
def test_no_offsets_raise_with_one_feature_too(mode: int, make_arena: Make) -> None:
    arena, none = make_arena([(9, 3, "int8")]), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(BadInput, check=has(parameter="offsets")):
        flat.gather_pool(kernels, arena.codes, arena.meta, arena.layout, none, none, None, mode)


def test_an_arena_without_features_has_nothing_to_look_up(make_arena: Make) -> None:
    arena = make_arena([(9, 3, "int8")], features=[])
    ids, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(BadInput, check=has(parameter="features")):
        flat.gather_pool(kernels, arena.codes, arena.meta, arena.layout, ids, offsets, None, F.SUM)


# -- types and shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.uint8], ids=str)
def test_ids_and_offsets_of_a_wrong_type_raise(dtype: torch.dtype, training: Any) -> None:
    ids, offsets = torch.tensor(IDS), torch.tensor(OFFSETS)
    _raises(training, "gather_pool", BadInput, {"parameter": "ids", "value": dtype}, ids.to(dtype), offsets, None)
    _raises(training, "gather_pool", BadInput, {"parameter": "offsets", "value": dtype}, ids, offsets.to(dtype), None)


def test_ids_and_offsets_must_be_flat(training: Any) -> None:
    ids, offsets = torch.tensor(IDS), torch.tensor(OFFSETS)
    _raises(training, "gather_pool", BadInput, {"parameter": "ids", "value": 2}, ids[None], offsets, None)
    _raises(training, "gather_pool", BadInput, {"parameter": "offsets", "value": 0}, ids, offsets[0], None)


@pytest.mark.parametrize("mode", [F.MEAN, F.MAX, F.NONE], ids=["mean", "max", "none"])
def test_weights_work_with_sums_only(mode: int, training: Any) -> None:
    offsets = torch.tensor([0, 3, 5, 7] if mode == F.NONE else OFFSETS)
    fields = {"parameter": "per-sample weights", "mode": F.MODES[mode]}
    _raises(training, "gather_pool", BadInput, fields, torch.tensor(IDS), offsets, torch.ones(7), mode=mode)


def test_weights_must_be_one_float_for_each_id(training: Any) -> None:
    ids, offsets = torch.tensor(IDS), torch.tensor(OFFSETS)
    for weights, value in ((torch.ones(6), 6), (torch.ones(7, dtype=torch.float64), torch.float64), (torch.ones(7, 1), 2)):
        fields = {"parameter": "per-sample weights", "value": value}
        _raises(training, "gather_pool", BadInput, fields, ids, offsets, weights)


@pytest.mark.parametrize("kernel", EVERY[1:])
def test_every_kernel_refuses_ids_that_are_no_integers(kernel: str, training: Any) -> None:
    _raises(training, kernel, BadInput, {"parameter": "ids"}, torch.tensor(IDS).float(), torch.tensor(OFFSETS), None)


@pytest.mark.parametrize("kernel", EVERY[2:])
def test_every_kernel_refuses_weights_that_do_not_match(kernel: str, training: Any) -> None:
    fields = {"parameter": "per-sample weights", "value": 8}
    _raises(training, kernel, BadInput, fields, torch.tensor(IDS), torch.tensor(OFFSETS), torch.ones(8))


@pytest.mark.parametrize("kernel", EVERY[1:])
@pytest.mark.parametrize("shape", [(2, 13), (3, 12)], ids=str)
def test_every_kernel_refuses_a_gradient_of_another_shape(shape: tuple[int, int], kernel: str, training: Any) -> None:
    before = training.changed()
    with pytest.raises(BadInput, check=has(parameter="gradient")):
        _calls(training, torch.ones(shape))[kernel](torch.tensor(IDS), torch.tensor(OFFSETS), None)
    assert all(torch.equal(a, b) for a, b in zip(before, training.changed(), strict=True))


@pytest.mark.parametrize("format", range(len(F.NAMES)), ids=F.NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_refused(value: float, format: int) -> None:
    values = torch.zeros(3, 5)
    values[1, 4] = value
    with pytest.raises(FormatError, check=has(row=1)) as caught:
        kernels.quantize_rows(values, format)
    assert str(caught.value.value) == str(value)


def test_rows_must_be_two_dimensions_of_fp32() -> None:
    for values in (torch.zeros(5), torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, 0), torch.zeros(3, 2049)):
        with pytest.raises(BadInput):
            kernels.quantize_rows(values, F.INT8)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "value"),
    [(F.SGD, float("nan")), (F.SGD, float("inf")), (F.SGD, -3e38), (F.ADAM, float("nan")), (F.ADAM, float("inf"))],
    ids=["sgd nan", "sgd inf", "sgd huge", "adam nan", "adam inf"],
)
def test_a_gradient_that_would_break_a_row_names_it_and_leaves_it(
    optimizer: int, value: float, make_arena: Make, make_training: Make
) -> None:
    """The other rows of the batch are updated: all but the bad row are as if it had not been looked up."""
    training, other = (make_training(make_arena(TABLES), optimizer) for _ in range(2))
    grads = torch.ones(3, 5)
    grads[1, 2] = value
    rows, good = torch.tensor([2, 31 + 5, 31 + 17 + 3]), torch.tensor([0, 2])
    rows = rows.sort().values
    t = training
    with pytest.raises(BadGradient, check=has(row=int(rows[1]), step=8)) as caught:
        flat.update_rows(kernels, t.codes, t.meta, t.states, t.layout, rows, grads, t.hyper, t.clock, optimizer, True)
    assert (caught.value.row, caught.value.step) == (int(rows[1]), 8) and isinstance(caught.value, ValueError)
    t = other
    flat.update_rows(kernels, t.codes, t.meta, t.states, t.layout, rows[good], grads[good], t.hyper, t.clock, optimizer, True)
    assert all(torch.equal(a, b) for a, b in zip(training.changed(), other.changed(), strict=True))


def test_a_bad_gradient_of_bags_names_the_first_bad_row(training: Any) -> None:
    grad = torch.ones(2, 12)
    grad[0, 5] = float("nan")  # feature 1, bag 0 of it: ids 16 and 2 of table 1
    first = training.layout.tables.features[1][F.ROW]
    with pytest.raises(BadGradient) as caught:
        _calls(training, grad)["update_bags"](torch.tensor(IDS), torch.tensor(OFFSETS), None)
    assert (caught.value.row, caught.value.step) == (first + 2, 8)


# -- trusted ids ------------------------------------------------------------------------------------------------------


def test_unchecked_ids_are_not_looked_at(make_arena: Make, on: On) -> None:
    """Two tables lie next to each other: row 9 of the first is row 0 of the second, so this reads what is there."""
    arena = make_arena([(9, 3, "int8"), (5, 3, "int8")])
    lookup = (torch.tensor([9, 4]), torch.tensor([0, 1, 2]), None)
    good = (torch.tensor([8, 0]), torch.tensor([0, 1, 2]), None)
    with pytest.raises(IdOutOfRange):
        flat.gather_pool(kernels, arena.codes, arena.meta, arena.layout, *lookup, F.SUM)
    wanted, _ = flat.gather_pool(gather, arena.codes, arena.meta, arena.layout, *good, F.SUM, torch.float32)
    out, _ = flat.gather_pool(kernels, arena.codes, arena.meta, arena.layout, *lookup, F.SUM, checked=False)
    assert torch.equal(out[0, :3], wanted[0, 3:])
    table = on((arena.codes, arena.meta, arena.layout))
    out, _ = flat.gather_pool(gpu_gather, *table, *on(lookup), F.SUM, torch.float32, False)
    error_buffer(table[0]).raise_pending()
    assert torch.equal(out[0, :3].cpu(), wanted[0, 3:])


# -- errors travel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [IdOutOfRange(1, 4, -3, 17), IdOutOfRange(1, 4, -3, 17, "user", "clicked", 3), BadGradient(5, 8), BadInput("x")],
    ids=repr,
)
def test_errors_survive_pickling_and_copying(error: Exception) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_an_error_can_name_its_table_and_its_feature() -> None:
    error = IdOutOfRange(1, 4, -3, 17).named("user", "clicked")
    assert str(error).startswith(
        "Feature 'clicked' of table 'user' has ids 0 to 16, but the id at position 4 of the ids of all"
    )
    error = IdOutOfRange(1, 4, -3, 17, first=3).named("user", "user")
    assert str(error).startswith("Feature 'user' has ids 0 to 16, but the id at position 1 is -3.")
    assert (error.position, error.first) == (4, 3)
    assert (error.feature, error.table) == (1, "user")


@pytest.mark.parametrize("row", [-1, 10**6])
def test_an_arena_row_that_does_not_exist_is_refused(row: int, training: Any) -> None:
    before, t = [x.clone() for x in training.changed()], training
    rows_U, grads_UW = torch.tensor([0, row]), torch.ones(2, t.layout.tables.max_dim)
    with pytest.raises(BadInput, check=has(parameter="rows", available=t.layout.tables.rows)):
        flat.update_rows(kernels, t.codes, t.meta, t.states, t.layout, rows_U, grads_UW, t.hyper, t.clock, F.SGD, True)
    assert all(torch.equal(a, b) for a, b in zip(before, training.changed(), strict=True))
