"""What an `nn.Module` must be able to do: move, cast, copy, save, load, compile, run under autocast and DDP."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import thermocline as tc
from forked import script
from support import has, mentions, module_arguments

OPTIMIZERS = [tc.SGD(lr=0.1), tc.Adagrad(lr=0.1), tc.RowwiseAdagrad(lr=0.1), tc.Adam(lr=0.1)]


def ids_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def bag(**keywords: Any) -> tc.EmbeddingBag:
    torch.manual_seed(0)
    return tc.EmbeddingBag(31, 6, mode="sum", **module_arguments(**keywords))


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
    first, second = (nn.Sequential(tc.Embedding(31, 6, rows=tc.RowConfig(precision, optimizer=optimizer))) for _ in range(2))
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
    with pytest.raises(RuntimeError, check=mentions("31 x 6 int8; 1 slots for 6 int8", "31 x 6 fp8; 1 slots for 6 fp8")):
        bag(precision="fp8").load_state_dict(bag().state_dict())
    with pytest.raises(RuntimeError, check=mentions("(31, 5)", "(31, 6)")):
        bag().load_state_dict({"weight": torch.zeros(31, 5)})
    with pytest.raises(RuntimeError, check=mentions("state0", "optimizer")):
        bag(optimizer=tc.Adagrad(lr=0.1)).load_state_dict(bag().state_dict())
    saved = bag().state_dict()
    del saved["meta"]
    with pytest.raises(RuntimeError, check=mentions("Missing key", "meta")):
        bag().load_state_dict(saved)
    with pytest.raises(RuntimeError, check=mentions("Unexpected key", "bias")):
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


@pytest.mark.parametrize(
    "built, move",
    [
        ("cpu", lambda m: m.to("meta")),
        ("cpu", lambda m: m.to_empty(device="cpu")),
    ],
    ids=["to meta", "emptied"],
)
def test_a_move_that_brings_no_values_is_refused_before_anything_moves(built, move):
    model = nn.Sequential(bag(device=built))
    with pytest.raises(tc.BadInput, check=has(parameter="device")):
        move(model)
    assert model[0].arena.device.type == built == model[0].placeholder.device.type
    assert equal(model[0], bag())
    assert bag(device="meta").half().dtype == torch.float16


def table(device: str) -> tc.EmbeddingCollection:
    tables = [tc.Table("a", 31, 6, ids=tc.IdMap.hashed(31)), tc.Table("b", 9, 4, features=("c", "d"))]
    return tc.EmbeddingCollection(tables, rows=tc.RowConfig("int4", cache=0.2), device=device, dtype=torch.float16)


@pytest.mark.parametrize(
    "make",
    [
        lambda device: tc.EmbeddingBag(31, 6, mode="max", include_last_offset=True, padding_idx=3, device=device),
        lambda device: tc.Embedding(31, 6, ids=tc.IdMap.hashed(31), rows=tc.RowConfig("int8", update="step"), device=device),
        table,
    ],
    ids=["EmbeddingBag", "Embedding", "EmbeddingCollection"],
)
def test_a_module_on_meta_is_materialized_by_to_empty_and_reset_parameters(make):
    torch.manual_seed(0)
    wanted = make("cpu")
    model = nn.Sequential(make("meta")).eval()
    model[0].requires_grad_(False)
    assert model.to_empty(device="cpu") is model
    assert not model[0].training and not model[0].placeholder.requires_grad
    torch.manual_seed(0)
    model[0].reset_parameters()
    assert repr(model[0]) == repr(wanted) and model[0].dtype == wanted.dtype
    assert equal(model[0], wanted) and model[0].fused_optimizer.param_groups[0]["params"][0] is model[0].placeholder
    model[0].requires_grad_(True)
    ids = torch.ones(5, 3, dtype=torch.int64)
    for module in (model[0].train(), wanted):
        out = module(ids)
        (out if isinstance(out, torch.Tensor) else out.values()).float().sum().backward()
        module.fused_optimizer.step()
    assert equal(model[0], wanted)


def test_what_was_freed_before_is_not_taken_for_values_that_came_along():
    """Empty memory may hold what an earlier module was asked with."""
    asked = []

    def emptied(tensor):
        asked.append(tensor.clone())
        return asked[-2].clone() if tensor.shape == asked[0].shape and len(asked) > 1 else torch.zeros_like(tensor)

    for _ in range(2):
        with pytest.raises(tc.BadInput, check=has(parameter="device")):
            bag()._apply(emptied)


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
    assert [name for name, _ in model[0].named_parameters()] == ["placeholder"] and model[0].placeholder.numel() == 1


def test_activation_checkpoints_update_rows_once():
    plain, kept = nn.Sequential(bag(), nn.Linear(6, 2)), nn.Sequential(bag(), nn.Linear(6, 2))
    kept.load_state_dict(plain.state_dict())
    (plain(ids_of((5, 3))) ** 2).sum().backward()
    (torch.utils.checkpoint.checkpoint(kept, ids_of((5, 3)), use_reentrant=False) ** 2).sum().backward()
    assert equal(plain, kept) and kept[0].trainer.clock.tolist() == [0, 1]


def test_checkpoints_with_passes_of_their_own_are_no_accumulation():
    """A reentrant checkpoint runs a backward pass inside the user's, one for each."""
    model = nn.Sequential(bag(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss():
        out = model(ids_of((5, 3))) + torch.zeros(5, 1, requires_grad=True)
        for _ in range(2):
            out = torch.utils.checkpoint.checkpoint(lambda sum: sum + model(ids_of((5, 3))), out, use_reentrant=True)
        return out.sum()

    for step in range(2):
        loss().backward()
        optimizer.step()
        assert model[0].trainer.clock.tolist() == [0, step + 1]
    loss().backward()
    with pytest.raises(tc.BadInput, check=has(parameter="update", value="backward")):
        loss().backward()


@pytest.mark.parametrize("kind", [tc.EmbeddingBag, tc.Embedding])
def test_an_id_out_of_range_is_told_where_it_was_given_beside_padding(kind):
    module = kind(31, 6, padding_idx=2)
    with pytest.raises(tc.IdOutOfRange, check=has(table="table", rows=31, position=4, id=31)):
        module(torch.tensor([[2, 5, 2], [2, 31, 2]]))


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
        (lambda: tc.EmbeddingBag(31, 6, rows=tc.RowConfig(optimizer=tc.Adam(lr=0.1))), "2-D", 6),
        (lambda: tc.EmbeddingBag(31, 6, mode="sum"), "flat", 6),
        (lambda: tc.EmbeddingBag(31, 6, mode="max", rows=tc.RowConfig("int4")), "2-D", 6),
        (lambda: tc.EmbeddingBag(31, 6, padding_idx=3), "2-D", 6),
        (lambda: tc.Embedding(31, 6), "2-D", 6),
        (lambda: tc.Embedding(31, 6, padding_idx=3), "2-D", 6),
        (
            lambda: tc.EmbeddingCollection([tc.Table("a", 31, 4), tc.Table("b", 31, 2, row_config=tc.RowConfig("int4"))]),
            "2-D",
            6,
        ),
        (lambda: tc.EmbeddingCollection([tc.Table("a", 31, 4), tc.Table("b", 31, 2)]), "dict", 6),
    ],
)
def test_a_compiled_model_trains_to_the_same_bits(make, kind, width):
    torch.manual_seed(3)
    torch._dynamo.reset()
    eager = Model(make(), width)
    model = copy.deepcopy(eager)
    with torch._dynamo.config.patch(error_on_recompile=kind != "dict"):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for step in range(3):
            for run, first in ((eager, eager.first), (compiled, model.first)):
                first.fused_optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # must not compile again
                run(*inputs(kind, step)).backward()
                first.fused_optimizer.step()
    assert equal(eager.first, model.first)
    assert model.first.trainer.clock.tolist() == [0, 3]


