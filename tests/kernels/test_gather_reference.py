"""The definition of gather-and-pool, against nn.EmbeddingBag and nn.Embedding on the dequantized tables."""

from __future__ import annotations

import flat
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather import reference as gather_reference
from thermocline.kernels.gather.reference import bag_of_each, read_rows
from thermocline.rows.arena import Arena
from thermocline.rows.precision import PRECISIONS
from thermocline.rows.table_spec import TableSpec

POOLED = [F.SUM, F.MEAN, F.MAX]
named = {"ids": lambda mode: F.MODES[mode]}
MIXED = [
    TableSpec(7, 3, "int8"),
    TableSpec(63, 48, "int4"),
    TableSpec(5, 1, "fp32"),
    TableSpec(63, 3, "int8"),
    TableSpec(11, 100, "bf16"),
]


def random_arena(specs: list[TableSpec], features: list[int] | None = None, seed: int = 0) -> Arena:
    arena = Arena(specs, features)
    arena.randomize_(1.0, torch.Generator().manual_seed(seed))
    return arena


def random_ids(arena: Arena, lengths: list[list[int]], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and offsets of bags whose lengths are given by feature."""
    generator = torch.Generator().manual_seed(seed)
    fields = zip(lengths, arena.layout.tables.features, strict=True)
    ids = [torch.randint(0, field[F.ROWS], (sum(bags),), generator=generator) for bags, field in fields]
    offsets = torch.tensor([0] + [n for bags in lengths for n in bags]).cumsum(0)
    return torch.cat(ids), offsets


def table_of(arena: Arena, feature: int) -> Tensor:
    field = arena.layout.tables.features[feature]
    return read_rows(arena.codes, arena.meta, field, torch.arange(field[F.ROWS]))


def torch_pool(arena: Arena, ids: Tensor, offsets: Tensor, mode: int, weights: Tensor | None = None) -> Tensor:
    """What nn.EmbeddingBag makes of the same lookups, feature by feature."""
    features = len(arena.features)
    batch, out = (offsets.numel() - 1) // features, []
    for f in range(features):
        bags = offsets[f * batch : (f + 1) * batch + 1]
        here = slice(int(bags[0]), int(bags[-1]))
        mine = None if weights is None else weights[here]
        table, name = table_of(arena, f), F.MODES[mode]
        out.append(
            nnf.embedding_bag(ids[here], table, bags - bags[0], mode=name, per_sample_weights=mine, include_last_offset=True)
        )
    return torch.cat(out, dim=1)


bag_lengths = st.integers(1, 9).flatmap(
    lambda batch: st.lists(st.lists(st.integers(0, 7), min_size=batch, max_size=batch), min_size=1, max_size=6)
)


@pytest.mark.parametrize("mode", POOLED, **named)
@given(lengths=bag_lengths, seed=st.integers(0, 99))
def test_many_tables_pool_as_torch_pools_each(mode, lengths, seed):
    specs = [MIXED[(seed + f) % len(MIXED)] for f in range(len(lengths))]
    arena = random_arena(specs)
    ids, offsets = random_ids(arena, lengths, seed)
    out, _ = flat.gather_pool(gather_reference, arena.codes, arena.meta, arena.layout, ids, offsets, None, mode, torch.float32)
    torch.testing.assert_close(out, torch_pool(arena, ids, offsets, mode), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", [1, 3, 48, 100, 128, 513])
def test_every_precision_and_dimension_pools_as_torch_does(precision, dim):
    arena = random_arena([TableSpec(63, dim, precision)])
    ids, offsets = random_ids(arena, [[5, 0, 1, 20]])
    out, _ = flat.gather_pool(gather_reference, arena.codes, arena.meta, arena.layout, ids, offsets, None, F.SUM, torch.float32)
    torch.testing.assert_close(out, torch_pool(arena, ids, offsets, F.SUM), rtol=1e-5, atol=1e-5)


@given(lengths=bag_lengths, seed=st.integers(0, 99))
def test_weighted_sums_and_the_gradient_of_their_weights_are_torchs(lengths, seed):
    specs = [MIXED[(seed + f) % len(MIXED)] for f in range(len(lengths))]
    arena = random_arena(specs)
    ids, offsets = random_ids(arena, lengths, seed)
    weights = torch.randn(ids.numel(), generator=torch.Generator().manual_seed(seed)).requires_grad_()
    expected = torch_pool(arena, ids, offsets, F.SUM, weights)
    table = (arena.codes, arena.meta, arena.layout)
    out, _ = flat.gather_pool(gather_reference, *table, ids, offsets, weights.detach(), F.SUM, torch.float32)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed + 1))
    (weights_grad,) = torch.autograd.grad(expected, weights, grad)
    torch.testing.assert_close(
        flat.weight_gradient(gather_reference, *table, ids, offsets, grad), weights_grad, rtol=1e-4, atol=1e-4
    )


@given(counts=st.lists(st.sampled_from([0, 1, 7, 63]), min_size=1, max_size=5))
def test_unpooled_lookups_are_nn_embedding_with_zeros_after_short_rows(counts):
    arena = random_arena(MIXED[: len(counts)])
    ids, offsets = random_ids(arena, [[n] for n in counts])
    out, _ = flat.gather_pool(
        gather_reference, arena.codes, arena.meta, arena.layout, ids, offsets, None, F.NONE, torch.float32
    )
    assert out.shape == (sum(counts), max(t.dim for t in arena.tables))
    for f, table in enumerate(arena.tables):
        here = slice(int(offsets[f]), int(offsets[f + 1]))
        assert torch.equal(out[here, : table.dim], nnf.embedding(ids[here], table_of(arena, f)))
        assert (out[here, table.dim :] == 0).all()


@pytest.mark.parametrize("mode", POOLED, **named)
def test_features_that_share_a_table_read_the_same_rows_into_their_own_columns(mode):
    arena = random_arena([TableSpec(7, 3, "int8"), TableSpec(5, 48, "fp16")], features=[0, 1, 0])
    ids, offsets = random_ids(arena, [[2, 0, 3], [1, 1, 1], [2, 0, 3]])
    ids[-5:] = ids[:5]
    out, _ = flat.gather_pool(gather_reference, arena.codes, arena.meta, arena.layout, ids, offsets, None, mode, torch.float32)
    torch.testing.assert_close(out, torch_pool(arena, ids, offsets, mode), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[:, :3], out[:, 51:])


@pytest.mark.parametrize("mode", POOLED, **named)
def test_empty_bags_are_zeros_and_an_empty_batch_is_empty(mode):
    arena = random_arena(MIXED[:2])
    no_ids = torch.zeros(0, dtype=torch.int64)
    for batch in (0, 1, 63):
        offsets = torch.zeros(2 * batch + 1, dtype=torch.int64)
        out, _ = flat.gather_pool(
            gather_reference, arena.codes, arena.meta, arena.layout, no_ids, offsets, None, mode, torch.float32
        )
        assert torch.equal(out, torch.zeros(batch, 51))


def test_max_winner_is_the_first_of_equals_and_minus_one_in_an_empty_bag():
    arena = Arena([TableSpec(3, 2)])
    arena.write(0, torch.arange(3), torch.tensor([[1.0, -5.0], [1.0, -2.0], [-1.0, -2.0]]))
    offsets = torch.tensor([0, 3, 3, 4])
    out, winners = flat.gather_pool(
        gather_reference, arena.codes, arena.meta, arena.layout, torch.tensor([0, 1, 2, 2]), offsets, None, F.MAX, torch.float32
    )
    assert out.tolist() == [[1, -2], [0, 0], [-1, -2]]
    assert winners.tolist() == [[0, 1], [-1, -1], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", [*POOLED, F.NONE], **named)
def test_short_outputs_are_the_fp32_output_rounded_once(dtype, mode):
    arena = random_arena([TableSpec(63, 48, "int8")])
    ids = random_ids(arena, [[20]])[0]
    offsets = torch.tensor([0, 20]) if mode == F.NONE else torch.tensor([0, 7, 7, 20])
    table = (arena.codes, arena.meta, arena.layout, ids, offsets, None, mode)
    assert torch.equal(
        flat.gather_pool(gather_reference, *table, dtype)[0],
        flat.gather_pool(gather_reference, *table, torch.float32)[0].to(dtype),
    )


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_ids_and_offsets_may_have_32_or_64_bits(ids_dtype, offsets_dtype):
    arena = random_arena(MIXED[:2])
    ids, offsets = random_ids(arena, [[2, 3], [0, 4]])
    common = (None, F.MEAN, torch.float32)
    expected, _ = flat.gather_pool(gather_reference, arena.codes, arena.meta, arena.layout, ids, offsets, *common)
    ids, offsets = ids.to(ids_dtype), offsets.to(offsets_dtype)
    assert torch.equal(
        flat.gather_pool(gather_reference, arena.codes, arena.meta, arena.layout, ids, offsets, *common)[0], expected
    )


def test_every_id_knows_its_bag():
    assert bag_of_each(torch.tensor([0, 0, 2, 2, 5, 5]), 5).tolist() == [1, 1, 3, 3, 3]
    assert bag_of_each(torch.tensor([0, 0, 0]), 0).tolist() == []
