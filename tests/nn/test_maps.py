"""Id maps in modules: the same bits as mapping ids beforehand, unified tables equal to separate ones, no cost without."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc
from support import has, mentions
from thermocline.ids.idmap import IdMap
from thermocline.kernels import dispatch
from thermocline.kernels.gpu.launch import INTERPRETED

KEPT = range(0, 900, 3)
MAPS = {
    "user": IdMap.hashed(101, salt=5),
    "item": IdMap.pruned(KEPT, fallback=7, salt=1),
    "shop": None,
    "near": IdMap.hashed(40, salt=2).prune([3, 4, 30, 31], fallback=3).offset(11),
    "far": IdMap.identity(11),
}
ROWS = {"user": 101, "item": 307, "shop": 23, "place": 18}


def tables(mapped: bool) -> list[tc.Table]:
    def ids(*names: str) -> Any:
        found = {name: MAPS[name] for name in names if MAPS[name] is not None}
        return found if mapped else None

    return [
        tc.Table("user", 101, 6, ids=MAPS["user"] if mapped else None),
        tc.Table("item", 307, 6, ids=ids("item")),
        tc.Table("shop", 23, 6, ids=ids("shop")),
        tc.Table("place", 18, 6, ("near", "far"), ids=ids("near", "far")),
    ]


def batch(size: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Raw ids: any 64 bits where any are taken."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for feature in ("user", "item", "shop", "near", "far"):
        lengths = torch.randint(0, 4, (size,), generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        ids_N = torch.randint(-(1 << 62), 1 << 62, (int(offsets[-1]),), generator=generator)
        if feature in ("item", "shop", "far"):
            ids_N = ids_N.remainder({"item": 1200, "shop": 23, "far": 11}[feature])
        made[feature] = (ids_N, offsets)
    return made


def mapped_before(given: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (ids if MAPS[name] is None else MAPS[name](ids), offsets) for name, (ids, offsets) in given.items()}


def step(module: Any, given: Any) -> Tensor:
    out = module(given).values()
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    module.fused_optimizer.step()
    module.fused_optimizer.zero_grad()
    return out.detach()


def same(one: dict[str, Tensor], other: dict[str, Tensor], but: tuple[str, ...] = ("ids",)) -> bool:
    assert {*one} - {*but} == {*other} - {*but}
    return all(torch.equal(one[name], other[name]) for name in one if name not in but)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "none"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("precision, cache", [("int8", 0.1), ("int4", 0.0), ("fp32", 0.0)])
def test_training_equals_training_on_ids_that_were_mapped_before_bit_for_bit(mode, update, precision, cache):
    torch.manual_seed(0)
    plain = tc.EmbeddingCollection(tables(False), mode=mode, rows=tc.RowConfig(precision, cache=cache, update=update))
    module = tc.EmbeddingCollection(tables(True), mode=mode, rows=tc.RowConfig(precision, cache=cache, update=update))
    module.load_state_dict({**plain.state_dict(), "ids": module.state_dict()["ids"]})
    for seed in range(4):
        given = batch(13, seed)
        assert torch.equal(step(module, given), step(plain, mapped_before(given)))
    assert same(module.state_dict(), plain.state_dict())


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_the_same_holds_for_the_triton_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "_module", lambda kernel, _: import_module(f"thermocline.kernels.{kernel}.gpu"))
    torch.manual_seed(0)
    plain, module = (tc.EmbeddingCollection(tables(mapped), rows=tc.RowConfig("int8", cache=0.0)) for mapped in (False, True))
    module.load_state_dict({**plain.state_dict(), "ids": module.state_dict()["ids"]})
    for seed in range(2):
        given = batch(3, seed)
        assert torch.equal(step(module, given), step(plain, mapped_before(given)))
    assert same(module.state_dict(), plain.state_dict())


SMALL = [
    tc.Table("city", 5, 6),
    tc.Table("hour", 24, 6, ("from", "to")),
    tc.Table("brand", 60, 6, ids=IdMap.hashed(60, salt=3)),
]
LARGE = tc.Table("user", 200, 6)


def small_batch(size: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = {"city": 5, "from": 24, "to": 24, "brand": 1 << 40, "user": 200}
    offsets = torch.arange(0, 2 * size + 1, 2)
    return {name: (torch.randint(0, most, (2 * size,), generator=generator), offsets) for name, most in rows.items()}


@pytest.mark.parametrize("precision, cache", [("int8", 0.2), ("int4", 0.4), ("fp32", 0.0)])
def test_a_unified_table_equals_separate_ones_from_first_value_to_last_update(precision, cache):
    torch.manual_seed(7)
    apart = tc.EmbeddingCollection([*SMALL, LARGE], rows=tc.RowConfig(precision, cache=cache))
    torch.manual_seed(7)
    one = tc.unify("small", SMALL)
    assert (one.rows, one.features) == (89, ("city", "from", "to", "brand"))
    together = tc.EmbeddingCollection([one, LARGE], rows=tc.RowConfig(precision, cache=cache))
    assert together.features == apart.features
    for seed in range(6):
        given = small_batch(11, seed)
        assert torch.equal(step(together, given), step(apart, given))
    rows = torch.cat([apart.get_rows(table.name) for table in SMALL])
    assert torch.equal(together.get_rows("small"), rows) and torch.equal(together.get_rows("user"), apart.get_rows("user"))
    assert same(together.state_dict(), apart.state_dict(), but=("ids", "tables"))


def test_unified_tables_are_of_one_kind():
    with pytest.raises(tc.BadInput, check=mentions("'city' has 5", "'hour' has 6")):
        tc.unify("small", [tc.Table("city", 3, 5), tc.Table("hour", 3, 6)])
    with pytest.raises(tc.BadInput, check=has(parameter="tables")):
        tc.unify("small", [])
    with pytest.raises(tc.BadInput, check=has(parameter="tables", value="city")):
        tc.unify("small", [tc.Table("city", 3, 5), tc.Table("town", 3, 5, ("city",))])


def test_where_ids_are_rows_nothing_is_mapped_saved_or_counted(monkeypatch):
    monkeypatch.setattr(dispatch, "map_ids", None)
    own = [tc.Table("a", 9, 4, ids=IdMap.identity(9)), tc.Table("b", 7, 4, ("c", "d"), ids={"c": IdMap.identity(7)})]
    module = tc.EmbeddingCollection(own)
    plain = tc.EmbeddingCollection([tc.Table("a", 9, 4), tc.Table("b", 7, 4, ("c", "d"))])
    assert module.maps is None and "ids" not in module.state_dict()
    assert module.memory() == plain.memory()
    module(torch.ones(3, 3, dtype=torch.int64))
    assert tc.EmbeddingBag(9, 4, ids=IdMap.identity(9)).maps is None


@pytest.mark.parametrize("make", [tc.EmbeddingBag, tc.Embedding])
def test_a_single_table_maps_its_ids_and_its_rows_stay_rows(make):
    map = IdMap.pruned([10, 1 << 50, 30], fallback=2)
    torch.manual_seed(0)
    module = make(5, 4, ids=map, rows=tc.RowConfig("fp32"))
    ids = torch.tensor([[30, 10], [1 << 50, -7], [10, 11]])
    wanted = nn.functional.embedding(map(ids), module.weight)
    torch.testing.assert_close(module(ids), wanted.mean(1) if make is tc.EmbeddingBag else wanted)
    assert torch.equal(module.get_rows(torch.tensor([1])), module.weight[1:2])
    module.set_rows(torch.tensor([2]), torch.ones(1, 4))
    assert torch.equal(module(torch.tensor([[1 << 50]])).reshape(-1), torch.ones(4)) and module.ids == map
    assert "pruned(3 ids" in repr(module)


def test_an_id_outside_its_part_of_a_unified_table_is_named_and_changes_nothing():
    module = tc.EmbeddingCollection([tc.unify("small", SMALL), LARGE])
    before = copy.deepcopy(module.state_dict())
    given = small_batch(3, 0)
    given["from"][0][2] = 24
    with pytest.raises(tc.IdOutOfRange, check=mentions("'from'", "'small'", "0 to 23", "position 2 is 24")):
        module(given)
    assert same(module.state_dict(), before)


def test_an_id_out_of_range_of_a_feature_without_a_map_is_told_as_ever():
    plain, module = (tc.EmbeddingCollection(tables(mapped)) for mapped in (False, True))
    given = batch(5, 0)
    given["shop"][0][1] = 23
    errors = []
    for each, ids in ((plain, mapped_before(given)), (module, given)):
        with pytest.raises(tc.IdOutOfRange, check=mentions("'shop'", "0 to 22", "position 1 is 23")) as caught:
            each(ids)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_memory_counts_what_maps_keep():
    plain, module = (tc.EmbeddingCollection(tables(mapped)) for mapped in (False, True))
    extra = module.memory().parts["maps"] - plain.memory().parts["maps"]
    kept = MAPS["item"].bytes + MAPS["near"].bytes
    assert kept <= extra <= kept + 64 + 8 * 12 * 5
    assert MAPS["item"].bytes == 2 * 68


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_with_another_map_is_refused_by_name_and_nothing_changes(strict):
    other = [tc.Table("user", 101, 6, ids=IdMap.hashed(101, salt=6)), *tables(True)[1:]]
    saved = tc.EmbeddingCollection(other).state_dict()
    for module, words in (
        (tc.EmbeddingCollection(tables(True)), ("'user'", "'salt': 6", "'salt': 5")),
        (tc.EmbeddingCollection(tables(False)), ("id map", "none")),
    ):
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(RuntimeError, check=mentions(*words)):
            module.load_state_dict(saved, strict=strict)
        assert same(module.state_dict(), before)


def test_a_state_without_maps_lacks_them_and_plain_weights_need_none():
    module = tc.EmbeddingCollection(tables(True), rows=tc.RowConfig("fp32"))
    with pytest.raises(RuntimeError, check=mentions("Missing key", '"ids"')):
        module.load_state_dict(tc.EmbeddingCollection(tables(False), rows=tc.RowConfig("fp32")).state_dict())
    weights = {f"{name}.weight": torch.randn(rows, 6) for name, rows in ROWS.items()}
    module.load_state_dict(weights)
    assert torch.equal(module.get_rows("item"), weights["item.weight"])


def test_kept_ids_that_differ_in_one_are_another_map():
    one, other = (tc.EmbeddingBag(5, 4, ids=IdMap.pruned(kept)) for kept in ([1, 2, 3, 9], [1, 2, 3, 8]))
    one.load_state_dict(tc.EmbeddingBag(5, 4, ids=IdMap.pruned([9, 3, 2, 1])).state_dict())
    with pytest.raises(RuntimeError, check=mentions("'input'", "id map")):
        other.load_state_dict(one.state_dict())


def test_copies_pickles_and_casts_map_as_before():
    module = tc.EmbeddingCollection(tables(True), rows=tc.RowConfig("fp32"))
    given = batch(5, 0)
    wanted = module(given).values()
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    again = tc.EmbeddingCollection(tables(True), rows=tc.RowConfig("fp32"))
    again.load_state_dict(torch.load(buffer))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), again):
        assert torch.equal(copied(given).values(), wanted) and copied.id_maps == module.id_maps
    assert torch.equal(module.double()(given).values(), wanted.double())


@pytest.mark.parametrize("form", ["dict", "tensor"])
def test_a_compiled_collection_maps_and_trains_to_the_same_bits(form):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = tc.EmbeddingCollection(tables(True), rows=tc.RowConfig(cache=0.0))
    module = copy.deepcopy(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
        for seed in range(3):
            given: Any = batch(4, seed)
            if form == "tensor":
                given = torch.stack([ids.repeat(9)[: 4 + seed] for ids, _ in given.values()], 1)
            outs = []
            for run in (eager, compiled):
                out = run(given).values()
                out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
                outs.append(out.detach())
            assert torch.equal(*outs)
    assert same(eager.state_dict(), module.state_dict())


def test_prefetch_is_given_rows(monkeypatch):
    module = tc.EmbeddingCollection(tables(True))
    seen: list[Tensor] = []
    monkeypatch.setattr(type(module.arena), "prefetches", True)
    monkeypatch.setattr(module.arena, "prefetch", lambda one: seen.append(one[0]))
    given = batch(5, 0)
    module.prefetch(given)
    assert torch.equal(seen[0], torch.cat([ids for ids, _ in mapped_before(given).values()]))


def test_maps_that_do_not_fit_are_refused_with_both_numbers():
    with pytest.raises(tc.BadInput, check=has(feature="a", table="a", needed=12, available=10)):
        tc.Table("a", 10, 4, ids=IdMap.hashed(12))
    with pytest.raises(tc.BadInput, check=has(parameter="ids", table="a", value=["b"])):
        tc.Table("a", 10, 4, ids={"b": IdMap.hashed(3)})
    with pytest.raises(tc.BadInput, check=has(feature="input", needed=12)):
        tc.EmbeddingBag(10, 4, ids=IdMap.hashed(12))
    with pytest.raises(tc.BadInput, check=has(parameter="ids", value=[1, 2])):
        tc.Embedding(10, 4, ids=[1, 2])
    with pytest.raises(tc.BadInput, check=has(parameter="padding_idx", value=3)):
        tc.Embedding(10, 4, padding_idx=3, ids=IdMap.hashed(10))
