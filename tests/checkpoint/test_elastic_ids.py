"""Checkpoints of tables whose ids come and go: keys with rows, on the same capacity bit for bit, on another by heat."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import thermocline as tc
from support import has
from thermocline import BadInput, IdMap, RowConfig, Table
from thermocline.checkpoint import compact, convert, export_tables

CONFIG = RowConfig("int8", cache=0.1)


def _tables(
    rows: int = 300, ids: bool = True, update: str = "backward", grow_from: int | None = None
) -> tc.EmbeddingCollection:
    map = IdMap.elastic(rows, admit_after=2, half_life=10, grow_from=grow_from) if ids else None
    tables = [Table("hour", 24, 8), Table("item", rows, 8, features=("seen", "bought"), ids=map)]
    return tc.EmbeddingCollection(tables, rows=RowConfig("int8", cache=0.1, update=update))


def _train(tables: tc.EmbeddingCollection, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        items = torch.randint(5 * step, 5 * step + 300, (64, 2), generator=generator) * 7919
        hours = torch.randint(0, 24, (64, 1), generator=generator)
        tables(torch.cat([hours, items], 1)).values().square().sum().backward()
        if tables.rows.update == "step":
            tables.fused_optimizer.step()
            tables.fused_optimizer.zero_grad()


def _same(a: nn.Module, b: nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("update, grow_from", [("backward", None), ("step", None), ("backward", 80)])
def test_a_resumed_run_trains_on_bit_for_bit(update: str, grow_from: int | None, tmp_path: Path):
    rows = 300 if grow_from is None else 1000
    tables, filled = (_tables(rows, update=update, grow_from=grow_from) for _ in range(2))
    _train(tables, 0, 20)
    tc.save(tables, tmp_path / "a", progress={"step": 20})
    assert tc.resume(tmp_path / "a", filled) == {"step": 20}
    loaded = tc.load(tmp_path / "a")
    for each in (tables, filled, loaded):
        _train(each, 20, 26)
    assert _same(tables, filled) and _same(tables, loaded)
    assert grow_from is None or 400 < tables.elastic().state()["rows"] < 984
    assert tables.elastic().state()["evicted"] > 0


@pytest.mark.parametrize("background", [False, True])
def test_incremental_saves_have_the_ids_of_their_moment(background: bool, tmp_path: Path):
    tables = _tables()
    for step in range(0, 24, 6):
        _train(tables, step, step + 6)
        if background:
            job = tc.save_async(tables, tmp_path / "a", incremental=True)
            at, ids = {name: tensor.clone() for name, tensor in tables.state_dict().items()}, tables.elastic().ids()
            _train(tables, 100 + step, 103 + step)
            job.wait()
        else:
            tc.save(tables, tmp_path / "a", incremental=True)
            at, ids = tables.state_dict(), tables.elastic().ids()
    loaded = tc.load(tmp_path / "a")
    assert torch.equal(loaded.elastic().ids(), ids)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in at.items() if name.startswith("elastic"))


@pytest.mark.parametrize(
    "rows, dropped, then, grow_from", [(100, 200, None, None), (1000, 0, None, None), (1000, 0, None, 50), (300, 0, 50, None)]
)
def test_another_capacity_takes_the_hottest_ids_with_their_rows(
    rows: int, dropped: int, then: int | None, grow_from: int | None, tmp_path: Path
):
    tables, other = _tables(grow_from=then), _tables(rows, grow_from=grow_from)
    _train(tables, 0, 20)
    tables.flush()
    tc.save(tables, tmp_path / "a")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tc.load_into(other, tmp_path / "a")
    assert bool(seen) == bool(dropped) and other.elastic().state()["dropped"] == dropped
    ids = other.elastic().ids()
    old, now = tables.elastic().rows_of(ids), other.elastic().rows_of(ids)
    assert ids.numel() == tables.elastic().ids().numel() - dropped >= 84
    assert torch.equal(tables.get_rows("item", old), other.get_rows("item", now))
    states = [each.arena.state_views(1, each.trainer.states, True)[0][at] for each, at in ((tables, old), (other, now))]
    assert torch.equal(*states) and torch.equal(tables.get_rows("hour"), other.get_rows("hour"))
    _train(other, 20, 23)


def test_static_and_elastic_tables_do_not_load_into_each_other(tmp_path: Path):
    for ids, name in ((True, "elastic"), (False, "static")):
        tc.save(_tables(ids=ids), tmp_path / name)
        with pytest.raises(BadInput, check=lambda e: str(e.saved) != str(e.model) and e.feature == "seen"):
            tc.load_into(_tables(ids=not ids), tmp_path / name)


def test_another_rule_is_refused_with_both_named(tmp_path: Path):
    tc.save(_tables(), tmp_path / "a")
    tables = [Table("hour", 24, 8), Table("item", 300, 8, features=("seen", "bought"), ids=IdMap.elastic(300))]
    with pytest.raises(BadInput, check=has(feature="seen", model=IdMap.elastic(300))):
        tc.load_into(tc.EmbeddingCollection(tables, rows=CONFIG), tmp_path / "a")


def test_rows_are_not_exported_without_their_ids(tmp_path: Path):
    tables = _tables()
    tc.save(tables, tmp_path / "a")
    for export in (partial(export_tables, tables), partial(convert, tmp_path / "a", tmp_path / "b.safetensors")):
        with pytest.raises(BadInput, check=has(parameter="ids")):
            export()


def test_a_compacted_chain_has_the_same_ids(tmp_path: Path):
    tables = _tables()
    for step in (0, 6, 12):
        _train(tables, step, step + 6)
        tc.save(tables, tmp_path / "a", incremental=True)
    compact(tmp_path / "a")
    assert _same(tc.load(tmp_path / "a"), tables)
