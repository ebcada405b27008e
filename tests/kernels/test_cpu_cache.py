"""The cache on the CPU: after every step the bits of the reference, in every array."""

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
from thermocline.errors import BadGradient, BadInput
from thermocline.kernels.cache import reference as caching
from thermocline.kernels.gather import cpu as cpu_gather
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.layout import Cache
from thermocline.kernels.sum_gradients import reference as sums
from thermocline.kernels.update import cpu, reference
from thermocline.rows.arena import Arena

pytestmark = pytest.mark.usefixtures("poisoned_scratch")

Make = Callable[..., Any]
CACHED = [name for name, words in zip(F.NAMES, F.META_WORDS, strict=True) if words]
DIMS = (1, 3, 16, 48, 64, 100, 128)
MODES = range(len(F.MODES))
OPTIMIZERS = range(len(F.OPTIMIZERS))
# rows, dimension, precision and slots; the last kind has no slots of its own
TABLE = st.tuples(
    st.sampled_from([1, 2, 33, 500]), st.sampled_from(DIMS), st.sampled_from(CACHED), st.sampled_from([0, 1, 7, 600])
)
PLAIN = st.tuples(st.sampled_from([5, 70]), st.sampled_from(DIMS), st.sampled_from(["fp32", "bf16"]), st.just(0))
# Two pools, one of them with two tables and three features; an fp32 table between; a table without slots.
TABLES = [(300, 20, "int8"), (17, 3, "int4"), (200, 20, "int8"), (40, 16, "fp32"), (90, 200, "int2"), (30, 8, "fp8")]
FEATURES = [0, 1, 2, 0, 3, 4, 5]
SLOTS = [30, 4, 11, 0, 13, 0]


def _same(got: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got.changed(), wanted.changed(), strict=True))


def _counts(arena: Arena, lookup: Any, mode: int, rows_U: Tensor) -> Tensor:
    """How often each distinct row is looked up."""
    first = torch.tensor([f[F.ROW] for f in arena.layout.tables.features])
    batch = 1 if mode == F.NONE else (lookup.offsets.numel() - 1) // len(first)
    feature_N = gather.bag_of_each(lookup.offsets.long(), lookup.ids.numel()) // batch
    rows, counts = torch.unique(first[feature_N] + lookup.ids, return_counts=True)
    assert torch.equal(rows, rows_U)
    return counts


def _step_by_bags(wanted: Any, got: Any, arena: Arena, lookup: Any, mode: int, optimizer: int, stochastic: bool = True) -> None:
    """One step of the reference, of sums and counts, and one of the kernel."""
    place = (wanted.codes, wanted.meta, wanted.layout)
    out, winners = flat.gather_pool(gather, *place, *lookup, mode, torch.float32, cache=wanted.cache)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(int(wanted.clock[F.STEP])))
    rows_U, grads_UW = flat.sum_row_gradients(sums, wanted.layout, *lookup, mode, winners, grad)
    counts_U = _counts(arena, lookup, mode, rows_U)
    place = (wanted.codes, wanted.meta, wanted.states, wanted.layout, rows_U, grads_UW, wanted.hyper, wanted.clock)
    flat.update_rows(reference, *place, optimizer, stochastic, wanted.cache, counts_U)
    place = (got.codes, got.meta, got.states, got.layout, *lookup, mode, winners, grad, got.hyper, got.clock)
    flat.update_bags(cpu, *place, optimizer, stochastic, got.cache)
    assert _same(got, wanted)


def _step_by_rows(wanted: Any, got: Any, rows_U: Tensor, optimizer: int, stochastic: bool = True) -> None:
    """One step of the reference and of the kernel on these rows."""
    shape = (rows_U.numel(), wanted.layout.tables.max_dim)
    grads_UW = torch.randn(shape, generator=torch.Generator().manual_seed(int(wanted.clock[F.STEP])))
    for module, made in ((reference, wanted), (cpu, got)):
        place = (made.codes, made.meta, made.states, made.layout, rows_U, grads_UW, made.hyper, made.clock)
        flat.update_rows(module, *place, optimizer, stochastic, made.cache)
    assert _same(got, wanted)


