"""What an `nn.Module` must be able to do: move, cast, copy, save, load, compile, run under autocast and DDP."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import thermocline as tc
from thermocline.nn import collection
from thermocline.nn.features import read_features
from thermocline.rows.arena import Arena

OPTIMIZERS = [tc.SGD(lr=0.1), tc.Adagrad(lr=0.1), tc.RowwiseAdagrad(lr=0.1), tc.Adam(lr=0.1)]


def ids_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def bag(**keywords: Any) -> tc.EmbeddingBag:
    torch.manual_seed(0)
    return tc.EmbeddingBag(31, 6, mode="sum", **keywords)


def train(module: nn.Module, steps: int = 2, seed: int = 0) -> None:
    for step in range(steps):
        (module(ids_of((5, 3), seed + step)) ** 2).sum().backward()


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def by_torch_save(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch_save], ids=["copy", "pickle", "save"]
)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_copy_trains_on_alone_to_the_same_bits(optimizer, copied, update):
    module = bag(optimizer=optimizer, update=update)
    module.fused_optimizer.param_groups[0]["lr"] = 0.25
    train(module)
    other = copied(module)
    before = state(other)
    for each in (module, other):
        train(each, seed=7)
        each.fused_optimizer.step()
        if each is module:
            assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert equal(module, other) and other.fused_optimizer.param_groups[0]["lr"] == 0.25
    other.fused_optimizer.param_groups[0]["lr"] = 0.5
    assert module.trainer.hyper[0] == 0.25 and other.trainer.hyper[0] == 0.5


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("precision", ["int8", "int4", "fp32"])
def test_a_loaded_state_trains_on_to_the_same_bits(optimizer, precision):
    first, second = (nn.Sequential(tc.Embedding(31, 6, optimizer=optimizer, precision=precision)) for _ in range(2))
    first[0].fused_optimizer.param_groups[0]["lr"] = 0.03
    train(first)
    second.load_state_dict(state(first))
    assert equal(first, second) and second[0].fused_optimizer.param_groups[0]["lr"] == 0.03
    for module in (first, second):
        train(module, seed=7)
    assert equal(first, second)


def test_a_plain_weight_still_loads_and_leaves_the_optimizer_alone():
    old, new = nn.Sequential(nn.EmbeddingBag(31, 6, mode="sum")), nn.Sequential(bag(precision="fp32"))
    train(new)
    sums = new[0].trainer.states[0].clone()
    new.load_state_dict(old.state_dict())
    assert torch.equal(new[0].weight, old[0].weight) and torch.equal(new[0].trainer.states[0], sums)


def test_states_that_do_not_fit_are_refused_with_their_numbers():
    with pytest.raises(
        RuntimeError, match=r"saved rows are 31 x 6 int8; 1 slots for 6 int8.*, this module's 31 x 6 fp8; 1 slots for 6 fp8"
    ):
        bag(precision="fp8").load_state_dict(bag().state_dict())
    with pytest.raises(RuntimeError, match="values are"):
        bag().load_state_dict({"weight": torch.zeros(31, 5)})
    with pytest.raises(RuntimeError, match="optimizer it was saved with"):
        bag(optimizer=tc.Adagrad(lr=0.1)).load_state_dict(bag().state_dict())
    saved = bag().state_dict()
    del saved["meta"]
    with pytest.raises(RuntimeError, match=r"Missing key.*meta"):
        bag().load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
        bag().load_state_dict({**bag().state_dict(), "bias": torch.zeros(1)})
    bag().load_state_dict({}, strict=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("cast", [nn.Module.to, nn.Module.type], ids=["to", "type"])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_casts_change_the_output_and_nothing_that_is_stored(dtype, update, cast):
    module = bag(optimizer=tc.Adam(lr=0.1), update=update)
    train(module)
    before, wanted = state(module), module(ids_of((5, 3))).detach()
    same = cast(module, dtype)
    assert same is module and module(ids_of((5, 3))).dtype == dtype
    torch.testing.assert_close(module(ids_of((5, 3))), wanted.to(dtype), rtol=0, atol=0)
    assert all(
        torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype for name, tensor in state(module).items()
    )
    train(module)
    module.fused_optimizer.step()
    assert not equal(module, bag(optimizer=tc.Adam(lr=0.1)))
    assert tc.EmbeddingBag(9, 4, dtype=dtype)(torch.zeros(1, 1, dtype=torch.int64)).dtype == dtype


def test_a_model_in_double_precision_trains():
    model = nn.Sequential(bag(), nn.Linear(6, 1)).double()
    before = state(model[0])
    model(ids_of((5, 3))).sum().backward()
    assert not torch.equal(model[0].arena.codes, before["codes"])


def test_modules_share_memory_as_torchs_do():
    module = bag().share_memory()
    assert module.arena.codes.is_shared() and module.trainer.states[0].is_shared()
    train(module)


def test_autocast_leaves_the_output_as_torchs_does():
    theirs, ours = nn.EmbeddingBag(31, 6, mode="sum"), bag()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(ids_of((5, 3))).dtype == theirs(ids_of((5, 3))).dtype == torch.float32
        out = nn.Linear(6, 1)(ours(ids_of((5, 3))))
    out.float().sum().backward()


def test_the_parameter_of_a_module_freezes_its_rows():
    model = nn.Sequential(bag(), nn.Linear(6, 2))
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    before = state(model[0])
    model(ids_of((5, 3))).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model[0].state_dict().items())
    assert [name for name, _ in model[0].named_parameters()] == ["anchor"] and model[0].anchor.numel() == 1


def test_activation_checkpoints_update_rows_once():
    plain, kept = nn.Sequential(bag(), nn.Linear(6, 2)), nn.Sequential(bag(), nn.Linear(6, 2))
    kept.load_state_dict(plain.state_dict())
    (plain(ids_of((5, 3))) ** 2).sum().backward()
    (torch.utils.checkpoint.checkpoint(kept, ids_of((5, 3)), use_reentrant=False) ** 2).sum().backward()
    assert equal(plain, kept) and kept[0].trainer.clock.tolist() == [0, 1]


def test_defaults_of_another_type_do_not_reach_the_rows():
    torch.set_default_dtype(torch.float64)
    try:
        modules = [bag(), tc.EmbeddingCollection([tc.Table("a", 31, 6)])]
        outputs = [modules[0](ids_of((5, 3))), modules[1](ids_of((5, 1))).values()]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(out.dtype == torch.float64 for out in outputs)


# -- torch.compile ----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, first: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.top = first, nn.Linear(width, 3, bias=False)

    def forward(self, *input: Any) -> Tensor:
        out = self.first(*input)
        out = out if isinstance(out, Tensor) else out.values()
        return (self.top(out.reshape(-1, out.shape[-1])) ** 2).sum()


def inputs(kind: str, seed: int) -> tuple[Any, ...]:
    if kind == "dict":
        return ({"a": (ids_of((9,), seed), torch.tensor([0, 4, 9])), "b": (ids_of((3,), seed), torch.tensor([0, 0, 3]))},)
    if kind == "flat":
        return ids_of((9,), seed), torch.tensor([0, 4]), torch.rand(9, generator=torch.Generator().manual_seed(seed))
    return (ids_of((5, 2), seed),)


@pytest.mark.parametrize(
    "make, kind, width",
    [
        (lambda: tc.EmbeddingBag(31, 6, optimizer=tc.Adam(lr=0.1)), "2-D", 6),
        (lambda: tc.EmbeddingBag(31, 6, mode="sum"), "flat", 6),
        (lambda: tc.EmbeddingBag(31, 6, mode="max", precision="int4"), "2-D", 6),
        (lambda: tc.EmbeddingBag(31, 6, padding_idx=3), "2-D", 6),
        (lambda: tc.Embedding(31, 6), "2-D", 6),
        (lambda: tc.Embedding(31, 6, padding_idx=3), "2-D", 6),
        (lambda: tc.EmbeddingCollection([tc.Table("a", 31, 4), tc.Table("b", 31, 2, precision="int4")]), "2-D", 6),
        (lambda: tc.EmbeddingCollection([tc.Table("a", 31, 4), tc.Table("b", 31, 2)]), "dict", 6),
    ],
)
def test_a_compiled_model_trains_to_the_same_bits(make, kind, width):
    torch.manual_seed(3)
    torch._dynamo.reset()
    eager = Model(make(), width)
    model = copy.deepcopy(eager)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=kind != "dict"):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for step in range(3):
            for run, first in ((eager, eager.first), (compiled, model.first)):
                first.fused_optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # must not compile again
                run(*inputs(kind, step)).backward()
                first.fused_optimizer.step()
    assert equal(eager.first, model.first)
    assert model.first.trainer.clock.tolist() == [0, 3]


def test_a_model_whose_gradients_wait_is_compiled_in_pieces():
    torch.manual_seed(3)
    torch._dynamo.reset()
    eager = Model(tc.EmbeddingBag(31, 6, update="step"), 6)
    eager(ids_of((5, 2), 9)).backward()  # gradients wait while the compiler looks at parameters
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        for run, first in ((eager, eager.first), (compiled, model.first)):
            run(ids_of((5, 2), step)).backward()
            if step % 2:
                first.fused_optimizer.step()
                first.fused_optimizer.zero_grad()
    assert equal(eager.first, model.first)


# -- prefetch -----------------------------------------------------------------------------------------------------------


class Seen:
    """Stands for an arena's prefetch and remembers what reached it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[list[int], list[int]]] = []
        self.arrivals = 0
        monkeypatch.setattr(Arena, "prefetches", True)
        monkeypatch.setattr(Arena, "prefetch", lambda _, ids, offsets: self.batches.append((ids.tolist(), offsets.tolist())))
        monkeypatch.setattr(Arena, "arrive", lambda _: self._count())

    def _count(self) -> None:
        self.arrivals += 1


