"""Looking rows up and training them: shapes, names in errors, seeds, and a small regression that converges."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import thermocline
from support import has
from thermocline import formats as F
from thermocline.errors import BadGradient, BadInput, IdOutOfRange
from thermocline.rows.arena import Arena
from thermocline.rows.optimizers import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import Trainer, lookup, synchronize

TABLES = [TableSpec(31, 4, "int8", "user"), TableSpec(17, 3, "int4", "shop"), TableSpec(23, 5, "fp32", "item")]


def _arena(seed: int = 1, features: list[int] | None = None) -> Arena:
    arena = Arena(TABLES, features)
    arena.randomize_(1.0, torch.Generator().manual_seed(seed))
    return arena


def _rows(arena: Arena) -> list[Tensor]:
    return [arena.read(table).clone() for table in range(len(arena.tables))]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring_trains_the_rows_it_looked_up() -> None:
    example = textwrap.dedent((Trainer.__doc__ or "").split("Example::\n\n", 1)[1])
    names: dict[str, Any] = {"thermocline": thermocline, "torch": torch}
    exec(compile(example, "docstring", "exec"), names)
    assert names["out"].shape == (1, 64)
    changed = names["arena"].read(0).abs().sum(1).nonzero()[:, 0]  # every row was zero
    assert changed.tolist() == [3, 5]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 63])
def test_pooled_outputs_are_batch_by_all_columns(batch: int, dtype: torch.dtype, mode: str) -> None:
    ids, offsets = torch.arange(4 * batch) % 17, torch.arange(4 * batch + 1)
    out = lookup(_arena(features=[0, 1, 2, 1]), ids, offsets, mode=mode, dtype=dtype)
    assert out.shape == (batch, 4 + 3 + 5 + 3) and out.dtype == dtype and not out.requires_grad


@pytest.mark.parametrize("count", [0, 1, 63, 1000])
def test_unpooled_outputs_are_ids_by_the_largest_dimension(count: int) -> None:
    arena, ids = _arena(), torch.arange(count) % 17
    out = lookup(arena, ids, torch.tensor([0, 0, count, count]), mode="none")
    assert out.shape == (count, 5)
    assert torch.equal(out[:, :3], arena.read(1)[ids]) and not out[:, 3:].any()


def test_bags_of_one_id_are_the_rows_themselves() -> None:
    arena = _arena()
    out = lookup(arena, torch.tensor([30, 2, 16, 16, 0, 22], dtype=torch.int32), torch.arange(7, dtype=torch.int32))
    user, shop, item = _rows(arena)
    assert torch.equal(out, torch.cat([user[[30, 2]], shop[[16, 16]], item[[0, 22]]], 1))


def test_ids_and_weights_may_be_strided_views() -> None:
    arena = _arena()
    ids, offsets, weights = torch.tensor([30, 2, 16, 16, 0, 22]), torch.arange(7), torch.rand(6)
    wanted = lookup(arena, ids, offsets, weights)
    pair, pairs = torch.stack([ids, ids + 99], 1), torch.stack([weights, weights + 1], 1)
    assert torch.equal(lookup(arena, pair[:, 0], offsets, pairs[:, 0]), wanted)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(("table", "name"), [(0, "user"), (1, "shop"), (2, "item")])
def test_an_id_out_of_range_names_the_table_of_its_feature(table: int, name: str, trained: bool) -> None:
    arena = _arena(features=[2, 0, 1])
    trainer = Trainer(arena, SGD(lr=0.1)) if trained else None
    before, position = arena.codes.clone(), [2, 0, 1].index(table)
    ids, rows = torch.zeros(3, dtype=torch.int64), TABLES[table].rows
    ids[position] = rows
    with pytest.raises(IdOutOfRange, check=has(table=name, rows=rows, position=position, id=rows)):
        lookup(arena, ids, torch.arange(4), trainer=trainer)
    assert torch.equal(arena.codes, before)


@pytest.mark.parametrize("mode", ["avg", "", "SUM"])
def test_an_unknown_mode_names_the_known_ones(mode: str) -> None:
    with pytest.raises(BadInput, check=has(parameter="mode", value=mode)):
        lookup(_arena(), torch.zeros(3, dtype=torch.int64), torch.arange(4), mode=mode)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_an_output_type_that_is_no_float_of_16_or_32_bits_raises(dtype: torch.dtype) -> None:
    with pytest.raises(BadInput, check=has(parameter="dtype", value=dtype)):
        lookup(_arena(), torch.zeros(3, dtype=torch.int64), torch.arange(4), dtype=dtype)


def test_a_gradient_of_nan_names_the_row_and_the_step_and_leaves_the_row() -> None:
    arena = _arena()
    trainer, before = Trainer(arena, SGD(lr=0.1)), _rows(arena)
    lookup(arena, torch.tensor([3, 4, 5]), torch.arange(4), trainer=trainer).sum().backward()
    grad = torch.ones(1, 12)
    grad[0, 5] = float("nan")  # a column of "shop"
    out, middle = lookup(arena, torch.tensor([3, 4, 5]), torch.arange(4), trainer=trainer), _rows(arena)
    with pytest.raises(BadGradient) as caught:
        out.backward(grad)
    first = next(f for f in arena.layout.tables.features if f[F.DIM] == 3)[F.ROW]
    assert (caught.value.row, caught.value.step) == (first + 4, 2)
    user, shop, item = _rows(arena)
    assert torch.equal(shop, middle[1]) and not torch.equal(shop, before[1])
    assert not torch.equal(user, middle[0]) and not torch.equal(item, middle[2])


# -- training ---------------------------------------------------------------------------------------------------------

OPTIMIZERS = [SGD(lr=0.3), Adagrad(lr=0.3), RowwiseAdagrad(lr=0.3), Adam(lr=0.1)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_only_rows_that_were_looked_up_change(optimizer: RowOptimizer) -> None:
    arena = _arena()
    before, trainer = _rows(arena), Trainer(arena, optimizer)
    lookup(arena, torch.tensor([3, 3, 16, 22]), torch.tensor([0, 2, 3, 4]), trainer=trainer).sum().backward()
    changed = [(a != b).any(1).nonzero()[:, 0].tolist() for a, b in zip(before, _rows(arena), strict=True)]
    assert changed == [[3], [16], [22]]
    assert trainer.clock.tolist() == [0, 1]


def test_state_is_as_large_as_its_optimizer_says() -> None:
    arena = _arena()
    sizes = [[s.numel() for s in Trainer(arena, optimizer).states] for optimizer in OPTIMIZERS]
    assert sizes == [[], [arena.elements], [arena.rows], [arena.elements] * 2]
    assert arena.rows == 71 and arena.elements == 31 * 4 + 17 * 3 + 23 * 5


def test_a_lookup_without_a_trainer_changes_no_row_and_gives_weights_a_gradient() -> None:
    arena = _arena()
    codes, meta = arena.codes.clone(), arena.meta.clone()
    weights = torch.ones(3, requires_grad=True)
    lookup(arena, torch.tensor([3, 4, 5]), torch.arange(4), weights).sum().backward()
    assert torch.equal(arena.codes, codes) and torch.equal(arena.meta, meta)
    wanted = [rows[id].sum() for rows, id in zip(_rows(arena), (3, 4, 5), strict=True)]
    torch.testing.assert_close(weights.grad, torch.stack(wanted))


def test_lookups_without_grad_train_nothing() -> None:
    arena = _arena()
    trainer, codes = Trainer(arena, SGD(lr=0.3)), arena.codes.clone()
    with torch.no_grad():
        out = lookup(arena, torch.tensor([3, 4, 5]), torch.arange(4), trainer=trainer)
    assert not out.requires_grad and torch.equal(arena.codes, codes) and trainer.clock.tolist() == [0, 0]


def test_a_compiled_lookup_trains_to_the_same_bits() -> None:
    arenas = [_arena(), _arena()]
    trainers = [Trainer(arena, Adam(lr=0.1), seed=3) for arena in arenas]
    ids, offsets = torch.arange(30) % 17, torch.arange(0, 31, 2)
    torch._dynamo.reset()
    compiled = torch.compile(lookup, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        for arena, trainer, function in zip(arenas, trainers, (lookup, compiled), strict=True):
            (function(arena, ids, offsets, trainer=trainer) ** 2).sum().backward()
    assert torch.equal(arenas[0].codes, arenas[1].codes) and torch.equal(arenas[0].meta, arenas[1].meta)
    for name in ("hyper", "clock"):
        assert torch.equal(getattr(trainers[0], name), getattr(trainers[1], name))
    assert all(torch.equal(a, b) for a, b in zip(trainers[0].states, trainers[1].states, strict=True))


def _train(
    precision: str, optimizer: RowOptimizer, steps: int, seed: int = 0, stochastic: bool = True, first: float = 0.0
) -> tuple[Arena, list[float]]:
    """Bags of three rows are to sum to what the same bags of a hidden table sum to; (arena, mean squared error by step).

    `first`: what the first column holds from the start, and is to hold.
    """
    hidden = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    arena, start = Arena([TableSpec(50, 8, precision)]), torch.zeros(50, 8)
    hidden[:, 0] = start[:, 0] = first
    arena.write(0, torch.arange(50), start)
    trainer = Trainer(arena, optimizer, stochastic, seed)
    generator = torch.Generator().manual_seed(2)
    errors = []
    for _ in range(steps):
        ids = torch.randint(0, 50, (3 * 32,), generator=generator)
        out = lookup(arena, ids, torch.arange(0, 3 * 32 + 1, 3), trainer=trainer)
        error = (out - hidden[ids].view(32, 3, 8).sum(1)) ** 2
        error.sum().backward()
        errors.append(error.mean().item())
    return arena, errors


def test_an_int8_table_learns_a_regression_nearly_as_fp32_does() -> None:
    """fp32 finds the hidden table; int8 comes as near as the width of its codes lets it."""
    fp32, int8 = (_train(precision, RowwiseAdagrad(lr=0.3), 300)[1] for precision in ("fp32", "int8"))
    assert fp32[0] == int8[0] > 1.0
    assert fp32[-1] < 1e-9
    assert int8[-1] < 3 * (2 * 3 / 127) ** 2 / 6  # three rows of |values| below 3, rounding noise of a sixth of a code squared
    assert all(error < 2 * exact + 0.01 for error, exact in zip(int8, fp32, strict=True))


def test_small_steps_are_lost_to_nearest_rounding_but_not_to_stochastic() -> None:
    """A large first column makes codes 0.16 wide; steps are smaller than half of that."""
    nearest, stochastic = (_train("int8", SGD(lr=0.004), 400, stochastic=s, first=20.0)[1] for s in (False, True))
    assert stochastic[-1] < 0.1 * nearest[-1]


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_the_seed_of_a_trainer_decides_the_rounding() -> None:
    tables = [_train("int8", SGD(lr=0.01), 20, seed)[0] for seed in (5, 5, 6)]
    assert torch.equal(tables[0].codes, tables[1].codes) and torch.equal(tables[0].meta, tables[1].meta)
    assert not torch.equal(tables[0].codes, tables[2].codes)


def test_nearest_rounding_does_not_look_at_the_seed() -> None:
    tables = [_train("int8", SGD(lr=0.01), 20, seed, stochastic=False)[0] for seed in (5, 6)]
    assert torch.equal(tables[0].codes, tables[1].codes) and torch.equal(tables[0].meta, tables[1].meta)


@pytest.mark.parametrize("seed", [0, -1, 2**62, -(2**63)])
def test_a_seed_is_any_64_bit_number(seed: int) -> None:
    arena, trainer = _train("int4", SGD(lr=0.1), 2, seed)[0], Trainer(_arena(), SGD(lr=0.1), seed=seed)
    assert trainer.clock.tolist() == [seed, 0]
    assert arena.read(0).isfinite().all()


def test_synchronize_has_nothing_to_wait_for_on_a_cpu() -> None:
    synchronize(_arena())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_synchronize_raises_what_a_gpu_reported() -> None:
    arena = Arena([TableSpec(5, 3, "int8", "user")], device="cuda")
    lookup(arena, torch.tensor([5], device="cuda"), torch.tensor([0, 1], device="cuda"))
    with pytest.raises(IdOutOfRange, check=has(table="user", rows=5)):
        synchronize(arena)
