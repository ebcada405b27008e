"""Id maps of modules on a card: the rows of the CPU, moved with the module, in one launch and without a wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import thermocline as tc
from support import module_arguments
from thermocline.ids.idmap import IdMap
from thermocline.kernels.ids import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]


def tables() -> list[tc.Table]:
    small = [tc.Table("city", 50, 8), tc.Table("brand", 60, 8, ids=IdMap.hashed(60, salt=3))]
    return [
        tc.Table("user", 3001, 8, ids=IdMap.hashed(3001, salt=5)),
        tc.Table("item", 707, 8, ids=IdMap.pruned(range(0, 2100, 3), fallback=7)),
        tc.Table("shop", 105, 8, ids=IdMap.pruned(torch.arange(100) ** 5, fallback=5)),
        tc.unify("small", small),
    ]


def batch(seed: int, size: int = 33) -> dict[str, tuple[Tensor, Tensor]]:
    """Ids that are distinct in each feature, so that no order of adding can tell the devices apart; features share no row."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(size + 1)
    scattered = torch.randperm(3001, generator=generator)[:size] << 40
    item = torch.randperm(700, generator=generator)[:size] * 3
    shop = torch.randperm(100, generator=generator)[:size] ** 5
    city = torch.randperm(50, generator=generator)[:size]
    ids = {"user": scattered, "item": item, "shop": shop, "city": city, "brand": scattered}
    return {name: (each, offsets) for name, each in ids.items()}


def moved(given: Any, device: str) -> Any:
    return {name: (ids.to(device), offsets.to(device)) for name, (ids, offsets) in given.items()}


def step(module: Any, given: Any) -> Tensor:
    out = module(given).values()
    out.backward(torch.linspace(-1, 1, out.numel(), device="cpu").view_as(out).to(out.device))
    return out.detach()


def rows_before(given: Any) -> Any:
    maps = tc.EmbeddingCollection(tables(), rows=tc.RowConfig("fp32")).id_maps
    return {name: (maps[name](ids), offsets) for name, (ids, offsets) in given.items()}


def plain_tables() -> list[tc.Table]:
    return [tc.Table(t.name, t.rows, t.dim, t.features) for t in tables()]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_module_moved_to_a_card_maps_as_on_the_cpu(precision):
    torch.manual_seed(0)
    here = tc.EmbeddingCollection(tables(), rows=tc.RowConfig(precision, cache=0.0))
    there = copy.deepcopy(here).to("cuda")
    assert there.maps.words.is_cuda and there.maps.counts.is_cuda
    for seed in range(3):
        given = batch(seed)
        with torch.no_grad():
            assert torch.equal(here(given).values(), there(moved(given, "cuda")).values().cpu())
    there.cpu()
    assert not there.maps.words.is_cuda


@pytest.mark.parametrize("residency", ["device", "host"])
def test_training_on_a_card_equals_training_on_ids_that_were_mapped_before(residency):
    torch.manual_seed(0)
    keywords = {"precision": "int8", "cache": 0.05, "device": "cuda", "residency": residency}
    module, plain = (
        tc.EmbeddingCollection(tables(), **module_arguments(**keywords)),
        tc.EmbeddingCollection(plain_tables(), **module_arguments(**keywords)),
    )
    for table in plain_tables():
        values_RD = torch.randn(table.rows, 8, device="cuda")
        rows_R = torch.arange(table.rows, device="cuda")
        for each in (module, plain):
            each.flush()
            each.set_rows(table.name, rows_R, values_RD)
    for each in (module, plain):
        each.flush()
    for seed in range(6):
        given = batch(seed)
        ahead = moved(batch(seed + 1), "cuda")
        module.prefetch(ahead)
        assert torch.equal(step(module, moved(given, "cuda")), step(plain, moved(rows_before(given), "cuda")))
    for table in plain_tables():
        assert torch.equal(module.get_rows(table.name), plain.get_rows(table.name))


def test_all_features_are_mapped_in_one_launch_and_nothing_waits(monkeypatch):
    module = tc.EmbeddingCollection(tables(), rows=tc.RowConfig(cache=0.0), device="cuda")
    given = moved(batch(0), "cuda")
    step(module, given)
    launches = []
    plain = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda *args, **keywords: (launches.append(args[0]), plain(*args, **keywords)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = module(given).values()
        out.backward(torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(launches) == 1


def test_an_id_outside_its_part_is_named_at_the_next_call_and_changes_nothing():
    module = tc.EmbeddingCollection(tables(), rows=tc.RowConfig(cache=0.0), device="cuda")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    given = moved(batch(0), "cuda")
    given["city"][0][2] = 50
    with torch.no_grad():
        try:
            module(given)  # the kernel may have told already when the lookup begins
            torch.cuda.synchronize()
            module(moved(batch(1), "cuda"))
        except tc.IdOutOfRange as error:
            assert "Feature 'city' of table 'small' has ids 0 to 49, but the id at position 101 of the ids of all" in str(error)
        else:
            pytest.fail("an id out of range went unnoticed")
    torch.cuda.synchronize()
    module(moved(batch(1), "cuda"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_compiled_collection_on_a_card_maps_and_trains_to_the_same_bits():
    torch.manual_seed(0)
    eager = tc.EmbeddingCollection(tables(), rows=tc.RowConfig(cache=0.0), device="cuda")
    module = copy.deepcopy(eager)
    compiled = torch.compile(module)
    for seed in range(3):
        given = moved(batch(seed), "cuda")
        assert torch.equal(step(eager, given), step(compiled, given))
    for table in eager.tables:
        assert torch.equal(eager.get_rows(table.name), module.get_rows(table.name))
