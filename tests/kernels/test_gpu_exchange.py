"""Triton exchanges rows as the definition does, bit for bit, and never asks the GPU for a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support import has
from thermocline import IdOutOfRange
from thermocline import formats as F
from thermocline.errors import BadOffsets
from thermocline.kernels.exchange import gpu, reference
from thermocline.kernels.exchange.fields import NOWHERE, OTHER_NODES, ROW_BYTES, SAME_NODE, STRAIGHT, WORDS
from thermocline.kernels.gpu.errors import error_buffer

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
ODD = [(57, 5, "int8"), (40, 33, "int4"), (31, 128, "fp32"), (23, 7, "int8_affine"), (9, 64, "bf16"), (9, 6, "int2")]
EVEN = [(57, 6, "int8"), (31, 10, "fp32"), (9, 64, "fp16")]  # records of pairs of bytes
WORDLY = [(57, 64, "int8"), (40, 72, "int4"), (31, 12, "fp32"), (9, 64, "fp16"), (19, 64, "fp8"), (19, 20, "int4_affine")]
WIDE = [(11, 2044, "int8"), (7, 1500, "fp32"), (5, 1100, "int8")]  # rows of several tiles


def fields_of(arena: Any) -> Tensor:
    lines = []
    for k in range(len(arena.tables)):
        codes_RB, meta_RW, row, format, dim = arena.views(k)
        at = codes_RB.storage_offset(), meta_RW.storage_offset()
        lines.append([F.row_bytes(format, dim), F.META_WORDS[format], *at, row, dim, format, (2, 4, 1)[k % 3]])
    return torch.tensor(lines)


@pytest.mark.parametrize("count", [0, 1, 65])
@pytest.mark.parametrize("tables", [ODD, EVEN, WORDLY, WIDE], ids=["bytes", "pairs", "words", "wide"])
def test_rows_travel_and_arrive_as_defined(tables: Any, count: int, make_arena: Any, on: On) -> None:
    arena, generator = make_arena(tables), torch.Generator().manual_seed(count)
    fields_KF, width = fields_of(arena), max(dim for _, dim, _ in tables)
    part_N = torch.randint(len(tables), (count,), generator=generator)
    place_N = (torch.rand(count, generator=generator) * torch.tensor([rows for rows, _, _ in tables])[part_N]).long()
    sizes_K = fields_KF[:, ROW_BYTES] + 4 * fields_KF[:, WORDS]
    offset_N, size = reference.offsets(part_N, sizes_K)
    back_N, target_N = torch.randperm(count, generator=generator), torch.randperm(count, generator=generator) * 4 * width
    turned_N, _ = reference.offsets(part_N[back_N], sizes_K)
    given = codes, meta, fields, part, place, offset = arena.codes, arena.meta, fields_KF, part_N, place_N, offset_N
    found = []
    for module, to in ((reference, lambda tensor: tensor), (gpu, on)):
        codes, meta, fields, part, place, offset = map(to, given)
        message, other = (to(torch.zeros(int(size), dtype=torch.uint8)) for _ in range(2))
        rows = to(torch.zeros(count * 4 * width, dtype=torch.uint8))
        module.pack_rows(codes, meta, fields, part, place, offset, message)
        module.copy_rows(message, to(offset_N[back_N]), fields, to(part_N[back_N]), to(turned_N), other)
        module.unpack_rows(other, to(turned_N), fields, to(part_N[back_N]), to(target_N[back_N]), rows)
        found.append([message.cpu(), other.cpu(), rows.cpu()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tables, seed", [(ODD, 0), (EVEN, 1), (WORDLY, 2), (WIDE, 3)], ids=["bytes", "pairs", "words", "wide"])
def test_gradients_travel_in_fp32_bf16_or_int8(tables: Any, seed: int, make_arena: Any, on: On) -> None:
    generator, fields_KF = torch.Generator().manual_seed(seed), fields_of(make_arena(tables))
    width, part_N = int(fields_KF[:, 5].max()), torch.randint(len(tables), (63,), generator=generator)
    grads_UW = torch.randn(77, width, generator=generator)
    grads_UW[7, 3], grads_UW[8, 3], grads_UW[9, 2] = float("nan"), 3.4e38, float("-inf")
    grads_UW[:, 1] = 1 + 2.0**-8  # halfway between two numbers of bf16
    grads_UW[10], grads_UW[11] = 0.0, 1e-38  # no scale
    at_N = torch.randperm(77, generator=generator)[:63]
    wanted = reference.pack_gradients(grads_UW, fields_KF, part_N, at_N)
    message = gpu.pack_gradients(*on((grads_UW, fields_KF, part_N, at_N)), wanted.numel())
    one, two = (reference.unpack_gradients(each.cpu(), fields_KF, part_N, width) for each in (message, wanted))
    assert torch.equal(one.isnan(), two.isnan())  # whose bits may differ
    assert torch.equal(one.nan_to_num(1.5).view(torch.int32), two.nan_to_num(1.5).view(torch.int32))
    back = gpu.unpack_gradients(message, *on((fields_KF, part_N)), width).cpu()
    assert torch.equal(back.view(torch.int32), one.view(torch.int32))
    assert gpu.pack_gradients(*on((grads_UW, fields_KF, part_N[:0], at_N[:0]))).numel() == 0


@pytest.mark.parametrize("count", [0, 1, 257, 1003])
@pytest.mark.parametrize("limit", [1, 500, 1 << 40])
@pytest.mark.parametrize("once", [True, False])
def test_distinct_rows_ascend_and_the_rest_is_padding(limit: int, count: int, once: bool, on: On) -> None:
    rows_N = torch.randint(limit, (count,), generator=torch.Generator().manual_seed(1))
    found = [each.cpu() for each in gpu.distinct_padded(on(rows_N), limit, once)]
    for mine, theirs in zip(found, reference.distinct_padded(rows_N, limit, once), strict=True):
        assert torch.equal(mine, theirs)
    exact = gpu.distinct_rows(on(rows_N), limit, once)
    for mine, theirs in zip(exact, reference.distinct_rows(rows_N, limit, once), strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_rows_beyond_the_limit_are_not_counted(on: On) -> None:
    found_N, _, number = gpu.distinct_padded(on(torch.tensor([7, 3, 9, 7, 9, 0])), 9)
    assert found_N.tolist() == [0, 3, 7, 9, 9, 9] and number.tolist() == [3]


@pytest.mark.parametrize("count", [0, 1, 333])
def test_rows_go_where_their_parts_go(count: int, on: On) -> None:
    generator = torch.Generator().manual_seed(4)
    part_N, home_N = (torch.randint(6, (count,), generator=generator) for _ in range(2))
    ways_K = torch.tensor([NOWHERE, STRAIGHT, SAME_NODE, OTHER_NODES, STRAIGHT, SAME_NODE])
    wanted = reference.route(part_N, home_N, ways_K, 1, 2, 6)
    for mine, theirs in zip(gpu.route(*on((part_N, home_N, ways_K)), 1, 2, 6), wanted, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    if count:
        padded_N = torch.cat([part_N, torch.full((5,), -1)]), torch.cat([home_N, torch.zeros(5, dtype=torch.int64)])
        counts_PK, order_N = gpu.route(*on(padded_N), on(ways_K), 1, 2, 6)
        assert torch.equal(counts_PK.cpu(), wanted[0]) and torch.equal(order_N[:count].cpu(), wanted[1])


FEATURES = torch.tensor([[97, 5], [61, 200], [23, 300]])  # rows, first global row


@pytest.mark.parametrize("batch, longest", [(0, 0), (1, 1), (1, 600), (7, 3)])
def test_global_rows_follow_the_features(batch: int, longest: int, on: On) -> None:
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, longest + 1, (3 * batch,), generator=generator)
    feature_N = torch.arange(3).repeat_interleave(lengths.view(3, batch).sum(1))
    ids_N = (torch.rand(len(feature_N), generator=generator) * FEATURES[feature_N, 0]).long()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rows_N = gpu.global_rows(on(FEATURES), on(ids_N), on(offsets), 400)
    assert torch.equal(rows_N.cpu(), ids_N + FEATURES[feature_N, 1])
    error_buffer(rows_N).raise_pending()


def test_bad_ids_and_offsets_arrive_in_the_mailbox(on: On) -> None:
    fields_F2, offsets = on(FEATURES), on(torch.tensor([0, 2, 2, 5]))
    rows_N = gpu.global_rows(fields_F2, on(torch.tensor([3, 96, 22, -1, 4])), offsets, 400)
    assert rows_N.tolist() == [8, 101, 322, 400, 304]
    with pytest.raises(IdOutOfRange, check=has(feature=2, rows=23, position=3, id=-1)):
        error_buffer(rows_N).raise_pending()
    gpu.global_rows(fields_F2, on(torch.tensor([3, 96, 22, 1, 4])), on(torch.tensor([0, 3, 2, 5])), 400)
    with pytest.raises(BadOffsets, check=has(position=1, value=(3, 2))):
        error_buffer(rows_N).raise_pending()
