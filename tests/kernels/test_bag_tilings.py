"""The bag kernel of the race of tilings against the reference: every precision, cached rows, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.tilings import tiling as T
from benchmarks.tilings.tiling import Tiling
from support import has
from thermocline import formats as F
from thermocline.errors import BadInput, IdOutOfRange
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.gather import reference
from thermocline.kernels.layout import Cache
from thermocline.rows.arena import Arena

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
TILINGS = [Tiling(128, 4, 1), Tiling(64, 8, 3, fetch=True), Tiling(32, 4, 4, split=True), Tiling(32, 16, 32, convert=False)]
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
TABLES = [(31, 8, "int8"), (17, 3, "int4"), (23, 20, "fp16"), (5, 8, "int2"), (9, 1, "fp8"), (12, 96, "int8"), (7, 40, "fp32")]


def _cached(arena: Arena) -> RowArrays:
    """The arena, with random values in its slots and every second row in a slot while slots last."""
    rows = arena.arrays
    if rows.cache is None:
        return rows
    cache = Cache(*(tensor.clone() for tensor in rows.cache))
    meta, generator = rows.meta.clone(), torch.Generator().manual_seed(5)
    cache.values.copy_(torch.randn(cache.values.shape, generator=generator))
    cache.near.copy_(torch.randint(-(1 << 30), 1 << 30, cache.near.shape, generator=generator))
    for pool in rows.layout.tables.pools:
        words = F.META_WORDS[pool.format]
        for slot in range(pool.slots):
            number = pool.base + slot + F.CACHED
            if slot >= pool.fp32_slots:
                number = pool.int8_base + slot - pool.fp32_slots + F.CACHED + F.INT8_SLOT
                scale = torch.tensor([0.01 * (slot + 1)]).view(torch.int32)
                cache.near[(pool.int8_base + slot - pool.fp32_slots) * F.int8_slot_words(pool.dim)] = scale[0]
            if 2 * slot < pool.rows:
                meta[pool.meta + 2 * slot * words] = number
    return RowArrays(rows.codes, meta, rows.layout, cache)


def _moved(rows: RowArrays, on: On) -> RowArrays:
    return RowArrays(*on((rows.codes, rows.meta, rows.layout)), None if rows.cache is None else Cache(*on(tuple(rows.cache))))


def _check(rows: RowArrays, lookup: Any, mode: int, tiling: Tiling, on: On, dtype: torch.dtype = torch.float32) -> None:
    got = T.gather_pool(_moved(rows, on), LookupCall(*on(lookup), mode, dtype, True), tiling)
    wanted = reference.gather_pool(rows, LookupCall(*lookup, mode, dtype, True))[0]
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: tiling.label)
@pytest.mark.parametrize("format", range(len(F.NAMES)), ids=F.NAMES)
def test_every_precision_with_cached_rows(
    format: int, tiling: Tiling, make_arena: Make, make_lookup: Make, errors: Any, on: On
) -> None:
    slots = [9] if F.META_WORDS[format] else None
    arena = make_arena([(41, (7, 36, 100)[format % 3], F.NAMES[format])], seed=format, slots=slots)
    _check(_cached(arena), make_lookup(arena, 13, 9, seed=format), (F.SUM, F.MEAN)[format % 2], tiling, on)


@pytest.mark.parametrize("precision", ["int4", "int2"])
def test_rows_in_int8_slots(precision: str, make_arena: Make, make_lookup: Make, errors: Any, on: On) -> None:
    arena = make_arena([(41, 36, precision)], slots=[5], near=[7])
    for tiling in TILINGS:
        _check(_cached(arena), make_lookup(arena, 11, 6, seed=3), F.SUM, tiling, on)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: tiling.label)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_weighted_bags_of_many_tables(
    dtype: torch.dtype, tiling: Tiling, make_arena: Make, make_lookup: Make, errors: Any, on: On
) -> None:
    arena = make_arena(TABLES, [0, 1, 2, 5, 0, 3, 4, 6, 5])
    ids = torch.int32 if dtype == torch.float16 else torch.int64
    _check(arena.arrays, make_lookup(arena, 5, 3, seed=2, weighted=True, dtype=ids), F.SUM, tiling, on, dtype)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300])
def test_bags_longer_than_the_window_of_checks(length: int, make_arena: Make, errors: Any, on: On) -> None:
    arena = make_arena([(57, 12, "int4"), (30, 20, "int8")], slots=[4, 4])
    lengths = torch.tensor([0, 1, length, 3, length, 2])
    ids = torch.cat([torch.arange(int(lengths[:3].sum())) * 5 % 57, torch.arange(int(lengths[3:].sum())) * 7 % 30])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    for tiling in TILINGS:
        _check(_cached(arena), (ids, offsets, None), F.MEAN, tiling, on)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: tiling.label)
@pytest.mark.parametrize("id", [30, -1, 2**40])
@pytest.mark.parametrize("at", [0, 140, 299])
def test_a_bad_id_is_reported_and_adds_nothing(at: int, id: int, tiling: Tiling, make_arena: Make, errors: Any, on: On) -> None:
    arena = make_arena([(57, 4, "int8"), (30, 8, "int8")])
    ids, offsets = torch.arange(600) % 30, torch.tensor([0, 150, 300, 450, 600])
    bad = ids.clone()
    bad[300 + at] = id
    out = T.gather_pool(_moved(arena.arrays, on), LookupCall(*on((bad, offsets, None)), F.SUM), tiling)
    wanted = reference.gather_pool(arena.arrays, LookupCall(ids, offsets, None, F.SUM))[0]
    bag = 0 if at < 150 else 1
    others = torch.ones_like(wanted, dtype=torch.bool)
    others[bag, 4:] = False
    torch.testing.assert_close(out.cpu()[others], wanted[others])
    if id != 2**40:  # a bad id whose low half names a row may add that row
        field = arena.layout.tables.features[1]
        wanted[bag, 4:] -= reference.read_rows(arena.codes, arena.meta, field, ids[300 + at : 301 + at])[0]
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(IdOutOfRange) as caught:
        errors.raise_pending()
    assert (caught.value.feature, caught.value.position, caught.value.id, caught.value.rows) == (1, 300 + at, id, 30)


@pytest.mark.parametrize(
    "offsets", [[0, 3, 1, 5, 5], [-1, 1, 3, 5, 5], [0, 1, 3, 5, 9], [1, 1, 3, 5, 5], [0, 1, 9, 3, 5]], ids=str
)
def test_bad_offsets_are_reported_by_every_tiling(offsets: list[int], make_arena: Make, errors: Any, on: On) -> None:
    arena = make_arena([(31, 4, "int8"), (17, 3, "int4")])
    lookup = on((torch.tensor([4, 6, 1, 0, 9]), torch.tensor(offsets), None))
    for tiling in TILINGS:
        out = T.gather_pool(_moved(arena.arrays, on), LookupCall(*lookup, F.SUM), tiling)
        assert out.isfinite().all()
        with pytest.raises(BadInput, check=has(parameter="offsets")):
            errors.raise_pending()