@pytest.mark.parametrize(
    "module, batch, wanted",
    [
        (tc.EmbeddingBag(31, 6), (torch.tensor([[1, 2], [3, 4]]),), ([1, 2, 3, 4], [0, 2, 4])),
        (tc.EmbeddingBag(31, 6), (torch.tensor([1, 2, 3]), torch.tensor([0, 1])), ([1, 2, 3], [0, 1, 3])),
        (tc.Embedding(31, 6, padding_idx=2), (torch.tensor([[1, 2], [3, 4]]),), ([1, 2, 3, 4], [0, 4])),
        (
            tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 9, 3)]),
            ({"b": (torch.tensor([7]), torch.tensor([0, 1])), "a": (torch.tensor([5, 6]), torch.tensor([0, 2]))},),
            ([5, 6, 7], [0, 2, 3]),
        ),
        (tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 9, 3)]), (torch.tensor([[5, 7]]),), ([5, 7], [0, 1, 2])),
    ],
    ids=["bag", "bag with offsets", "embedding", "collection", "one id each"],
)
def test_prefetch_takes_what_forward_takes_and_forward_knows_it_again(module, batch, wanted, monkeypatch):
    seen = Seen(monkeypatch)
    other = copy.deepcopy(batch)
    module.prefetch(*batch)
    assert seen.batches == [wanted]
    module(*other)
    assert seen.arrivals == 0, "another batch waits for nothing"
    module(*batch)
    module(*batch)
    assert seen.arrivals == 1


