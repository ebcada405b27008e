"""What an exchange does on a CPU is what its definition does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from thermocline import formats as F
from thermocline.kernels.exchange import cpu, reference
from thermocline.kernels.exchange.fields import (
    COLUMN_BYTES,
    NOWHERE,
    OTHER_NODES,
    ROW_BYTES,
    SAME_NODE,
    STRAIGHT,
    WORDS,
    vector_bytes,
)
from thermocline.rows.arena import Arena

TABLES = [(57, 5, "int8"), (40, 33, "int4"), (31, 128, "fp32"), (23, 7, "int8_affine"), (9, 64, "bf16"), (9, 6, "int2")]
WIDTH, COUNT = 128, 333


def _fields(arena: Arena) -> torch.Tensor:
    lines = []
    for k in range(len(TABLES)):
        codes_RB, meta_RW, row, format, dim = arena.views(k)
        at = codes_RB.storage_offset(), meta_RW.storage_offset()
        lines.append([F.row_bytes(format, dim), F.META_WORDS[format], *at, row, dim, format, (2, 4, 1)[k % 3]])
    return torch.tensor(lines)


@pytest.fixture
def batch(make_arena: Callable[..., Any]) -> Any:
    """An arena, what its parts are, and the parts and places of some rows."""
    arena, generator = make_arena(TABLES), torch.Generator().manual_seed(3)
    part_N = torch.randint(len(TABLES), (COUNT,), generator=generator)
    share_N = torch.rand(COUNT, generator=generator)
    place_N = (share_N * torch.tensor([rows for rows, _, _ in TABLES])[part_N]).long()
    return arena, _fields(arena), part_N, place_N, generator


def test_rows_travel_as_they_are_stored_and_arrive_as_they_are_read(batch: Any) -> None:
    arena, fields_KF, part_N, place_N, generator = batch
    offset_N, size = reference.offsets(part_N, fields_KF[:, ROW_BYTES] + 4 * fields_KF[:, WORDS])
    found = cpu.offsets(part_N, fields_KF[:, ROW_BYTES] + 4 * fields_KF[:, WORDS])
    assert torch.equal(found[0], offset_N) and found[1] == size and size > 0
    back_N, target_N = torch.randperm(COUNT, generator=generator), torch.randperm(COUNT, generator=generator) * 4 * WIDTH
    turned_N, _ = reference.offsets(part_N[back_N], fields_KF[:, ROW_BYTES] + 4 * fields_KF[:, WORDS])
    shelves = []
    for module in (reference, cpu):
        message, other = (torch.zeros(int(size), dtype=torch.uint8) for _ in range(2))
        shelf = torch.zeros(COUNT * 4 * WIDTH, dtype=torch.uint8)
        module.pack_rows(arena.codes, arena.meta, fields_KF, part_N, place_N, offset_N, message)
        module.copy_rows(message, offset_N[back_N], fields_KF, part_N[back_N], turned_N, other)
        module.unpack_rows(other, turned_N, fields_KF, part_N[back_N], target_N[back_N], shelf)
        shelves.append(shelf)
    assert torch.equal(*shelves)
    values_NW = shelves[0].view(torch.float32).view(COUNT, WIDTH)
    for k, (_, dim, _) in enumerate(TABLES):
        at_K = (part_N == k).nonzero()[:, 0]
        assert torch.equal(values_NW[target_N[at_K] // (4 * WIDTH), :dim], arena.read(k, place_N[at_K]))


def test_one_row_alone_may_have_its_meta_words_at_any_byte(make_arena: Callable[..., Any]) -> None:
    arena = make_arena(TABLES)
    fields_KF, none = _fields(arena), torch.zeros(1, dtype=torch.int64)
    for module in (reference, cpu):
        message, shelf = torch.zeros(9, dtype=torch.uint8), torch.zeros(4 * WIDTH, dtype=torch.uint8)
        module.pack_rows(arena.codes, arena.meta, fields_KF, none, none + 3, none, message)
        module.unpack_rows(message, none, fields_KF, none, none, shelf)
        assert torch.equal(shelf.view(torch.float32)[:5], arena.read(0, none + 3)[0])


def test_gradients_travel_in_fp32_bf16_or_int8(batch: Any) -> None:
    _, fields_KF, part_N, _, generator = batch
    grads_UW = torch.randn(400, WIDTH, generator=generator)
    grads_UW[7, 3], grads_UW[8, 3] = float("nan"), 3e38
    at_N = torch.randperm(400, generator=generator)[:COUNT]
    grads_UW[9], grads_UW[10] = 0.0, 1e-38  # no scale
    messages = [module.pack_gradients(grads_UW, fields_KF, part_N, at_N) for module in (cpu, reference)]
    assert messages[0].shape == messages[1].shape
    for message in messages:
        mine, theirs = (module.unpack_gradients(message, fields_KF, part_N, WIDTH) for module in (cpu, reference))
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
    mine, theirs = (cpu.unpack_gradients(message, fields_KF, part_N, WIDTH) for message in messages)
    assert torch.equal(mine.isnan(), theirs.isnan())  # whose bits may differ
    assert torch.equal(mine.nan_to_num().view(torch.int32), theirs.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 128, 1000])
def test_int8_vectors_are_off_by_half_a_step_of_their_largest_number(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    fields_KF = torch.tensor([[0, 0, 0, 0, 0, dim, F.FP32, COLUMN_BYTES["int8"]]])
    values_NW = torch.randn(200, dim, generator=generator) * 10.0 ** torch.randint(-20, 20, (200, 1), generator=generator)
    part_N, at_N = torch.zeros(200, dtype=torch.int64), torch.arange(200)
    for module in (reference, cpu):
        message = module.pack_gradients(values_NW, fields_KF, part_N, at_N)
        assert message.numel() == 200 * vector_bytes(dim, 1) == 200 * (dim + 4)
        found_NW = module.unpack_gradients(message, fields_KF, part_N, dim)
        size_N1 = values_NW.abs().amax(1, keepdim=True)
        assert ((found_NW - values_NW).abs() <= size_N1 / 254 * (1 + 1e-5)).all()
        assert (found_NW - values_NW).abs().max() > 0 or dim == 1, "rounded"


@pytest.mark.parametrize("limit", [1, 500, 1 << 40, 1 << 61])
@pytest.mark.parametrize("once", [True, False])
def test_distinct_rows_ascend_and_every_lookup_finds_its_own(limit: int, once: bool) -> None:
    rows_N = torch.randint(limit, (1003,), generator=torch.Generator().manual_seed(1))
    found, wanted = (module.distinct_rows(rows_N, limit, once) for module in (cpu, reference))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert torch.equal(found[0][found[1]], rows_N)


def test_rows_go_where_their_parts_go(batch: Any) -> None:
    _, _, part_N, _, generator = batch
    home_N = torch.randint(6, (COUNT,), generator=generator)
    ways_K = torch.tensor([NOWHERE, STRAIGHT, SAME_NODE, OTHER_NODES, STRAIGHT, SAME_NODE])
    found, wanted = (module.route(part_N, home_N, ways_K, 1, 2, 6) for module in (cpu, reference))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    none = part_N[:0]
    for module in (cpu, reference):
        counts_PK, order_N = module.route(none, none, ways_K, 0, 2, 6)
        assert counts_PK.shape == (7, 6) and not counts_PK.any() and not order_N.numel()
