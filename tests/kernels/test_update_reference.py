"""The definition of the row update, against torch's optimizers and a row-wise Adagrad in float64."""

from __future__ import annotations

import flat
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support import has
from thermocline import BadGradient
from thermocline import formats as F
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.update import reference as update_reference
from thermocline.kernels.update.reference import advance, square_root, step, tree_sum
from thermocline.rows.arena import Arena
from thermocline.rows.optimizers import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from thermocline.rows.precision import PRECISIONS
from thermocline.rows.table_spec import TableSpec

OPTIMIZERS = [SGD(lr=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1), Adam(lr=0.01, weight_decay=0.1)]
by_name = {"ids": lambda optimizer: F.OPTIMIZERS[optimizer.code]}


class Training:
    """An arena, the state of an optimizer, and a gradient drawn for any rows."""

    def __init__(self, specs: list[TableSpec], optimizer: RowOptimizer, stochastic: bool = False) -> None:
        self.arena, self.optimizer, self.stochastic = Arena(specs), optimizer, stochastic
        self.generator = torch.Generator().manual_seed(0)
        self.arena.randomize_(1.0, self.generator)
        self.hyper = optimizer.hyper()
        self.states = optimizer.states(self.arena.rows, self.arena.elements)
        self.clock = torch.tensor([7, 0])

    def gradient(self, rows_U: Tensor) -> Tensor:
        return torch.randn(rows_U.numel(), self.arena.layout.tables.max_dim, generator=self.generator)

    def update(self, rows_U: Tensor, grads_UW: Tensor) -> None:
        arena = self.arena
        flat.update_rows(
            update_reference, arena.codes, arena.meta, self.states, arena.layout, rows_U, grads_UW, self.hyper, self.clock,
            self.optimizer.code, self.stochastic,
        )  # fmt: skip

    def everything(self) -> list[Tensor]:
        return [t.clone() for t in (self.arena.codes, self.arena.meta, *self.states)]


def some_rows(training: Training, count: int = 0) -> Tensor:
    order = torch.randperm(training.arena.rows, generator=training.generator)
    return order[: count or training.arena.rows].sort().values


# -- against torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adagrad(lr=0.1, eps=1e-6), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, foreach=False)),
    ],
)
@pytest.mark.parametrize("dim", [1, 3, 48, 100])
def test_sgd_and_adagrad_are_torchs(ours, theirs, dim):
    training = Training([TableSpec(63, dim)], ours)
    weight = training.arena.read(0).clone().requires_grad_()
    optimizer = theirs([weight])
    for _ in range(5):
        rows_U = some_rows(training, 41)
        grads_UW = training.gradient(rows_U)
        weight.grad = torch.zeros_like(weight).index_copy_(0, rows_U, grads_UW)
        optimizer.step()
        training.update(rows_U, grads_UW)
    torch.testing.assert_close(training.arena.read(0), weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 3, 48, 100])
def test_adam_is_torchs_sparse_adam_on_the_rows_that_were_looked_up(dim):
    training = Training([TableSpec(63, dim)], Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-3))  # as large as the gradients
    weight = training.arena.read(0).clone().requires_grad_()
    optimizer = torch.optim.SparseAdam([weight], lr=0.01, betas=(0.8, 0.95), eps=1e-3)
    for _ in range(5):
        rows_U = some_rows(training, 41)
        grads_UW = 1e-3 * training.gradient(rows_U)
        weight.grad = torch.sparse_coo_tensor(rows_U[None], grads_UW, weight.shape, check_invariants=False)
        optimizer.step()
        training.update(rows_U, grads_UW)
    torch.testing.assert_close(training.arena.read(0), weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_is_torchs_adamw_when_all_rows_are_looked_up(decay):
    training = Training([TableSpec(63, 48)], Adam(lr=0.01, eps=1e-12, weight_decay=decay))
    weight = training.arena.read(0).clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.01, eps=1e-12, weight_decay=decay, foreach=False)
    for _ in range(7):
        rows_U = some_rows(training)
        grads_UW = training.gradient(rows_U)
        weight.grad = grads_UW.clone()
        optimizer.step()
        training.update(rows_U, grads_UW)
    torch.testing.assert_close(training.arena.read(0), weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 3, 48, 100, 513])
