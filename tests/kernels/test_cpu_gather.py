"""Gather on the CPU: the bits of the reference, in every mode, format and shape of batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from support import has
from thermocline import formats as F
from thermocline.errors import BadInput, IdOutOfRange
from thermocline.kernels.gather import cpu, reference
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

pytestmark = pytest.mark.usefixtures("poisoned_scratch")

Make = Callable[..., Any]
MODES = range(len(F.MODES))
FORMATS = range(len(F.NAMES))
TABLE = st.tuples(st.integers(1, 90), st.integers(1, 150), st.sampled_from(F.NAMES))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TABLES = [(31, 8, "int8"), (17, 3, "int4"), (23, 20, "fp16"), (5, 200, "int2"), (9, 1, "fp8"), (12, 64, "int8")]
TABLES += [(3, 130, "fp32")]
FEATURES = [0, 1, 2, 0, 3, 4, 5, 1, 6]  # tables 0 and 1 are shared


def _check(arena: Arena, lookup: Any, mode: int, dtype: torch.dtype = torch.float32) -> None:
    got, winners = flat.gather_pool(cpu, arena.codes, arena.meta, arena.layout, *lookup, mode, dtype, True)
    wanted, wanted_winners = flat.gather_pool(reference, arena.codes, arena.meta, arena.layout, *lookup, mode, dtype)
    assert got.dtype == dtype and got.shape == wanted.shape
    assert torch.equal(got, wanted)  # every number equal; zeros of either sign
    assert torch.equal(winners, wanted_winners) and winners.shape == wanted_winners.shape


@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_every_precision_in_every_mode(format: int, mode: int, make_arena: Make, make_lookup: Make) -> None:
    for dim in (1, 3, 48, 72, 100, 127, 128, 200, 360, 513):
        arena = make_arena([(41, dim, F.NAMES[format])], seed=format)
        lookup = make_lookup(arena, 13 if mode != F.NONE else None, 4, seed=mode)
        for dtype in DTYPES:
            _check(arena, lookup, mode, dtype)
        if mode == F.SUM:
            _check(arena, make_lookup(arena, 7, 9, seed=dim, weighted=True), mode)


@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_many_tables_at_once(ids: torch.dtype, mode: int, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    for batch in (1, 2, 65, 200):
        _check(arena, make_lookup(arena, None if mode == F.NONE else batch, 5, seed=batch, dtype=ids), mode)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    tables=st.lists(TABLE, min_size=1, max_size=4),
    batch=st.sampled_from([0, 1, 63]),
    longest=st.integers(0, 16),
    mode=st.sampled_from(MODES),
    weighted=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_batch(
    tables: Any, batch: int, longest: int, mode: int, weighted: bool, seed: int, make_arena: Make, make_lookup: Make
) -> None:
    arena = make_arena(tables, [*range(len(tables)), 0], seed=seed)
    lookup = make_lookup(arena, None if mode == F.NONE else batch, longest, seed=seed, weighted=weighted and mode == F.SUM)
    _check(arena, lookup, mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_every_type_scale_rows(dtype: torch.dtype, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    ids, offsets, weights = make_lookup(arena, 20, 6, weighted=True)
    _check(arena, (ids, offsets, weights.to(dtype)), F.SUM)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for mode in MODES:
            _check(arena, make_lookup(arena, None if mode == F.NONE else 600, 20 if mode != F.NONE else 1500), mode)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("threads", "count", "bags", "tiles"), [(1, 16_000, 512, 4), (2, 16_000, 250, 8), (9, 16_000, 64, 32), (1, 15_999, 64, 32)]
)
def test_tiles_of_long_bags_are_large_but_every_thread_has_some(
    threads: int, count: int, bags: int, tiles: int, make_arena: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert cpu._tiles(make_arena([(31, 8, "int8")]).layout, 2000, count)[:2] == (bags, tiles)


def test_large_outputs_go_past_the_caches_unchanged(
    make_arena: Make, make_lookup: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "STREAM_MIN_BYTES", 0)
    arena = make_arena([(31, 64, "int8"), (17, 32, "int4"), (9, 7, "fp32"), (5, 64, "fp32")])
    for batch in (1, 7, 8, 9, 130):
        _check(arena, make_lookup(arena, batch, 3), F.SUM)


def test_infinite_and_too_large_sums_reach_short_outputs_as_torch_rounds_them() -> None:
    arena = Arena([TableSpec(6, 4, "fp32")])
    rows = torch.tensor([65519.9, 65520.0, 65504.0, 1e38, -1e38, 3.3895e38])[:, None].expand(6, 4).contiguous()
    arena.codes.copy_(rows.view(torch.uint8).view(-1))
    ids, offsets = torch.tensor([0, 1, 2, 3, 4, 5, 5, 5]), torch.tensor([0, 1, 2, 3, 4, 5, 6, 8])
    for dtype in DTYPES:
        _check(arena, (ids, offsets, None), F.SUM, dtype)


def test_winner_is_the_first_of_equals(make_arena: Make) -> None:
    arena = make_arena([(5, 20, "int8")])
    _check(arena, (torch.tensor([1, 1, 2, 2, 1]), torch.tensor([0, 2, 5, 5]), None), F.MAX)


@pytest.mark.parametrize("format", FORMATS, ids=F.NAMES)
def test_gradient_of_weights(format: int, make_arena: Make, make_lookup: Make) -> None:
    for dim in (1, 3, 100, 128):
        arena = make_arena([(41, dim, F.NAMES[format]), (9, 5, "fp32")], [0, 1, 0])
        ids, offsets, _ = make_lookup(arena, 13, 4)
        grad = torch.randn(13, arena.layout.tables.width, generator=torch.Generator().manual_seed(dim))
        for dtype in DTYPES:
            got = flat.weight_gradient(cpu, arena.codes, arena.meta, arena.layout, ids, offsets, grad.to(dtype))
            wanted = flat.weight_gradient(reference, arena.codes, arena.meta, arena.layout, ids, offsets, grad.to(dtype))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES, ids=F.MODES)
@pytest.mark.parametrize("bad", [-1, 31, 2**62, -(2**63)])
def test_id_out_of_range_names_feature_and_position(mode: int, bad: int, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    ids, offsets, _ = make_lookup(arena, None if mode == F.NONE else 90, 3, full=True)
    position = int(offsets[3 * (90 if mode != F.NONE else 1)]) + 1  # feature 3 looks up table 0
    ids[position] = bad
    with pytest.raises(IdOutOfRange) as error:
        flat.gather_pool(cpu, arena.codes, arena.meta, arena.layout, ids, offsets, None, mode, torch.float32, True)
    assert (error.value.feature, error.value.position, error.value.id, error.value.rows) == (3, position, bad, 31)


def test_id_out_of_range_raises_in_the_gradient_of_weights(make_arena: Make) -> None:
    arena = make_arena([(5, 4, "int8")])
    with pytest.raises(IdOutOfRange):
        flat.weight_gradient(
            cpu, arena.codes, arena.meta, arena.layout, torch.tensor([5]), torch.tensor([0, 1]), torch.zeros(1, 4)
        )


@pytest.mark.parametrize("offsets", [[1, 2, 4], [0, 3, 2], [0, 2, 3], [0, 5, 4], [0, -1, 4], [0, 2**60, 4]], ids=str)
@pytest.mark.parametrize("mode", [F.SUM, F.MAX])
def test_offsets_that_cannot_be_right_raise(offsets: list[int], mode: int, make_arena: Make) -> None:
    arena = make_arena([(5, 4, "int8")])
    ids = torch.tensor([0, 1, 2, 3])
    with pytest.raises(BadInput, check=has(parameter="offsets")):
        flat.gather_pool(
            cpu, arena.codes, arena.meta, arena.layout, ids, torch.tensor(offsets), None, mode, torch.float32, True
        )


def test_batch_of_nothing_still_checks_offsets(make_arena: Make) -> None:
    arena = make_arena([(5, 4, "int8")])
    with pytest.raises(BadInput, check=has(parameter="offsets")):
        flat.gather_pool(
            cpu, arena.codes, arena.meta, arena.layout, torch.tensor([1]), torch.tensor([0]), None, F.SUM, torch.float32
        )


def test_trusted_ids_are_not_checked_but_give_the_same(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    lookup = make_lookup(arena, 50, 4)
    checked = flat.gather_pool(cpu, arena.codes, arena.meta, arena.layout, *lookup, F.SUM, torch.float32, True)[0]
    trusted = flat.gather_pool(cpu, arena.codes, arena.meta, arena.layout, *lookup, F.SUM, torch.float32, False)[0]
    assert torch.equal(checked, trusted)


def test_rows_past_two_to_the_31_elements_are_found() -> None:
    # 2.5 GB, of which few pages are touched
    arena = Arena([TableSpec(5_000_000, 2048, "int2"), TableSpec(40, 2048, "int2")])
    rows_N = torch.tensor([0, 4_194_305, 4_999_999])
    values_ND = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0))
    arena.write(0, rows_N, values_ND)
    out, _ = flat.gather_pool(
        cpu, arena.codes, arena.meta, arena.layout, rows_N, torch.tensor([0, 1, 2, 3, 3, 3, 3]), None, F.SUM, torch.float32
    )
    assert torch.equal(out[:, :2048], arena.read(0, rows_N))
    assert not out[:, 2048:].any()


def test_a_failed_lookup_leaves_the_next_one_whole(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES)
    lookup = make_lookup(arena, 50, 4)
    broken = lookup.ids.clone()
    broken[-1] = 10**6
    with pytest.raises(IdOutOfRange):
        flat.gather_pool(cpu, arena.codes, arena.meta, arena.layout, broken, lookup.offsets, None, F.SUM, torch.float32)
    _check(arena, lookup, F.SUM)


def test_columns_that_no_feature_fills_are_zero(make_arena: Make) -> None:
    from thermocline.kernels.layout import Layout, write_spec

    arena = make_arena([(5, 4, "int8")])
    fields = [*arena.layout.tables.features[0]]
    fields[F.COLUMN] = 3
    layout = Layout.of(torch.tensor([fields]), write_spec([fields]))
    lookup = (torch.tensor([2]), torch.tensor([0, 1]), None)
    out: Tensor = flat.gather_pool(cpu, arena.codes, arena.meta, layout, *lookup, F.SUM, torch.float32)[0]
    assert out.shape == (1, 7) and not out[:, :3].any() and out[:, 3:].any()


@pytest.mark.parametrize("dim", [61, 65, 66, 67, 69, 70, 129, 193, 194])
def test_columns_after_a_short_last_plane_keep_their_values(dim: int, make_arena: Make, make_lookup: Make) -> None:
    for format in ("int2", "int2_affine", "int4"):
        arena = make_arena([(9, 5, "fp32"), (11, dim, format)])
        for mode in (F.SUM, F.MEAN):
            _check(arena, make_lookup(arena, 5, 3, seed=dim), mode)
