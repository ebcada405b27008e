"""The sequence model: what it computes, against plain torch and against its own definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.accuracy.plain_tables import PlainItems
from support import has, mentions
from thermocline import BadInput, EmbeddingCollection, IdMap, RowConfig, RowwiseAdagrad, Table
from thermocline.checkpoint.format.dense_state import load_dense
from thermocline.data.sequences import SequenceLog
from thermocline.data.synthetic_sequences import SyntheticSequences
from thermocline.models import SequenceModel, initialize
from thermocline.models.sequence import Encoder
from thermocline.train.sequence import sampled_softmax

ROWS, DIM, LENGTH, LR = 101, 8, 7, 0.1


def a_log() -> SequenceLog:
    return SyntheticSequences(users=61, items=100, seed=3).log(length=LENGTH, negatives=5, seed=3)


def model_of(tables: nn.Module) -> SequenceModel:
    initialize(tables, {"item": ROWS}, DIM, seed=1)
    torch.manual_seed(5)
    return SequenceModel(tables, DIM, LENGTH)


def ours(precision: str = "fp32") -> SequenceModel:
    table = Table("item", ROWS, DIM, ("item", "negative"))
    return model_of(
        EmbeddingCollection([table], mode="none", rows=RowConfig(precision, cache=0.0, optimizer=RowwiseAdagrad(lr=LR)))
    )


def plain() -> SequenceModel:
    return model_of(PlainItems(ROWS, DIM, LR, lambda ids: ids))


def test_fp32_rows_train_as_a_plain_embedding_does():
    log, (one, other) = a_log(), (ours(), plain())
    optimizers = [torch.optim.SGD(model.encoder.parameters(), lr=0.1) for model in (one, other)]
    batches = list(log.batches(13))
    assert len(batches) > 10
    for batch in batches:
        losses = [sampled_softmax(model(*batch[:3]), batch) for model in (one, other)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
        for model, loss, dense in zip((one, other), losses, optimizers, strict=True):
            dense.zero_grad()
            model.embeddings.fused_optimizer.zero_grad()
            loss.mean().backward()
        for mine, theirs in zip(one.encoder.parameters(), other.encoder.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        for model, dense in zip((one, other), optimizers, strict=True):
            dense.step()
            model.embeddings.fused_optimizer.step()
        rows = torch.arange(ROWS)
        torch.testing.assert_close(
            one.embeddings.get_rows("item", rows), other.embeddings.get_rows("item", rows), rtol=1e-3, atol=1e-4
        )


def test_every_place_is_predicted_from_what_came_before_and_nothing_else():
    model = plain()
    items, negatives = torch.tensor([4, 9, 2, 7, 7, 1]), torch.tensor([[3, 5], [6, 8]])
    offsets = torch.tensor([0, 4, 6])
    found = model(items, offsets, negatives)
    assert found.target_T.tolist() == [1, 2, 3, 5] and found.sample_T.tolist() == [0, 0, 0, 1]
    rows = model.embeddings.table.weight
    for at, (first, last) in enumerate([(0, 1), (0, 2), (0, 3), (4, 5)]):
        state = model.encode(items[first:last], torch.tensor([0, last - first]))[0]
        torch.testing.assert_close(found.next_T[at], state @ rows[items[last]])
        torch.testing.assert_close(found.negative_TK[at], rows[negatives[int(at == 3)]] @ state)


def test_attention_is_that_of_torch():
    torch.manual_seed(2)
    encoder, x = Encoder(DIM, LENGTH, 1, 2), torch.randn(3, 5, DIM)
    block, theirs = encoder.blocks[0], nn.MultiheadAttention(DIM, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(block.query_key_value.weight)
        theirs.in_proj_bias.zero_()
        theirs.out_proj.weight.copy_(block.out.weight)
        theirs.out_proj.bias.copy_(block.out.bias)
    into = x * DIM**0.5 + encoder.positions[:5]
    normed = block.before_attention(into)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    into = into + theirs(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)[0]
    into = into + block.mlp(block.before_mlp(into))
    torch.testing.assert_close(encoder(x), encoder.norm(into))


def test_the_loss_is_softmax_without_the_right_answer_among_the_wrong():
    log, model = a_log(), plain()
    batch = next(log.batches(17))
    hit = batch._replace(negatives_BK=batch.negatives_BK.clone())
    hit.negatives_BK[0, 2] = hit.items_N[1]  # what follows the first item of the first sample
    found = model(*hit[:3])
    losses = sampled_softmax(found, hit)
    wrong = [0, 1, 3, 4]
    scores = torch.cat([found.next_T[:1] - hit.chance_N[1], found.negative_TK[0, wrong] - hit.chance_BK[0, wrong]])
    torch.testing.assert_close(losses[0], -torch.log_softmax(scores, 0)[0])


def test_an_empty_batch_has_no_loss_and_gradients_of_zero():
    model = ours()
    none = torch.zeros(0, dtype=torch.int64)
    found = model(none, torch.zeros(1, dtype=torch.int64), none.view(0, 5))
    (found.next_T.sum() + found.negative_TK.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.encoder.parameters())


def test_raw_ids_become_rows_by_the_map_of_the_table():
    ids = IdMap.pruned([10, 70, 500])
    model = SequenceModel(PlainItems(ids.rows, DIM, LR, ids), DIM, LENGTH)
    one, other = (model.encode(torch.tensor(items), torch.tensor([0, 2])) for items in ([70, 999], [70, 1000]))
    assert torch.equal(one, other)


def test_a_checkpoint_states_its_heads_and_one_without_them_still_loads():
    one, other, wrong = (Encoder(DIM, LENGTH, 1, heads) for heads in (2, 2, 4))
    rows = torch.randn(3, 5, DIM)
    saved = one.state_dict()
    assert len(saved["heads"]) == 2 and not dict(one.named_buffers())
    other.load_state_dict(saved)
    assert torch.equal(one(rows), other(rows))
    with pytest.raises(RuntimeError, check=mentions("2 heads", "4")):
        wrong.load_state_dict(saved)
    with pytest.raises(BadInput, check=mentions("heads")):
        load_dense(wrong, saved)
    old = {name: tensor + 1 for name, tensor in saved.items() if name != "heads"}
    load_dense(other, old)
    assert torch.equal(other.positions, one.positions + 1)
    with pytest.raises(BadInput, check=mentions("norm.bias")):
        load_dense(other, {name: tensor for name, tensor in old.items() if name != "norm.bias"})


@pytest.mark.parametrize(
    "make, fields",
    [
        (lambda: SequenceModel(EmbeddingCollection([Table("item", 9, 4)]), 4, 3), {"parameter": "features"}),
        (lambda: Encoder(6, 3, 1, 4), {"parameter": "heads"}),
        (lambda: plain().encode(torch.arange(8), torch.tensor([0, 8])), {"parameter": "length", "available": 7}),
    ],
)
def test_what_cannot_be_is_refused(make, fields):
    with pytest.raises(BadInput, check=has(**fields)):
        make()
