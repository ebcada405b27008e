"""Tables as plain matrices of safetensors files: other readers open them, and nothing is in memory twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import thermocline as tc
from support import has
from thermocline.checkpoint import export_rows, import_rows
from thermocline.checkpoint.format import tensor_files
from thermocline.nn import rows_module


def bag(precision: str = "fp32", rows: int = 63, **keywords: Any) -> tc.EmbeddingBag:
    torch.manual_seed(1)
    return tc.EmbeddingBag(rows, 7, rows=tc.RowConfig(precision, **keywords))


TYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip


@pytest.mark.parametrize("precision", TYPES)
def test_other_readers_open_what_is_written_and_it_comes_back(precision, tmp_path):
    ours, path = bag(), tmp_path / "rows.safetensors"
    export_rows(ours, path, precision=precision)
    state = load_file(path)
    assert state["weight"].dtype == TYPES[precision] and state["weight"].shape == (63, 7)
    values_RD = state["weight"].float() * state.get("weight_scale", torch.ones(63, 1))
    torch.testing.assert_close(values_RD, ours.weight.detach().as_subclass(torch.Tensor), rtol=0.07, atol=0.02)
    other = bag()
    other.set_rows(torch.arange(63), torch.zeros(63, 7))
    import_rows(other, path)
    assert torch.equal(other.get_rows(torch.arange(63)), values_RD)


def test_int8_rows_keep_their_codes(tmp_path):
    ours, other = bag("int8", cache=0.0), bag("int8", cache=0.0)
    export_rows(ours, tmp_path / "a.safetensors", precision="int8")
    other.set_rows(torch.arange(63), torch.zeros(63, 7))
    import_rows(other, tmp_path / "a.safetensors")
    assert torch.equal(other.state_dict()["codes"], ours.state_dict()["codes"])


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_tables_of_layers_that_lie_side_by_side_are_read_by_columns(precision, tmp_path):
    """As in Gemma 3n: one matrix [vocabulary, layers * columns]."""
    torch.manual_seed(2)
    whole_RD, path = torch.randn(63, 21), tmp_path / "layers.safetensors"
    scale_R1 = whole_RD.abs().amax(1, keepdim=True) / 127
    state = {"weight": (whole_RD / scale_R1).round().to(torch.int8), "weight_scale": scale_R1}
    if precision == "bf16":
        state = {"weight": whole_RD.bfloat16()}
    save_file(state, path)
    layer, read_RD = bag(), state["weight"].float() * state.get("weight_scale", 1.0)
    for first in (0, 7, 14):
        import_rows(layer, path, columns=(first, first + 7))
        assert torch.equal(layer.get_rows(torch.arange(63)), read_RD[:, first : first + 7])
    for columns in ((15, 22), (-7, 0), (0, 8), (7, 0)):
        with pytest.raises(tc.BadInput, check=has(parameter="columns", needed=(63, 7))):
            import_rows(layer, path, columns=columns)


def test_rows_are_written_and_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "BLOCK", 10)
    sizes: list[int] = []
    read_into = tensor_files.TensorFile.read_into
    monkeypatch.setattr(tensor_files.TensorFile, "read_into", lambda *given: sizes.append(len(given[2])) or read_into(*given))
    ours, other = bag(), bag()
    export_rows(ours, tmp_path / "a.safetensors", precision="int8")
    other.set_rows(torch.arange(63), torch.zeros(63, 7))
    import_rows(other, tmp_path / "a.safetensors")
    assert max(sizes) == 10
    torch.testing.assert_close(other.get_rows(torch.arange(63)), ours.get_rows(torch.arange(63)), rtol=0, atol=0.02)


def test_a_matrix_is_chosen_by_name_and_fits_the_table(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_file({"a": torch.zeros(63, 7), "b": torch.ones(63, 7, dtype=torch.bfloat16), "c": torch.zeros(9, 7)}, path)
    ours = bag()
    import_rows(ours, path, name="b")
    assert bool((ours.weight == 1).all())
    for given, fields in (
        ({}, {"parameter": "name", "available": ["a", "b", "c"]}),
        ({"name": "d"}, {"parameter": "name", "value": "d"}),
        ({"name": "c"}, {"parameter": "name", "value": (9, 7), "needed": (63, 7)}),
        ({"name": "a", "table": "shop"}, {"parameter": "table", "value": "shop"}),
    ):
        with pytest.raises(tc.BadInput, check=has(**fields)):
            import_rows(ours, path, **given)
    save_file({"q": torch.zeros(63, 7, dtype=torch.int8)}, tmp_path / "q.safetensors")
    with pytest.raises(tc.BadInput, check=has(parameter="name", value="q")):
        import_rows(ours, tmp_path / "q.safetensors")


def test_a_bad_export_is_refused(tmp_path):
    (tmp_path / "there").touch()
    with pytest.raises(tc.BadInput, check=has(parameter="path")):
        export_rows(bag(), tmp_path / "there")
    with pytest.raises(tc.BadInput, check=has(parameter="precision", value="int4")):
        export_rows(bag(), tmp_path / "new", precision="int4")
    two = tc.EmbeddingCollection([tc.Table("a", 9, 4), tc.Table("b", 9, 4)])
    with pytest.raises(tc.BadInput, check=has(parameter="table", available=["a", "b"])):
        export_rows(two, tmp_path / "new")
