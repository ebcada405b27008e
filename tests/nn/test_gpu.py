"""The modules on a card: moved there, trained there, the same bits as on the CPU, and no wait on the way."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc
from support import mentions, module_arguments
from thermocline.rows import staging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

MAKE = [
    pytest.param(lambda **k: tc.EmbeddingBag(101, 7, mode="sum", **module_arguments(**k)), id="bag"),
    pytest.param(
        lambda **k: tc.EmbeddingBag(101, 7, mode="max", padding_idx=3, **module_arguments(**k)), id="max with padding"
    ),
    pytest.param(lambda **k: tc.Embedding(101, 7, **module_arguments(**k)), id="embedding"),
    pytest.param(
        lambda **k: tc.EmbeddingCollection([tc.Table(n, 101, 7) for n in "abc"], **module_arguments(**k)), id="collection"
    ),
]


def ids_of(seed: int) -> Tensor:
    """Distinct ids, so that no order of adding can tell the devices apart."""
    return torch.randperm(101, generator=torch.Generator().manual_seed(seed))[:99].view(33, 3)


def step(module: Any, ids: Tensor) -> None:
    out = module(ids)
    out = out if isinstance(out, Tensor) else out.values()
    out.backward(torch.linspace(-1, 1, out.numel(), device="cpu").view_as(out).to(out.device))
    module.fused_optimizer.step()
    module.fused_optimizer.zero_grad()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_module_moved_to_a_card_trains_to_the_bits_of_the_cpu(make, update, precision):
    torch.manual_seed(0)
    here = make(update=update, precision=precision, cache=0.0)
    there = make(update=update, precision=precision, cache=0.0)
    there.load_state_dict(here.state_dict())
    assert there.to("cuda") is there and there.arena.codes.is_cuda and there.trainer.states[0].is_cuda
    for seed in range(3):
        for module, device in ((here, "cpu"), (there, "cuda")):
            module.fused_optimizer.param_groups[0]["lr"] = 0.1 / (seed + 1)
            step(module, ids_of(seed).to(device))
    back = there.cpu().state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in here.state_dict().items())


def test_a_step_on_a_card_with_a_new_rate_does_not_wait():
    module = tc.EmbeddingBag(101, 7, mode="sum", device="cuda", rows=tc.RowConfig(cache=0.0))
    ids = ids_of(0).cuda()

    def step_once() -> None:
        module(ids).sum().backward()

    step_once()
    module.fused_optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.fused_optimizer.param_groups[0]["lr"] = 0.3
        step_once()
        module.fused_optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_converted_model_stays_on_its_card():
    model = nn.Sequential(nn.EmbeddingBag(101, 7), nn.Linear(7, 2)).cuda()
    tc.convert_(model)
    assert model[0].arena.codes.is_cuda
    model(ids_of(0).cuda()).sum().backward()


# -- prefetch: tables in host memory ------------------------------------------------------------------------------------------


def host_bag(policy: str, precision: str, **keywords: Any) -> Any:
    """A bag with a cache far too small for its batches, in host memory."""
    torch.manual_seed(0)
    keywords = {"cache": 0.01, "seed": 3, **keywords}
    return tc.EmbeddingBag(
        5003,
        20,
        mode="sum",
        device="cuda",
        **module_arguments(precision=precision, policy=policy, residency="host", **keywords),
    )


def thrashing_batches(count: int) -> list[Tensor]:
    """Few rows often, many rows once, and whole batches that come back two and three steps later."""
    batches: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        ids = (torch.rand(61, 7, generator=generator) ** (1 + step % 3) * 5003).long()
        batches.append(batches[step - 2 - step % 2] if step % 5 == 4 else ids.cuda())
    return batches


def held(module: Any) -> dict[str, Tensor]:
    """Everything a module has, on the CPU; cached rows put back, so that nothing is compared that nobody reads."""
    module.flush()
    torch.cuda.synchronize()
    return {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}


def assert_same(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), name


def train_alike(ahead: Any, plain: Any, batches: list[Tensor], look_after: tuple[int, ...] = ()) -> None:
    """Train both, the first with prefetching: the same outputs, and after some steps the same rows where they were."""
    for step, ids in enumerate(batches):
        if step + 1 < len(batches):
            ahead.prefetch(batches[step + 1])
        outs = [module(ids) for module in (ahead, plain)]
        assert torch.equal(*outs)
        for out in outs:
            out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out))
        if step in look_after:
            assert torch.equal(ahead.get_rows(ids), plain.get_rows(ids))  # everything goes back, and comes again


@pytest.fixture(params=[0, 5_000_000], ids=["prompt copies", "late copies"])
def delay(request, monkeypatch):
    """Copies that begin long after they were ordered meet everything that may happen before they end."""
    plain = staging.Stage._copy

    def late(self: Any) -> None:
        with torch.cuda.stream(self._side.stream):
            torch.cuda._sleep(request.param)
        plain(self)

    monkeypatch.setattr(staging.Stage, "_copy", late)


@pytest.mark.parametrize("room", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("precision", ["int8", "int4", "int2"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_prefetch_changes_no_bit_of_fifty_thrashing_steps(policy, precision, room, delay, monkeypatch):
    monkeypatch.setattr(staging, "BATCHES", room)
    ahead, plain = host_bag(policy, precision), host_bag(policy, precision)
    train_alike(ahead, plain, thrashing_batches(50))
    moved = ahead.stats()
    assert moved["prefetch_rows_in"] > 0 and moved["prefetch_rows_out"] > 0 and moved["evictions"] > 0
    assert room > 0.1 or moved["prefetch_no_room"] > 0
    assert_same(held(ahead), held(plain))


@pytest.mark.parametrize("staged", [0.02, 0.3, "60KiB"])
def test_rows_that_linger_change_no_bit_and_come_once_while_there_is_room(staged, delay):
    ahead, plain = host_bag("lfu", "int8", staged=staged), host_bag("lfu", "int8")
    train_alike(ahead, plain, thrashing_batches(60), look_after=(20, 40))
    moved = ahead.stats()
    assert moved["prefetch_rows_there"] > 0 and moved["prefetch_rows_out"] > 0
    assert staged != "60KiB" or 50_000 < ahead.memory().parts["staging"] < 70_000
    assert_same(held(ahead), held(plain))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("update", ["backward", "step"])
def test_prefetches_at_any_time_change_no_bit(seed, update, delay):
    dice = random.Random(seed)
    policy, staged = ("lru", "lfu")[seed % 2], (None, 0.2)[seed // 2]
    ahead = host_bag(policy, "int8", update=update, staged=staged)
    plain = host_bag(policy, "int8", update=update)
    batches = thrashing_batches(50)

    def something(step: int) -> None:
        chance = dice.random()
        if chance < 0.5:
            ahead.prefetch(batches[min(step + dice.choice((0, 1, 1, 2, 3)), len(batches) - 1)])
        elif chance < 0.53:
            assert torch.equal(ahead.get_rows(batches[step]), plain.get_rows(batches[step]))
        elif chance < 0.56:
            with torch.no_grad():
                assert torch.equal(ahead(batches[step]), plain(batches[step]))

    for step, ids in enumerate(batches):
        something(step)
        outs = [module(ids) for module in (ahead, plain)]
        assert torch.equal(*outs)
        something(step)
        for out in outs:
            out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out))
        something(step)
        for module in (ahead, plain):
            module.fused_optimizer.step()
            module.fused_optimizer.zero_grad()
    assert_same(held(ahead), held(plain))


@pytest.mark.parametrize("mode", ["sum", "none"])
def test_a_collection_of_many_tables_prefetches(mode, delay):
    def make() -> Any:
        torch.manual_seed(0)
        tables = [
            tc.Table("a", 3001, 8),
            tc.Table("b", 500, 12, row_config=tc.RowConfig("int4")),
            tc.Table("c", 800, 8, features=("c", "d")),
        ]
        tables += [
            tc.Table("e", 90, 8, row_config=tc.RowConfig("fp32")),
            tc.Table("f", 700, 5, row_config=tc.RowConfig("int8_affine")),
        ]
        return tc.EmbeddingCollection(tables, mode=mode, rows=tc.RowConfig(cache=0.02, residency="host"), device="cuda")

    def draw(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        rows = {"a": 3001, "b": 500, "c": 800, "d": 800, "e": 90, "f": 700}
        ends = torch.arange(0, 33 * 4, 4, device="cuda")
        return {name: (torch.randint(n, (128,), generator=generator).cuda(), ends) for name, n in rows.items()}

    ahead, plain = make(), make()
    batches = [draw(seed % 7) for seed in range(20)]
    for step, ids in enumerate(batches[:-1]):
        ahead.prefetch(batches[step + 1])
        outs = [module(ids).values() for module in (ahead, plain)]
        assert torch.equal(*outs)
        for out in outs:
            out.backward(torch.ones_like(out))
    assert ahead.memory().parts["staging"] > 0 and ahead.stats()["prefetch_rows_in"] > 0
    assert_same(held(ahead), held(plain))


@pytest.mark.parametrize("precision, policy, at_once", [("int8", "lfu", 4), ("int4", "lru", 3), ("int8", "adaptive", 2)])
@pytest.mark.parametrize("room", [0.3, 3.0])
def test_batches_whose_rows_come_together_change_no_bit(precision, policy, at_once, room, delay, monkeypatch):
    monkeypatch.setattr(staging, "BATCHES", room)
    ahead, plain = host_bag(policy, precision), host_bag(policy, precision)
    for ids, _ in ahead.prefetched(thrashing_batches(51), at_once=at_once):
        outs = [module(ids) for module in (ahead, plain)]
        assert torch.equal(*outs)
        for out in outs:
            out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out))
    moved = ahead.stats()
    assert moved["prefetch_rows_in"] > 0 and moved["prefetch_rows_out"] > 0 and moved["evictions"] > 0
    assert_same(held(ahead), held(plain))


def test_copies_saves_and_moves_find_prefetched_rows(delay):
    ahead, plain = host_bag("lfu", "int8"), host_bag("lfu", "int8")
    batches = thrashing_batches(12)
    for step, ids in enumerate(batches[:-1]):
        ahead.prefetch(batches[step + 1])
        for module in (ahead, plain):
            module(ids).sum().backward()
        if step == 4:
            assert torch.equal(ahead.weight, plain.weight)
        if step == 5:
            ahead = copy.deepcopy(ahead)
        if step == 6:
            state = ahead.state_dict()
            assert state.keys() == plain.state_dict().keys()
            ahead.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
        if step == 7:
            ahead = ahead.half().float()
        if step == 8:
            for module in (ahead, plain):
                module.set_rows(ids[0], torch.ones(7, 20))
    assert_same(held(ahead), held(plain))
    assert_same(held(ahead.cpu()), held(plain))


def test_memory_of_a_dropped_module_is_not_reused_before_its_updates_are_done():
    module, ids = host_bag("lru", "int8", cache=0.0), thrashing_batches(1)[0]
    module(ids).sum().backward()  # compiles
    torch.cuda.synchronize()
    size, where = module.arena.codes.numel(), module.arena.codes.data_ptr()
    out = module(ids)
    torch.cuda._sleep(1 << 28)
    out.sum().backward()
    del module, out
    gc.collect()
    others = [torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(7) for _ in range(20)]
    assert where in [other.data_ptr() for other in others]  # PyTorch gives it to one of them; else this could not fail
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others)


def test_a_step_with_prefetch_does_not_wait():
    module, batches = host_bag("lru", "int8"), thrashing_batches(8)
    for step in range(4):
        module.prefetch(batches[step + 1])
        module(batches[step]).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4, 7):
            module.prefetch(batches[step + 1])
            module(batches[step]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_with_rows_that_come_together_do_not_wait():
    module, batches = host_bag("lru", "int8"), thrashing_batches(24)
    try:
        for step, (ids, _) in enumerate(module.prefetched(batches, at_once=2)):
            if step == 8:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            module(ids).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_backward_after_later_prefetches_changes_no_bit():
    ahead, plain = host_bag("lru", "int8"), host_bag("lru", "int8")
    compiled, batches = torch.compile(ahead), thrashing_batches(12)
    for step, ids in enumerate(batches[:-1]):
        outs = [run(ids) for run in (compiled, plain)]
        following = batches[step + 1].repeat(1 + step // 4, 1)  # now and then too many for the room there is
        ahead.prefetch(following)
        ahead.prefetch(following)
        for out in outs:
            out.sum().backward()
    assert_same(held(ahead), held(plain))


def test_a_compiled_model_prefetches():
    ahead, plain = host_bag("lru", "int8"), host_bag("lru", "int8")
    compiled, batches = torch.compile(ahead), thrashing_batches(12)
    for step, ids in enumerate(batches[:-1]):
        ahead.prefetch(batches[step + 1])
        for run in (compiled, plain):
            run(ids).sum().backward()
    assert_same(held(ahead), held(plain))


def test_ids_that_lie_elsewhere_are_refused_by_prefetch_too():
    module = host_bag("lru", "int8")
    with pytest.raises(tc.BadInput, check=mentions("cpu", "cuda")):
        module.prefetch(thrashing_batches(1)[0].cpu())


@pytest.mark.parametrize("policy", ["lfu", "lru", "adaptive"])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_three_precisions_train_on_a_card_to_the_bits_of_the_cpu(policy, update):
    torch.manual_seed(0)
    tiers = {"fp32": 0.1, "int8": 0.2, "int2": 0.7}
    here, there = (
        tc.EmbeddingBag(101, 7, mode="sum", rows=tc.RowConfig(tiers, policy=policy, update=update)) for _ in range(2)
    )
    there.load_state_dict(here.state_dict())
    there.to("cuda")
    for seed in range(9):
        ids = ids_of(seed // 3)[:10]
        if seed % 3:  # of those that came, the last: they are in near slots
            ids = ids.flatten().sort()[0][-6:].view(2, 3)
        for module, device in ((here, "cpu"), (there, "cuda")):
            step(module, ids.to(device))
    assert here.stats()["promotions"] > 0 and there.stats() == here.stats()
    back = there.cpu().state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in here.state_dict().items())
