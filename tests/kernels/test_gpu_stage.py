"""Staged rows: a run that stages them ends with the bits of a run that does not, whenever codes are copied and batches come."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import flat
import pytest
import torch
from staged import FEATURES, SLOTS, TABLES, Make, On, Run, batch_of, same

from support import mentions
from thermocline import formats as F
from thermocline.kernels.gather import gpu as gather
from thermocline.kernels.gpu.launch import INTERPRETED
from thermocline.kernels.stage import area_of, gpu, reference
from thermocline.kernels.stage import gpu_evict as gpu_leave

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

CACHED = [name for name, words in zip(F.NAMES, F.META_WORDS, strict=True) if words]


def _train(staged: Run, plain: Run, lookups: list[Any], modes: list[int], seed: int) -> None:
    """Step by step, with prefetches and copies at any point between the operations of a step."""
    dice = random.Random(seed)

    def something() -> None:
        happens = dice.random()
        if happens < 0.4:
            first = min(len(lookups) - 1, step + dice.choice((0, 1, 1, 1, 2)))
            staged.prefetch(*lookups[first : first + dice.choice((1, 1, 2, 3))])
        elif happens < 0.5:
            staged.arrive()
        elif happens < 0.7:
            staged.copy()
        elif happens < 0.9:
            staged.choose()

    for step, (lookup, mode) in enumerate(zip(lookups, modes, strict=True)):
        something()
        (ours, winners), (wanted, _) = (run.forward(lookup, mode) for run in (staged, plain))
        assert torch.equal(ours, wanted)
        something()
        grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(step)).to(ours.device)
        if lookup.weights is not None:
            made = (staged.made, plain.made)
            one, other = (
                flat.weight_gradient(gather, m.codes, m.meta, m.layout, lookup.ids, lookup.offsets, grad, m.cache) for m in made
            )
            assert torch.equal(one, other)
        something()
        for run in (staged, plain):
            run.backward(lookup, mode, winners, grad)
    staged.settle()
    assert same(staged.made, plain.made)
    assert staged.staging is not None and (staged.staging.rows == F.EMPTY).all()


@pytest.mark.parametrize("early", [True, False], ids=["copied before", "copied after"])
@pytest.mark.parametrize("way", ["arriving", "leaving"])
def test_a_row_in_transit_may_be_read_updated_and_admitted(way, early, make_arena: Make, make_training: Make, on: On):
    arena = make_arena([(9, 4, "int8")], slots=[1], policy="lru")  # the first row of a batch comes in, the others do not
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    staged, plain = Run(on(made), (6,)), Run(on(made))
    batch, other, another = (batch_of(on, ids) for ids in ([1, 2, 3], [5], [6, 7]))  # two of which need room for a third
    staged.prefetch(batch)
    if way == "leaving":
        staged.prefetch(other)
        staged.prefetch(another)
    held, _ = staged.states()
    bit = F.ARRIVING if way == "arriving" else F.LEAVING
    assert all(held[row][0] & bit for row in (1, 2, 3))
    if early:
        staged.copy()
    for step in range(1, 3):
        lookup = (batch.ids, batch.offsets, None)
        (ours, winners), (wanted, _) = (run.forward(lookup, F.SUM) for run in (staged, plain))
        assert torch.equal(ours, wanted)
        for run in (staged, plain):
            run.backward(lookup, F.SUM, winners, step * torch.ones_like(ours))
    staged.arrive()
    held, _ = staged.states()
    assert sorted(held) == ([] if way == "arriving" else [2, 3, 5, 6, 7])
    staged.settle()
    assert same(staged.made, plain.made)


def _step(runs: tuple[Run, Run], lookup: Any, grad: float) -> None:
    """The same step of both runs, with the same outputs."""
    (ours, winners), (wanted, _) = (run.forward(lookup, F.SUM) for run in runs)
    assert torch.equal(ours, wanted)
    for run in runs:
        run.backward(lookup, F.SUM, winners, grad * torch.ones_like(ours))


def test_a_leaving_row_that_goes_through_the_cache_is_not_overwritten_by_its_copy(
    make_arena: Make, make_training: Make, on: On
):
    arena = make_arena([(9, 4, "int8")], slots=[1], policy="lru")
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    runs = staged, _ = Run(on(made), (6,)), Run(on(made))
    for ids in ([1, 2, 3], [5], [6, 7]):
        staged.prefetch(batch_of(on, ids))
    assert staged.states()[0][1][0] & F.LEAVING
    for step, ids in enumerate(([1], [4])):  # neither was prefetched: the first is admitted, the second drives it out
        batch = batch_of(on, ids)
        _step(runs, (batch.ids, batch.offsets, None), 1.0 + step)
    assert not staged.under_way, "the second refresh waited"
    staged.settle()
    assert same(*(run.made for run in runs))


def test_batches_of_the_last_two_prefetches_refresh_the_cache_without_a_wait(make_arena: Make, make_training: Make, on: On):
    arena = make_arena([(40, 4, "int8")], slots=[1], policy="lru")
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    runs = staged, _ = Run(on(made), (12,)), Run(on(made))
    groups = [[batch_of(on, [k, k + 1]) for k in range(first, first + 6, 2)] for first in range(0, 36, 6)]
    for group, following in pairwise(groups):
        staged.prefetch(*following)
        assert staged.staging is not None
        for step, batch in enumerate(group):
            _step(runs, (batch.ids, batch.offsets, None), 1.0 + step)
            assert staged.under_way or group is groups[0], "rows of the first were not prefetched"
    assert int(staged.staging.counts[0, F.ROWS_OUT]) > 0
    _step(runs, (batch.ids, batch.offsets, None), 1.0)  # the same once more is another
    assert staged.under_way
    _step(runs, (batch.ids, batch.offsets, None), 1.0)
    assert not staged.under_way
    staged.settle()
    assert same(*(run.made for run in runs))


@pytest.mark.parametrize("format", CACHED)
def test_every_format_trains_to_the_same_bits(format, make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    arena = make_arena([(40, 5, format)], slots=[4], policy=F.POLICIES[CACHED.index(format) % 2])
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    lookups = [on(make_lookup(arena, 4, 3, seed=seed)) for seed in range(5)]
    _train(Run(on(made), (17,)), Run(on(made)), lookups, [F.SUM] * len(lookups), seed=CACHED.index(format))


@pytest.mark.parametrize("seed, places", [(0, (2, 5)), (1, (0, 25))])
def test_several_pools_whatever_room_there_is(seed, places, make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    arena = make_arena(TABLES, FEATURES, slots=SLOTS, policy=F.POLICIES[seed % 2])
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    modes = [F.SUM, F.MAX, F.SUM, F.NONE, F.SUM]
    lookups = [
        on(make_lookup(arena, None if mode == F.NONE else 3, 4, seed=step + 10 * seed, weighted=mode == F.SUM and step > 1))
        for step, mode in enumerate(modes)
    ]
    _train(Run(on(made), places), Run(on(made)), lookups, modes, seed)


def _meddle(run: Run, dice: random.Random) -> None:
    """What training does to rows that are staged or in transit, all of it, and to the words of their tables."""
    assert run.staging is not None
    for number in range(len(run.staging.places)):
        here = reference.Places(run.made.codes, run.made.meta, run.staging, run.made.layout.tables.pools, number)
        for at, word in enumerate(here.meta_RW[:, 0].tolist()):
            chance = dice.random()
            if chance > 0.3 or word >= 0:
                continue
            if word < F.STAGED:
                here.meta_RW[at, 0] = at  # driven out of the cache
            elif chance < 0.1:
                here.meta_RW[at, 0] = F.CACHED | at  # admitted
            elif word & F.ARRIVING:
                here.meta_RW[at, 0] = at  # updated in its table
            elif word & F.LEAVING:
                here.meta_RW[at, 0] = word & ~F.LEAVING  # updated in its place
            if word >= F.STAGED and not word & F.ARRIVING:
                here.codes_PB[word & F.PLACE_BITS] += 1


def _everything(run: Run) -> list[Any]:
    """All that a decision is about, to the last place."""
    assert run.staging is not None
    found: list[Any] = [run.made.meta.tolist(), run.made.codes.tolist(), run.staging.counts.tolist(), run.staging.rows.tolist()]
    for number in range(len(run.staging.places)):
        here = reference.Places(run.made.codes, run.made.meta, run.staging, run.made.layout.tables.pools, number)
        free, chosen, opened = (int(here.counts[field]) for field in (F.FREE, F.CHOSEN, F.OPEN))
        found += [here.free_L[:free].tolist(), here.chosen_S[:chosen].tolist(), here.leaving_L[:opened].tolist()]
        found += [here.ages_P.tolist()]
        found += [here.codes_PB.tolist(), here.meta_PW.tolist(), here.until_P.tolist()]
        pointing_R = (here.meta_RW[:, 0] < 0) & (here.meta_RW[:, 0] >= F.STAGED)
        place_K = (here.meta_RW[pointing_R, 0] & F.PLACE_BITS).long()
        assert torch.equal(here.rows_P[place_K], pointing_R.nonzero()[:, 0] + here.pool.row)  # nobody else's place
    return found


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("tile", [8 if INTERPRETED else 128, 1024])  # small ones make many programs
def test_the_kernels_do_what_the_definition_says(tile, slices, make_arena: Make, make_training: Make, on: On, monkeypatch):
    for module, name, size in ((gpu, "TILE", tile), (gpu_leave, "TILE", tile), (gpu_leave, "SCAN", 2 * tile)):
        monkeypatch.setattr(module, name, size)
    arena = make_arena([(70, 4, "int8"), (50, 4, "int8"), (30, 9, "int8_affine")], slots=[6, 4, 2])
    made, dice = make_training(arena, F.ROWWISE_ADAGRAD), random.Random(tile)
    runs = [Run(on(made), (41, 17), module, (19, 9), slices) for module in (gpu, reference)]
    for step in range(14):
        ids = [dice.randrange(rows) // (1 + step % 2) for rows in (70, 50, 30) for _ in range(6)]
        batch, seed = batch_of(on, ids, [0, 6, 12, 18]), dice.random()
        more = batch_of(on, [69, ids[0], 49, 49, 31], [0, 2, 4, 5])  # a row that both have, and an id that no table has
        for run in runs:
            run.prefetch(*([batch, more] if step % 4 == 3 else [batch]))
            _meddle(run, random.Random(seed))
            run.copy()
            if step % 3 == 2:
                run.arrive()
        ours, wanted = (_everything(run) for run in runs)
        assert ours == wanted
    counts = runs[1].staging.counts
    assert counts[:, [F.ROWS_IN, F.ROWS_OUT, F.ROWS_THERE]].min() > 0
    assert slices > 1 or counts[:, F.HAND].min() > 0  # three times as many sweep the whole table
    for run in runs:
        run.settle()
    assert _everything(runs[0]) == _everything(runs[1])
    assert (runs[1].staging.rows == F.EMPTY).all()


def test_a_row_that_comes_back_while_there_is_room_is_not_moved_again(make_arena: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    run = Run(on(make_training(arena, F.SGD)), (14,))
    for ids in ([1, 2, 3], [4, 5], [6], [7], [1, 2, 3], [5]):
        run.prefetch(batch_of(on, ids))
    run.arrive()
    assert run.staging is not None
    counts = run.staging.counts[0].tolist()
    assert (counts[F.ROWS_IN], counts[F.ROWS_THERE], counts[F.ROWS_OUT], counts[F.NO_ROOM]) == (7, 4, 0, 0)
    assert sorted(run.states()[0]) == [1, 2, 3, 4, 5, 6, 7]


def test_the_row_that_was_not_asked_for_the_longest_leaves_first(make_arena: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    run = Run(on(make_training(arena, F.SGD)), (6,))
    left = []
    for ids in ([1, 2], [3, 4], [1, 5], [6], [4, 7]):  # from the third on, room must be made; 1 was chosen when it came again
        run.prefetch(batch_of(on, ids))
        left.append([row for row, state in run.states()[0].items() if state[0] & F.LEAVING])
    assert left == [[], [], [2], [3, 4], [1]]


def test_rows_of_batches_that_come_together_are_there_until_the_last_of_them(make_arena: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    run = Run(on(make_training(arena, F.SGD)), (12,))
    first, second = [[1, 2], [2, 3], [], [4]], [[5, 6], [7], [1, 8]]
    run.prefetch(*(batch_of(on, ids, [0, len(ids)]) for ids in first))
    run.arrive()
    assert sorted(run.states()[0]) == [1, 2, 3, 4]
    run.prefetch(*(batch_of(on, ids) for ids in second))
    run.arrive()
    assert sorted(run.states()[0]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.staging is not None and run.staging.counts[0, [F.ROWS_IN, F.ROWS_THERE, F.NO_ROOM]].tolist() == [8, 1, 0]


def test_rows_that_find_no_room_are_counted_and_stay(make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    run = Run(on(make_training(arena, F.SGD)), (7,))
    run.prefetch(on(make_lookup(arena, 20, 1, full=True, distinct=True)))
    run.arrive()
    held, _ = run.states()
    assert len(held) == 7
    assert run.staging is not None and int(run.staging.counts[0, F.NO_ROOM]) == 13 and int((run.made.meta < 0).sum()) == 7


def test_ids_that_no_table_has_claim_nothing(make_arena: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8"), (9, 4, "int8")], slots=[3, 0])
    run = Run(on(make_training(arena, F.SGD)), (30,))
    run.prefetch(batch_of(on, [-1, 49, 50, 7, 8, 9, 1 << 40], [0, 3, 7]))
    assert sorted(run.states()[0]) == [49, 57, 58]


def test_an_earlier_cache_finds_the_new_staging_area(make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    made, lookup = make_training(arena, F.ROWWISE_ADAGRAD), on(make_lookup(arena, 4, 3))
    staged, plain = Run(on(made), (7,)), Run(on(made))
    old = staged.made.cache
    staged = Run(staged.made, (30,))
    staged.prefetch(lookup)
    staged.arrive()
    old.home.copy_(staged.made.cache.home)  # as an arena does
    staged.made.cache = old
    assert area_of(old) is staged.area
    (ours, winners), (wanted, _) = (run.forward(lookup, F.SUM) for run in (staged, plain))
    assert torch.equal(ours, wanted)
    for run in (staged, plain):
        run.backward(lookup, F.SUM, winners, torch.ones_like(ours))
    staged.settle()
    assert same(staged.made, plain.made)
    old.home.zero_()
    assert area_of(old) is None and not old.staged


def test_a_copy_of_the_arrays_is_refused(make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    run, lookup = Run(on(make_training(arena, F.SGD)), (30,)), on(make_lookup(arena, 2, 2))
    run.made.meta = run.made.meta.clone()
    with pytest.raises(RuntimeError, check=mentions("torch.compile", "inductor")):
        run.forward(lookup, F.SUM)
