"""Staged rows: a run that stages them ends with the bits of a run that does not, whenever codes are copied and batches come."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels import gpu_sort
from thermocline.kernels.gather import gpu as gather
from thermocline.kernels.gpu_launch import INTERPRETED
from thermocline.kernels.layout import Staging
from thermocline.kernels.stage import as_staged, given_up, gpu, gpu_ahead, gpu_leave, reference
from thermocline.kernels.update import gpu as update

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
CACHED = [name for name, words in zip(F.NAMES, F.META_WORDS, strict=True) if words]
# Two pools, one of two tables, and rows that cannot be staged; two features share a table.
TABLES = [(70, 4, "int8"), (40, 3, "int4"), (50, 4, "int8"), (20, 8, "fp32")]
FEATURES = [0, 1, 2, 2, 3]
SLOTS = [6, 3, 4, 0]


class Run:
    """A training run on Triton's kernels, with or without a staging area."""

    def __init__(
        self, made: Any, places: tuple[int, ...] = (), module: Any = gpu, most: tuple[int, ...] | None = None, slices: int = 1
    ) -> None:
        self.made, self.module, self.under_way, self.refreshes = made, module, False, 0
        self.staging: Staging | None = None
        if places:
            self.staging = reference.make_staging(made.codes, made.meta, made.layout.tables.pools, places, most, slices)
            made.cache = made.cache._replace(area=self.staging.area)
            self._open()

    @property
    def table(self) -> tuple[Any, ...]:
        return self.made.meta, self.staging, self.made.layout, self.made.codes

    def copy(self) -> None:
        """Once, at any time before it must have been: what was copied too early or too late must not matter."""
        if self.under_way:
            self.module.copy(*self.table)
            self.under_way = False

    def choose(self) -> None:
        """When all that was chosen is open, at any time before the next decision or commit."""
        assert self.staging is not None
        if self.slices_left == 0:
            self.module.choose(*self.table)
            self.slices_left = self.staging.slices

    def _open(self) -> None:
        self.module.choose(*self.table)
        self.module.send(*self.table)
        self.slices_left = 0
        self.choose()

    def _set_out(self) -> None:
        self.under_way, self.refreshes = True, 0

    def prefetch(self, lookup: Any) -> None:
        self.copy()
        self.choose()
        self.module.commit(*self.table, True)
        self.module.claim(*self.table, lookup.ids, lookup.offsets)
        self.module.send(*self.table)
        self.slices_left -= 1
        self._set_out()

    def arrive(self) -> None:
        self.copy()
        self.choose()
        self.module.commit(*self.table, False)

    def settle(self) -> None:
        assert self.staging is not None
        self.arrive()
        for _ in range(self.staging.rounds):
            self.module.choose(*self.table, True)
            self.module.send(*self.table, True)
            self._set_out()
            self.arrive()
        self._open()

    def forward(self, lookup: Any, mode: int) -> tuple[Tensor, Tensor]:
        made = self.made
        return gather.gather_pool(made.codes, made.meta, made.layout, *lookup, mode, torch.float32, True, made.cache)

    def backward(self, lookup: Any, mode: int, winners: Tensor, grad: Tensor) -> None:
        made = self.made
        self.refreshes += 1
        if self.refreshes == 2:  # waits for the copies, on a card
            self.copy()
        update.update_bags(
            made.codes, made.meta, made.states, made.layout, *lookup, mode, winners, grad, made.hyper, made.clock,
            F.ROWWISE_ADAGRAD, True, made.cache,
        )  # fmt: skip

    def states(self) -> tuple[dict[int, tuple[int, list[int], bytes]], list[int]]:
        """What every staged row goes through and has in its place, and how many rows moved."""
        assert self.staging is not None
        held = {}
        for number in range(len(self.staging.places)):
            here = reference.Places(self.made.codes, self.made.meta, self.staging, self.made.layout.tables.pools, number)
            places = torch.arange(len(here.rows_P), device=here.rows_P.device)
            for place, at, word in zip(*(t.tolist() for t in here.found(places)), strict=True):
                if not (F.STAGED <= word < 0 and word & F.PLACE_BITS == place):
                    continue  # its row went elsewhere
                codes = bytes(here.codes_PB[place].tolist()) if not word & F.ARRIVING else b""
                held[at + here.pool.row] = (word & ~F.PLACE_BITS, here.meta_PW[place].tolist(), codes)
        return held, self.staging.counts[:, [F.FREE, F.LEFT, F.ROWS_IN, F.ROWS_OUT]].flatten().tolist()