@pytest.mark.parametrize(
    "module, batch, wrong, said",
    [
        (tc.Embedding(31, 6), (torch.tensor([1]),), ([1],), "ids are a list"),
        (tc.EmbeddingBag(31, 6), (torch.tensor([[1]]),), ([[1]],), "ids are a list"),
        (tc.EmbeddingBag(31, 6), (torch.tensor([[1]]),), (torch.tensor([1]), [0]), "offsets are a list"),
        (
            tc.EmbeddingCollection([tc.Table("a", 31, 6)]),
            ({"a": (torch.tensor([5]), torch.tensor([0, 1]))},),
            ({"a": ([5], [0, 1])},),
            "ids of feature 'a' are a list",
        ),
    ],
    ids=["embedding", "bag", "bag with offsets", "collection"],
)
def test_ids_that_are_no_tensor_are_refused_by_prefetch_and_after_one(module, batch, wrong, said, monkeypatch):
    Seen(monkeypatch)
    module.prefetch(*batch)
    for call in (module, module.prefetch):
        with pytest.raises(tc.BadInput, match=said):
            call(*wrong)


def test_a_prefetched_batch_is_read_once_unless_it_changed(monkeypatch):
    Seen(monkeypatch)
    module, reads = tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 31, 6)], mode="none"), []
    monkeypatch.setattr(collection, "read_features", lambda *args: reads.append(1) or read_features(*args))
    first, second = ((torch.tensor(ids), torch.tensor([0, 2, 3])) for ids in ([7, 8, 9], [5, 6, 7]))
    batch, other = {"a": first, "b": second}, {"a": (first[0].clone(), first[1]), "b": second}
    module.prefetch(batch)
    module.prefetch(other)
    module({"a": second, "b": first})
    assert len(reads) == 3, "the same tensors under other names"
    module({"b": second, "a": first})
    assert len(reads) == 3
    module(batch)
    assert len(reads) == 4, "what was prefetched is used once"
    module.prefetch(batch)
    first[0][0] = 3
    assert torch.equal(module(batch)["a"], module.get_rows("a", torch.tensor([3, 8, 9]))) and len(reads) == 6
    module.prefetch(batch)
    first[1][1] = 1
    assert module(batch).offsets("a").tolist() == [0, 1, 3] and len(reads) == 8


