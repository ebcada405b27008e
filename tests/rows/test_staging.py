"""Prefetching an arena's rows: room, counts, and what is left when all is put back. Without a card, in Triton's interpreter."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels import ops
from thermocline.kernels.stage import area_of
from thermocline.kernels.stage.gpu_area import StagingArea
from thermocline.rows.arena import Arena
from thermocline.rows.optimizers import SGD
from thermocline.rows.staging import Stage, place_bytes
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import Trainer, lookup

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors need Triton's interpreter; a GPU runs test_gpu_stage.py"),
]


def make() -> tuple[Arena, Tensor, Tensor]:
    """An arena of two kinds of rows, and a batch of 5 and 4 distinct rows of them."""
    arena = Arena([TableSpec(90, 6, "int8"), TableSpec(40, 3, "int4"), TableSpec(30, 2, "fp32")], slots=[3, 2, 0])
    arena.randomize_(1.0, torch.Generator().manual_seed(0))
    ids = torch.tensor([8, 8, 1, 89, 4, 5, 39, 0, 1, 1, 2, 7, 7])
    return arena, ids, torch.tensor([0, 6, 11, 13])


def stage_for(arena: Arena, ids: Tensor, offsets: Tensor) -> Stage:
    return Stage(arena.codes, arena.meta, arena.layout, [(ids, offsets)])


def test_there_is_room_for_three_batches_like_the_first():
    arena, ids, offsets = make()
    stage = stage_for(arena, ids, offsets)
    assert stage.staging.places == (12, 15)  # pools go by dimension
    assert stage.suffices([(ids, offsets)]) and not stage.suffices(2 * [(ids, offsets)])


def test_batches_that_come_together_get_the_room_of_all_and_come_at_once():
    arena, ids, offsets = make()
    codes, meta = arena.codes.clone(), arena.meta.clone()
    together = [(ids, offsets), (ids[:0], torch.zeros(4, dtype=torch.int64)), ((ids + 3) % 30, offsets)]
    stage = Stage(arena.codes, arena.meta, arena.layout, together)
    assert stage.staging.places == (24, 24) and stage.suffices(together) and stage.suffices(together[:1])
    stage.prefetch(together)
    stage.arrive()
    assert stage.statistics()["prefetch_rows_in"] == int((arena.meta < 0).sum()) == 8 + 8
    stage.settle()
    assert torch.equal(arena.codes, codes) and torch.equal(arena.meta, meta)


def test_there_is_room_for_tables_that_the_first_batch_has_nothing_of():
    arena, ids, _ = make()
    first = torch.tensor([0, 13, 13, 13])
    stage = stage_for(arena, ids, first)  # 9 rows of the first of three features
    assert stage.staging.places == (3, 27)
    stage.prefetch([(torch.arange(13), torch.tensor([0, 4, 13, 13]))])
    assert stage.statistics()["prefetch_rows_in"] == 4 + 3 and stage.statistics()["prefetch_no_room"] == 6


def test_what_is_prefetched_is_counted_and_put_back():
    arena, ids, offsets = make()
    codes, meta = arena.codes.clone(), arena.meta.clone()
    stage = stage_for(arena, ids, offsets)
    stage.prefetch([(ids, offsets)])
    assert int((arena.meta < 0).sum()) == 9
    counts = stage.statistics()
    assert counts["prefetch_rows_in"] == 9 and counts["prefetch_bytes_in"] == 5 * 6 + 4 * 2
    assert counts["prefetch_rows_out"] == counts["prefetch_no_room"] == 0
    stage.arrive()
    stage.prefetch([((ids + 3) % 30, offsets)])
    stage.settle()
    assert torch.equal(arena.codes, codes) and torch.equal(arena.meta, meta)
    assert (stage.staging.rows == F.EMPTY).all()
    counts = stage.statistics()
    assert counts["prefetch_rows_in"] == counts["prefetch_rows_out"] > 9


def test_room_that_was_asked_for_is_a_share_of_every_kind_of_rows():
    arena, ids, offsets = make()
    stage = Stage(arena.codes, arena.meta, arena.layout, [(ids, offsets)], share=0.3)
    assert stage.staging.places == (12, 27) and stage.staging.most == (4, 5)  # what one batch may move
    each = [place_bytes(pool.format, pool.dim) for pool in arena.layout.tables.pools]
    assert 0 <= stage.bytes - 12 * each[0] - 27 * each[1] < 600  # beside lists and counts


def test_a_first_batch_without_ids_leaves_room_that_later_ones_can_use():
    arena, ids, offsets = make()
    stage = Stage(arena.codes, arena.meta, arena.layout, [(ids[:0], torch.zeros(4, dtype=torch.int64))], share=0.3)
    assert stage.staging.places == (12, 27) and stage.staging.most == (1, 1)
    codes, meta = arena.codes.clone(), arena.meta.clone()
    stage.prefetch([(ids, offsets)])
    assert stage.statistics()["prefetch_rows_in"] == 2
    stage.settle()
    assert torch.equal(arena.codes, codes) and torch.equal(arena.meta, meta)


def test_rows_stay_until_their_places_are_needed_and_all_of_them_can_be_put_back():
    arena, ids, offsets = make()
    codes, meta = arena.codes.clone(), arena.meta.clone()
    stage = Stage(arena.codes, arena.meta, arena.layout, [(ids, offsets)], share=0.9)
    assert stage.staging.slices > 1
    batches = [(ids + shift) % 30 for shift in (0, 3, 9, 14, 21)]
    for batch in (*batches, *batches):
        stage.prefetch([(batch, offsets)])
    counts = stage.statistics()
    assert counts["prefetch_rows_there"] > counts["prefetch_rows_in"] > 9 and counts["prefetch_no_room"] == 0
    stage.settle()
    assert torch.equal(arena.codes, codes) and torch.equal(arena.meta, meta)
    counts = stage.statistics()
    assert counts["prefetch_rows_in"] == counts["prefetch_rows_out"]
    stage.prefetch([(ids, offsets)])  # finds open places again
    assert stage.statistics()["prefetch_rows_in"] == counts["prefetch_rows_in"] + 9
    stage.settle()


def test_an_arena_on_the_device_of_its_lookups_has_nothing_to_prefetch():
    arena, _, _ = make()
    assert not arena.prefetches and "staging" not in arena.memory().parts
    arena.settle()
    arena.unstage()
    assert "prefetch_rows_in" not in arena.stats()


def test_an_area_that_was_made_in_inference_mode_can_be_used_outside(monkeypatch):
    monkeypatch.setattr(Arena, "prefetches", True)
    arena, ids, offsets = make()
    codes = arena.codes.clone()
    with torch.inference_mode():
        arena.prefetch((ids, offsets))
        arena.prefetch((ids, offsets))
    arena.arrive()
    arena.prefetch(((ids + 3) % 30, offsets))
    arena.unstage()
    assert torch.equal(arena.codes, codes) and arena.stats()["prefetch_rows_in"] > 9


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_a_compiled_backward_finds_rows_where_later_prefetches_put_them(monkeypatch):
    arena, ids, offsets = make()
    trainer, areas = Trainer(arena, SGD(lr=0.1)), []
    monkeypatch.setattr(ops, "update_bags", lambda rows, *args: areas.append(area_of(rows.cache)))

    def stage() -> StagingArea:
        arena.unstage()
        arena._stage = stage_for(arena, ids, offsets)
        arena._set_home(arena._stage.area.home)
        return arena._stage.area

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        run = torch.compile(lambda: lookup(arena, ids, offsets, trainer=trainer).sum(), fullgraph=True)
        loss, area = run(), stage()  # from none to one
        loss.backward()
        assert areas.pop() is area
        loss, newer = run(), stage()  # to another, and the graph keeps the old one
        loss.backward()
        assert areas.pop() is newer is not area
        loss = run()
        arena.unstage()  # to none
        loss.backward()
        assert areas.pop() is None
