"""The definition of the row gradients, against what autograd gives the weight of nn.EmbeddingBag."""

from __future__ import annotations

import flat
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st

from thermocline import formats as F
from thermocline.kernels.gather import reference as gather_reference
from thermocline.kernels.sum_gradients import reference as sum_reference
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

SPECS = [TableSpec(7, 3), TableSpec(5, 48), TableSpec(63, 1)]
bag_lengths = st.integers(0, 9).flatmap(
    lambda batch: st.lists(st.lists(st.integers(0, 7), min_size=batch, max_size=batch), min_size=4, max_size=4)
)


@pytest.mark.parametrize("mode", [F.SUM, F.MEAN, F.MAX], ids=lambda mode: F.MODES[mode])
@given(lengths=bag_lengths, weighted=st.booleans(), seed=st.integers(0, 99))
def test_summed_row_gradients_are_those_of_autograd_shared_tables_included(mode, lengths, weighted, seed):
    generator = torch.Generator().manual_seed(seed)
    arena = Arena(SPECS, features=[0, 1, 0, 2])
    arena.randomize_(1.0, generator)
    batch = len(lengths[0])
    offsets = torch.tensor([0] + [n for bags in lengths for n in bags]).cumsum(0)
    tables = [arena.read(t).clone().requires_grad_() for t in range(3)]
    ids, out = [], []
    weights = torch.rand(int(offsets[-1]), generator=generator) if weighted and mode == F.SUM else None
    for f, table in enumerate(arena.features):
        bags = offsets[f * batch : (f + 1) * batch + 1]
        ids.append(torch.randint(0, SPECS[table].rows, (sum(lengths[f]),), generator=generator))
        mine = None if weights is None else weights[int(bags[0]) : int(bags[-1])]
        options = {"mode": F.MODES[mode], "per_sample_weights": mine, "include_last_offset": True}
        if batch:
            out.append(nnf.embedding_bag(ids[-1], tables[table], bags - bags[0], **options))
    ids = torch.cat(ids)
    grad = torch.randn(batch, arena.layout.tables.width, generator=generator)
    expected = [torch.zeros_like(t) for t in tables]
    if batch:
        expected = torch.autograd.grad(torch.cat(out, dim=1), tables, grad)
    lookup = (arena.layout, ids, offsets, weights, mode)
    _, winners = flat.gather_pool(gather_reference, arena.codes, arena.meta, *lookup, torch.float32)
    rows_U, grads_UW = flat.sum_row_gradients(sum_reference, *lookup, winners, grad)
    assert torch.equal(rows_U, rows_U.unique())
    dense = torch.zeros(arena.rows, arena.layout.tables.max_dim).index_copy_(0, rows_U, grads_UW)
    for table, feature in enumerate([0, 1, 3]):
        field = arena.layout.tables.features[feature]
        mine = dense[field[F.ROW] : field[F.ROW] + field[F.ROWS]]
        torch.testing.assert_close(mine[:, : field[F.DIM]], expected[table], rtol=1e-5, atol=1e-5)
        assert (mine[:, field[F.DIM] :] == 0).all()


def test_unpooled_gradients_are_summed_by_row():
    arena = Arena(SPECS[:2])
    ids, offsets = torch.tensor([6, 0, 6, 4, 4]), torch.tensor([0, 3, 5])
    grad = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    no_winners = torch.zeros(0, dtype=torch.int32)
    rows_U, grads_UW = flat.sum_row_gradients(sum_reference, arena.layout, ids, offsets, None, F.NONE, no_winners, grad)
    assert rows_U.tolist() == [0, 6, 7 + 4]
    assert torch.equal(grads_UW[:2, :3], torch.stack([grad[1, :3], grad[0, :3] + grad[2, :3]]))
    assert (grads_UW[:2, 3:] == 0).all()
    assert torch.equal(grads_UW[2], grad[3] + grad[4])
