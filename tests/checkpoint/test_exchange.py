"""Tables of other libraries, other precisions, and the command line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_save import Model, assert_same_state, train
from torch import nn
from typer.testing import CliRunner

import thermocline as tc
from support import has
from thermocline.checkpoint import Checkpoint, convert, diff
from thermocline.checkpoint.interop import export_tables, find_weights, import_tables
from thermocline.cli import app
from thermocline.nn.config import RowConfig


def test_state_dicts_of_torch_modules_become_tables_and_go_back():
    torch.manual_seed(1)
    model = nn.ModuleDict({"member": nn.EmbeddingBag(50, 6), "goods": nn.Embedding(30, 4), "top": nn.Linear(10, 1)})
    rows = import_tables(model.state_dict(), ["member", "goods"], rows=RowConfig("fp32"))
    assert torch.equal(rows.get_rows("member"), model["member"].weight)
    back = export_tables(rows, "torch")
    assert back.keys() == {"member.weight", "goods.weight"} and torch.equal(back["goods.weight"], model["goods"].weight)
    assert list(find_weights(nn.EmbeddingBag(9, 2).state_dict())) == ["table"]
    with pytest.raises(tc.BadInput, check=has(parameter="tables", matrices=["member.weight", "goods.weight", "top.weight"])):
        import_tables(model.state_dict())
    with pytest.raises(tc.BadInput, check=has(table="shops")):
        import_tables(model.state_dict(), ["shops"])


def test_state_dicts_of_torchrec_are_known_by_their_keys():
    torch.manual_seed(2)
    state = {
        "sparse.ebc.embedding_bags.user.weight": torch.randn(40, 8),
        "sparse.ec.embeddings.item.weight": torch.randn(20, 8),
        "over.0.weight": torch.randn(16, 16),
    }
    rows = import_tables(state, rows=RowConfig("int8", cache=1.0))
    assert [table.name for table in rows.tables] == ["user", "item"]
    assert torch.allclose(rows.get_rows("user"), state["sparse.ebc.embedding_bags.user.weight"], atol=0.05)
    assert list(export_tables(rows)) == ["embedding_bags.user.weight", "embedding_bags.item.weight"]


@pytest.mark.parametrize("bits, pack", [(8, "byte"), (4, "4bit"), (2, "2bit")])
def test_fused_tables_of_torch_keep_every_bit_through_a_checkpoint(tmp_path, bits, pack):
    values = torch.randn(33, 8, generator=torch.Generator().manual_seed(3))
    packed = getattr(torch.ops.quantized, f"embedding_bag_{pack}_prepack")(values)
    save_file({"item.weight": packed}, tmp_path / "fused.safetensors")
    convert(tmp_path / "fused.safetensors", tmp_path / "folder", bits=bits)
    convert(tmp_path / "folder", tmp_path / "again.safetensors", style="fused")
    assert torch.equal(load_file(tmp_path / "again.safetensors")["item.weight"], packed)
    with pytest.raises(tc.BadInput, check=has(parameter="bits", table="item")):
        convert(tmp_path / "fused.safetensors", tmp_path / "other")


def test_a_whole_model_is_converted_and_compared_without_its_code(tmp_path):
    torch.manual_seed(4)
    model = Model()
    dense = torch.optim.Adam(model.parameters())
    train(model, dense, 0, 5)
    tc.save(model, tmp_path / "a", optimizers=dense)
    convert(tmp_path / "a", tmp_path / "same")
    found = diff(tmp_path / "a", tmp_path / "same")
    assert found.same and [each.table for each in found.tables] == ["a", "b", "bag"] and found.steps == (5, 5)
    other = Model()
    tc.load_into(other, tmp_path / "same")
    assert_same_state(model, other)
    convert(tmp_path / "a", tmp_path / "small", "int2")
    found = diff(tmp_path / "a", tmp_path / "small")
    assert not found.same and found.tables[0].precision == ("int8", "int2") and found.tables[0].rows > 100 and not found.dense
    convert(tmp_path / "a", tmp_path / "rows.safetensors", style="torchrec")
    assert torch.equal(load_file(tmp_path / "rows.safetensors")["embedding_bags.b.weight"], model.rows.get_rows("b"))


def test_pickles_and_names_that_are_taken_are_refused(tmp_path):
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "model.pt")
    with pytest.raises(tc.BadInput, check=has(parameter="source")):
        convert(tmp_path / "model.pt", tmp_path / "folder")
    with pytest.raises(tc.BadInput, check=has(parameter="target")):
        convert(tmp_path / "x.safetensors", tmp_path)


def thermocline(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_the_command_line_shows_compares_and_compacts(tmp_path):
    torch.manual_seed(5)
    rows = tc.EmbeddingCollection([tc.Table("user", 60, 4, ids=tc.IdMap.hashed(60, salt=2)), tc.Table("item", 30, 4)])
    tc.save(rows, tmp_path / "a", incremental=True, progress={"batch": 3})
    rows(torch.tensor([[1, 2]])).values().sum().backward()
    tc.save(rows, tmp_path / "a", incremental=True)
    shown = thermocline("inspect", tmp_path / "a", "--json", tmp_path / "told.json")
    assert shown.exit_code == 0
    assert "user: hashed(60, salt=2)" in shown.stdout and "save 2: incremental, step 1" in shown.stdout
    assert "sha256 verified" in shown.stdout and "rowwise_adagrad (lr 0.02" in shown.stdout
    told = json.loads((tmp_path / "told.json").read_text())
    assert [table["rows"] for table in told["tables"]] == [60, 30] and len(told["saves"]) == 2
    tc.save(rows, tmp_path / "b")
    done = thermocline("compact", tmp_path / "a")
    assert done.exit_code == 0 and "2 saves of" in done.stdout
    assert len(Checkpoint.open(tmp_path / "a").manifest.saves) == 1
    rows.set_rows("item", torch.tensor([7]), torch.ones(1, 4))
    assert diff(tmp_path / "a", tmp_path / "b").same
    tc.save(rows, tmp_path / "b")
    done = thermocline("diff", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 1 and "they differ" in done.stdout
    file = next((tmp_path / "b").rglob("rows-*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file.name}' is damaged" in str(thermocline("inspect", tmp_path / "b").exception)