def test_a_model_whose_gradients_wait_is_compiled_in_one_graph():
    torch.manual_seed(3)
    torch._dynamo.reset()
    eager = Model(tc.EmbeddingBag(31, 6, rows=tc.RowConfig(update="step")), 6)
    eager(ids_of((5, 2), 9)).backward()  # gradients wait while the compiler looks at parameters
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(4):
        for run, first in ((eager, eager.first), (compiled, model.first)):
            run(ids_of((5, 2), step)).backward()
            if step % 2:
                first.fused_optimizer.step()
                first.fused_optimizer.zero_grad()
    assert equal(eager.first, model.first)


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def test_rows_that_would_diverge_between_ranks_are_refused(tmp_path: Path):
    ranks = [script(Path(__file__).with_name("ddp_rank.py"), rank, tmp_path) for rank in range(2)]
    assert [rank.finish().returncode for rank in ranks] == [0, 0]


def test_torchs_get_and_set_state_dict_take_converted_models():
    def trained(seed, steps):
        torch.manual_seed(seed)
        model = nn.Sequential(tc.EmbeddingBag(31, 6, rows=tc.RowConfig("int8", cache=0.2)), nn.Linear(6, 2))
        optimizers = [tc.fused_optimizer(model), torch.optim.Adam(model[1].parameters())]
        for _ in range(steps):
            model(torch.randint(0, 31, (4, 3))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return model, optimizers

    model, optimizers = trained(0, 3)
    optimizers[0].param_groups[0]["lr"] = 0.5
    saved, state = get_state_dict(model, optimizers)
    assert set(saved) == set(model.state_dict()) and "0.codes" in saved
    other, theirs = trained(1, 1)
    set_state_dict(other, theirs, model_state_dict=saved, optim_state_dict=state)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    assert theirs[0].param_groups[0]["lr"] == 0.5
    assert torch.equal(theirs[1].state[other[1].weight]["exp_avg"], optimizers[1].state[model[1].weight]["exp_avg"])