def two_tables() -> tc.EmbeddingCollection:
    torch.manual_seed(0)
    return tc.EmbeddingCollection([tc.Table("a", 31, 6), tc.Table("b", 31, 6)], precision="fp32", cache=0)


def both(values: Tensor, *rest: Tensor) -> dict[str, tuple[Tensor, ...]]:
    return {name: (values, torch.tensor([0, 2, 5]), *rest) for name in "ab"}


def test_a_buffer_that_is_refilled_past_autograd_has_the_rows_of_its_newest_batch(monkeypatch):
    Seen(monkeypatch)
    ahead, plain, values = two_tables(), two_tables(), torch.zeros(5, dtype=torch.long)
    batch = both(values)
    for step in range(5):
        values.data.copy_(torch.arange(5) + 5 * step)  # raises no version, as a collective does
        assert values._version == 0
        if step != 3:  # which finds what was prefetched used up
            ahead.prefetch(batch)
        outs = [module(batch).values() for module in (ahead, plain)]
        assert torch.equal(*outs)
        for out in outs:
            out.sum().backward()


def test_nobody_gets_the_memory_of_prefetched_ids_before_their_forward(monkeypatch):
    Seen(monkeypatch)
    module, values = two_tables(), torch.arange(5)
    memory = StorageWeakRef(values.untyped_storage())
    module.prefetch(both(values))
    values.data = torch.arange(5, 10)
    assert not memory.expired()


def test_weights_are_trained_after_a_prefetch_without_gradients(monkeypatch):
    seen = Seen(monkeypatch)
    grads = []
    for prefetched in (True, False):
        module, weights = two_tables(), torch.linspace(-1, 1, 5, requires_grad=True)
        batch = both(torch.arange(5), weights)
        if prefetched:
            with torch.no_grad():
                module.prefetch(batch)
        module(batch).values().square().sum().backward()
        grads.append(weights.grad)
    assert seen.arrivals == 1
    assert grads[1].any() and torch.equal(*grads)


@pytest.mark.parametrize(
    "module, batch",
    [
        (tc.EmbeddingBag(31, 6, precision="fp32"), torch.tensor([[1, 2], [3, 4]])),
        (tc.Embedding(31, 6, precision="fp32"), torch.tensor([[1, 2], [3, 4]])),
        (two_tables(), torch.tensor([[5, 7]])),
    ],
    ids=["bag", "embedding", "collection"],
)
def test_a_prefetch_in_inference_mode_is_no_hindrance_to_training(module, batch, monkeypatch):
    seen, before = Seen(monkeypatch), state(module)
    with torch.inference_mode():
        module.prefetch(batch)
    out = module(batch)
    (out if isinstance(out, Tensor) else out.values()).sum().backward()
    assert seen.arrivals == 1 and not torch.equal(state(module)["codes"], before["codes"])


def test_rows_of_tensors_that_are_prefetched_twice_arrive_twice(monkeypatch):
    seen, module, ids = Seen(monkeypatch), bag(), ids_of((5, 3))
    for step in range(3):
        module.prefetch(ids)
        module(ids)
        assert seen.arrivals == step + 1


