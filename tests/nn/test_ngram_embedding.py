"""`NGramEmbedding`: what it computes and trains, which positions count, and how it is saved, prefetched and refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import thermocline as tc
from support import has
from thermocline.heat import profile_batches
from thermocline.nn import NGramEmbedding, NGramHash
from thermocline.nn import rows_module as rows_module
from thermocline.plan import TablesConfig, Topology
from thermocline.rows.arena import Arena

NGRAMS = NGramHash(997, vocabulary=50, orders=(2, 3), heads=2, exclude=(0,), salt=5)
PLAIN = NGramHash(997, vocabulary=50, orders=(2, 3), heads=2)
FP32 = tc.RowConfig("fp32", optimizer=tc.SGD(lr=0.1))


def tokens_of(batch: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def memory(ngrams: NGramHash = NGRAMS, dim: int = 6, **keywords: Any) -> NGramEmbedding:
    torch.manual_seed(0)
    return NGramEmbedding(ngrams, dim, **{"rows": FP32, **keywords})


@pytest.mark.parametrize("mode", ["concatenate", "sum"])
@pytest.mark.parametrize("gate", [False, True])
def test_output_and_updates_equal_those_of_plain_torch(mode, gate):
    ours = memory(mode=mode, out_features=8, gate=gate)
    theirs = copy.deepcopy(ours)
    weight_RD = nn.Parameter(ours.table.get_rows("ngrams"))
    tokens_BL, hidden_BLD = tokens_of(), torch.randn(3, 7, 8)
    tokens_BL[1, 4:] = 0
    values = nn.functional.embedding(NGRAMS(tokens_BL), weight_RD)
    values = values.flatten(2) if mode == "concatenate" else values.sum(2)
    wanted = theirs.projection(values)
    if gate:
        score = (nn.functional.rms_norm(hidden_BLD, (8,)) * theirs.key(values)).sum(-1, keepdim=True) / 8**0.5
        wanted = wanted * torch.sigmoid(score.sign() * score.abs().clamp_min(1e-6).sqrt())
    wanted = wanted * (tokens_BL != 0)[..., None]
    out = ours(tokens_BL, hidden_BLD) if gate else ours(tokens_BL)
    torch.testing.assert_close(out, wanted)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    wanted.backward(upstream)
    torch.testing.assert_close(ours.projection.weight.grad, theirs.projection.weight.grad)
    torch.testing.assert_close(ours.table.get_rows("ngrams"), weight_RD.detach() - 0.1 * weight_RD.grad)


def test_later_tokens_change_nothing():
    ours, tokens_BL = memory(PLAIN), tokens_of(2, 9)
    changed_BL = tokens_BL.clone()
    changed_BL[:, 5:] = tokens_of(2, 4, seed=1)
    assert torch.equal(ours(tokens_BL)[:, :5], ours(changed_BL)[:, :5])
    assert torch.equal(ours(tokens_BL[:, :5]), ours(tokens_BL)[:, :5])


def test_the_last_tokens_are_enough_to_decode():
    ours, tokens_BL = memory(PLAIN), tokens_of(2, 9)
    assert torch.equal(ours(tokens_BL[:, -3:])[:, -1], ours(tokens_BL)[:, -1])


def test_padding_on_the_left_is_as_the_start_of_a_sequence():
    ours, tokens_BL = memory(), tokens_of(2, 5)
    padded_BL = nn.functional.pad(tokens_BL, (3, 0), value=0)
    out = ours(padded_BL)
    assert torch.equal(out[:, 3:], ours(tokens_BL)) and not out[:, :3].any()


def test_packed_documents_do_not_see_each_other():
    ours, first_BL, second_BL = memory(), tokens_of(1, 4), tokens_of(1, 5, seed=1)
    packed_BL = torch.cat([first_BL, torch.zeros(1, 1, dtype=torch.int64), second_BL], 1)
    assert torch.equal(ours(packed_BL)[:, 5:], ours(second_BL))


def test_excluded_tokens_train_no_row():
    ours = memory(rows=tc.RowConfig("int8", cache=0.1, optimizer=tc.SGD(lr=0.1)))
    before = ours.table.get_rows("ngrams")
    ours(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
    assert torch.equal(ours.table.get_rows("ngrams"), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_has_the_type_of_autocast_from_the_kernel_on(dtype, monkeypatch):
    ours, seen = memory(out_features=8), []
    look_up = rows_module.ops.lookup
    monkeypatch.setattr(rows_module.ops, "lookup", lambda *given: seen.append(given[1].dtype) or look_up(*given))
    with torch.autocast("cpu", dtype):
        out = ours(tokens_of())
    assert out.dtype == dtype and seen == [dtype]
    out.float().sum().backward()
    assert ours(tokens_of()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_modules_take_half_gradients(dtype, monkeypatch):
    ours, seen = memory().to(dtype), []
    update = rows_module.ops.D.update_bags
    monkeypatch.setattr(rows_module.ops.D, "update_bags", lambda *given: seen.append(given[-1].dtype) or update(*given))
    before, out = ours.table.get_rows("ngrams"), ours(tokens_of())
    out.sum().backward()
    assert out.dtype == dtype and seen == [dtype]
    assert not torch.equal(ours.table.get_rows("ngrams"), before)
    assert NGramEmbedding(PLAIN, 4, dtype=dtype, rows=FP32)(tokens_of()).dtype == dtype


@pytest.mark.parametrize("gate", [False, True])
def test_compiled_modules_compute_and_train_the_same(gate):
    eager = memory(out_features=8, gate=gate, rows=tc.RowConfig("int8", cache=0.1))
    compiled = copy.deepcopy(eager)
    step = torch.compile(compiled, fullgraph=True)
    more = (torch.randn(3, 7, 8),) if gate else ()
    for seed in range(2):
        torch.testing.assert_close(step(tokens_of(seed=seed), *more), eager(tokens_of(seed=seed), *more))
        step(tokens_of(seed=seed), *more).sum().backward()
        eager(tokens_of(seed=seed), *more).sum().backward()
    torch.testing.assert_close(compiled.table.get_rows("ngrams"), eager.table.get_rows("ngrams"))


class _Rows:
    """Adds rows to the tokens of a batch, in a worker."""

    def __call__(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens_BL = torch.stack(batch)
        return tokens_BL, NGRAMS(tokens_BL)


def test_rows_may_come_from_a_worker_of_a_data_loader():
    ours = memory()
    for tokens_BL, rows_BLS in DataLoader(tokens_of(5, 7), batch_size=3, num_workers=1, collate_fn=_Rows()):
        assert torch.equal(ours(rows_BLS), ours(tokens_BL))


@pytest.mark.parametrize("mode", ["concatenate", "sum"])
@pytest.mark.parametrize("given", ["tokens", "rows"])
def test_prefetched_batches_are_known_and_give_the_same(mode, given, monkeypatch):
    prefetched: list[Tensor] = []
    parsed: list[Any] = []
    read = tc.EmbeddingCollection._read
    monkeypatch.setattr(Arena, "prefetches", True)
    monkeypatch.setattr(Arena, "prefetch", lambda _, *batches: prefetched.extend(ids for ids, _ in batches))
    monkeypatch.setattr(tc.EmbeddingCollection, "_read", lambda self, given: parsed.append(given) or read(self, given))
    ours, batches = memory(mode=mode), [tokens_of(seed=seed) for seed in range(4)]
    inputs = {"tokens": lambda batch: batch, "rows": NGRAMS}[given]
    for batch, rows in ours.prefetched(batches, ids=inputs, at_once=1):
        out = ours(rows)
        assert torch.equal(out, ours(batch))
    assert [ids.tolist() for ids in prefetched] == [NGRAMS(batch).reshape(-1).tolist() for batch in batches[1:]]
    assert len(parsed) == 3 + 1 + 4  # to prefetch three, the first, and every batch of tokens


def test_a_model_is_saved_and_resumed_exactly(tmp_path):
    rows = tc.RowConfig("int8", cache=0.1)
    model = nn.Sequential(memory(out_features=8, rows=rows))
    adam = torch.optim.Adam(model.parameters())
    model(tokens_of()).square().sum().backward()
    adam.step()
    tc.save(model, tmp_path / "run", optimizers=adam)
    other = nn.Sequential(memory(out_features=8, rows=rows))
    tc.resume(tmp_path / "run", other, optimizers=torch.optim.Adam(other.parameters()))
    assert torch.equal(other(tokens_of()), model(tokens_of()))
    plain = nn.Sequential(memory(out_features=8, rows=rows))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(tokens_of()), model(tokens_of()))


@pytest.mark.parametrize("other", [NGramHash(997, 50, (2, 3), 2, (0,), salt=6), NGramHash(997, 50, (2, 3), 2, (13,), salt=5)])
def test_rows_of_other_ngrams_are_refused(other, tmp_path):
    model, different = nn.Sequential(memory()), nn.Sequential(memory(other))
    with pytest.raises(RuntimeError):
        different.load_state_dict(model.state_dict())
    tc.save(model, tmp_path / "run")
    with pytest.raises(tc.BadInput, check=lambda error: "0.ngrams" in [*error.wrong_value, *error.wrong_shape]):
        tc.load_into(different, tmp_path / "run")
    wider = NGramHash(997, 99, (2, 3), 2, (0,), salt=5)  # more tokens change no row
    nn.Sequential(memory(wider)).load_state_dict(model.state_dict())


def test_copies_pickles_and_the_meta_device_keep_the_map():
    ours = memory()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(tokens_of()), ours(tokens_of()))
    with torch.device("meta"):
        made = memory()
    made.to_empty(device="cpu").load_state_dict(ours.state_dict())
    assert torch.equal(made(tokens_of()), ours(tokens_of()))


@pytest.mark.parametrize("mode", ["concatenate", "sum"])
def test_a_sharded_table_gives_and_trains_the_same(mode):
    rows = tc.RowConfig(cache=0.0, optimizer=tc.SGD(lr=0.1))
    one, sharded = (nn.ModuleDict({"memory": memory(mode=mode, rows=rows)}) for _ in range(2))
    pooling = "none" if mode == "concatenate" else "sum"
    table = {"name": "ngrams", "rows": 997, "dim": 6, "pooling": pooling, "precision": "int8", "cache": 0.0, "lookups": 28}
    config = TablesConfig.model_validate({"batch": 3, "tables": [table]})
    cluster = Topology.load("laptop").model_copy(update={"gpus_per_node": 1})
    heat = profile_batches([{"ngrams": NGRAMS(tokens_of()).reshape(3, -1).numpy()}])
    tc.shard_(sharded, tc.make_plan(config, heat, cluster, budget="2MB"), heat)
    for seed in range(2):
        out, wanted = sharded["memory"](tokens_of(seed=seed)), one["memory"](tokens_of(seed=seed))
        assert torch.equal(out, wanted)
        out.square().sum().backward()
        wanted.square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert sharded["memory"](tokens_of()).dtype == torch.bfloat16
    for batch, rows in sharded["memory"].prefetched([tokens_of()]):
        assert torch.equal(sharded["memory"](rows), one["memory"](batch))


def test_an_empty_batch_gives_no_vectors():
    assert memory(PLAIN)(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 24)
    assert memory(PLAIN, mode="sum")(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 6)


def test_conversion_leaves_the_module_alone():
    model = nn.ModuleDict({"words": nn.Embedding(50, 8), "memory": memory()})
    before = model["memory"](tokens_of())
    tc.convert_(model, tc.RowConfig("int8"))
    assert isinstance(model["words"], tc.Embedding) and torch.equal(model["memory"](tokens_of()), before)
    assert len(tc.fused_optimizer(model).param_groups) == 2


@pytest.mark.parametrize(
    "keywords, parameter",
    [
        ({"rows": 0}, "rows"),
        ({"rows": 12, "heads": 7}, "rows"),
        ({"rows": 4, "heads": 2, "exclude": (1,)}, "rows"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"vocabulary": 2.5}, "vocabulary"),
        ({"heads": 0}, "heads"),
        ({"orders": ()}, "orders"),
        ({"orders": (0,)}, "orders"),
        ({"orders": 3}, "orders"),
        ({"exclude": (50,)}, "exclude"),
        ({"exclude": (-1,)}, "exclude"),
        ({"salt": "a"}, "salt"),
    ],
)
def test_a_bad_field_of_the_hash_is_named(keywords, parameter):
    with pytest.raises(tc.BadInput, check=has(parameter=parameter)):
        NGramHash(**{"rows": 997, "vocabulary": 50, **keywords})


@pytest.mark.parametrize(
    "keywords, parameter",
    [({"mode": "mean"}, "mode"), ({"gate": True}, "gate"), ({"rows": "int8"}, "rows"), ({"ngrams": 997}, "ngrams")],
)
def test_a_bad_argument_of_the_module_is_named(keywords, parameter):
    with pytest.raises(tc.BadInput, check=has(parameter=parameter)):
        NGramEmbedding(**{"ngrams": NGRAMS, "embedding_dim": 4, **keywords})


@pytest.mark.parametrize(
    "given, fields",
    [
        ((tokens_of().float(),), {"parameter": "tokens"}),
        ((tokens_of(3, 2),), {"parameter": "tokens", "value": 2, "needed": 3}),
        ((tokens_of()[..., None].repeat(1, 1, 3),), {"parameter": "rows", "needed": 4}),
        ((tokens_of(), torch.zeros(3, 7, 8)), {"parameter": "hidden"}),
        ((torch.full((1, 5), 50),), {"name": "tokens", "id": 50, "rows": 50}),
        ((torch.full((1, 5, 4), 997),), {"table": "ngrams", "id": 997, "rows": 997}),
    ],
)
def test_a_bad_input_of_forward_is_named(given, fields):
    with pytest.raises(tc.BadInput, check=has(**fields)):
        memory()(*given)


def test_rows_that_do_not_fit_name_bytes_and_precisions(monkeypatch):
    monkeypatch.setattr("thermocline.nn.config.free_bytes", lambda _: 100_000_000)
    with pytest.raises(tc.BadInput, check=lambda error: error.needed > error.available == 100_000_000):
        NGramEmbedding(NGramHash(2_000_000, 50), 64)


def test_rows_that_do_not_fit_into_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr("thermocline.nn.config.free_bytes", lambda device: 1 << 40 if device.type == "cuda" else 100_000_000)
    ngrams, rows = NGramHash(2_000_000, 50), tc.RowConfig("int8", residency="host")
    with pytest.raises(tc.BadInput, check=has(needed=128_000_000, available=100_000_000, device=torch.device("cpu"))):
        NGramEmbedding(ngrams, 64, rows=rows, device="cuda")
