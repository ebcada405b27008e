"""The kernels as PyTorch operators: opcheck, torch.compile of a training step, and what backward does to the rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from thermocline import formats as F
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap
from thermocline.kernels import dequantize_rows, ops
from thermocline.kernels.update.reference import STATES

# PyTorch's own: inductor still imports TorchScript, and says that its caches are off as they were told to be.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]

Make = Callable[..., Any]
thermocline = torch.ops.thermocline

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
TABLES = [(31, 4, "int8"), (17, 3, "int4"), (23, 5, "fp32")]
FEATURES = [0, 1, 2, 0]
SLOTS = [6, 3, 0]
NO_WINNERS = torch.zeros(0, dtype=torch.int32)


class Model(nn.Module):
    """An arena as buffers, an anchor that ties lookups into the graph, and a linear layer on top."""

    def __init__(self, arena: Any, optimizer: int = F.ROWWISE_ADAGRAD, mode: int = F.SUM, seed: int = 5) -> None:
        super().__init__()
        self.spec, self.mode, self.optimizer = arena.spec, mode, optimizer
        self.stochastic = True
        size = arena.rows if optimizer == F.ROWWISE_ADAGRAD else arena.elements
        for name, tensor in {
            "codes": arena.codes.clone(),
            "meta": arena.meta.clone(),
            "fields": arena.layout.fields_F8.clone(),
            "hyper": torch.tensor([0.3, 1e-6, 0.9, 0.999, 0.01, 1.0, 1.0], dtype=torch.float64),
            "clock": torch.tensor([seed, 0]),
            "state0": torch.zeros(size if STATES.get(optimizer, 0) > 0 else 0),
            "state1": torch.zeros(size if STATES.get(optimizer, 0) > 1 else 0),
            **{f"cache{i}": part.clone() for i, part in enumerate(arena.cache)},
        }.items():
            self.register_buffer(name, tensor)
        self.parts = len(arena.cache)
        self.anchor = nn.Parameter(torch.zeros(1))
        self.top = nn.Linear(arena.layout.tables.width, 3, bias=False)
        with torch.no_grad():
            self.top.weight.copy_(torch.randn(self.top.weight.shape, generator=torch.Generator().manual_seed(3)))

    @property
    def states(self) -> list[Tensor]:
        return [self.state0, self.state1][: STATES.get(self.optimizer, 0)]

    @property
    def cache(self) -> list[Tensor]:
        return [getattr(self, f"cache{i}") for i in range(self.parts)]

    def lookup(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        out, _ = thermocline.lookup(
            self.codes, self.meta, self.cache, self.fields, ids, offsets, weights, self.anchor, self.states, self.hyper,
            self.clock, self.spec, self.mode, torch.float32, self.optimizer, self.stochastic, True,
        )  # fmt: skip
        return out

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
        """A loss whose gradient is the same bits however it is compiled: nothing is added up but in matrix products."""
        return (self.top(self.lookup(ids, offsets, weights)) * target).sum()

    def trained(self) -> dict[str, Tensor]:
        """A copy of everything that training changes."""
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _batch(arena: Any, make_lookup: Make, batch: int, seed: int, weighted: bool = False) -> tuple[Any, ...]:
    ids, offsets, weights = make_lookup(arena, batch, 3, seed=seed, weighted=weighted)
    if weights is not None:
        weights.requires_grad_()
    return ids, offsets, weights, torch.randn(batch, 3, generator=torch.Generator().manual_seed(seed))


def _train(model: Model, step: Callable[..., Tensor], batches: list[tuple[Any, ...]]) -> list[Tensor]:
    """A few steps; returns the losses and the gradients of the weights."""
    dense = torch.optim.SGD(model.top.parameters(), lr=0.125)
    seen = []
    for batch in batches:
        dense.zero_grad()
        loss = step(*batch)
        loss.backward()
        dense.step()
        seen += [batch[2].grad] if batch[2] is not None else []
    assert model.anchor.grad is None
    return seen


# -- opcheck ----------------------------------------------------------------------------------------------------------


def _opcheck(name: str, args: tuple[Any, ...], device: str) -> None:
    def there(thing: Any) -> Any:
        if isinstance(thing, list):
            return [there(each) for each in thing]
        return thing.detach().to(device).requires_grad_(thing.requires_grad) if isinstance(thing, Tensor) else thing

    torch.library.opcheck(getattr(thermocline, name).default, tuple(there(arg) for arg in args))


def test_every_op_of_the_library_is_checked_here_or_in_test_ngrams() -> None:
    assert set(ops._SCHEMAS) == {"lookup", "weight_gradient", "hand_over", "update_bags", "map_ids", "ngram_rows"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", range(len(F.MODES)), ids=F.MODES)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_lookup_passes_opcheck(trained: bool, mode: int, device: str, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    ids, offsets, weights = make_lookup(arena, None if mode == F.NONE else 5, 3, weighted=mode == F.SUM)
    optimizer = F.ADAM if trained else ops.FROZEN
    model = Model(arena, optimizer, mode)
    anchor = torch.zeros(1, requires_grad=trained)
    args = (
        model.codes, model.meta, model.cache, model.fields, ids, offsets, weights, anchor, model.states, model.hyper,
        model.clock, model.spec, mode, torch.float32, optimizer, True, True,
    )  # fmt: skip
    _opcheck("lookup", args, device)


@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradient_passes_opcheck(device: str, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    ids, offsets, _ = make_lookup(arena, 5, 3)
    grad = torch.randn(5, arena.layout.tables.width)
    table = (arena.codes, arena.meta, arena.cache, arena.layout.fields_F8)
    _opcheck("weight_gradient", (*table, ids, offsets, grad, arena.spec), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", range(len(F.OPTIMIZERS)), ids=F.OPTIMIZERS)
def test_updates_pass_opcheck(optimizer: int, device: str, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    model, lookup = Model(arena, optimizer), make_lookup(arena, 5, 3)
    table = (model.codes, model.meta, model.cache, model.fields, model.states, model.hyper, model.clock)
    grad = torch.randn(5, arena.layout.tables.width)
    _opcheck("update_bags", (*table, *lookup, NO_WINNERS, grad, model.spec, F.SUM, optimizer, True), device)


class Recipient:
    """Counts what it gets."""

    def __init__(self) -> None:
        self.opened, self.received = 0, []

    def open(self) -> None:
        self.opened += 1

    def receive(self, call: Any, winners: Tensor, grad: Tensor) -> None:
        self.received.append(call.ids_N.tolist())


@pytest.mark.parametrize("device", DEVICES)
def test_hand_over_passes_opcheck(device: str) -> None:
    owner, ids, ends = Recipient(), torch.tensor([1, 3, 5, 1]), torch.tensor([0, 2, 4])
    args = (torch.zeros(1), ids, ends, None, NO_WINNERS, torch.randn(2, 4), F.SUM, ops.register_owner(owner), 1)
    _opcheck("hand_over", args, device)
    assert [3, 5] in owner.received


def test_operators_of_tables_stay_outside_of_cuda_graphs() -> None:
    """A graph of mode="reduce-overhead" would copy whole tables into its own memory, and skip the Python of updates."""
    for name in ops._SCHEMAS:
        assert torch.Tag.cudagraph_unsafe in getattr(thermocline, name).default.tags


@pytest.mark.parametrize("device", DEVICES)
def test_map_ids_passes_opcheck(device: str, make_raw: Make) -> None:
    maps = [IdMap.hashed(1000, 3), None, IdMap.pruned(range(0, 500, 2)), IdMap.pruned([1, 1 << 50])]
    held = IdMaps(maps, "cpu")
    _opcheck("map_ids", (held.fields_FM, held.words, held.counts, *make_raw(maps, 5, 3), 1), device)


# -- torch.compile ----------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing from earlier: compiled graphs are cached on disk by the calls in them, whatever those calls did then."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def _compiled_equals_eager(arena: Any, batches: list[tuple[Any, ...]], backend: str, **kwargs: Any) -> None:
    eager, compiled = Model(arena, **kwargs), Model(arena, **kwargs)
    before = eager.trained()
    wanted = _train(eager, eager, batches)
    weights = [w.clone() for w in wanted]
    for batch in batches:
        if batch[2] is not None:
            batch[2].grad = None
    got = _train(compiled, torch.compile(compiled, fullgraph=True, backend=backend), batches)
    assert _equal(compiled.trained(), eager.trained())
    assert not torch.equal(eager.codes, before["codes"]) and eager.clock.tolist() == [5, len(batches)]
    assert all(torch.equal(a, b) for a, b in zip(got, weights, strict=True))


@needs_compiler
def test_a_training_step_compiled_by_inductor_leaves_the_same_bits(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    batches = [_batch(arena, make_lookup, 5, seed, weighted=True) for seed in range(3)]
    _compiled_equals_eager(arena, batches, "inductor")


@pytest.mark.parametrize("optimizer", range(len(F.OPTIMIZERS)), ids=F.OPTIMIZERS)
@pytest.mark.parametrize("mode", [F.SUM, F.MEAN, F.MAX], ids=["sum", "mean", "max"])
def test_a_compiled_training_step_leaves_the_same_bits(mode: int, optimizer: int, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    batches = [_batch(arena, make_lookup, 5, seed) for seed in range(3)]
    _compiled_equals_eager(arena, batches, "aot_eager", optimizer=optimizer, mode=mode)


def test_weights_get_their_gradient_when_compiled(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    batches = [_batch(arena, make_lookup, 5, seed, weighted=True) for seed in range(3)]
    _compiled_equals_eager(arena, batches, "aot_eager")


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_batches_of_any_size_run_when_compiled(dynamic: bool | None, make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    batches = [_batch(arena, make_lookup, size, seed) for seed, size in enumerate([5, 9, 17, 2, 63])]
    eager, compiled = Model(arena), Model(arena)
    _train(eager, eager, batches)
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch._dynamo.config.patch(error_on_recompile=dynamic is True):
        _train(compiled, step, batches)
    assert _equal(compiled.trained(), eager.trained())


def test_inference_compiles_and_changes_nothing(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    model, batch = Model(arena), _batch(arena, make_lookup, 5, 1)
    before, wanted = model.trained(), model(*batch)
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(*batch)
    assert torch.equal(got, wanted) and _equal(model.trained(), before)


# -- backward ---------------------------------------------------------------------------------------------------------


def test_lookups_without_grad_change_nothing(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    model, batch = Model(arena), _batch(arena, make_lookup, 5, 1)
    before = model.trained()
    with torch.no_grad():
        quiet = model.lookup(*batch[:3])
    assert not quiet.requires_grad and _equal(model.trained(), before)
    loud = model.lookup(*batch[:3])
    assert loud.requires_grad and torch.equal(loud, quiet) and _equal(model.trained(), before)


def test_a_table_looked_up_twice_before_backward_is_updated_twice(make_arena: Make, make_lookup: Make) -> None:
    """As two optimizer steps would: the second update starts from the rows the first one left."""
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    once, twice, one_by_one = Model(arena), Model(arena), Model(arena)
    ids, offsets, _ = make_lookup(arena, 5, 3, seed=1)
    ones = torch.ones(5, arena.layout.tables.width)
    once.lookup(ids, offsets).backward(ones)
    (twice.lookup(ids, offsets) + twice.lookup(ids, offsets)).backward(ones)
    for _ in range(2):
        one_by_one.lookup(ids, offsets).backward(ones)
    assert twice.clock.tolist() == [5, 2]
    assert _equal(twice.trained(), one_by_one.trained()) and not _equal(twice.trained(), once.trained())


def test_a_frozen_lookup_leaves_rows_alone_and_still_gives_weights_their_gradient(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    frozen, trained = Model(arena, ops.FROZEN), Model(arena)
    before = frozen.trained()
    ids, offsets, weights, target = _batch(arena, make_lookup, 5, 1, weighted=True)
    frozen(ids, offsets, weights, target).backward()
    assert _equal(frozen.trained(), before)
    gradient, weights.grad = weights.grad, None
    trained(ids, offsets, weights, target).backward()
    assert torch.equal(weights.grad, gradient), "weights' gradients read rows as they were before the update"
    assert not torch.equal(trained.codes, before["codes"])


def test_the_gradient_of_weights_is_what_autograd_makes_of_dequantized_rows(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena([(31, 4, "int8")])
    model = Model(arena)
    ids, offsets, weights, _ = _batch(arena, make_lookup, 7, 2, weighted=True)
    rows = dequantize_rows(arena.codes.view(31, 4), arena.meta.view(31, 1), F.INT8, 4)
    mine = weights.detach().clone().requires_grad_()
    grad = torch.randn(7, 4, generator=torch.Generator().manual_seed(4))
    wanted = nn.functional.embedding_bag(ids, rows, offsets[:-1], mode="sum", per_sample_weights=mine)
    wanted.backward(grad)
    out = model.lookup(ids, offsets, weights)
    torch.testing.assert_close(out, wanted)
    out.backward(grad)
    torch.testing.assert_close(weights.grad, mine.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_sixteen_bits_get_a_gradient_of_their_own_type(
    dtype: torch.dtype, make_arena: Make, make_lookup: Make
) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    ids, offsets, weights = make_lookup(arena, 5, 3, weighted=True)
    weights = weights.to(dtype).requires_grad_()
    Model(arena).lookup(ids, offsets, weights).sum().backward()
    assert weights.grad.dtype == dtype and weights.grad.abs().sum() > 0


def test_a_gradient_that_is_expanded_or_transposed_updates_as_its_copy_does(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    ids, offsets, _ = make_lookup(arena, 5, 3)
    width = arena.layout.tables.width
    for grad in (torch.ones(1, 1).expand(5, width), torch.randn(width, 5).t()):
        view, copy = Model(arena), Model(arena)
        view.lookup(ids, offsets).backward(grad)
        copy.lookup(ids, offsets).backward(grad.contiguous())
        assert _equal(view.trained(), copy.trained())


def test_an_output_that_no_loss_uses_updates_nothing(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    model = Model(arena)
    before = model.trained()
    out = model.lookup(*make_lookup(arena, 5, 3)[:2])
    (out.detach().sum() + model.top.weight.sum()).backward()
    assert _equal(model.trained(), before)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(make_arena: Make, make_lookup: Make) -> None:
    arena = make_arena(TABLES, FEATURES, slots=SLOTS)
    batches = [_batch(arena, make_lookup, 17, seed) for seed in range(3)]
    first, again, other = Model(arena), Model(arena), Model(arena, seed=6)
    for model in (first, again, other):
        _train(model, model, batches)
    assert _equal(first.trained(), again.trained())
    assert not torch.equal(first.codes, other.codes)