def _some_rows(arena: Arena, seed: int, most: int) -> Tensor:
    """Distinct arena rows, small numbers of each table more often, in no order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(most, generator=generator) ** 3 * arena.rows).long().unique()
    return drawn[torch.randperm(drawn.numel(), generator=generator)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(
    tables=st.lists(st.one_of(TABLE, TABLE, PLAIN), min_size=1, max_size=4),
    policy=st.sampled_from(F.POLICIES),
    batch=st.sampled_from([0, 1, 13]),
    longest=st.integers(0, 9),
    mode=st.sampled_from(MODES),
    optimizer=st.sampled_from(OPTIMIZERS),
    stochastic=st.booleans(),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_any_arena_over_many_steps(
    tables: Any, policy: str, batch: int, longest: int, mode: int, optimizer: int, stochastic: bool, count: int, seed: int,
    make_arena: Make, make_lookup: Make, make_training: Make, threads: Make, lookups_agree: Make,
) -> None:  # fmt: skip
    threads(count)
    shapes, slots = [t[:3] for t in tables], [t[3] for t in tables]
    arena = make_arena(shapes, [*range(len(tables)), 0], seed=seed, slots=slots, policy=policy)
    wanted, got, by_row, reference_by_row = (make_training(arena, optimizer, seed) for _ in range(4))
    for step in range(7):
        weighted = mode == F.SUM and step % 2 == 1
        lookup = make_lookup(arena, None if mode == F.NONE else batch, longest, seed=seed + step, weighted=weighted)
        _step_by_bags(wanted, got, arena, lookup, mode, optimizer, stochastic)
        lookups_agree(got, lookup, mode)
        rows_U = _some_rows(arena, seed + step, 30)
        _step_by_rows(reference_by_row, by_row, rows_U if step % 2 else rows_U.sort()[0], optimizer, stochastic)


@pytest.mark.parametrize("format", CACHED)
def test_bags_longer_than_what_is_asked_for_at_once(
    format: str, make_arena: Make, make_lookup: Make, make_training: Make, lookups_agree: Make
) -> None:
    arena = make_arena([(500, 150, format), (60, 3, format)], slots=[90, 10])
    wanted, got = (make_training(arena, F.ROWWISE_ADAGRAD) for _ in range(2))
    for step, longest in enumerate((0, 31, 32, 33, 63, 64, 65, 200)):
        lookup = make_lookup(arena, 3, longest, seed=step, weighted=step % 3 == 1, full=True)
        _step_by_bags(wanted, got, arena, lookup, F.SUM, F.ROWWISE_ADAGRAD)
        lookups_agree(got, lookup, F.SUM)


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
@pytest.mark.parametrize("format", CACHED)
def test_every_format_and_dimension_while_the_cache_thrashes(
    format: str, policy: str, make_arena: Make, make_lookup: Make, make_training: Make, lookups_agree: Make
) -> None:
    for dim in DIMS:
        for slots in (1, 10, 41):
            arena = make_arena([(41, dim, format)], seed=dim, slots=[slots], policy=policy)
            wanted, got = (make_training(arena, F.ROWWISE_ADAGRAD) for _ in range(2))
            for step in range(5):
                lookup = make_lookup(arena, 11, 4, seed=step, weighted=step == 3)
                _step_by_bags(wanted, got, arena, lookup, F.SUM, F.ROWWISE_ADAGRAD)
                lookups_agree(got, lookup, F.SUM)
            assert int(got.cache.ledger[0, F.HITS]) > 0


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=F.OPTIMIZERS)
def test_pools_beside_tables_without_slots(
    optimizer: int, mode: int, policy: str, make_arena: Make, make_lookup: Make, make_training: Make, lookups_agree: Make
) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS, policy=policy)
    wanted, got = (make_training(arena, optimizer) for _ in range(2))
    for step in range(30):  # counts are halved many times on the way
        batch, longest = (None, 40) if mode == F.NONE else ((2, 63)[step % 2], 6)
        _step_by_bags(wanted, got, arena, make_lookup(arena, batch, longest, seed=step), mode, optimizer)
    assert all(got.cache.ledger[:, field].min() > 0 for field in (F.HITS, F.EVICTIONS, F.WRITE_BACKS))
    lookups_agree(got, make_lookup(arena, None if mode == F.NONE else 99, 9, seed=99), mode)


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_do_not_change_a_bit(
    count: int, policy: str, make_arena: Make, make_lookup: Make, make_training: Make, threads: Make, lookups_agree: Make
) -> None:
    threads(count)
    tables = [(20_000, 20, "int8"), (3000, 5, "int4"), (9000, 20, "int8")]
    arena = make_arena(tables, slots=[900, 70, 20], policy=policy)
    wanted, got, by_row, reference_by_row = (make_training(arena, F.ROWWISE_ADAGRAD) for _ in range(4))
    limits = torch.tensor([t[0] for t in tables])
    for step in range(6):
        ids, offsets, _ = lookup = make_lookup(arena, 1500, 8, seed=step)
        if step % 3:  # small ids more often, and once nearly all of them one row
            limit_N = limits[gather.bag_of_each(offsets, ids.numel()) // 1500]
            ids = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) ** 6 * limit_N).long()
            ids = torch.where(ids % 5 > 0, 7, ids) if step == 5 else ids
            lookup = lookup._replace(ids=ids)
        _step_by_bags(wanted, got, arena, lookup, F.SUM, F.ROWWISE_ADAGRAD)
        _step_by_rows(reference_by_row, by_row, _some_rows(arena, step, 9000), F.ROWWISE_ADAGRAD)
    lookups_agree(got, lookup, F.SUM)


def test_the_window_is_steered_as_in_the_reference(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(9000, 1, "int8"), (70, 2, "int4")], slots=[131, 9], policy="adaptive")
    wanted, got = (make_training(arena, F.SGD) for _ in range(2))
    seen = set()
    for step in range(200):
        rows_U = _some_rows(arena, step, 20) if step > 150 else _some_rows(arena, step, 300) // 30 + 40 * step
        _step_by_rows(wanted, got, torch.cat([rows_U[rows_U < 9000], torch.tensor([9000 + step % 70])]).unique(), F.SGD)
        seen.add(tuple(got.cache.ledger[0, F.WINDOW :].tolist()))
    assert [len(set(field)) > 9 for field in zip(*seen, strict=True)] == [True, True, True], "it was not put to the test"
    assert got.cache.ledger[0, F.SINCE] < got.cache.ledger[0, F.LOOKUPS], "nothing was halved"


def test_counters_may_carry_into_their_neighbours(make_arena: Make, make_lookup: Make, make_training: Make) -> None:
    arena = make_arena([(3000, 4, "int8")], slots=[50])
    generator = torch.Generator().manual_seed(3)
    sketch = Cache(*arena.cache).sketch
    sketch.copy_(torch.randint(-(2**31), 2**31, sketch.shape, generator=generator))
    sketch[::3] |= 0xFFFF
    wanted, got = (make_training(arena, F.SGD) for _ in range(2))
    for step in range(5):
        _step_by_bags(wanted, got, arena, make_lookup(arena, 300, 9, seed=step), F.SUM, F.SGD)


def test_a_row_that_was_not_updated_leaves_as_it_came(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(40, 7, "int4")], slots=[5], policy="lru")
    wanted, got = (make_training(arena, F.SGD) for _ in range(2))
    pool, rows_K = arena.pools[0], torch.tensor([3, 9, 20, 21, 39])
    for made in (wanted, got):
        caching._PoolSlots(made.codes, made.meta, made.cache, pool).admit(rows_K, torch.arange(5), torch.zeros(5), 0)
    assert int((got.meta < 0).sum()) == 5
    _step_by_rows(wanted, got, torch.tensor([0, 9, 10, 11, 12, 13]), F.SGD)
    left = torch.tensor([3, 20, 21, 39])
    assert torch.equal(got.meta[left], arena.meta[left])
    assert torch.equal(got.codes.view(-1)[: 40 * 4].view(40, 4)[left], arena.codes[: 40 * 4].view(40, 4)[left])
    assert got.cache.ledger[0].tolist()[: F.WINDOW] == [6, 6, 1, 4, 4, 0, 0]


@pytest.mark.parametrize("broken", ["id", "offsets"])
def test_bad_input_leaves_the_cache_as_it_was(broken: str, make_arena: Make, make_lookup: Make, make_training: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    wanted, got = (make_training(arena, F.ADAM) for _ in range(2))
    lookup = make_lookup(arena, 100, 4, full=True)
    _step_by_bags(wanted, got, arena, lookup, F.SUM, F.ADAM)
    if broken == "id":
        lookup.ids[int(lookup.offsets[300]) + 2] = 300
    else:
        lookup.offsets[555] = lookup.offsets[554] - 1
    place = (got.codes, got.meta, got.states, got.layout, *lookup, F.SUM, torch.empty(0, dtype=torch.int32))
    with pytest.raises(BadInput):
        flat.update_bags(cpu, *place, torch.ones(100, arena.layout.tables.width), got.hyper, got.clock, F.ADAM, True, got.cache)
    assert _same(got, wanted)
    with pytest.raises(BadInput):
        flat.gather_pool(cpu_gather, got.codes, got.meta, got.layout, *lookup, F.SUM, torch.float32, True, got.cache)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize("optimizer", [F.ADAGRAD, F.ROWWISE_ADAGRAD, F.ADAM], ids=lambda o: F.OPTIMIZERS[o])
def test_a_bad_gradient_spares_a_cached_row(poison: float, optimizer: int, make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(9, 20, "int8")], slots=[4], policy="lru")
    wanted, got = (make_training(arena, optimizer) for _ in range(2))
    rows_U = torch.tensor([1, 2, 5, 7])
    _step_by_rows(wanted, got, rows_U, optimizer)
    grads_UW = torch.ones(4, 20)
    grads_UW[2, 13] = poison
    before = got.cache.values.clone()
    for module, made in ((reference, wanted), (cpu, got)):
        place = (made.codes, made.meta, made.states, made.layout, rows_U, grads_UW, made.hyper, made.clock)
        with pytest.raises(BadGradient) as error:
            flat.update_rows(module, *place, optimizer, True, made.cache)
        assert error.value.row == 5
    assert _same(got, wanted)
    assert (got.cache.values.view(4, 20) == before.view(4, 20)).all(1).tolist() == [False, False, True, False]


def test_an_empty_batch_changes_nothing(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(9, 4, "int8")], slots=[2])
    wanted, got = (make_training(arena, F.SGD) for _ in range(2))
    _step_by_rows(wanted, got, torch.empty(0, dtype=torch.int64), F.SGD)
    assert got.cache.clock[F.STEP] == 0 and got.cache.steps == 0