def _same(a: Any, b: Any) -> bool:
    """Compares everything but the staging area, and what cached rows have in their tables: nobody reads that."""
    for made in (a, b):
        for field in made.layout.tables.distinct:
            width, words, rows = F.row_bytes(field[F.FORMAT], field[F.DIM]), F.META_WORDS[field[F.FORMAT]], field[F.ROWS]
            if words:
                meta_RW = made.meta[field[F.META] : field[F.META] + rows * words].view(rows, words)
                cached_R = meta_RW[:, 0] < 0
                made.codes[field[F.CODES] : field[F.CODES] + rows * width].view(rows, width)[cached_R] = 0
                meta_RW[cached_R, 1:] = 0
    ours, wanted = (made.changed()[:-1] for made in (a, b))
    return all(torch.equal(x, y) for x, y in zip(ours, wanted, strict=True))


def _batch(on: On, ids: list[int], offsets: list[int] | None = None) -> Any:
    """What a prefetch takes of a batch; one bag unless told."""
    return SimpleNamespace(ids=on(torch.tensor(ids)), offsets=on(torch.tensor(offsets or [0, len(ids)])))


def _train(staged: Run, plain: Run, lookups: list[Any], modes: list[int], seed: int) -> None:
    """Step by step, with prefetches and copies at any point between the operations of a step."""
    dice = random.Random(seed)

    def something() -> None:
        happens = dice.random()
        if happens < 0.4:
            staged.prefetch(lookups[min(len(lookups) - 1, step + dice.choice((0, 1, 1, 1, 2)))])
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
                gather.weight_gradient(m.codes, m.meta, m.layout, lookup.ids, lookup.offsets, grad, m.cache) for m in made
            )
            assert torch.equal(one, other)
        something()
        for run in (staged, plain):
            run.backward(lookup, mode, winners, grad)
    staged.settle()
    assert _same(staged.made, plain.made)
    assert staged.staging is not None and (staged.staging.rows == F.EMPTY).all()


@pytest.mark.parametrize("early", [True, False], ids=["copied before", "copied after"])
@pytest.mark.parametrize("way", ["arriving", "leaving"])
def test_a_row_in_transit_may_be_read_updated_and_admitted(way, early, make_arena: Make, make_training: Make, on: On):
    arena = make_arena([(9, 4, "int8")], slots=[1], policy="lru")  # the first row of a batch comes in, the others do not
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    staged, plain = Run(on(made), (6,)), Run(on(made))
    batch, other, another = (_batch(on, ids) for ids in ([1, 2, 3], [5], [6, 7]))  # two of which need room for a third
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
    assert _same(staged.made, plain.made)


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
        batch, seed = _batch(on, ids, [0, 6, 12, 18]), dice.random()
        for run in runs:
            run.prefetch(batch)
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
        run.prefetch(_batch(on, ids))
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
        run.prefetch(_batch(on, ids))
        left.append([row for row, state in run.states()[0].items() if state[0] & F.LEAVING])
    assert left == [[], [], [2], [3, 4], [1]]


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
    run.prefetch(_batch(on, [-1, 49, 50, 7, 8, 9, 1 << 40], [0, 3, 7]))
    assert sorted(run.states()[0]) == [49, 57, 58]