class Keyed:
    """Shaped like a KeyedJaggedTensor that makes its offsets when asked for them."""

    def __init__(self, keys: str) -> None:
        self.names, self.ids = list(keys), torch.arange(5)

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> Tensor:
        return self.ids

    def offsets(self) -> Tensor:
        return torch.tensor([0, 1, 2, 4, 5])


@pytest.mark.parametrize("what", ["inference", "new offsets", "another order"])
def test_rows_arrive_for_batches_of_which_nobody_knows_whether_they_changed(what, monkeypatch):
    seen, module = Seen(monkeypatch), two_tables().eval()
    with torch.inference_mode(what == "inference"):
        values = torch.arange(5)
    batch: Any = both(values) if what == "inference" else Keyed("ab" if what == "new offsets" else "ba")
    with torch.no_grad():
        wanted = module(batch).values()
        for step in range(3):
            module.prefetch(batch)
            assert torch.equal(module(batch).values(), wanted)
            module(batch)
            assert seen.arrivals == step + 1


def test_keys_in_another_order_are_another_batch(monkeypatch):
    Seen(monkeypatch)
    module, first, second = two_tables(), Keyed("ab"), Keyed("ba")
    offsets = first.offsets()
    second.ids = first.ids
    monkeypatch.setattr(Keyed, "offsets", lambda _: offsets)
    wanted = [module(keyed).values() for keyed in (first, second)]
    module.prefetch(first)
    assert torch.equal(module(second).values(), wanted[1]) and torch.equal(module(first).values(), wanted[0])


def test_a_forward_that_is_captured_uses_nothing_that_was_prefetched(monkeypatch):
    seen, module, given = Seen(monkeypatch), bag(), [ids_of((5, 3)), None]
    module.prefetch(*given)
    with monkeypatch.context() as card:
        card.setattr(Arena, "device", torch.device("cuda"))
        card.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert module.begin(given) is None and seen.arrivals == 0
    assert module.begin(given) is not None and seen.arrivals == 1


def test_a_compiled_model_does_not_depend_on_what_is_prefetched(monkeypatch):
    Seen(monkeypatch)
    module, graphs = bag(), []
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=lambda graph, _: graphs.append(1) or graph.forward)
    with torch.no_grad():
        for step in range(4):
            compiled(ids_of((5, 3), step))
            module.prefetch(ids_of((5, 3), step + 1))
    assert len(graphs) == 1


def test_prefetch_without_a_card_does_nothing():
    module, ids = bag(residency="host"), ids_of((5, 3))
    before = state(module)
    module.prefetch(ids)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(module).items())
    assert "staging" not in module.memory().parts


def test_room_for_staged_rows_is_asked_for_as_a_cache_is(tmp_path: Path):
    assert bag(residency="host").arena.staged is None
    assert bag(residency="host", staged=0.25).arena.staged == 0.25
    assert bag(residency="host", staged="310B").arena.staged == pytest.approx(310 / (31 * (6 + 4 + 13)))
    assert bag(residency="host", staged="1GiB").arena.staged == 1.0
    copied = copy.deepcopy(bag(residency="host", staged=0.25))
    assert copied.arena.staged == 0.25 == copied.storage.staged
    copied.save_pretrained(tmp_path / "saved")
    assert tc.EmbeddingBag.from_pretrained(tmp_path / "saved").arena.staged == 0.25


@pytest.mark.parametrize(
    "keywords, said",
    [
        ({}, "residency 'device'; rows are staged with residency='host'"),
        ({"residency": "host", "cache": 0.0}, "needs a cache"),
        ({"residency": "host", "precision": "fp32"}, "needs a cache"),
        ({"residency": "host", "staged": -1.0}, "more than 0"),
        ({"residency": "host", "staged": "much"}, "staged is 'much'; use a share of the rows, such as 0.2, or bytes"),
    ],
)
def test_room_for_staged_rows_is_refused_where_it_means_nothing(keywords, said):
    with pytest.raises(tc.BadInput, match=said):
        bag(**{"staged": 0.2, **keywords})


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def test_training_inside_ddp_raises_and_the_way_out_works(tmp_path: Path):
    script = Path(__file__).with_name("ddp_rank.py")
    ranks = [subprocess.Popen([sys.executable, script, str(rank), tmp_path]) for rank in range(2)]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