def test_rowwise_adagrad_is_its_formula_in_float64(dim):
    training = Training([TableSpec(63, dim)], RowwiseAdagrad(lr=0.1, eps=1e-6))
    weight, sums = training.arena.read(0).double(), torch.zeros(63, dtype=torch.float64)
    for _ in range(5):
        rows_U = some_rows(training, 41)
        grads_UW = training.gradient(rows_U)
        sums[rows_U] += grads_UW.double().square().mean(1)
        weight[rows_U] -= 0.1 * grads_UW.double() / (sums[rows_U].sqrt() + 1e-6)[:, None]
        training.update(rows_U, grads_UW)
    torch.testing.assert_close(training.arena.read(0).double(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(training.states[0].double(), sums, rtol=1e-5, atol=0)


# -- tables, states and rounding ------------------------------------------------------------------------------------

MIXED = [TableSpec(9, 3, "int8"), TableSpec(7, 48, "int4"), TableSpec(5, 3, "int8"), TableSpec(6, 48, "fp32")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_is_dequantized_stepped_and_requantized(optimizer, stochastic, precision):
    training = Training([TableSpec(9, 5, "bf16"), TableSpec(63, 13, precision)], optimizer, stochastic)
    field = training.arena.layout.tables.features[1]
    local_U = torch.tensor([0, 5, 62])
    grads_UW = training.gradient(local_U)
    weight_ND, hyper = training.arena.read(1)[local_U], training.hyper.clone()
    advance(torch.tensor([7, 0]), hyper)
    fresh = [torch.zeros(3) if optimizer.states_per_row else torch.zeros(3, 13) for _ in training.states]
    stepped_ND, _ = step(weight_ND, grads_UW, fresh, hyper, optimizer.code, F.planes(field[F.FORMAT]))
    clock = torch.tensor([7, 1]) if stochastic else None
    rows_U = local_U + field[F.ROW]
    expected = quantize.quantize_rows(stepped_ND, field[F.FORMAT], clock, rows_U)
    training.update(rows_U, grads_UW)
    assert torch.equal(training.arena.read(1)[local_U], quantize.dequantize_rows(*expected, field[F.FORMAT], 13))
    assert training.clock.tolist() == [7, 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
def test_rows_that_were_not_looked_up_keep_every_bit(optimizer):
    training = Training(MIXED, optimizer, stochastic=True)
    before = [training.arena.read(t).clone() for t in range(4)]
    states = [s.clone() for s in training.states]
    touched = torch.tensor([2, 11, 16, 22])
    training.update(touched, training.gradient(touched))
    for t, spec in enumerate(MIXED):
        first = training.arena.layout.tables.features[t][F.ROW]
        changed_R = (training.arena.read(t) != before[t]).any(1)
        assert changed_R.tolist() == [(first + r) in touched for r in range(spec.rows)]
    if optimizer.states_per_row:
        assert (training.states[0] != states[0]).nonzero()[:, 0].tolist() == touched.tolist()
    elif training.states:
        assert sum(int((s != 0).sum()) for s in training.states) == optimizer.states_per_column * (2 * 3 + 2 * 48)


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_small_steps_add_up_under_stochastic_rounding_and_vanish_under_nearest(precision):
    drift = {}
    for stochastic in (False, True):
        training = Training([TableSpec(63, 48, precision)], SGD(lr=1e-4), stochastic)
        before_ND = training.arena.read(0).clone()
        for _ in range(50):
            training.update(torch.arange(63), torch.ones(63, 48))
        drift[stochastic] = float((training.arena.read(0) - before_ND).mean())
    assert drift[True] == pytest.approx(-0.005, rel=0.3)
    assert abs(drift[False]) < 0.001


# -- refused rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_leaves_its_row_and_state_untouched_and_is_named(optimizer, precision, bad):
    training, healthy = (Training([TableSpec(63, 5, precision)], optimizer) for _ in range(2))
    rows_U = torch.tensor([3, 11, 40, 62])
    for each in (training, healthy):
        each.update(rows_U, each.gradient(rows_U))
    grads_UW = training.gradient(rows_U)
    keep = torch.tensor([0, 2])
    healthy.update(rows_U[keep], grads_UW[keep])
    grads_UW[1, 4] = grads_UW[3, 0] = bad
    with pytest.raises(BadGradient, check=has(row=11, step=2)):
        training.update(rows_U, grads_UW)
    for ours, theirs in zip(training.everything(), healthy.everything(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_row_that_would_reach_two_to_the_126_is_refused():
    training = Training([TableSpec(3, 2)], SGD(lr=1.0))
    grads_UW = torch.tensor([[0.0, -(2.0**126)], [0.0, -(2.0**125)]])
    with pytest.raises(BadGradient, check=has(row=0)):
        training.update(torch.tensor([0, 2]), grads_UW)
    assert training.arena.read(0)[2, 1] == 2.0**125


def test_the_clock_ticks_even_when_nothing_is_updated():
    training = Training([TableSpec(3, 2)], Adam(lr=1.0, betas=(0.5, 0.25)))
    for _ in range(3):
        training.update(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2))
    assert training.clock.tolist() == [7, 3]
    assert training.hyper[F.BETA1_POWER : F.BETA2_POWER + 1].tolist() == [0.5**3, 0.25**3]


# -- arithmetic -----------------------------------------------------------------------------------------------------

BIG = 2.0**24  # the first number that adding 1 does not change


def test_the_order_of_the_tree_sum_is_this_one():
    x = torch.tensor([[BIG, 1.0, 1.0, 1.0, -BIG]])
    assert tree_sum(x, 1).tolist() == [2.0]  # ((BIG + 1) + (1 + 1)) + ((-BIG + 0) + (0 + 0))
    assert tree_sum(x, 2).tolist() == [1.0]  # ((BIG + 1) + (1 + 0)) + ((1 - BIG) + (0 + 0))
    assert tree_sum(x, 4).tolist() == [2.0]  # ((BIG + 1) + (1 + 1)) + ((-BIG + 0) + (0 + 0)), planes of two columns
    y = torch.tensor([[BIG, 1.0, 1.0, 1.0, 1.0, 1.0, -BIG]])
    assert tree_sum(y, 1).tolist() == [4.0]  # ((BIG + 1) + (1 + 1)) + ((1 + 1) + (-BIG + 0))
    assert tree_sum(y, 2).tolist() == [4.0]  # the same: planes of four columns
    assert tree_sum(y, 4).tolist() == [4.0]


@given(dim=st.integers(1, 2048), planes=st.sampled_from([1, 2, 4]))
def test_the_tree_sum_is_a_sum(dim, planes):
    x_ND = torch.rand(3, dim, generator=torch.Generator().manual_seed(dim))
    torch.testing.assert_close(tree_sum(x_ND, planes).double(), x_ND.double().sum(1), rtol=2e-6, atol=0)


@given(dim=st.sampled_from([1, 2, 4, 64, 128, 2048]), planes=st.sampled_from([2, 4]))
def test_planes_make_no_difference_to_the_tree_sum_of_a_power_of_two(dim, planes):
    x_ND = torch.randn(63, dim, generator=torch.Generator().manual_seed(dim))
    assert torch.equal(tree_sum(x_ND, planes), tree_sum(x_ND, 1))


def test_the_square_root_is_rounded_correctly():
    bits = torch.randint(0, 0x7F800000, (100_001,), generator=torch.Generator().manual_seed(0)).int()
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, 1.0, 4.0])])
    assert np.array_equal(square_root(x).numpy(), np.sqrt(x.numpy()))