def test_rows_are_found_by_whoever_knows_an_old_area(make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    made, lookup = make_training(arena, F.ROWWISE_ADAGRAD), on(make_lookup(arena, 4, 3))
    staged, plain = Run(on(made), (7,)), Run(on(made))
    old = staged.made.cache
    staged = Run(staged.made, (30,))
    staged.prefetch(lookup)
    staged.arrive()
    assert as_staged(old, staged.made.codes, staged.made.meta).area is staged.made.cache.area is not old.area
    staged.made.cache = as_staged(old, staged.made.codes, staged.made.meta)
    (ours, winners), (wanted, _) = (run.forward(lookup, F.SUM) for run in (staged, plain))
    assert torch.equal(ours, wanted)
    for run in (staged, plain):
        run.backward(lookup, F.SUM, winners, torch.ones_like(ours))
    staged.settle()
    assert _same(staged.made, plain.made)
    given_up(staged.made.codes, staged.made.meta)
    assert not as_staged(old, staged.made.codes, staged.made.meta).staged


def _sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lookups each sort of an update has, from now on."""
    sort, seen = update.sort_lookups, []

    def counted(layout: Any, ids_N: Tensor, *rest: Any) -> Any:
        seen.append(ids_N.numel())
        return sort(layout, ids_N, *rest)

    monkeypatch.setattr(update, "sort_lookups", counted)
    return seen


class _ByHand(gpu_sort._Sorter):
    """Does its work anew instead of replaying it."""

    def _record(self) -> Callable[[], None]:
        return self._work


def _record_all_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sort is one of those that are recorded, and overwrites what the last one with the same sorters left."""
    kept: dict[Any, gpu_sort._Sorter] = {}

    def sorter(count: int, kind: torch.dtype, device: torch.device, sorters: gpu_sort.Sorters) -> gpu_sort._Sorter:
        if (sorters, kind) not in kept:
            kept[sorters, kind] = (_ByHand if INTERPRETED else gpu_sort._Sorter)(301, kind, device)
        return kept[sorters, kind]

    monkeypatch.setattr(gpu_sort, "_sorter", sorter)


@pytest.mark.parametrize("mode", [F.SUM, F.NONE, F.MEAN])
def test_the_update_of_a_batch_that_was_prefetched_does_not_sort_it_again(
    mode, make_arena: Make, make_lookup: Make, make_training: Make, on: On, monkeypatch
):
    _record_all_sorts(monkeypatch)
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    made = make_training(arena, F.ROWWISE_ADAGRAD)
    staged, plain, seen = Run(on(made), (25, 40)), Run(on(made)), _sorts(monkeypatch)
    batches = [on(make_lookup(arena, None if mode == F.NONE else 4, 3, seed=seed, weighted=False)) for seed in range(4)]
    counts = [batch.ids.numel() for batch in batches]
    staged.prefetch(batches[0])
    for step, batch in enumerate(batches[:3]):
        staged.prefetch(batches[step + 1])  # sorted between the sort of this batch and its update
        (ours, winners), (wanted, _) = (run.forward(batch, mode) for run in (staged, plain))
        assert torch.equal(ours, wanted)
        for run in (staged, plain):
            run.backward(batch, mode, winners, torch.randn(ours.shape, generator=torch.Generator().manual_seed(step)).to(ours))
    assert seen == (counts[:3] if mode != F.MEAN else [count for count in counts[:3] for _ in range(2)])
    staged.settle()
    assert _same(staged.made, plain.made)


@pytest.mark.parametrize("what", ["ids", "offsets"])
def test_a_batch_that_changed_since_it_was_prefetched_is_sorted_anew(
    what, make_arena: Make, make_lookup: Make, make_training: Make, on: On, monkeypatch
):
    arena = make_arena([(50, 4, "int8"), (50, 4, "int8")], slots=[3, 2])
    made, batch = make_training(arena, F.ROWWISE_ADAGRAD), on(make_lookup(arena, 4, 3, weighted=False, full=True))
    staged, plain, seen = Run(on(made), (30,)), Run(on(made)), _sorts(monkeypatch)
    staged.prefetch(batch)
    if what == "ids":
        batch.ids[2:7] = batch.ids[:5].clone()
    else:
        batch.offsets[4] -= 1  # an id of the second feature instead of the first
    for run in (staged, plain):
        out, winners = run.forward(batch, F.SUM)
        run.backward(batch, F.SUM, winners, torch.ones_like(out))
    assert len(seen) == 2
    staged.settle()
    assert _same(staged.made, plain.made)


def test_a_buffer_that_is_refilled_past_autograd_is_updated_with_its_newest_batch(
    make_arena: Make, make_lookup: Make, make_training: Make, on: On, monkeypatch
):
    arena = make_arena([(50, 4, "int8"), (50, 4, "int8")], slots=[3, 2])
    made, batch = make_training(arena, F.ROWWISE_ADAGRAD), on(make_lookup(arena, 4, 3, weighted=False, full=True))
    staged, plain, seen = Run(on(made), (30,)), Run(on(made)), _sorts(monkeypatch)
    for step in range(5):
        batch.ids.data.copy_((batch.ids + 7) % 50)  # raises no version, as a collective does
        for _ in range((1, 2, 1, 0, 1)[step]):
            staged.prefetch(batch)
        for run in (staged, plain):
            out, winners = run.forward(batch, F.SUM)
            run.backward(batch, F.SUM, winners, (1 + step) * torch.ones_like(out))
    assert len(seen) == 5 + 1  # the one that was not prefetched
    staged.settle()
    assert _same(staged.made, plain.made)


def test_what_was_sorted_ahead_is_not_for_captured_graphs(make_arena: Make, make_lookup: Make, on: On, monkeypatch):
    arena, area = make_arena([(50, 4, "int8")], slots=[3]), on(torch.zeros(8, dtype=torch.int64))
    batch = on(make_lookup(arena, 4, 3, weighted=False))
    gpu_ahead.sort_ahead(area, on(arena.layout), batch.ids, batch.offsets)
    found = partial(gpu_ahead.sorted_ahead, area, batch.ids, batch.offsets, F.SUM, batch.ids)
    with monkeypatch.context() as captured:
        captured.setattr(gpu_ahead, "_captured", lambda _: True)
        assert found() is None
    assert found() is not None and found() is None, "once"
    gpu_ahead.forget(area)


def test_a_copy_of_the_arrays_is_refused(make_arena: Make, make_lookup: Make, make_training: Make, on: On):
    arena = make_arena([(50, 4, "int8")], slots=[3])
    run, lookup = Run(on(make_training(arena, F.SGD)), (30,)), on(make_lookup(arena, 2, 2))
    run.made.meta = run.made.meta.clone()
    with pytest.raises(RuntimeError, match="copy of its arrays"):
        run.forward(lookup, F.SUM)
